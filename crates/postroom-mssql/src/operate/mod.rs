//! What operators see of the store and do to it.

pub(crate) mod archive;
pub(crate) mod audit;
mod dead;
mod doctor;
mod keys;
mod listing;
pub(crate) mod operations;
mod prune;
mod receptions;
pub(crate) mod reconcile;
mod retain;
mod routes;
mod status;
mod vitals;
mod why;

use std::collections::BTreeSet;

use tiberius::Row;
use tiberius::error::Error;
use uuid::Uuid;

use crate::conn::Conn;
use crate::sql::{get, named};

pub(crate) use dead::{act_on_dead, dead_letters, dead_payload};
pub(crate) use doctor::diagnose;
pub(crate) use keys::{act_on_key, waiting_keys};
pub(crate) use listing::{message, messages, note_payload_read, send};
pub(crate) use prune::prune_step;
pub(crate) use receptions::receptions;
pub(crate) use retain::retain_step;
pub(crate) use routes::{forget_route, routes, set_route};
pub(crate) use status::{status, unrouted_topics, work_waits};
pub(crate) use vitals::{note_sizes, vitals};
pub(crate) use why::whereabouts;

/// The hash that a key is found by.
pub(crate) fn hash(key: &str) -> String {
    format!("convert(binary(32), hashbytes('SHA2_256', {key}))")
}

/// A column with a word of a list.
fn word<T>(row: &Row, column: &str, of: impl FnOnce(&str) -> Option<T>) -> Result<T, Error> {
    let word: String = get(row, column)?;
    of(&word).ok_or_else(|| Error::Conversion(format!("{column} has the unknown value {word:?}").into()))
}

/// Consumers that have rows in one of these tables, each found by one step in the table's index.
async fn consumers(conn: &mut Conn, tables: &[&str]) -> Result<BTreeSet<String>, Error> {
    let mut consumers = BTreeSet::new();
    for table in tables {
        let sql = format!("select min(consumer) from postroom_{table} where consumer > @last");
        let mut last = String::new();
        while let Some(Some(next)) = conn.first::<Option<String>>(&sql, named! { "last" => &last }).await? {
            consumers.insert(next.clone());
            last = next;
        }
    }
    Ok(consumers)
}

/// An id that is stored.
fn uuid(text: &str) -> Result<Uuid, Error> {
    Uuid::parse_str(text).map_err(|error| Error::Conversion(error.to_string().into()))
}
