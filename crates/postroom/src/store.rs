//! A store as a whole, for programs that are configured with one: the `postroom` binary, and programs like it.

use std::sync::Arc;

use async_trait::async_trait;

use crate::diagnosis::Diagnosis;
use crate::error::{BoxError, StoreError};
use crate::inbox::Consumer;
use crate::intake::Intakes;
use crate::keeper::Keeper;
use crate::message::Message;
use crate::operator::Operator;
use crate::route::Route;
use crate::source::Source;
use crate::wake::Wake;

/// Lanes of a new schema: more relays than this cannot share the work of a route.
pub const LANES_DEFAULT: u16 = 16;

/// So many databases a query may find.
pub const DISCOVERED_MAX: usize = 10_000;

/// A database that a query found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Discovered {
    /// Its name.
    pub name: String,
    /// Its URL, if the query says it.
    pub url: Option<String>,
}

impl Discovered {
    /// From the columns of each row, as texts.
    ///
    /// # Errors
    /// When there are too many. One without a name has an empty one, which is no name of a store.
    pub fn of(rows: Vec<Vec<Option<String>>>) -> Result<Vec<Self>, StoreError> {
        let refused = |source: String| StoreError::Refused { what: DISCOVER, source: source.into() };
        if rows.len() > DISCOVERED_MAX {
            return Err(refused(format!("the query finds more than {DISCOVERED_MAX} databases")));
        }
        let found = |row: Vec<Option<String>>| {
            let mut columns = row.into_iter();
            Self { name: columns.next().flatten().unwrap_or_default(), url: columns.next().flatten() }
        };
        Ok(rows.into_iter().map(found).collect())
    }
}

/// What a failed discovery was for.
pub const DISCOVER: &str = "ask for databases";

/// One database that holds an outbox and an inbox.
#[async_trait]
pub trait Store: Operator {
    /// Its side of tables that already exist; none: this store cannot take rows of them.
    fn intakes(&self) -> Option<&dyn Intakes> {
        None
    }

    /// Its URL or another name for it, without secrets.
    fn shown(&self) -> String;

    /// What a route asks for and this store cannot do, in words; none: it can do everything.
    fn cannot(&self, route: &Route) -> Option<String> {
        let _ = route;
        None
    }

    /// The relay's side of one route, for a relay with this name, which no other relay may have.
    async fn source(&self, route: &Route, owner: &str) -> Result<Arc<dyn Source>, StoreError>;

    /// The inbox table of a consumer, for its filler.
    fn keeper(&self, consumer: &Consumer) -> Arc<dyn Keeper>;

    /// Asks the application's own tables for other databases: a query whose first column is a name and whose second one, if it has one, is a URL.
    /// It runs where it can change nothing. Rows beyond [`DISCOVERED_MAX`] are an error.
    async fn discover(&self, query: &str) -> Result<Vec<Discovered>, StoreError>;

    /// Writes one message in a transaction of its own, as an application does: for tests of an installation.
    async fn send(&self, message: &Message) -> Result<(), StoreError>;

    /// Checks whether everything that a process with these needs requires is there; changes nothing.
    async fn check(&self, needs: Needs) -> Result<Vec<Finding>, StoreError>;

    /// Looks for what can lose messages, hold them up, or let the tables grow; changes nothing.
    async fn diagnose(&self) -> Result<Vec<Diagnosis>, StoreError>;

    /// Wakes these relays when writers of other processes notify, for as long as the returned value is kept. None: writers
    /// cannot notify here; relays poll in any case.
    fn listen(&self, wakes: Vec<Wake>) -> Option<Box<dyn Send>> {
        drop(wakes);
        None
    }

    /// Creates the tables or brings them up to date; safe to repeat. `lanes` is for a new schema, [`LANES_DEFAULT`] if it is
    /// none; a number other than that of an existing schema is an error. Stores without lanes ignore it.
    async fn migrate(&self, lanes: Option<u16>) -> Result<Migrated, MigrateError>;

    /// What [`migrate`](Self::migrate) would do; changes nothing.
    async fn plan(&self) -> Result<MigrationPlan, MigrateError>;

    /// The whole schema as one script, for those who apply migrations with their own tool.
    fn print_sql(&self, lanes: Option<u16>) -> Result<String, MigrateError>;
}

/// What a process will do with a store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Needs {
    /// Relay its messages.
    pub relay: bool,
    /// Fill inboxes in it.
    pub filler: bool,
    /// Remove what is finished and old.
    pub retention: bool,
    /// Look at the state and the sizes of the store, for metrics.
    pub metrics: bool,
    /// Carry out operations on many messages.
    pub operations: bool,
    /// Compare messages with effects.
    pub comparisons: bool,
    /// Take rows of tables that already exist.
    pub intakes: bool,
}

/// What a check found.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Finding {
    /// It is as it must be.
    pub ok: bool,
    /// What was found, in words.
    pub found: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

impl Finding {
    /// It is as it must be.
    pub fn good(found: impl Into<String>) -> Self {
        Self { ok: true, found: found.into(), advice: None }
    }

    /// Something must be changed.
    pub fn bad(found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { ok: false, found: found.into(), advice: Some(advice.into()) }
    }
}

/// What a migration run did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Migrated {
    /// Numbers and names applied by this run; empty when the schema was up to date.
    pub applied: Vec<(i64, &'static str)>,
    /// Number of the newest migration.
    pub version: i64,
}

/// What a migration run would do. All steps are one transaction, so each lock is held until its end.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct MigrationPlan {
    /// Number of the newest migration in the database; 0: there is none.
    pub version: i64,
    /// What would be done, in order; empty: nothing.
    pub steps: Vec<MigrationStep>,
}

/// One migration that is not applied yet.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct MigrationStep {
    /// Its number.
    pub number: i64,
    /// Its name.
    pub name: &'static str,
    /// What it locks, and for whom that matters, in words.
    pub locks: &'static str,
}

/// Why the schema was not brought up to date. Nothing was changed: all migrations of a run are one transaction.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    /// The store could not be reached, or rejected the request.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// An applied migration differs from the one in this program.
    #[error(
        "migrate: migration {number} ({name}) was applied with different content than this program has; \
         use the version that applied it, or restore the migration file"
    )]
    Changed {
        /// Its number.
        number: i64,
        /// Its name.
        name: String,
    },
    /// The schema is newer than this program.
    #[error(
        "migrate: the schema has migration {number}, but the newest that this program knows is {known}; use a newer postroom"
    )]
    Newer {
        /// Newest number in the database.
        number: i64,
        /// Newest number in this program.
        known: i64,
    },
    /// The number of lanes is out of range.
    #[error("migrate: {0} lanes are not possible; choose 1 to 1024")]
    Lanes(u16),
    /// The schema has another number of lanes.
    #[error(
        "migrate: the schema has {schema} lanes, which cannot be changed to {asked}; leave out --lanes to keep them"
    )]
    OtherLanes {
        /// Lanes of the schema.
        schema: u16,
        /// Lanes that were asked for.
        asked: u16,
    },
    /// The schema belongs to another role, which could have put anything into it.
    #[error(
        "migrate: the schema postroom belongs to role {owner:?}, and this is role {role:?}; run `postroom migrate` as {owner:?}, or drop \
         the schema if it was created by mistake"
    )]
    Owner {
        /// Its owner.
        owner: String,
        /// The role that asked.
        role: String,
    },
    /// A migration failed; everything was rolled back.
    #[error("apply migration {number} ({name}); everything was rolled back")]
    Failed {
        /// Its number.
        number: i64,
        /// Its name.
        name: &'static str,
        /// The database's answer.
        #[source]
        source: BoxError,
    },
}
