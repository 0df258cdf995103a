// place ORDER_ID [--fail]: an order and its message in one transaction. take: the messages of the consumer billing.
using System;
using System.Collections.Generic;
using System.Text.Json;
using System.Threading.Tasks;
using Npgsql;

static class Shop
{
    record Message(Guid Id, long Claim, string Type, byte[] Payload);

    // Npgsql reads some of libpq's variables by itself, and host, port, database and TLS mode are not among them.
    static string ConnectionString()
    {
        static string Env(string name, string otherwise) => Environment.GetEnvironmentVariable(name) is { Length: > 0 } value ? value : otherwise;
        var builder = new NpgsqlConnectionStringBuilder
        {
            Host = Env("PGHOST", "localhost"),
            Port = int.Parse(Env("PGPORT", "5432")),
            Database = Env("PGDATABASE", ""),
            Username = Env("PGUSER", ""),
            Password = Env("PGPASSWORD", ""),
            SslMode = Env("PGSSLMODE", "verify-full") switch
            {
                "verify-full" => SslMode.VerifyFull,
                "disable" => SslMode.Disable,
                var mode => throw new ArgumentException($"PGSSLMODE is {mode}; this program knows verify-full and disable"),
            },
            Timeout = 10,
        };
        if (Env("PGSSLROOTCERT", "") is { Length: > 0 } file) builder.RootCertificate = file;
        return builder.ConnectionString;
    }

    static async Task Place(NpgsqlConnection connection, string orderId, bool fail)
    {
        var json = JsonSerializer.Serialize(new { order = orderId });
        // Rolls back when it is disposed of without a commit, as after an exception.
        await using var tx = await connection.BeginTransactionAsync();
        const string upsert = "insert into orders (id, status) values ($1, 'placed') on conflict (id) do update set status = 'placed'";
        await using (var row = new NpgsqlCommand(upsert, connection, tx) { Parameters = { new() { Value = orderId } } })
        {
            await row.ExecuteNonQueryAsync();
        }
        // snippet: begin
        // C#, Npgsql: tx is the NpgsqlTransaction of your business rows
        var sql = "select postroom.enqueue('orders', 'order.placed', $1::jsonb, key => $2)";
        await using var command = new NpgsqlCommand(sql, connection, tx) { Parameters = { new() { Value = json }, new() { Value = orderId } } };
        await command.ExecuteScalarAsync();
        // snippet: end
        if (fail) await tx.RollbackAsync(); else await tx.CommitAsync();
    }

    // Returns how many messages could not be handled. They are tried again later, by whoever takes then.
    static async Task<int> Take(NpgsqlConnection connection)
    {
        var worker = $"csharp-{Environment.ProcessId}";
        var failed = 0;
        while (true)
        {
            var messages = new List<Message>();
            const string sql = "select message_id, claim, type, payload from postroom.inbox_take('billing', 10, $1, '30 seconds')";
            await using (var command = new NpgsqlCommand(sql, connection) { Parameters = { new() { Value = worker } } })
            await using (var rows = await command.ExecuteReaderAsync())
            {
                while (await rows.ReadAsync())
                    messages.Add(new(rows.GetGuid(0), rows.GetInt64(1), rows.GetString(2), rows.GetFieldValue<byte[]>(3)));
            }
            if (messages.Count == 0) return failed;
            foreach (var message in messages)
            {
                try
                {
                    var orderId = await Handle(connection, message);
                    Console.WriteLine($"handled {message.Id} {message.Type} {orderId}");
                }
                catch (Exception error) when (error is NpgsqlException or JsonException or KeyNotFoundException or InvalidOperationException)
                {
                    await Execute(connection, null, "select postroom.inbox_fail('billing', $1, $2, $3)", message.Id, message.Claim, error.Message);
                    Console.Error.WriteLine($"failed {message.Id} {message.Type}: {error.Message}");
                    failed++;
                }
            }
        }
    }

    // The effect, and that it was had, in one transaction.
    static async Task<string> Handle(NpgsqlConnection connection, Message message)
    {
        using var body = JsonDocument.Parse(message.Payload);
        var orderId = body.RootElement.GetProperty("order").GetString() ?? throw new JsonException("an order without an id");
        await using var tx = await connection.BeginTransactionAsync();
        await Execute(connection, tx, "insert into bills (order_id) values ($1)", orderId);
        await Execute(connection, tx, "select postroom.inbox_done('billing', $1, $2)", message.Id, message.Claim);
        await tx.CommitAsync();
        return orderId;
    }

    static async Task Execute(NpgsqlConnection connection, NpgsqlTransaction? tx, string sql, params object[] values)
    {
        await using var command = new NpgsqlCommand(sql, connection, tx);
        foreach (var value in values) command.Parameters.Add(new() { Value = value });
        await command.ExecuteNonQueryAsync();
    }

    static async Task<int> Main(string[] arguments)
    {
        var placing = arguments is ["place", not ['-', ..]] or ["place", not ['-', ..], "--fail"];
        if (!placing && arguments is not ["take"])
        {
            Console.Error.WriteLine("usage: place ORDER_ID [--fail] | take");
            return 1;
        }
        try
        {
            await using var connection = new NpgsqlConnection(ConnectionString());
            await connection.OpenAsync();
            if (!placing) return await Take(connection) > 0 ? 1 : 0;
            var fail = arguments.Length == 3;
            await Place(connection, arguments[1], fail);
            Console.WriteLine($"{(fail ? "rolled back" : "placed")} {arguments[1]}");
            return 0;
        }
        catch (Exception error) when (error is NpgsqlException or ArgumentException or FormatException or System.IO.IOException)
        {
            Console.Error.WriteLine($"error: {error.Message}{(error.InnerException is { } inner ? $": {inner.Message}" : "")}");
            return 1;
        }
    }
}
