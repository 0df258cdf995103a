//! A consumer's transactions on a connection of its own.

use async_trait::async_trait;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, Opts, Transaction, TxOpts};
use postroom::{Session, StoreError, Transactions};

use crate::Mysql;
use crate::connect::{connect, store_error};

/// A statement of a handler may end the transaction: `commit`, a change of the schema, a deadlock. The savepoint is gone with it.
const BEGUN: &str = "savepoint postroom_begun";
const STILL_OPEN: &str = "release savepoint postroom_begun";
const NO_SUCH_SAVEPOINT: u16 = 1305;

/// A worker's connection. Transactions that are dropped are rolled back before the next one begins.
pub struct MysqlSession {
    opts: Opts,
    conn: Option<Conn>,
}

impl MysqlSession {
    /// Nothing is opened before the first transaction.
    pub fn new(opts: &Opts) -> Self {
        Self { opts: opts.clone(), conn: None }
    }

    async fn begun(&mut self) -> Result<Transaction<'_>, Error> {
        // One that broke, or was left in the middle of an answer, is not used again.
        let sound = match self.conn.as_mut() {
            Some(conn) => conn.query_drop("rollback").await.is_ok(),
            None => false,
        };
        if !sound {
            self.conn = None;
            let mut conn = connect(&self.opts).await?;
            // After a deadlock the server goes on without a transaction, and would commit each statement by itself.
            conn.query_drop("set session autocommit = 0").await?;
            self.conn = Some(conn);
        }
        let Some(conn) = self.conn.as_mut() else {
            return Err(Error::Other("there is no connection".into()));
        };
        let mut tx = conn.start_transaction(TxOpts::default()).await?;
        tx.query_drop(BEGUN).await?;
        Ok(tx)
    }
}

impl Transactions for Mysql {
    type Tx<'c> = Transaction<'c>;
}

#[async_trait]
impl Session<Mysql> for MysqlSession {
    async fn begin(&mut self) -> Result<Transaction<'_>, StoreError> {
        self.begun().await.map_err(|error| store_error("begin the consumer's transaction", error))
    }
}

/// Commits what was begun, and nothing else.
pub(crate) async fn commit(mut tx: Transaction<'_>) -> Result<(), StoreError> {
    const WHAT: &str = "commit the effect";
    match tx.query_drop(STILL_OPEN).await {
        Ok(()) => {}
        Err(Error::Server(server)) if server.code == NO_SUCH_SAVEPOINT => {
            let source = "its transaction was ended by a statement in it".into();
            return Err(StoreError::Refused { what: WHAT, source });
        }
        Err(error) => return Err(store_error(WHAT, error)),
    }
    tx.commit().await.map_err(|error| store_error(WHAT, error))
}
