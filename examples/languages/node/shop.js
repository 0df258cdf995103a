// place ORDER_ID [--fail]: an order and its message in one transaction. take: the messages of the consumer billing.
"use strict";
const fs = require("node:fs");
const pg = require("pg");

// pg reads PGHOST, PGPORT, PGDATABASE, PGUSER and PGPASSWORD by itself, and no file of PGSSLROOTCERT.
function tls() {
  const mode = process.env.PGSSLMODE ?? "verify-full";
  if (mode === "disable") return false;
  if (mode !== "verify-full") throw new Error(`PGSSLMODE is ${mode}; this program knows verify-full and disable`);
  const file = process.env.PGSSLROOTCERT;
  return file ? { ca: fs.readFileSync(file, "utf8") } : true; // Node verifies issuer and name unless told otherwise
}

async function place(client, orderId, fail) {
  const order = { order: orderId };
  await client.query("begin");
  try {
    await client.query(
      "insert into orders (id, status) values ($1, 'placed') on conflict (id) do update set status = 'placed'",
      [orderId],
    );
    // snippet: begin
    // Node, pg: between client.query("begin") and client.query("commit"), on the same client
    const sql = "select postroom.enqueue('orders', 'order.placed', $1::jsonb, key => $2)";
    await client.query(sql, [JSON.stringify(order), orderId]);
    // snippet: end
    await client.query(fail ? "rollback" : "commit");
  } catch (error) {
    await client.query("rollback").catch(() => {}); // the first error is the one to tell
    throw error;
  }
}

// Returns how many messages could not be handled. They are tried again later, by whoever takes then.
async function take(client) {
  const worker = `node-${process.pid}`;
  let failed = 0;
  for (;;) {
    const { rows } = await client.query(
      "select message_id, claim, type, payload from postroom.inbox_take('billing', 10, $1, '30 seconds')",
      [worker],
    );
    if (rows.length === 0) return failed;
    // claim is a bigint, which pg gives as a string: it goes back as it came.
    for (const { message_id, claim, type, payload } of rows) {
      try {
        const orderId = JSON.parse(payload.toString("utf8")).order;
        await client.query("begin");
        await client.query("insert into bills (order_id) values ($1)", [orderId]);
        await client.query("select postroom.inbox_done('billing', $1, $2)", [message_id, claim]);
        await client.query("commit");
        console.log(`handled ${message_id} ${type} ${orderId}`);
      } catch (error) {
        await client.query("rollback"); // outside of a transaction no more than a warning
        await client.query("select postroom.inbox_fail('billing', $1, $2, $3)", [message_id, claim, String(error)]);
        console.error(`failed ${message_id} ${type}: ${error.message}`);
        failed += 1;
      }
    }
  }
}

async function main([command, orderId, flag, ...rest]) {
  const placing = command === "place" && orderId && !orderId.startsWith("-") && (flag === undefined || flag === "--fail");
  const taking = command === "take" && orderId === undefined;
  if (!(placing || taking) || rest.length > 0) throw new Error("usage: place ORDER_ID [--fail] | take");
  const client = new pg.Client({ ssl: tls(), connectionTimeoutMillis: 10_000 });
  client.on("error", () => {}); // a lost connection fails the query that runs; without a listener it would end the process
  await client.connect();
  try {
    if (taking) return (await take(client)) > 0 ? 1 : 0;
    await place(client, orderId, flag === "--fail");
    console.log(`${flag === "--fail" ? "rolled back" : "placed"} ${orderId}`);
    return 0;
  } finally {
    await client.end().catch(() => {});
  }
}

main(process.argv.slice(2)).then(
  (code) => (process.exitCode = code),
  (error) => {
    // Where a name has several addresses the reasons are in `errors`, and `message` is empty.
    console.error(`error: ${error.message || (error.errors ?? [error]).map(String).join("; ")}`);
    process.exitCode = 1;
  },
);
