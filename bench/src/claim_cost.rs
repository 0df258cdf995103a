//! What a claim costs at different backlogs.

use std::time::Instant;

use postroom::{BoxError, Outcome, Report as Renewal, Route, Settlement, Source, Want};
use postroom_postgres::LogSource;

use postroom_testkit::postgres::Database;
use tokio_postgres::Client;

use crate::measure::Report;
use crate::setup;

const CLAIMS: usize = 60;
const MESSAGES: usize = 500;

/// From a thousand messages to `largest`, by tens.
pub async fn by_backlog(report: &mut Report, largest: usize) -> Result<(), BoxError> {
    let (database, client) = setup::database().await?;
    // The second route reads what the first has just read: the same work, with every page in the cache.
    let (first, again) = (source(&database, "bench").await?, source(&database, "again").await?);
    let mut rows = Vec::new();
    let (mut backlog, mut size) = (0, 1000);
    while size <= largest {
        setup::fill(&client, size - backlog).await?;
        backlog = size;
        rows.push((format!("backlog of {size}"), claims(&first, &client, true).await?));
        rows.push((format!("backlog of {size}, pages in the cache"), claims(&again, &client, false).await?));
        size *= 10;
    }
    report.table(format!("Claiming {MESSAGES} messages at once"), "µs a message", rows);
    Ok(())
}

async fn source(database: &Database, route: &str) -> Result<LogSource, BoxError> {
    let route = Route { lease: std::time::Duration::from_secs(3600), ..Route::new(route) };
    let source = LogSource::open(&postroom_postgres::Database::new(database.url())?, &route, "bench").await?;
    source.renew(&Renewal::default()).await?;
    Ok(source)
}

async fn claims(source: &LogSource, client: &Client, refill: bool) -> Result<Vec<f64>, BoxError> {
    let mut times = Vec::new();
    for claim in 0..CLAIMS {
        let began = Instant::now();
        let claimed = source.claim(Want::up_to(MESSAGES)).await?;
        // The first few warm the caches up.
        if claim >= 10 {
            times.push(began.elapsed().as_secs_f64() * 1e6 / claimed.deliveries.len().max(1) as f64);
        }
        if claimed.deliveries.len() < MESSAGES / 2 {
            return Err(format!("a claim brought only {} messages", claimed.deliveries.len()).into());
        }
        let done: Vec<Settlement> = claimed
            .deliveries
            .iter()
            .map(|delivery| Settlement { token: delivery.token, outcome: Outcome::Done })
            .collect();
        source.settle(&done).await?;
        if refill {
            // The backlog stays as it is.
            let more = "insert into postroom.outbox (topic, type, payload, key)
                        select 'orders', 'order.placed', convert_to(repeat('x', 200), 'UTF8'), 'key-' || n
                          from generate_series(1, $1::bigint) n";
            client.execute(more, &[&(done.len() as i64)]).await?;
        }
    }
    Ok(times)
}
