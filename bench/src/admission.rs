//! How many messages a second an inbox admits, beside the same effect without one.

use std::time::Instant;

use postroom::{Admitted, BoxError, Consumer, ConsumerStore, MessageId, Session};
use postroom_postgres::{Connector, Postgres, PostgresSession};
use postroom_testkit::postgres::Database;
use tokio_postgres::Transaction;
use tokio_postgres::types::Type;
use uuid::Uuid;

use crate::measure::Report;
use crate::setup;

const CONNECTIONS: usize = 4;
const BATCH: usize = 100;
/// Messages of one sample, one by one and in batches.
const SINGLES: usize = 6_000;
const BATCHED: usize = 60_000;

/// Ids as writers make them, in the order of time.
const HISTORY: &str = "insert into postroom.inbox (consumer, message_id)
    select 'bench', (lpad(to_hex(1700000000000 + n), 12, '0') || '7' || substr(md5(n::text), 1, 3) || '8' || substr(md5(n::text), 4, 15))::uuid
      from generate_series($1::bigint, $2::bigint) n";

/// With this much history, and none.
pub async fn by_history(report: &mut Report, rounds: usize, history: usize) -> Result<(), BoxError> {
    for (batch, messages) in [(1, SINGLES), (BATCH, BATCHED)] {
        let how = if batch == 1 { "one by one".to_owned() } else { format!("{batch} in a transaction") };
        let mut rows: Vec<(String, Vec<f64>)> = Vec::new();
        for rows_there in [0, history] {
            let (database, client) = setup::database().await?;
            client.batch_execute("create table effects (message_id uuid not null, cents bigint not null)").await?;
            for begin in (0..rows_there).step_by(1_000_000) {
                let end = (begin + 1_000_000).min(rows_there);
                client.execute(HISTORY, &[&(begin as i64 + 1), &(end as i64)]).await?;
            }
            client.batch_execute("analyze postroom.inbox; checkpoint").await?;
            for _ in 0..rounds {
                let mut sample = |name: String, rate: f64| match rows.iter_mut().find(|(known, _)| *known == name) {
                    Some((_, samples)) => samples.push(rate),
                    None => rows.push((name, vec![rate])),
                };
                if rows_there == 0 {
                    sample("no inbox".to_owned(), run(&database, messages, batch, None).await?);
                }
                for duplicates in [0, 1, 50] {
                    let rate = run(&database, messages, batch, Some(duplicates)).await?;
                    sample(format!("inbox of {rows_there} rows, {duplicates}% duplicates"), rate);
                }
            }
        }
        let title = format!("Admission with an insert as the effect, {how}, {CONNECTIONS} connections");
        report.table(title, "messages/s", rows);
    }
    Ok(())
}

/// One sample: messages a second.
async fn run(database: &Database, messages: usize, batch: usize, duplicates: Option<usize>) -> Result<f64, BoxError> {
    let client = database.connect().await;
    client.batch_execute("truncate effects; checkpoint").await?;
    let ids: Vec<MessageId> = (0..messages).map(|_| MessageId::new()).collect();
    // Those that were admitted before, spread evenly.
    let known = |n: usize| duplicates.is_some_and(|percent| n * 37 % 100 < percent);
    let before: Vec<Uuid> = ids.iter().enumerate().filter(|(n, _)| known(*n)).map(|(_, id)| (*id).into()).collect();
    client.execute("select count(*) from postroom.inbox_admit_many('bench', $1::uuid[])", &[&before]).await?;
    let connector = Connector::new(database.url())?;
    let began = Instant::now();
    let workers: Vec<_> = (0..CONNECTIONS)
        .map(|worker| {
            let part: Vec<MessageId> = ids.iter().copied().skip(worker).step_by(CONNECTIONS).collect();
            let mut session = PostgresSession::new(connector.clone());
            tokio::spawn(async move {
                let consumer = Consumer::new("bench")?;
                for part in part.chunks(batch) {
                    let mut tx = session.begin().await?;
                    let new: Vec<Uuid> = if duplicates.is_some() {
                        let arrivals: Vec<_> = part.iter().map(|id| (*id, Some("k".to_owned()))).collect();
                        let admitted = Postgres::admit(&mut tx, &consumer, &arrivals).await?;
                        let new = part.iter().zip(admitted).filter(|(_, admitted)| *admitted == Admitted::New);
                        new.map(|(id, _)| (*id).into()).collect()
                    } else {
                        part.iter().map(|id| (*id).into()).collect()
                    };
                    effect(&tx, &new).await?;
                    Postgres::commit(tx).await?;
                }
                Ok::<(), BoxError>(())
            })
        })
        .collect();
    for worker in workers {
        worker.await??;
    }
    let rate = messages as f64 / began.elapsed().as_secs_f64();
    let row = client.query_one("select count(*), count(distinct message_id) from effects", &[]).await?;
    let (effects, distinct): (i64, i64) = (row.get(0), row.get(1));
    if effects != distinct || effects as usize != messages - before.len() {
        return Err(format!("{messages} messages, {} known: {effects} effects of {distinct}", before.len()).into());
    }
    Ok(rate)
}

async fn effect(tx: &Transaction<'_>, ids: &[Uuid]) -> Result<(), BoxError> {
    let sql = "insert into effects select id, 5 from unnest($1::uuid[]) id";
    tx.execute_typed(sql, &[(&ids, Type::UUID_ARRAY)]).await?;
    Ok(())
}
