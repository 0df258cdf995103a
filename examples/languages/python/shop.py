"""place ORDER_ID [--fail]: an order and its message in one transaction. take: the messages of the consumer billing.

libpq reads PGHOST, PGPORT, PGDATABASE, PGUSER, PGPASSWORD, PGSSLMODE and PGSSLROOTCERT by itself.
"""

import json
import os
import sys

import psycopg


class Refused(Exception):
    """What --fail asks for: something that goes wrong after the message was written."""


def place(connection, order_id, fail):
    order = {"order": order_id}
    cursor = connection.cursor()
    with connection.transaction():
        cursor.execute(
            "insert into orders (id, status) values (%s, 'placed') on conflict (id) do update set status = 'placed'", (order_id,)
        )
        # snippet: begin
        # Python, psycopg: autocommit=True, inside `with connection.transaction():`, together with your own statements
        sql = "select postroom.enqueue('orders', 'order.placed', %s::jsonb, key => %s)"
        cursor.execute(sql, (json.dumps(order), order_id))
        # snippet: end
        if fail:
            raise Refused


def take(connection):
    """Returns how many messages could not be handled. They are tried again later, by whoever takes then."""
    worker = f"python-{os.getpid()}"
    failed = 0
    while True:
        messages = connection.execute(
            "select message_id, claim, type, payload from postroom.inbox_take('billing', 10, %s, '30 seconds')", (worker,)
        ).fetchall()
        if not messages:
            return failed
        for message_id, claim, kind, payload in messages:
            try:
                with connection.transaction():
                    order_id = json.loads(payload)["order"]
                    connection.execute("insert into bills (order_id) values (%s)", (order_id,))
                    connection.execute("select postroom.inbox_done('billing', %s, %s)", (message_id, claim))
                print(f"handled {message_id} {kind} {order_id}", flush=True)
            except (psycopg.Error, ValueError, KeyError, TypeError) as error:
                connection.execute("select postroom.inbox_fail('billing', %s, %s, %s)", (message_id, claim, repr(error)))
                print(f"failed {message_id} {kind}: {error!r}", file=sys.stderr)
                failed += 1


def main(arguments):
    match arguments:
        case ["place", order_id] if not order_id.startswith("-"):
            fail = False
        case ["place", order_id, "--fail"]:
            fail = True
        case ["take"]:
            pass
        case _:
            print("usage: place ORDER_ID [--fail] | take", file=sys.stderr)
            return 1
    try:
        # With autocommit, `connection.transaction()` is a transaction and not a savepoint within one that nobody commits.
        with psycopg.connect("", autocommit=True, connect_timeout=10) as connection:
            if arguments[0] == "take":
                return 1 if take(connection) else 0
            try:
                place(connection, order_id, fail)
                print(f"placed {order_id}")
            except Refused:
                print(f"rolled back {order_id}")
            return 0
    except psycopg.Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
