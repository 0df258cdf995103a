//! The application's databases in one run: their tables, the configuration that names them, and the writers at work on them.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use postroom::BoxError;
use postroom_postgres::Connector;
use tokio::task::JoinHandle;
use tokio_postgres::Client;

use crate::Args;
use crate::systems::System;
use crate::writers::{self, Wrote};

const WRITERS: u64 = 4;
/// The business table.
const ORDERS: &str = "create table orders (key text primary key, n bigint not null)";
const ORDERS_MSSQL: &str = "create table orders ([key] nvarchar(64) not null primary key, n bigint not null)";

/// What kind of server a system is on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum On {
    Postgres,
    Mariadb,
    Mssql,
}

/// Connections of our own to the application's databases.
pub enum Tables {
    Postgres(Client),
    Mariadb(Vec<Conn>),
    Mssql(Box<postroom_mssql::Conn>),
}

/// The writers of one run.
pub type Writing = Vec<JoinHandle<Result<Wrote, String>>>;

impl Tables {
    /// What a query counts, in all of them.
    pub async fn count(&mut self, sql: &str) -> Result<i64, BoxError> {
        match self {
            Self::Postgres(client) => Ok(client.query_one(sql, &[]).await?.get(0)),
            Self::Mariadb(conns) => {
                let mut sum = 0;
                for conn in conns {
                    sum += conn.query_first::<i64, _>(sql).await?.unwrap_or_default();
                }
                Ok(sum)
            }
            Self::Mssql(conn) => {
                let row = conn.driver().simple_query(sql).await?.into_row().await?;
                Ok(row.and_then(|row| row.get(0)).unwrap_or_default())
            }
        }
    }
}

/// A new database on PostgreSQL: its URL, and a connection.
pub async fn postgres(server: &str, name: &str) -> Result<(String, Client), BoxError> {
    let admin = Connector::new(server)?.connect().await?;
    admin.batch_execute(&format!("create database {name}")).await?;
    let (base, _) = server.rsplit_once('/').ok_or("--store has to name a database")?;
    let url = format!("{base}/{name}");
    let client = Connector::new(&url)?.connect().await?;
    Ok((url, client))
}

/// Makes the databases of a system and starts its writers: the tables, what the configuration says of them, and the writers.
pub async fn begin(
    args: &Args,
    system: &'static System,
    unique: &str,
    all: &Arc<AtomicUsize>,
) -> Result<(Tables, String, Writing), BoxError> {
    match system.on {
        On::Postgres => {
            let (url, client) = postgres(&args.store, &format!("articles_{unique}")).await?;
            client.batch_execute(ORDERS).await?;
            client.batch_execute(system.schema).await?;
            let writer =
                |seed| tokio::spawn(writers::postgres(url.clone(), system.insert, seed, args.messages, all.clone()));
            let writing = (0..WRITERS).map(writer).collect();
            Ok((Tables::Postgres(client), format!("[store]\nurl = {url:?}\n"), writing))
        }
        On::Mariadb => {
            let server = args.mariadb.as_deref().ok_or("--mariadb names no server")?;
            let (urls, conns) = two_on_mariadb(server, system, unique).await?;
            let stores =
                urls.iter().map(|(name, url)| format!("[[stores]]\nname = {name:?}\nurl = {url:?}\n")).collect();
            let [first, second] = <[_; 2]>::try_from(urls).map_err(|_| "there are two databases")?;
            let writer = |seed| {
                let urls = [first.clone(), second.clone()];
                tokio::spawn(writers::tasks(urls, seed, args.messages, all.clone()))
            };
            Ok((Tables::Mariadb(conns), stores, (0..WRITERS).map(writer).collect()))
        }
        On::Mssql => {
            let url = args.mssql.as_deref().ok_or("--mssql names no database")?;
            let mut conn = postroom_mssql::connect(&postroom_mssql::settings_of(url)?).await?;
            for statement in std::iter::once(ORDERS_MSSQL).chain(statements(system.schema)) {
                conn.driver().simple_query(statement).await?.into_results().await?;
            }
            let writer =
                |seed| tokio::spawn(writers::mssql(url.to_owned(), system.insert, seed, args.messages, all.clone()));
            let writing = (0..WRITERS).map(writer).collect();
            Ok((Tables::Mssql(Box::new(conn)), format!("[store]\nurl = {url:?}\n"), writing))
        }
    }
}

fn statements(schema: &str) -> impl Iterator<Item = &str> {
    schema.split(";\n").filter(|statement| !statement.trim().is_empty())
}

/// The third article's two databases: what they are called there, and their URLs.
async fn two_on_mariadb(
    server: &str,
    system: &System,
    unique: &str,
) -> Result<(Vec<(String, String)>, Vec<Conn>), BoxError> {
    let (mut urls, mut conns) = (Vec::new(), Vec::new());
    let (base, _) = server.rsplit_once('/').ok_or("--mariadb has to name a database")?;
    let mut admin = Conn::new(postroom_mysql::options_of(server)?).await?;
    for name in ["exec_db01", "exec_db02"] {
        let database = format!("articles_{name}_{unique}");
        admin.query_drop(format!("create database {database}")).await?;
        let url = format!("{base}/{database}");
        let mut conn = Conn::new(postroom_mysql::options_of(&url)?).await?;
        for statement in statements(system.schema) {
            conn.query_drop(statement).await?;
        }
        urls.push((name.to_owned(), url));
        conns.push(conn);
    }
    Ok((urls, conns))
}
