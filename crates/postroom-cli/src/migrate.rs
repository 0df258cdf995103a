//! `postroom migrate`.

use clap::Args;
use postroom_postgres::{LANES_DEFAULT, MigrateError};

use crate::StoreArgs;
use crate::config;
use crate::exit::{self, Failure};
use crate::say::show;
use crate::store::Store;

#[derive(Debug, Args)]
pub struct MigrateArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Lanes of a new PostgreSQL schema, the units in which a route is read; fixed afterwards
    #[arg(long, default_value_t = LANES_DEFAULT, value_name = "N")]
    lanes: u16,
    /// Print the script instead of running it
    #[arg(long)]
    print_sql: bool,
}

pub async fn migrate(args: MigrateArgs, json: bool) -> Result<(), Failure> {
    let url = match args.store.store {
        Some(url) => url,
        // A script can be had without any store.
        None if args.print_sql && !args.store.config.exists() => "postgres://localhost".to_owned(),
        None => config::store_url(&args.store.config)?,
    };
    let store = Store::of(&url)?;
    if args.print_sql {
        let script = match store {
            Store::Postgres(_) => postroom_postgres::print_sql(args.lanes).map_err(of_postgres)?,
            Store::Sqlite(_) => postroom_sqlite::print_sql(),
        };
        if json {
            show!("{}", serde_json::json!({ "sql": script }));
        } else {
            print!("{script}");
        }
        return Ok(());
    }
    let shown = store.shown();
    let (applied, version): (Vec<String>, i64) = match store {
        Store::Postgres(connector) => {
            let migrated = postroom_postgres::migrate(&connector, args.lanes).await.map_err(of_postgres)?;
            let names = migrated.applied.iter().map(|(number, name)| format!("{number:04} {name}")).collect();
            (names, i64::from(migrated.version))
        }
        Store::Sqlite(path) => {
            let mut connection = postroom_sqlite::connect(&path)?;
            let applied = postroom_sqlite::migrate(&mut connection).map_err(of_sqlite)?;
            let version = postroom_sqlite::status(&connection)?.schema_version;
            (applied.iter().map(|(number, name)| format!("{number:04} {name}")).collect(), version)
        }
    };
    if json {
        show!("{}", serde_json::json!({ "store": shown, "applied": applied, "schema_version": version }));
    } else if applied.is_empty() {
        show!("{shown}: up to date at schema version {version}");
    } else {
        for name in &applied {
            show!("{shown}: applied {name}");
        }
    }
    Ok(())
}

fn of_postgres(error: MigrateError) -> Failure {
    match error {
        MigrateError::Store(error) => error.into(),
        MigrateError::Lanes(_) => Failure::of(exit::USAGE, &error),
        MigrateError::Changed { .. } | MigrateError::Newer { .. } | MigrateError::Failed { .. } => {
            Failure::of(exit::FAILURE, &error)
        }
    }
}

fn of_sqlite(error: postroom_sqlite::MigrateError) -> Failure {
    match error {
        postroom_sqlite::MigrateError::Store(error) => error.into(),
        other => Failure::of(exit::FAILURE, &other),
    }
}
