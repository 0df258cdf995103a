//! A database of the test's own.

use tokio_postgres::{Client, NoTls};

use crate::surroundings;

/// A database on the test run's server, dropped at the end on the next `create` of nobody: names are unique, and the
/// server goes with the test run.
#[derive(Debug, Clone)]
pub struct Database {
    url: String,
}

impl Database {
    /// Creates an empty database on the test run's server.
    ///
    /// # Panics
    /// If the server cannot be reached.
    pub async fn create() -> Self {
        Self::create_on(&surroundings::postgres_url()).await
    }

    /// Creates an empty database on the server of this URL.
    ///
    /// # Panics
    /// If the server cannot be reached.
    pub async fn create_on(server: &str) -> Self {
        let name = format!("t_{}", surroundings::unique());
        let admin = connect(server).await;
        admin.batch_execute(&format!("create database {name}")).await.expect("create a database");
        let (base, _) = server.rsplit_once('/').expect("a URL with a database");
        Self { url: format!("{base}/{name}") }
    }

    /// Its URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Drops it, with whoever is still connected.
    ///
    /// # Panics
    /// If the server cannot be reached.
    pub async fn drop(&self) {
        let (base, name) = self.url.rsplit_once('/').expect("a URL with a database");
        let admin = connect(&format!("{base}/postgres")).await;
        admin.batch_execute(&format!("drop database {name} with (force)")).await.expect("drop a database");
    }

    /// A connection to it.
    pub async fn connect(&self) -> Client {
        connect(&self.url).await
    }
}

/// A plain connection.
///
/// # Panics
/// If the server cannot be reached.
pub async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("connect to PostgreSQL");
    tokio::spawn(connection);
    client
}
