//! The queue of a key: of the messages with one key, only the first may be taken. What a take finds behind it is put off for some minutes, so that
//! a long queue is read once and not by each take. Whatever removes a message from its queue makes the next one due (docs/decisions/0038).

use std::collections::{HashMap, HashSet};

use mysql_async::prelude::Queryable;
use mysql_async::{Error, Params, Transaction, params};

use crate::log::json;

/// After this time a take looks again at what was put off. Only needed beside a program of an older version, which makes nothing due.
const PUT_OFF_MINUTES: u32 = 10;
/// Most messages that one take puts off; it has them locked until it ends.
const PUT_OFF_AT_ONCE: usize = 5000;
const KEYS_ASKED_AT_ONCE: usize = 32;
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
    let sql = "update postroom_inbox_messages force index (postroom_inbox_messages_due) set put_off = 0
                where consumer = ? and put_off = 1 and due_at <= utc_timestamp(6)";
    tx.exec_drop(sql, (consumer,)).await?;
    // A message that is being settled is locked, and skipped. The indexes are named, because without statistics the server chooses others.
    let sql = "select m.seq, cast(m.due_at as char), m.ordering_key, m.state,
                      m.state = 'early' and exists (
                          select 1 from postroom_inbox_messages e force index (postroom_inbox_messages_aggregate)
                           where e.consumer = m.consumer and e.aggregate_type = m.aggregate_type and e.aggregate_id = m.aggregate_id
                             and e.aggregate_version < m.aggregate_version and e.state = 'early' and e.due_at <= utc_timestamp(6)),
                      m.state = 'ready' and exists (
                          select 1 from postroom_inbox_messages e force index (postroom_inbox_messages_state)
                           where e.consumer = m.consumer and e.state = 'claimed' and e.key_hash = m.key_hash
                             and e.ordering_key = m.ordering_key)
                 from postroom_inbox_messages m force index (postroom_inbox_messages_due)
                where m.consumer = :consumer and m.put_off = 0 and m.due_at <= utc_timestamp(6) and m.due_at >= :due
                  and (m.due_at > :due or m.seq > :seq)
                  and (m.state <> 'claimed' or m.claims < :claims_max)
                order by m.due_at, m.seq limit :count for update skip locked";
    let at_once = max.saturating_mul(2).clamp(16, 1000);
    let (mut chosen, mut keys, mut put_off) = (Vec::new(), HashSet::new(), 0);
    // For each key, the lowest seq that this transaction has locked.
    let (mut heads, mut heads_locked) = (HashMap::<String, i64>::new(), 0);
    let (mut after_due, mut after_seq) = ("1000-01-01".to_owned(), 0_i64);
    while chosen.len() < max && put_off < PUT_OFF_AT_ONCE {
        let parameters = params! { "consumer" => consumer, "due" => &after_due, "seq" => after_seq, "count" => at_once as u64, "claims_max" => claims_max };
        let found: Vec<Due> = tx.exec(sql, parameters).await?;
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
        let sql = "update json_table(:seqs, '$[*]' columns (seq bigint path '$')) n
                     straight_join postroom_inbox_messages m force index (primary) on m.seq = n.seq
                      set m.put_off = 1, m.waits_since = utc_timestamp(6), m.due_at = timestampadd(minute, :minutes, utc_timestamp(6))";
        if !seqs.is_empty() {
            put_off += seqs.len();
            tx.exec_drop(sql, params! { "seqs" => json(&seqs), "minutes" => PUT_OFF_MINUTES }).await?;
        }
        if !full {
            break;
        }
    }
    Ok(chosen)
}

/// The committed first message of each of these queues, by its seq. One part for each key: the server uses the order of the index only if the key
/// is a constant.
async fn firsts(tx: &mut Transaction<'_>, consumer: &str, keys: &[&String]) -> Result<HashMap<String, i64>, Error> {
    const OF_KEY: &str = "(select ordering_key, seq from postroom_inbox_messages force index (postroom_inbox_messages_queue)
                            where consumer = ? and key_hash = unhex(sha2(?, 256)) and ordering_key = ? and state <> 'early'
                            order by seq limit 1)";
    let mut firsts = HashMap::with_capacity(keys.len());
    for keys in keys.chunks(KEYS_ASKED_AT_ONCE) {
        // Few different statements, which the connection keeps prepared.
        let count = if keys.len() == 1 { 1 } else { KEYS_ASKED_AT_ONCE };
        let asked = keys.iter().chain(std::iter::repeat_n(&keys[0], count - keys.len()));
        let values = asked.flat_map(|key| [consumer.into(), key.as_str().into(), key.as_str().into()]);
        let sql = vec![OF_KEY; count].join(" union all ");
        let found: Vec<(String, i64)> = tx.exec(sql, Params::Positional(values.collect())).await?;
        firsts.extend(found);
    }
    Ok(firsts)
}

/// The seq of the first message of a queue that no other transaction has locked. Locks it.
async fn lock_first(tx: &mut Transaction<'_>, consumer: &str, key: &str) -> Result<Option<i64>, Error> {
    let sql = "select seq from postroom_inbox_messages force index (postroom_inbox_messages_queue)
                where consumer = ? and key_hash = unhex(sha2(?, 256)) and ordering_key = ? and state <> 'early'
                order by seq limit 1 for update skip locked";
    tx.exec_first(sql, (consumer, key, key)).await
}

/// Makes the first message of a queue due, after another one has left the queue. Waits for a take that is putting it off.
pub(super) async fn next(tx: &mut Transaction<'_>, consumer: &str, key: Option<&str>) -> Result<(), Error> {
    let Some(key) = key else { return Ok(()) };
    let sql = "select seq, put_off from postroom_inbox_messages force index (postroom_inbox_messages_queue)
                where consumer = ? and key_hash = unhex(sha2(?, 256)) and ordering_key = ? and state <> 'early'
                order by seq limit 1 for update";
    let first: Option<(i64, bool)> = tx.exec_first(sql, (consumer, key, key)).await?;
    let Some((seq, true)) = first else { return Ok(()) };
    let sql = "update postroom_inbox_messages set put_off = 0, due_at = utc_timestamp(6), waits_since = utc_timestamp(6) where seq = ?";
    tx.exec_drop(sql, (seq,)).await
}
