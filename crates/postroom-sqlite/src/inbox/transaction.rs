//! A consumer's transaction on one file. Writers take turns in SQLite, so a worker that has begun is alone with the file. All
//! work happens on blocking threads, to which the connection goes and from which it comes back.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use postroom::{EnqueueError, Message, Session, StoreError, Transactions};
use rusqlite::{Connection, InterruptHandle, ffi};
use tokio::runtime::Handle;
use tokio::task::spawn_blocking;

use crate::Sqlite;
use crate::connect::{FileId, connect, file_at, store_error};
use crate::outbox::enqueue;

/// How long a worker waits for the file, and how often it asks.
const BEGIN_WAIT: Duration = Duration::from_secs(10);
const BEGIN_PAUSE: Duration = Duration::from_millis(5);
/// Until the work that nobody waits for any more is over.
const INTERRUPT_EVERY: Duration = Duration::from_millis(10);

/// There is no transaction any more.
#[derive(Debug, thiserror::Error)]
#[error("its transaction was ended by a statement in it, or because a statement in it was cancelled")]
pub(crate) struct Ended;

/// An open immediate transaction on a worker's own connection; rolled back when it is dropped.
#[derive(Debug)]
pub struct SqliteTransaction<'c> {
    /// None: it went to a blocking thread and nobody waited for it to come back. It is rolled back there.
    connection: &'c mut Option<Connection>,
    path: &'c Path,
    /// The file that the connection writes to.
    file: FileId,
}

impl SqliteTransaction<'_> {
    /// Runs statements of this transaction on a thread that may block. Dropping the future interrupts the statement and ends the
    /// transaction. After its end nothing runs any more, because each statement would be committed by itself.
    ///
    /// The closure moves to another thread, so it takes copies of what it needs.
    pub async fn run<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&Connection) -> Result<T, rusqlite::Error> + Send + 'static,
    ) -> Result<T, rusqlite::Error> {
        let misuse =
            |ended: Ended| rusqlite::Error::SqliteFailure(ffi::Error::new(ffi::SQLITE_MISUSE), Some(ended.to_string()));
        self.aside(work).await.map_err(misuse)?
    }

    /// Writes `messages` into this transaction, in their order.
    pub async fn enqueue(&mut self, messages: &[Message]) -> Result<(), EnqueueError> {
        let messages = messages.to_vec();
        let enqueued = self.aside(move |connection| enqueue(connection, &messages)).await;
        enqueued.map_err(|ended| EnqueueError::Store(ended.into()))?
    }

    /// As [`run`](Self::run), for the runtime's own statements.
    pub(crate) async fn stored<T: Send + 'static>(
        &mut self,
        what: &'static str,
        work: impl FnOnce(&Connection) -> Result<T, rusqlite::Error> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.aside(work).await.map_err(|ended| refused(what, ended))?.map_err(|error| store_error(what, error))
    }

    /// Runs on a blocking thread, within the transaction.
    pub(crate) async fn aside<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&Connection) -> T + Send + 'static,
    ) -> Result<T, Ended> {
        let Some(connection) = self.connection.take() else { return Err(Ended) };
        let over = Over(Arc::default());
        let mut interrupt = Interrupt { handle: Some(connection.get_interrupt_handle()), over: over.0.clone() };
        let worked = spawn_blocking(move || {
            let _over = over;
            let worked = (!connection.is_autocommit()).then(|| work(&connection));
            (connection, worked)
        });
        let worked = worked.await;
        interrupt.handle = None;
        match worked {
            Ok((connection, worked)) => {
                *self.connection = Some(connection);
                worked.ok_or(Ended)
            }
            // The connection was dropped, which rolled back.
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => Err(Ended),
            },
        }
    }

    pub(crate) async fn commit(mut self) -> Result<(), StoreError> {
        self.stored("commit the effect", |connection| connection.execute_batch("commit")).await?;
        // What was written to a file that is not there any more is not stored.
        still_there("commit the effect", self.path, self.file)
    }

    /// Whether it can still be committed.
    pub(crate) fn is_open(&self) -> bool {
        self.connection.as_ref().is_some_and(|connection| !connection.is_autocommit())
    }
}

impl Drop for SqliteTransaction<'_> {
    fn drop(&mut self) {
        if self.is_open() {
            // Closing it rolls back.
            close(self.connection.take());
        }
    }
}

/// Whether a path names the file that was opened there.
fn still_there(what: &'static str, path: &Path, file: FileId) -> Result<(), StoreError> {
    let problem = match file_at(path) {
        Some(now) if now == file => return Ok(()),
        Some(_) => format!("{} was replaced by another file meanwhile", path.display()),
        None => format!("{} is gone", path.display()),
    };
    Err(StoreError::Unavailable { what, source: problem.into() })
}

/// Says when it is dropped that the work on a connection is over.
struct Over(Arc<AtomicBool>);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Interrupts what runs on a connection when it is dropped, and what begins after that: an interrupt that comes between two statements
/// stops neither.
struct Interrupt {
    handle: Option<InterruptHandle>,
    over: Arc<AtomicBool>,
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        let Some(handle) = self.handle.take() else { return };
        handle.interrupt();
        let over = self.over.clone();
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(async move {
                while !over.load(Ordering::Acquire) {
                    handle.interrupt();
                    tokio::time::sleep(INTERRUPT_EVERY).await;
                }
            });
        }
    }
}

/// Closes a connection on a blocking thread: the last one of a file may have a write-ahead log to bring in.
fn close(connection: Option<Connection>) {
    match Handle::try_current() {
        Ok(runtime) if connection.is_some() => drop(runtime.spawn_blocking(move || drop(connection))),
        _ => drop(connection),
    }
}

pub(crate) fn refused(what: &'static str, error: impl Into<postroom::BoxError>) -> StoreError {
    StoreError::Refused { what, source: error.into() }
}

impl Transactions for Sqlite {
    type Tx<'c> = SqliteTransaction<'c>;
}

/// A worker's connection to a file.
#[derive(Debug)]
pub struct SqliteSession {
    path: PathBuf,
    connection: Option<Connection>,
    /// The file that the connection was opened on.
    file: Option<FileId>,
}

impl SqliteSession {
    /// Opens the file with the first transaction.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), connection: None, file: None }
    }
}

impl Drop for SqliteSession {
    fn drop(&mut self) {
        close(self.connection.take());
    }
}

#[async_trait]
impl Session<Sqlite> for SqliteSession {
    async fn begin(&mut self) -> Result<SqliteTransaction<'_>, StoreError> {
        const WHAT: &str = "begin the consumer's transaction";
        let mut waited = Duration::ZERO;
        loop {
            let (path, idle) = (self.path.clone(), self.connection.take().filter(Connection::is_autocommit));
            let opened = self.file.take();
            let begun = spawn_blocking(move || {
                // Opening would create it, and one that was replaced is another, although an open connection still sees the old.
                let file = file_at(&path).ok_or_else(|| {
                    let source = format!("there is no file {}; `postroom migrate` creates it", path.display()).into();
                    StoreError::Unavailable { what: WHAT, source }
                })?;
                if idle.is_some() && opened != Some(file) {
                    tracing::warn!(file = %path.display(), "the database file was replaced; it is opened again");
                }
                let connection = match idle {
                    Some(connection) if opened == Some(file) => connection,
                    _ => {
                        let connection = connect(&path)?;
                        still_there(WHAT, &path, file)?;
                        // Waiting for other writers is done here, without a thread.
                        connection.busy_timeout(Duration::ZERO).map_err(|error| store_error(WHAT, error))?;
                        connection
                    }
                };
                let begun = connection.execute_batch("begin immediate").map_err(|error| store_error(WHAT, error));
                Ok((connection, file, begun))
            });
            let begun = begun.await.map_err(|error| StoreError::Unavailable { what: WHAT, source: error.into() })?;
            let (connection, file, begun) = begun?;
            (self.connection, self.file) = (Some(connection), Some(file));
            match begun {
                Ok(()) => {
                    let (connection, path) = (&mut self.connection, &*self.path);
                    return Ok(SqliteTransaction { connection, path, file });
                }
                Err(error) if !matches!(error, StoreError::Busy { .. }) || waited >= BEGIN_WAIT => return Err(error),
                Err(_) => {
                    tokio::time::sleep(BEGIN_PAUSE).await;
                    waited += BEGIN_PAUSE;
                }
            }
        }
    }
}
