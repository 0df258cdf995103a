//! One connection, and statements on it.

use tiberius::error::Error;
use tiberius::{Client, Row, ToSql};
use tokio::net::TcpStream;
use tokio_util::compat::Compat;

use crate::sql::{FromRow, Named, numbered};

/// The driver's connection.
pub type Driver = Client<Compat<TcpStream>>;

/// A connection with our settings.
pub struct Conn {
    pub(crate) driver: Driver,
    /// A call was cancelled while it waited for an answer, or somebody else used the connection: what it is in the middle of is not known.
    pub(crate) doubtful: bool,
}

impl std::fmt::Debug for Conn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Conn").finish_non_exhaustive()
    }
}

impl Conn {
    /// The driver's connection.
    pub fn driver(&mut self) -> &mut Driver {
        self.doubtful = true;
        &mut self.driver
    }

    /// The rows of a statement.
    pub(crate) async fn rows(&mut self, sql: &str, parameters: Named) -> Result<Vec<Row>, Error> {
        self.doubtful = true;
        let sql = numbered(sql, &parameters);
        let values: Vec<&dyn ToSql> = parameters.iter().map(|(_, value)| value as &dyn ToSql).collect();
        let rows = self.driver.query(sql, &values).await?.into_first_result().await?;
        self.doubtful = false;
        Ok(rows)
    }

    pub(crate) async fn query<T: FromRow>(&mut self, sql: &str, parameters: Named) -> Result<Vec<T>, Error> {
        self.rows(sql, parameters).await?.iter().map(T::from_row).collect()
    }

    pub(crate) async fn first<T: FromRow>(&mut self, sql: &str, parameters: Named) -> Result<Option<T>, Error> {
        self.rows(sql, parameters).await?.first().map(T::from_row).transpose()
    }

    /// Executes a statement; how many rows it was about.
    pub(crate) async fn exec(&mut self, sql: &str, parameters: Named) -> Result<u64, Error> {
        self.doubtful = true;
        let sql = numbered(sql, &parameters);
        let values: Vec<&dyn ToSql> = parameters.iter().map(|(_, value)| value as &dyn ToSql).collect();
        let done = self.driver.execute(sql, &values).await?.total();
        self.doubtful = false;
        Ok(done)
    }

    /// Statements without parameters, as one batch of their own: what a transaction is begun and ended with.
    pub(crate) async fn batch(&mut self, sql: &str) -> Result<Vec<Row>, Error> {
        self.doubtful = true;
        let rows = self.driver.simple_query(sql).await?.into_first_result().await?;
        self.doubtful = false;
        Ok(rows)
    }

    /// Begins a transaction. It ends with [`Self::commit`], with [`Self::rollback`], or with the connection.
    pub(crate) async fn begin(&mut self) -> Result<(), Error> {
        self.batch("begin transaction").await.map(drop)
    }

    pub(crate) async fn commit(&mut self) -> Result<(), Error> {
        self.batch("commit transaction").await.map(drop)
    }

    pub(crate) async fn rollback(&mut self) -> Result<(), Error> {
        self.batch("if @@trancount > 0 rollback transaction").await.map(drop)
    }
}
