//! A steady stream whose messages are kept for a while: deletion in pieces beside partitions that are truncated as a whole.
//!
//! The partitions are a prototype of this benchmark's own. Their index on `id` is not unique: a partitioned table has no unique index
//! without the columns that it is partitioned by.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use postroom::{
    Batch, BoxError, Message, MessageId, Operator, Outbox, Retention, Sink, SinkLimits, Sweep, Unavailable, Verdict,
    Verdicts,
};
use postroom_postgres::Postgres;
use postroom_testkit::postgres::Database;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_postgres::Client;

use crate::measure::{Report, percentile};
use crate::{ours, resources, setup};

const RATE: u64 = 5000;
/// Messages of one transaction.
const BATCH: u64 = 10;
const WRITERS: u64 = 4;
const KEYS: u64 = 5000;
const SLOTS: u64 = 10;

/// How long to run, and how long messages are kept.
#[derive(Clone, Copy)]
pub struct Times {
    pub run: Duration,
    pub keep: Duration,
}

#[derive(Clone, Copy, PartialEq)]
enum How {
    Delete,
    Truncate,
}

/// What one run showed, after everything was kept for its time once.
#[derive(Default)]
struct Seen {
    p50: f64,
    p99: f64,
    worst_second: f64,
    table: f64,
    indexes: f64,
    dead_rows: f64,
    ours: f64,
    servers: f64,
    wal: f64,
}

/// Takes everything, and counts messages that come before an earlier one of their key.
#[derive(Default)]
struct InOrder(Mutex<HashMap<String, u64>>);

#[async_trait]
impl Sink for InOrder {
    fn limits(&self) -> SinkLimits {
        SinkLimits { batch_messages_max: 500, batch_bytes_max: usize::MAX, batches_in_flight_max: 4 }
    }

    async fn publish(&self, batch: &Batch) -> Result<Verdicts, Unavailable> {
        let mut verdicts = batch.silent();
        let mut newest = self.0.lock().map_err(|_| Unavailable::new("count", "a thread panicked"))?;
        for (place, message) in batch.messages().iter().enumerate() {
            let number =
                String::from_utf8_lossy(message.payload.get(..12).unwrap_or_default()).trim().parse().unwrap_or(0);
            let key = message.key.clone().unwrap_or_default();
            let last = newest.insert(key, number).unwrap_or(0);
            // An inversion is told by the verdict, so that it fails the gate.
            verdicts.judge(
                place,
                if number > last {
                    Verdict::Stored
                } else {
                    Verdict::failed(postroom::FailureKind::Permanent, "out of order")
                },
            );
        }
        Ok(verdicts)
    }

    async fn probe(&self) -> Result<(), Unavailable> {
        Ok(())
    }

    async fn close(&self) {}
}

/// Both ways, one after the other.
pub async fn compared(report: &mut Report, times: Times) -> Result<(), BoxError> {
    let mut seen = Vec::new();
    for how in [How::Delete, How::Truncate] {
        seen.push(stream(how, times).await?);
    }
    let rows = |of: fn(&Seen) -> f64| {
        ["deleted in pieces", "truncated by partition"]
            .iter()
            .zip(&seen)
            .map(|(name, seen)| ((*name).to_owned(), vec![of(seen)]))
            .collect::<Vec<_>>()
    };
    let minutes = |time: Duration| time.as_secs_f64() / 60.0;
    report.table("From commit to the sink's verdict: p50", "ms", rows(|seen| seen.p50));
    report.note(format!(
        "{RATE} messages a second for {:.0} minutes in transactions of {BATCH}, kept for {:.0}; figures are of the time after the first removal",
        minutes(times.run),
        minutes(times.keep)
    ));
    report.table("The same: p99", "ms", rows(|seen| seen.p99));
    report.table("The same: p99 of the worst second", "ms", rows(|seen| seen.worst_second));
    report.table("Largest size of the table", "MiB", rows(|seen| seen.table));
    report.table("Largest size of its indexes", "MiB", rows(|seen| seen.indexes));
    report.table("Most dead rows", "rows", rows(|seen| seen.dead_rows));
    report.table("Processor time of the relay and the writers", "% of a core", rows(|seen| seen.ours));
    report.table("Processor time of PostgreSQL", "% of a core", rows(|seen| seen.servers));
    report.table("WAL", "MiB/s", rows(|seen| seen.wal));
    Ok(())
}

async fn stream(how: How, times: Times) -> Result<Seen, BoxError> {
    let (database, client) = setup::database().await?;
    if how == How::Truncate {
        client.batch_execute(&partitions()).await?;
    }
    let (acked, mut acks) = mpsc::unbounded_channel();
    let (committed, mut commits) = mpsc::unbounded_channel();
    let run = ours::Run { acked: Some(acked), ..ours::Run::of(database.url()) };
    let mut relay = run.start(InOrder::default()).await?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let began = Instant::now();
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let (database, wake, committed) = (database.clone(), relay.wake.clone(), committed.clone());
        writers.spawn(async move { write(&database, writer, began, times.run, &committed, || wake.notify()).await });
    }
    drop(committed);
    let mut removing = JoinSet::new();
    let remover = database.clone();
    removing.spawn(async move {
        match how {
            How::Delete => delete(&remover, times.keep).await,
            How::Truncate => truncate(&remover, times.keep).await,
        }
    });

    let (mut seen, mut all) = (Seen::default(), Vec::new());
    let mut open: HashMap<MessageId, Instant> = HashMap::new();
    let mut early: HashMap<MessageId, Instant> = HashMap::new();
    let settled = times.keep + Duration::from_secs(90);
    let (mut second, mut this_second, mut sent) = (0_u64, Vec::new(), 0_usize);
    let mut from = None;
    let mut ticks = tokio::time::interval(Duration::from_secs(1));
    let mut writing = true;
    while writing || !open.is_empty() {
        let found = tokio::select! {
            Some((ids, at)) = commits.recv() => {
                let ids: Vec<MessageId> = ids;
                ids.into_iter().filter_map(|id| match early.remove(&id) {
                    Some(acked) => Some(acked.saturating_duration_since(at)),
                    None => { open.insert(id, at); None }
                }).collect()
            }
            Some((id, at)) = acks.recv() => {
                sent += 1;
                match open.remove(&id) {
                    Some(commit) => vec![at.saturating_duration_since(commit)],
                    None => { early.insert(id, at); Vec::new() }
                }
            }
            Some(ended) = writers.join_next() => { ended??; Vec::new() }
            Some(ended) = removing.join_next() => { ended??; return Err("the remover ended".into()) }
            _ = ticks.tick() => {
                second += 1;
                writing = !writers.is_empty();
                if began.elapsed() > times.run + Duration::from_secs(120) {
                    return Err(format!("{} messages were never sent, or out of order", open.len()).into());
                }
                let steady = began.elapsed() > settled && writing;
                if steady && from.is_none() {
                    from = Some((Instant::now(), resources::cpu(), servers(), resources::wal(&client).await?));
                }
                if steady && second.is_multiple_of(10) {
                    let row = client.query_one(SIZES, &[]).await?;
                    seen.table = seen.table.max(row.get::<_, f64>(0));
                    seen.indexes = seen.indexes.max(row.get::<_, f64>(1));
                    seen.dead_rows = seen.dead_rows.max(row.get::<_, f64>(2));
                }
                if steady && !this_second.is_empty() {
                    seen.worst_second = seen.worst_second.max(percentile(&this_second, 0.99));
                    // One in five is enough for the whole.
                    all.extend(this_second.iter().step_by(5));
                }
                if !writing && let Some((at, ours, theirs, wal)) = from.take() {
                    let passed = at.elapsed().as_secs_f64();
                    seen.ours = (resources::cpu() - ours).as_secs_f64() / passed * 100.0;
                    seen.servers = (servers() - theirs).as_secs_f64() / passed * 100.0;
                    seen.wal = (resources::wal(&client).await? - wal) / passed / 1048576.0;
                }
                this_second.clear();
                if second.is_multiple_of(60) {
                    eprintln!("  {second} s: {sent} sent, {} open", open.len());
                }
                Vec::new()
            }
        };
        this_second.extend(found.into_iter().map(|time: Duration| time.as_secs_f64() * 1000.0));
    }
    // The gate: each once, and in order. What was refused as out of order never gets here, and the loop above never ends.
    let total = (RATE * times.run.as_secs()) as usize;
    relay.stored(sent).await?;
    if sent != total || !early.is_empty() {
        return Err(format!("{total} messages were written, {sent} sent, {} of them nobody's", early.len()).into());
    }
    (seen.p50, seen.p99) = (percentile(&all, 0.5), percentile(&all, 0.99));
    relay.stop().await?;
    Ok(seen)
}

type Committed = mpsc::UnboundedSender<(Vec<MessageId>, Instant)>;

/// One writer's transactions, at an even rate.
async fn write(
    database: &Database,
    writer: u64,
    began: Instant,
    lasts: Duration,
    committed: &Committed,
    wake: impl Fn(),
) -> Result<(), BoxError> {
    let mut client = database.connect().await;
    for n in 0..RATE * lasts.as_secs() / BATCH / WRITERS {
        let due = began + Duration::from_secs_f64((n * WRITERS + writer) as f64 * BATCH as f64 / RATE as f64);
        tokio::time::sleep_until(due.into()).await;
        let messages: Vec<Message> = (0..BATCH)
            .map(|k| {
                let number = n * BATCH + k + 1;
                let payload = format!("{number:<12}{}", "x".repeat(setup::PAYLOAD - 12));
                Message::new("orders", "order.placed", payload.into_bytes())
                    .key(format!("{writer}-{}", number % (KEYS / WRITERS)))
                    .routing_key("orders.placed")
            })
            .collect();
        let ids = messages.iter().map(|message| message.id).collect();
        let mut tx = client.transaction().await?;
        Postgres.enqueue(&mut tx, &messages).await?;
        tx.commit().await?;
        let _ = committed.send((ids, Instant::now()));
        wake();
    }
    Ok(())
}

/// As `postroom run` does it.
async fn delete(database: &Database, keep: Duration) -> Result<(), BoxError> {
    let store = postroom_postgres::Database::new(database.url())?;
    let retention = Retention { outbox: Some(keep), ..Retention::default() };
    loop {
        let mut sweep = Sweep::begin(&retention);
        while !sweep.is_over() {
            let began = Instant::now();
            store.retain(&retention, &mut sweep).await?;
            tokio::time::sleep((began.elapsed() * 3).max(Duration::from_millis(50))).await;
        }
        tokio::time::sleep(Duration::from_secs(60)).await;
    }
}

/// The outbox as a partition for each minute, used again after ten.
fn partitions() -> String {
    let mut sql = "alter table postroom.outbox rename to outbox_plain;
        alter index postroom.outbox_fresh rename to plain_fresh;
        alter index postroom.outbox_late rename to plain_late;
        alter index postroom.outbox_id rename to plain_id;
        create table postroom.outbox (
            like postroom.outbox_plain including defaults including generated including constraints including storage,
            slot smallint not null default ((extract(epoch from clock_timestamp())::bigint / 60) % 10)
        ) partition by list (slot);
        alter table postroom.outbox alter column seq set default nextval('postroom.outbox_seq_seq');
        update postroom.settings set outbox_oid = 'postroom.outbox'::regclass;"
        .to_owned();
    for slot in 0..SLOTS {
        sql.push_str(&format!(
            "create table postroom.outbox_{slot} partition of postroom.outbox for values in ({slot});"
        ));
    }
    sql.push_str(
        "create index outbox_fresh on postroom.outbox (lane, seq);
         create index outbox_late on postroom.outbox (xid, lane, seq);
         create index outbox_id on postroom.outbox (id);",
    );
    sql
}

/// Empties each partition whose minute is over for as long as messages are kept, when every lane has passed it.
async fn truncate(database: &Database, keep: Duration) -> Result<(), BoxError> {
    let mut client: Client = database.connect().await;
    client.batch_execute("set lock_timeout = '100ms'").await?;
    loop {
        tokio::time::sleep(Duration::from_secs(5)).await;
        for slot in 0..SLOTS {
            let due = format!(
                "select coalesce(max(o.occurred_at) < clock_timestamp() - $1::float8 * interval '1 second', false)
                   from postroom.outbox_{slot} o where o.seq = (select max(m.seq) from postroom.outbox_{slot} m where m.lane = 0)"
            );
            if !client.query_one(&due, &[&keep.as_secs_f64()]).await?.get::<_, bool>(0) {
                continue;
            }
            let tx = client.transaction().await?;
            if tx.batch_execute(&format!("lock table postroom.outbox_{slot} in access exclusive mode")).await.is_err() {
                continue;
            }
            let unfinished = format!(
                "select exists (select from postroom.outbox_{slot} o join postroom.lanes l on l.lane = o.lane
                                 where not (o.seq <= l.position_seq and pg_visible_in_snapshot(o.xid, l.position_snapshot)))"
            );
            if !tx.query_one(&unfinished, &[]).await?.get::<_, bool>(0) {
                tx.batch_execute(&format!("truncate postroom.outbox_{slot}")).await?;
            }
            tx.commit().await?;
        }
    }
}

/// MiB of the table and of its indexes, and its dead rows.
const SIZES: &str = "
    select coalesce(sum(pg_table_size(c.oid)), 0)::float8 / 1048576, coalesce(sum(pg_indexes_size(c.oid)), 0)::float8 / 1048576,
           coalesce(sum(pg_stat_get_dead_tuples(c.oid)), 0)::float8
      from pg_class c where c.relnamespace = 'postroom'::regnamespace and c.relkind = 'r' and c.relname ~ '^outbox(_[0-9]+)?$'";

/// Processor time so far of all PostgreSQL processes of this machine.
fn servers() -> Duration {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let ticks = processes.filter_map(|process| {
        let text = std::fs::read_to_string(process.path().join("stat")).ok()?;
        let (head, rest) = text.rsplit_once(')')?;
        if !head.ends_with("(postgres") {
            return None;
        }
        let fields: Vec<&str> = rest.split_whitespace().collect();
        // utime, stime, and those of children that have ended.
        (11..15).map(|index| fields.get(index)?.parse::<u64>().ok()).sum::<Option<u64>>()
    });
    Duration::from_millis(ticks.sum::<u64>() * 10)
}
