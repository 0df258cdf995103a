//! What it costs: processor time, memory, WAL, and an idle relay.

use std::time::Duration;

use postroom::BoxError;
use tokio_postgres::Client;

use crate::measure::Report;
use crate::{ours, setup};

/// Processor time of this process so far.
pub fn cpu() -> Duration {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> =
        text.rsplit_once(')').map(|(_, rest)| rest.split_whitespace().collect()).unwrap_or_default();
    let ticks = |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok()).unwrap_or_default();
    // utime and stime, in ticks of 10 ms.
    Duration::from_millis((ticks(11) + ticks(12)) * 10)
}

/// Resident memory of this process, in MiB.
pub fn memory() -> f64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("VmRSS:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<f64>().ok()).unwrap_or_default() / 1024.0
}

/// Bytes of WAL written so far.
pub async fn wal(client: &Client) -> Result<f64, BoxError> {
    let sql = "select (pg_current_wal_insert_lsn() - '0/0')::float8";
    Ok(client.query_one(sql, &[]).await?.get(0))
}

/// A relay with nothing to do, for twenty seconds.
pub async fn idle(report: &mut Report) -> Result<(), BoxError> {
    const SECONDS: u64 = 20;
    let (database, client) = setup::database().await?;
    let (exchange, _audit) = setup::exchange().await;
    let relay = ours::Run::of(database.url()).into_rabbitmq(&exchange).await?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let transactions = async || -> Result<f64, BoxError> {
        // What a backend counted it reports at most once a second.
        let sql = "select xact_commit::float8 from pg_stat_database where datname = current_database()";
        Ok(client.query_one(sql, &[]).await?.get(0))
    };
    let (cpu_before, queries_before) = (cpu(), transactions().await?);
    tokio::time::sleep(Duration::from_secs(SECONDS)).await;
    let used = (cpu() - cpu_before).as_secs_f64() * 1000.0 / SECONDS as f64;
    let queries = (transactions().await? - queries_before) / SECONDS as f64;
    report.table(
        "An idle relay, each second",
        "see row",
        vec![("transactions at the database".to_owned(), vec![queries]), ("processor time, ms".to_owned(), vec![used])],
    );
    relay.stop().await?;
    Ok(())
}
