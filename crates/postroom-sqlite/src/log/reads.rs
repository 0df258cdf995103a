//! The statements of a claim.

use crate::connect::NOW;

/// Fresh rows in order: ?1 route, ?2 behind which seq, ?3 how many. Dealt with: parked or buried before a crash kept the position from
/// passing it.
pub(super) fn fresh() -> String {
    format!(
        "select o.*, 0 as attempts, null as replay, coalesce(o.visible_ms > {NOW}, false) as scheduled,
                (exists (select 1 from postroom_parked p where p.route = ?1 and p.seq = o.seq and p.id = o.id)
                 or exists (select 1 from postroom_dead_letters d
                             where d.route = ?1 and d.seq = o.seq and d.id = o.id)) as dealt_with,
                (exists (select 1 from postroom_parked p
                          where p.route = ?1 and p.ordering_key = coalesce(o.key, o.aggregate_id)
                            and p.state <> 'scheduled')
                 or exists (select 1 from postroom_blocked_keys b
                             where b.route = ?1 and b.ordering_key = coalesce(o.key, o.aggregate_id))) as behind
           from postroom_outbox o where o.seq > ?2 order by o.seq limit ?3"
    )
}

/// The replay that a parked row belongs to.
const REPLAY: &str = "(select max(w.operation) from postroom_operation_watch w
                  join postroom_operations a on a.id = w.operation and a.kind = 'replay' and a.route = p.route
                 where w.message_id = p.id and w.seq = p.seq) as replay";

/// Heads that are due, the longest due first: ?1 route, ?2 seqs in hand as JSON, ?3 how many.
pub(super) fn heads() -> String {
    format!(
        "select p.*, {REPLAY}, false as scheduled, false as behind, false as dealt_with from postroom_parked p
          where p.route = ?1 and p.state <> 'queued' and p.due_ms <= {NOW}
            and p.seq not in (select value from json_each(?2))
            and (p.ordering_key is null or not exists (
                    select 1 from postroom_parked e
                     where e.route = ?1 and e.ordering_key = p.ordering_key and e.state <> 'scheduled' and e.seq < p.seq))
            and not exists (select 1 from postroom_blocked_keys b
                             where b.route = ?1 and b.ordering_key = p.ordering_key)
          order by p.due_ms, p.seq limit ?3"
    )
}

/// What stands behind a head of its key, in order, up to what waits for its own time: ?1 route, ?2 seq of the head, ?3 how many.
pub(super) fn followers() -> String {
    format!(
        "select p.*, {REPLAY}, false as scheduled, false as behind, false as dealt_with from postroom_parked h
           join postroom_parked p on p.route = ?1 and p.ordering_key = h.ordering_key and p.state <> 'scheduled' and p.seq > h.seq
          where h.route = ?1 and h.seq = ?2
          order by p.seq limit ?3"
    )
}

#[cfg(test)]
mod tests {
    use rusqlite::{Connection, StatementStatus, params};

    use super::*;

    const ROWS: i64 = 1_000_000;
    const LIMIT: i64 = 1000;
    /// Steps of SQLite's machine for each row that a statement brings; a look at each row of the table would be hundreds of times as many.
    const STEPS_EACH: i64 = 400;

    /// Rows that a read brings, and the steps that it takes.
    fn cost(connection: &Connection, sql: &str, parameters: impl rusqlite::Params) -> (i64, i64) {
        let mut statement = connection.prepare(sql).unwrap();
        let mut rows = statement.query(parameters).unwrap();
        let mut brought = 0;
        while rows.next().unwrap().is_some() {
            brought += 1;
        }
        drop(rows);
        (brought, i64::from(statement.get_status(StatementStatus::VmStep)))
    }

    fn filled(table: &str, columns: &str, values: &str) -> Connection {
        let mut connection = Connection::open_in_memory().unwrap();
        crate::migrate::migrate(&mut connection).unwrap();
        let sql = format!(
            "with recursive n (n) as (select 1 union all select n + 1 from n where n < {ROWS})
             insert into {table} ({columns}, topic, type, payload, content_type)
             select {values}, 'orders', 'x', x'00', 'x' from n"
        );
        connection.execute_batch(&sql).unwrap();
        connection
    }

    const ID: &str = "printf('%08x-0000-7000-8000-000000000000', n)";

    #[test]
    fn a_read_of_fresh_rows_costs_what_it_brings_at_a_million() {
        let connection = filled("postroom_outbox", "id, key", &format!("{ID}, 'key-' || (n % 1000)"));
        for behind in [0, ROWS / 2, ROWS - LIMIT] {
            let (brought, steps) = cost(&connection, &fresh(), params!["orders", behind, LIMIT]);
            assert!(brought == LIMIT && steps < STEPS_EACH * LIMIT, "{steps} steps for {brought} rows behind {behind}");
        }
    }

    #[test]
    fn a_read_of_parked_rows_costs_what_it_brings_at_a_million() {
        let columns = "route, lane, occurred_ms, seq, id, ordering_key, state, attempts, due_ms";
        let values = |state: &str, due: &str| {
            format!(
                "'orders', 0, 0, n, {ID}, 'key-' || (n % 1000), case when n <= 1000 then 'retry' else {state} end, 1, {due}"
            )
        };
        let of_heads = |connection: &Connection| cost(connection, &heads(), params!["orders", "[1, 2, 3]", LIMIT]);
        // Nothing is due, and everything waits behind it.
        let connection = filled("postroom_parked", columns, &values("'queued'", "unixepoch() * 2000"));
        let (brought, steps) = of_heads(&connection);
        assert!(brought == 0 && steps < STEPS_EACH, "{steps} steps for {brought} rows");
        // One is due, and a thousand are behind it.
        connection.execute("update postroom_parked set due_ms = 0 where seq = 7", []).unwrap();
        let (brought, steps) = of_heads(&connection);
        assert!(brought == 1 && steps < STEPS_EACH, "{steps} steps for {brought} rows");
        let (brought, steps) = cost(&connection, &followers(), params!["orders", 7, 200]);
        assert!(brought == 200 && steps < STEPS_EACH * 200, "{steps} steps for {brought} rows");
        // All of them are.
        connection.execute("update postroom_parked set due_ms = 0", []).unwrap();
        let (brought, steps) = of_heads(&connection);
        assert!(brought == LIMIT - 3 && steps < STEPS_EACH * LIMIT, "{steps} steps for {brought} rows");
    }
}
