//! The queue of a key: of the messages with one key, only the first may be taken. What a take finds behind it is put off for some minutes, so that
//! a long queue is read once and not by each take. Whatever removes a message from its queue makes the next one due (docs/decisions/0038).

use std::collections::{HashMap, HashSet};

use tiberius::error::Error;

use crate::inbox::Transaction;
use crate::sql::{json, named};

/// After this time a take looks again at what was put off, should nothing have made it due.
const PUT_OFF_MINUTES: u32 = 10;
/// Most messages that one take puts off; it has them locked until it ends.
const PUT_OFF_AT_ONCE: usize = 5000;
/// Most queues whose first message a take looks for and locks.
const HEADS_LOCKED_MAX: usize = 500;

/// A message that is due, locked: seq, due time, key, state, whether an earlier version of its aggregate is due too, and whether another message
/// of its key is claimed.
type Due = (i64, String, Option<String>, String, bool, bool);

/// Seqs of up to `max` messages that can be taken, the longest due first, all locked. What was claimed `claims_max` times is for the
/// next take to bury.
pub(super) async fn due(
    tx: &mut Transaction<'_>,
    consumer: &str,
    max: usize,
    claims_max: u32,
) -> Result<Vec<i64>, Error> {
    let sql = "update postroom_inbox_messages with (rowlock, readcommittedlock, readpast) set put_off = 0
                where consumer = @consumer and put_off = 1 and due_at <= sysutcdatetime()";
    tx.exec(sql, named! { "consumer" => consumer }).await?;
    // A message that is being settled is locked, and skipped. The indexes are named: on a small table the server would read all of it, and lock what is of
    // no concern here.
    let sql = "select top (@count) m.seq, convert(nvarchar(33), m.due_at, 126), m.ordering_key, m.state,
                      case when m.state = 'early' and exists (
                          select 1 from postroom_inbox_messages e
                           where e.consumer = m.consumer and e.aggregate_hash = m.aggregate_hash and e.aggregate_type = m.aggregate_type
                             and e.aggregate_version < m.aggregate_version and e.state = 'early' and e.due_at <= sysutcdatetime())
                           then 1 else 0 end,
                      case when m.state = 'ready' and exists (
                          select 1 from postroom_inbox_messages e
                           where e.consumer = m.consumer and e.state = 'claimed' and e.key_hash = m.key_hash) then 1 else 0 end
                 from postroom_inbox_messages m with (updlock, rowlock, readcommittedlock, readpast, forceseek, index(postroom_inbox_messages_due))
                where m.consumer = @consumer and m.put_off = 0 and m.due_at <= sysutcdatetime() and m.due_at >= convert(datetime2(6), @due)
                  and (m.due_at > convert(datetime2(6), @due) or m.seq > @seq)
                  and (m.state <> 'claimed' or m.claims < @claims_max)
                order by m.due_at, m.seq";
    let at_once = max.saturating_mul(2).clamp(16, 1000);
    let (mut chosen, mut keys, mut put_off) = (Vec::new(), HashSet::new(), 0);
    // For each key, the lowest seq that this transaction has locked.
    let (mut heads, mut heads_locked) = (HashMap::<String, i64>::new(), 0);
    let (mut after_due, mut after_seq) = ("1900-01-01T00:00:00".to_owned(), 0_i64);
    while chosen.len() < max && put_off < PUT_OFF_AT_ONCE {
        let parameters = named! { "consumer" => consumer, "due" => &after_due, "seq" => after_seq, "count" => at_once, "claims_max" => claims_max };
        let found: Vec<Due> = tx.query(sql, parameters).await?;
        let full = found.len() >= at_once;
        let waiting = found.iter().filter(|(_, _, _, state, _, _)| state == "ready");
        let waiting = waiting.filter_map(|(_, _, key, _, _, _)| key.as_ref()).collect::<HashSet<_>>();
        let firsts = firsts(tx, consumer, &waiting.into_iter().collect::<Vec<_>>()).await?;
        let mut behind = Vec::new();
        for (seq, due, key, state, above_another, held) in found {
            (after_due, after_seq) = (due, seq);
            let mut is_behind = false;
            if let Some(key) = key.as_ref().filter(|_| state != "early") {
                let head = heads.entry(key.clone()).or_insert(seq);
                *head = seq.min(*head);
                is_behind = state == "ready" && firsts.get(key).is_some_and(|first| *first < seq);
                if is_behind {
                    behind.push((key.clone(), seq));
                }
            }
            // An early message whose window ended together with one of its key waits for the next take.
            let can_go = !above_another && !is_behind && !held;
            if can_go && chosen.len() < max && key.is_none_or(|key| keys.insert(key)) {
                chosen.push(seq);
            }
        }
        // A message is put off only behind one that this transaction has locked: whatever removes that one then waits for this transaction, and
        // sees what it has put off.
        let mut seqs = Vec::with_capacity(behind.len());
        for (key, seq) in behind {
            let head = heads.entry(key.clone()).or_insert(seq);
            if *head >= seq && heads_locked < HEADS_LOCKED_MAX {
                heads_locked += 1;
                *head = lock_first(tx, consumer, &key).await?.unwrap_or(seq).min(*head);
            }
            if *head < seq {
                seqs.push(seq);
            }
        }
        let sql = format!(
            "update m set put_off = 1, waits_since = sysutcdatetime(), due_at = dateadd(minute, {PUT_OFF_MINUTES}, sysutcdatetime())
               from openjson(@seqs) with (seq bigint '$') n
               join postroom_inbox_messages m with (rowlock) on m.seq = n.seq
             option (loop join, force order)"
        );
        if !seqs.is_empty() {
            put_off += seqs.len();
            tx.exec(&sql, named! { "seqs" => json(&seqs) }).await?;
        }
        if !full {
            break;
        }
    }
    Ok(chosen)
}

/// The committed first message of each of these queues, by its seq. The database has `read_committed_snapshot` on, so nobody is waited for; without it, this
/// waits for whoever removes the first one.
async fn firsts(tx: &mut Transaction<'_>, consumer: &str, keys: &[&String]) -> Result<HashMap<String, i64>, Error> {
    if keys.is_empty() {
        return Ok(HashMap::new());
    }
    let sql = "select k.ordering_key, f.seq
                 from openjson(@keys) with (ordering_key nvarchar(512) '$') k
                cross apply (select top (1) m.seq from postroom_inbox_messages m
                              where m.consumer = @consumer and m.key_hash = convert(binary(32), hashbytes('SHA2_256', k.ordering_key)) and m.state <> 'early'
                              order by m.seq) f";
    let found: Vec<(String, i64)> = tx.query(sql, named! { "consumer" => consumer, "keys" => json(keys) }).await?;
    Ok(found.into_iter().collect())
}

/// The seq of the first message of a queue that no other transaction has locked. Locks it.
async fn lock_first(tx: &mut Transaction<'_>, consumer: &str, key: &str) -> Result<Option<i64>, Error> {
    let sql = "select top (1) seq from postroom_inbox_messages with (updlock, rowlock, readcommittedlock, readpast, forceseek, index(postroom_inbox_messages_queue))
                where consumer = @consumer and key_hash = convert(binary(32), hashbytes('SHA2_256', @key)) and state <> 'early' order by seq";
    tx.first(sql, named! { "consumer" => consumer, "key" => key }).await
}

/// Makes the first message of a queue due, after another one has left the queue. Waits for a take that is putting it off.
pub(super) async fn next(tx: &mut Transaction<'_>, consumer: &str, key: Option<&str>) -> Result<(), Error> {
    let Some(key) = key else { return Ok(()) };
    let sql = "select top (1) seq, put_off from postroom_inbox_messages with (updlock, rowlock, forceseek, index(postroom_inbox_messages_queue))
                where consumer = @consumer and key_hash = convert(binary(32), hashbytes('SHA2_256', @key)) and state <> 'early' order by seq";
    let first: Option<(i64, bool)> = tx.first(sql, named! { "consumer" => consumer, "key" => key }).await?;
    let Some((seq, true)) = first else { return Ok(()) };
    let sql = "update postroom_inbox_messages with (rowlock)
                  set put_off = 0, due_at = sysutcdatetime(), waits_since = sysutcdatetime() where seq = @seq";
    tx.exec(sql, named! { "seq" => seq }).await.map(drop)
}
