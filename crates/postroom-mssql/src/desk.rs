//! Connections of operators' calls.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use postroom::{BoxError, StoreError};
use tiberius::error::Error;

use crate::conn::Conn;
use crate::connect::{Settings, connect, store_error};

/// A look at large tables may take a while; one that takes longer waits for something that is gone.
const CALL_TIMEOUT: Duration = Duration::from_secs(300);
const IDLE_MAX: usize = 4;
const DEADLOCK: u32 = 1205;
/// A call that met a deadlock was rolled back and is made again.
const TRIES: usize = 5;

/// Calls run beside each other, each on a connection of its own, some of which are kept for later ones.
pub(crate) struct Desk {
    settings: Settings,
    idle: Mutex<Vec<Conn>>,
    /// Calls take turns on one connection.
    turn: Option<tokio::sync::Mutex<()>>,
}

/// Why a call failed: the server said it, or we did.
pub(crate) enum Failed {
    Server(Error),
    Told(StoreError),
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Server(error)
    }
}

impl From<StoreError> for Failed {
    fn from(error: StoreError) -> Self {
        Self::Told(error)
    }
}

impl From<serde_json::Error> for Failed {
    fn from(error: serde_json::Error) -> Self {
        Self::Server(Error::Conversion(error.to_string().into()))
    }
}

impl Desk {
    pub fn new(settings: Settings) -> Self {
        Self { settings, idle: Mutex::default(), turn: None }
    }

    /// With one connection, which calls use in turn.
    pub fn one_at_a_time(self) -> Self {
        Self { turn: Some(tokio::sync::Mutex::default()), ..self }
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// A connection on which something failed is not used again.
    pub async fn call<T>(
        &self,
        what: &'static str,
        work: impl AsyncFnOnce(&mut Conn) -> Result<T, Failed> + Clone,
    ) -> Result<T, StoreError> {
        let done = tokio::time::timeout(CALL_TIMEOUT, async {
            let mut tries = 0;
            loop {
                tries += 1;
                match self.tried(work.clone()).await {
                    Err(Failed::Server(Error::Server(error))) if error.code() == DEADLOCK && tries < TRIES => {}
                    other => return other,
                }
            }
        });
        match done.await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(Failed::Server(error))) => Err(store_error(what, error)),
            Ok(Err(Failed::Told(error))) => Err(error),
            Err(elapsed) => Err(StoreError::Unavailable { what, source: BoxError::from(elapsed) }),
        }
    }

    async fn tried<T>(&self, work: impl AsyncFnOnce(&mut Conn) -> Result<T, Failed>) -> Result<T, Failed> {
        let _turn = match &self.turn {
            Some(turn) => Some(turn.lock().await),
            None => None,
        };
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        // It may have been closed by the server since.
        if let Some(conn) = &mut idle
            && conn.rollback().await.is_err()
        {
            idle = None;
        }
        let mut conn = match idle {
            Some(conn) => conn,
            None => connect(&self.settings).await?,
        };
        let value = work(&mut conn).await?;
        // A deed that had nothing to do leaves its transaction open, with its locks.
        if !conn.doubtful && conn.rollback().await.is_ok() {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            if idle.len() < IDLE_MAX {
                idle.push(conn);
            }
        }
        Ok(value)
    }
}

/// A transaction for a deed. One that is not committed is rolled back when the deed is over.
pub(crate) async fn begin(conn: &mut Conn) -> Result<&mut Conn, Error> {
    conn.begin().await?;
    Ok(conn)
}
