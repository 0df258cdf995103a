//! What is seen of a relay behind a pooler, and of the sessions that it shares with others.

use std::time::{Duration, Instant};

use tokio_postgres::{Error, SimpleQueryMessage};

/// What others rely on, and a relay sets for itself.
const SETTINGS: &[(&str, &str)] = &[("synchronous_commit", "on"), ("statement_timeout", "0"), ("enable_seqscan", "on")];
/// More than the pooler has connections for each database.
const SESSIONS: usize = 12;
/// A pooler whose server was away tries it again after 15 s.
const PATIENCE: Duration = Duration::from_secs(40);

pub enum Behind {
    /// It said that there is a pooler, and ended.
    Refused,
    /// The database could not be reached through the pooler.
    Unreachable,
    Wrong(String),
}

impl Behind {
    /// Of a relay's end, with its exit code and what it printed; none: it runs on.
    pub fn of(ended: Option<(Option<i32>, String)>) -> Self {
        match ended {
            None => Self::Wrong("a relay behind a pooler does not end".to_owned()),
            Some((Some(69 | 75), _)) => Self::Unreachable,
            Some((Some(code), printed)) if code != 0 && printed.contains("pooler") => Self::Refused,
            Some((code, printed)) => Self::Wrong(format!("a relay behind a pooler ended with {code:?}: {printed}")),
        }
    }
}

/// Settings in the pooler's sessions that are not what everybody else relies on. None, when it cannot be asked for a while.
pub async fn changed_settings(url: &str) -> Vec<String> {
    let began = Instant::now();
    let mut changed = Vec::new();
    let mut seen = 0;
    while seen < SESSIONS && began.elapsed() < PATIENCE {
        match tokio::time::timeout(PATIENCE, settings(url)).await {
            Ok(Ok(found)) => {
                changed.extend(found);
                seen += 1;
            }
            _ => tokio::time::sleep(Duration::from_millis(200)).await,
        }
    }
    changed.sort();
    changed.dedup();
    changed
}

async fn settings(url: &str) -> Result<Vec<String>, Error> {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
    tokio::spawn(connection);
    let mut changed = Vec::new();
    for (name, usual) in SETTINGS {
        for message in client.simple_query(&format!("show {name}")).await? {
            if let SimpleQueryMessage::Row(row) = message
                && row.get(0) != Some(usual)
            {
                changed.push(format!("{name} is {:?} in a session of the pooler, not {usual}", row.get(0)));
            }
        }
    }
    Ok(changed)
}
