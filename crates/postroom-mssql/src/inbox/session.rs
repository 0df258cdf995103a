//! A consumer's transactions on a connection of its own.

use std::ops::{Deref, DerefMut};

use async_trait::async_trait;
use postroom::{Session, StoreError, Transactions};
use tiberius::Row;
use tiberius::error::Error;

use crate::Mssql;
use crate::conn::{Conn, Driver};
use crate::connect::{Settings, connect, store_error};
use crate::sql::{FromRow, Named, get};

/// With implicit transactions the server never commits a statement by itself: after a deadlock, which ends the transaction, the next statement
/// begins another one. A failed statement leaves the transaction open, for the handler to judge. Set before each transaction, because what a handler
/// has set would stay.
const SESSION: &str = "set xact_abort off; set nocount off; set rowcount 0; set lock_timeout 5000; \
                       set transaction isolation level read committed; set implicit_transactions on";
/// Reading a table is what begins the transaction.
const BEGIN: &str = "select convert(bigint, current_transaction_id()) from postroom_settings";

/// A worker's connection. What a dropped transaction left is rolled back before the next one begins.
pub struct MssqlSession {
    settings: Settings,
    conn: Option<Conn>,
}

impl MssqlSession {
    /// Nothing is opened before the first transaction.
    pub fn new(settings: &Settings) -> Self {
        Self { settings: settings.clone(), conn: None }
    }

    async fn begun(&mut self) -> Result<Transaction<'_>, Error> {
        // One that broke, or may have been left in the middle of an answer, is not used again.
        let sound = match self.conn.as_mut() {
            Some(conn) if !conn.doubtful => conn.rollback().await.is_ok(),
            _ => false,
        };
        if !sound {
            self.conn = None;
            let conn = connect(&self.settings).await?;
            self.conn = Some(conn);
        }
        let Some(conn) = self.conn.as_mut() else {
            return Err(Error::Protocol("there is no connection".into()));
        };
        conn.batch(SESSION).await?;
        let rows = conn.batch(BEGIN).await?;
        let number = rows.first().map(|row| get(row, 0_usize)).transpose()?;
        let number = number.ok_or(Error::Protocol("postroom_settings is empty; run `postroom migrate`".into()))?;
        Ok(Transaction { conn, number })
    }
}

/// A transaction of a consumer. It is the driver's connection too, for the statements of a handler, which do not end the transaction.
pub struct Transaction<'c> {
    conn: &'c mut Conn,
    number: i64,
}

impl std::fmt::Debug for Transaction<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Transaction").field(&self.number).finish()
    }
}

impl Deref for Transaction<'_> {
    type Target = Driver;

    fn deref(&self) -> &Driver {
        &self.conn.driver
    }
}

impl DerefMut for Transaction<'_> {
    fn deref_mut(&mut self) -> &mut Driver {
        // Whether a handler's statement was waited for is not seen from here.
        self.conn.doubtful = true;
        &mut self.conn.driver
    }
}

impl Transaction<'_> {
    pub(crate) async fn rows(&mut self, sql: &str, parameters: Named) -> Result<Vec<Row>, Error> {
        self.conn.rows(sql, parameters).await
    }

    pub(crate) async fn query<T: FromRow>(&mut self, sql: &str, parameters: Named) -> Result<Vec<T>, Error> {
        self.conn.query(sql, parameters).await
    }

    pub(crate) async fn first<T: FromRow>(&mut self, sql: &str, parameters: Named) -> Result<Option<T>, Error> {
        self.conn.first(sql, parameters).await
    }

    pub(crate) async fn exec(&mut self, sql: &str, parameters: Named) -> Result<u64, Error> {
        self.conn.exec(sql, parameters).await
    }

    pub(crate) fn conn(&mut self) -> &mut Conn {
        self.conn
    }
}

impl Transactions for Mssql {
    type Tx<'c> = Transaction<'c>;
}

#[async_trait]
impl Session<Mssql> for MssqlSession {
    async fn begin(&mut self) -> Result<Transaction<'_>, StoreError> {
        self.begun().await.map_err(|error| store_error("begin the consumer's transaction", error))
    }
}

/// Commits what was begun, and nothing else: a statement of a handler may have ended it.
pub(crate) async fn commit(tx: Transaction<'_>) -> Result<(), StoreError> {
    const ENDED: u32 = 50002;
    const WHAT: &str = "commit the effect";
    let number = tx.number;
    let sql = format!(
        "if @@trancount <> 1 or current_transaction_id() <> {number} begin; throw {ENDED}, N'its transaction was ended by a statement in it', 1; end; \
         commit transaction"
    );
    match tx.conn.batch(&sql).await {
        Ok(_) => Ok(()),
        Err(Error::Server(server)) if server.code() == ENDED => {
            Err(StoreError::Refused { what: WHAT, source: server.message().into() })
        }
        Err(error) => Err(store_error(WHAT, error)),
    }
}
