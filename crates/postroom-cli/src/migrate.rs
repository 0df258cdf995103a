//! `postroom migrate`.

use clap::Args;
use postroom::{LANES_DEFAULT, MigrateError, Migrated};

use crate::StoreArgs;
use crate::exit::{self, Failure};
use crate::say::show;
use crate::store;

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
    // A script can be had without any store.
    let nameless = args.print_sql && args.store.store.is_none() && !args.store.config.exists();
    let store = if nameless { store::open("postgres://localhost")? } else { args.store.open()? };
    if args.print_sql {
        let script = store.print_sql(args.lanes)?;
        if json {
            show!("{}", serde_json::json!({ "sql": script }));
        } else {
            print!("{script}");
        }
        return Ok(());
    }
    let shown = store.shown();
    let Migrated { applied, version } = store.migrate(args.lanes).await?;
    let applied: Vec<String> = applied.iter().map(|(number, name)| format!("{number:04} {name}")).collect();
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

impl From<MigrateError> for Failure {
    fn from(error: MigrateError) -> Self {
        match error {
            MigrateError::Store(error) => error.into(),
            MigrateError::Lanes(_) => Self::of(exit::USAGE, &error),
            MigrateError::Changed { .. } | MigrateError::Newer { .. } | MigrateError::Failed { .. } => {
                Self::of(exit::FAILURE, &error)
            }
        }
    }
}
