//! A connection for one thing that an operator asks for.

use std::future::Future;
use std::time::Duration;

use postroom::StoreError;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, IsolationLevel, Transaction};

use crate::connect::Connector;
use crate::link::store_error;

/// Whoever waited for a relay's lock must see what the relay recorded, whatever level the server gives to a transaction.
const LEVEL: IsolationLevel = IsolationLevel::ReadCommitted;
/// Local to each transaction, so that they hold behind a pooler too. Names are looked for in pg_catalog alone: whoever may create
/// functions elsewhere must not run code as an operator. Waits end before whoever asked gives up.
const SETTINGS: &str = "select pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
                        set local lock_timeout = '10s';
                        set local statement_timeout = '50s';
                        set local jit = off";

/// An operator's connection. Everything happens in transactions.
pub(crate) struct OperatorSession {
    client: Client,
}

impl OperatorSession {
    pub async fn open(connector: &Connector) -> Result<Self, StoreError> {
        Ok(Self { client: connector.connect().await? })
    }

    /// Begins a transaction that may write.
    pub async fn deed(&mut self) -> Result<Transaction<'_>, StoreError> {
        self.begin(false).await
    }

    /// Begins a transaction that only looks.
    pub async fn look(&mut self) -> Result<Transaction<'_>, StoreError> {
        self.begin(true).await
    }

    async fn begin(&mut self, read_only: bool) -> Result<Transaction<'_>, StoreError> {
        let failed = |error| store_error("begin a transaction", error);
        let tx = self
            .client
            .build_transaction()
            .isolation_level(LEVEL)
            .read_only(read_only)
            .start()
            .await
            .map_err(failed)?;
        tx.batch_execute(SETTINGS).await.map_err(failed)?;
        Ok(tx)
    }
}

/// Longer than the server takes to end a statement of ours. A server that hangs does not even do that.
const ANSWERS_WITHIN: Duration = Duration::from_secs(75);

/// What an operator asked for, with an end: without an answer it is given up. Where it waited for a lock in vain, the error says who
/// has it.
pub(crate) async fn within<T>(
    connector: &Connector,
    what: &'static str,
    asked: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    match tokio::time::timeout(ANSWERS_WITHIN, asked).await {
        Ok(Err(error)) => Err(with_blockers(connector, with_grants(error)).await),
        Ok(answered) => answered,
        Err(_) => {
            let source = format!("the server did not answer within {} s", ANSWERS_WITHIN.as_secs()).into();
            Err(StoreError::Unavailable { what, source })
        }
    }
}

/// How often a server that works for long is asked whether it is there, and how long it has for that answer.
const LOOKS_EVERY: Duration = Duration::from_secs(15);
const IS_THERE_WITHIN: Duration = Duration::from_secs(15);

/// Something that may take as long as it needs, as long as the server answers others meanwhile. None: it answered nobody, twice in a row.
pub(crate) async fn while_it_answers<T>(connector: &Connector, work: impl Future<Output = T>) -> Option<T> {
    let silence = async {
        let mut silent = 0;
        while silent < 2 {
            tokio::time::sleep(LOOKS_EVERY).await;
            let asked = async {
                connector
                    .connect_beyond()
                    .await?
                    .batch_execute("select 1")
                    .await
                    .map_err(|error| store_error("ask", error))
            };
            // A refusal is an answer too.
            silent = if tokio::time::timeout(IS_THERE_WITHIN, asked).await.is_err() { silent + 1 } else { 0 };
        }
    };
    tokio::select! {
        biased;
        done = work => Some(done),
        () = silence => None,
    }
}

/// Adds where the grants are to an error of a missing right.
fn with_grants(error: StoreError) -> StoreError {
    let StoreError::Refused { what, source } = error else { return error };
    let code = source.downcast_ref::<tokio_postgres::Error>().and_then(tokio_postgres::Error::as_db_error);
    let source = match code.filter(|error| *error.code() == SqlState::INSUFFICIENT_PRIVILEGE) {
        Some(error) => {
            let told = error.message();
            format!("{told}; docs/grants-reader.sql has what looking needs, docs/grants-operator.sql what acting needs")
                .into()
        }
        None => source,
    };
    StoreError::Refused { what, source }
}

/// Adds who holds locks on our tables to an error of a wait for one.
pub(crate) async fn with_blockers(connector: &Connector, error: StoreError) -> StoreError {
    let StoreError::Busy { what, source } = error else { return error };
    let waited = source.downcast_ref::<tokio_postgres::Error>().and_then(tokio_postgres::Error::code);
    if waited != Some(&SqlState::LOCK_NOT_AVAILABLE) {
        return StoreError::Busy { what, source };
    }
    let told = match blockers(connector).await {
        Ok(blockers) if blockers.is_empty() => "it has been released; try again".to_owned(),
        Ok(blockers) => format!("{}; end that transaction, or wait for it, and try again", blockers.join("; ")),
        Err(_) => "try again; pg_locks and pg_stat_activity show who holds it".to_owned(),
    };
    StoreError::Busy { what, source: format!("it waited for a lock: {told}").into() }
}

/// The three oldest transactions with locks on our tables, in words.
async fn blockers(connector: &Connector) -> Result<Vec<String>, StoreError> {
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    let rows = tx
        .query(include_str!("sql/blockers.sql"), &[])
        .await
        .map_err(|error| store_error("find out who holds locks", error))?;
    Ok(rows.iter().filter_map(|row| row.try_get(0).ok()).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn work_on_a_server_that_answers_nobody_is_given_up() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("postgres://u@{}/x", silent.local_addr().unwrap());
        let connector = Connector::new(&url).unwrap();
        assert_eq!(while_it_answers(&connector, std::future::pending::<()>()).await, None);
        // One that refuses is there.
        drop(silent);
        assert_eq!(while_it_answers(&connector, tokio::time::sleep(Duration::from_secs(3600))).await, Some(()));
    }
}
