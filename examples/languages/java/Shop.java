import com.google.gson.Gson;
import com.google.gson.JsonParser;
import java.nio.charset.StandardCharsets;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.SQLException;
import java.util.ArrayList;
import java.util.Map;
import java.util.Properties;
import java.util.UUID;

/** place ORDER_ID [--fail]: an order and its message in one transaction. take: the messages of the consumer billing. */
public final class Shop {
    record Message(UUID id, long claim, String type, byte[] payload) {}

    /** The driver reads none of libpq's variables, and takes what they say as properties. */
    static Connection connect() throws SQLException {
        var env = System.getenv();
        var properties = new Properties();
        Map.of("user", "PGUSER", "password", "PGPASSWORD", "sslmode", "PGSSLMODE", "sslrootcert", "PGSSLROOTCERT")
            .forEach((property, name) -> { if (env.get(name) != null) properties.setProperty(property, env.get(name)); });
        properties.setProperty("connectTimeout", "10");
        var url = "jdbc:postgresql://" + env.getOrDefault("PGHOST", "localhost") + ":" + env.getOrDefault("PGPORT", "5432") + "/"
            + env.getOrDefault("PGDATABASE", "");
        return DriverManager.getConnection(url, properties);
    }

    static void place(Connection connection, String orderId, boolean fail) throws SQLException {
        var json = new Gson().toJson(Map.of("order", orderId));
        connection.setAutoCommit(false);
        try {
            try (var call = connection.prepareStatement(
                    "insert into orders (id, status) values (?, 'placed') on conflict (id) do update set status = 'placed'")) {
                call.setString(1, orderId); call.executeUpdate();
            }
            // snippet: begin
            // Java, JDBC: connection.setAutoCommit(false) and your own statements before it, connection.commit() after it
            try (var call = connection.prepareStatement("select postroom.enqueue('orders', 'order.placed', ?::jsonb, key => ?)")) {
                call.setString(1, json); call.setString(2, orderId); call.execute();
            }
            // snippet: end
            if (fail) connection.rollback(); else connection.commit();
        } catch (SQLException error) {
            connection.rollback();
            throw error;
        }
    }

    /** Returns how many messages could not be handled. They are tried again later, by whoever takes then. */
    static int take(Connection connection) throws SQLException {
        var worker = "java-" + ProcessHandle.current().pid();
        var failed = 0;
        while (true) {
            connection.setAutoCommit(true);
            var messages = new ArrayList<Message>();
            try (var call = connection.prepareStatement(
                    "select message_id, claim, type, payload from postroom.inbox_take('billing', 10, ?, '30 seconds')")) {
                call.setString(1, worker);
                var rows = call.executeQuery();
                while (rows.next()) {
                    messages.add(new Message(rows.getObject(1, UUID.class), rows.getLong(2), rows.getString(3), rows.getBytes(4)));
                }
            }
            if (messages.isEmpty()) return failed;
            for (var message : messages) {
                connection.setAutoCommit(false);
                try {
                    System.out.println("handled " + message.id + " " + message.type + " " + handle(connection, message));
                } catch (SQLException | RuntimeException error) {
                    connection.rollback();
                    try (var call = connection.prepareStatement("select postroom.inbox_fail('billing', ?, ?, ?)")) {
                        call.setObject(1, message.id); call.setLong(2, message.claim); call.setString(3, error.toString());
                        call.execute();
                    }
                    connection.commit();
                    System.err.println("failed " + message.id + " " + message.type + ": " + error);
                    failed++;
                }
            }
        }
    }

    /** The effect, and that it was had, in one transaction. */
    static String handle(Connection connection, Message message) throws SQLException {
        var body = JsonParser.parseString(new String(message.payload, StandardCharsets.UTF_8));
        var orderId = body.getAsJsonObject().get("order").getAsString();
        try (var call = connection.prepareStatement("insert into bills (order_id) values (?)")) {
            call.setString(1, orderId); call.executeUpdate();
        }
        try (var call = connection.prepareStatement("select postroom.inbox_done('billing', ?, ?)")) {
            call.setObject(1, message.id); call.setLong(2, message.claim); call.execute();
        }
        connection.commit();
        return orderId;
    }

    public static void main(String[] arguments) {
        var placing = arguments.length >= 2 && arguments[0].equals("place") && !arguments[1].startsWith("-");
        var fail = arguments.length == 3 && arguments[2].equals("--fail");
        var taking = arguments.length == 1 && arguments[0].equals("take");
        if (!taking && !(placing && (fail || arguments.length == 2))) {
            System.err.println("usage: place ORDER_ID [--fail] | take");
            System.exit(1);
        }
        try (var connection = connect()) {
            if (taking) {
                if (take(connection) > 0) System.exit(1);
                return;
            }
            place(connection, arguments[1], fail);
            System.out.println((fail ? "rolled back " : "placed ") + arguments[1]);
        } catch (SQLException error) {
            System.err.println("error: " + error.getMessage());
            System.exit(1);
        }
    }
}
