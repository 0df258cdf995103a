//! Whether a position still means what it meant: the file may have been restored, or its outbox emptied and counted from one
//! again.

use rusqlite::{Connection, OptionalExtension, Transaction, params};

use crate::connect::NOW;

/// How far a lane has been read, and which message that was.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Position {
    pub seq: i64,
    /// None: not known.
    pub id: Option<String>,
}

/// How the file stands towards what a relay knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    Known,
    /// The lane is not as this relay left it: restored from a backup, or somebody else's.
    Another,
    /// Seqs are handed out again that the position has passed.
    SeqsAgain,
}

/// Looks in the transaction that reads.
pub(crate) fn look(
    connection: &Connection,
    route: &str,
    owner: &str,
    epoch: i64,
    stored: i64,
    read: &Position,
) -> Result<Standing, rusqlite::Error> {
    let sql = "select position_seq from postroom_lanes where route = ?1 and lane = 0 and owner = ?2 and epoch = ?3";
    let left: Option<i64> =
        connection.prepare_cached(sql)?.query_row(params![route, owner, epoch], |row| row.get(0)).optional()?;
    if left != Some(stored) {
        return Ok(Standing::Another);
    }
    if seqs_again(connection, read)? {
        return Ok(Standing::SeqsAgain);
    }
    Ok(Standing::Known)
}

/// Whether seqs up to this position are, or will be, other messages'.
pub(crate) fn seqs_again(connection: &Connection, position: &Position) -> Result<bool, rusqlite::Error> {
    let sql = "select coalesce((select max(seq) from sqlite_sequence where name = 'postroom_outbox'), 0) < ?1
                   or coalesce((select o.id <> ?2 from postroom_outbox o where o.seq = ?1), false)";
    connection.prepare_cached(sql)?.query_row(params![position.seq, position.id], |row| row.get(0))
}

/// Gives all messages seqs above all that were ever used, in their order. A seq is handed out again only after everything from
/// it on was deleted, so all that is there now came later.
pub(crate) fn give_new_seqs(tx: &Transaction<'_>) -> Result<usize, rusqlite::Error> {
    let top: i64 = tx.query_row(
        "select max(coalesce((select max(position_seq) from postroom_lanes), 0),
                    coalesce((select max(seq) from postroom_outbox), 0),
                    coalesce((select max(seq) from postroom_parked), 0),
                    coalesce((select max(seq) from postroom_dead_letters), 0),
                    coalesce((select max(seq) from sqlite_sequence where name = 'postroom_outbox'), 0))",
        [],
        |row| row.get(0),
    )?;
    let moved = tx.execute("update postroom_outbox set seq = seq + ?1", [top])?;
    if tx.execute("update sqlite_sequence set seq = ?1 where name = 'postroom_outbox'", [2 * top])? == 0 {
        tx.execute("insert into sqlite_sequence (name, seq) values ('postroom_outbox', ?1)", [2 * top])?;
    }
    tx.execute("update postroom_lanes set position_id = null", [])?;
    Ok(moved)
}

/// After the clock went back: what waits since a moment that has not come yet waits from now on.
pub(crate) fn reset_waits(connection: &Connection, route: &str) -> Result<usize, rusqlite::Error> {
    let sql = format!(
        "update postroom_parked set due_ms = due_ms - (waits_since_ms - {NOW}), waits_since_ms = {NOW}
          where route = ?1 and state in ('retry', 'scheduled') and waits_since_ms > {NOW} + 2000"
    );
    connection.execute(&sql, [route])
}
