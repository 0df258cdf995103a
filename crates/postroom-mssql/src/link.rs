//! A connection for one purpose, opened when it is needed and again after it broke.

use std::time::Duration;

use postroom::{BoxError, StoreError};
use tiberius::error::Error;
use tokio::sync::Mutex;

use crate::conn::Conn;
use crate::connect::{Settings, connect, store_error};

/// No statement of ours takes this long; one that does waits for something that is gone.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Calls wait for each other. A call that fails, is cancelled, or takes too long, closes the connection, so that no half-done transaction can
/// meet the next one.
pub(crate) struct Link {
    settings: Settings,
    kept: Mutex<Option<Conn>>,
}

impl Link {
    pub fn new(settings: Settings) -> Self {
        Self { settings, kept: Mutex::default() }
    }

    pub async fn call<T>(
        &self,
        what: &'static str,
        work: impl AsyncFnOnce(&mut Conn) -> Result<T, Error>,
    ) -> Result<T, StoreError> {
        self.call_within(CALL_TIMEOUT, what, work).await
    }

    pub async fn call_within<T>(
        &self,
        patience: Duration,
        what: &'static str,
        work: impl AsyncFnOnce(&mut Conn) -> Result<T, Error>,
    ) -> Result<T, StoreError> {
        let done = tokio::time::timeout(patience, async {
            let mut kept = self.kept.lock().await;
            let mut conn = match kept.take() {
                Some(conn) => conn,
                None => connect(&self.settings).await?,
            };
            let value = work(&mut conn).await?;
            *kept = Some(conn);
            Ok(value)
        });
        match done.await {
            Ok(done) => done.map_err(|error| store_error(what, error)),
            Err(elapsed) => Err(StoreError::Unavailable { what, source: BoxError::from(elapsed) }),
        }
    }
}
