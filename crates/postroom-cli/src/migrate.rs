//! `postroom migrate`.

use clap::Args;
use postroom::{MigrateError, Migrated};

use crate::StoreArgs;
use crate::exit::{self, Failure};
use crate::say::show;
use crate::store;

#[derive(Debug, Args)]
pub struct MigrateArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Number of lanes of a new PostgreSQL schema: the partitions of the outbox, which the relays of a route share; cannot be changed later
    /// [default: 16]
    #[arg(long, value_name = "N")]
    lanes: Option<u16>,
    /// Show what would be done and what each step locks, without doing it
    #[arg(long, conflicts_with = "print_sql")]
    plan: bool,
    /// Print the script instead of running it
    #[arg(long)]
    print_sql: bool,
}

pub async fn migrate(args: MigrateArgs, json: bool) -> Result<(), Failure> {
    // A script can be printed without any store.
    let nameless = args.print_sql && args.store.store.is_none() && !args.store.config.exists();
    let store = if nameless { store::open("postgres://localhost")? } else { args.store.open()? };
    if args.print_sql {
        let script = store.print_sql(args.lanes)?;
        if json {
            show!("{}", serde_json::json!({ "sql": script }));
        } else {
            crate::say::to_stdout_as_it_is(script.trim_end());
        }
        return Ok(());
    }
    let shown = store.shown();
    if args.plan {
        let plan = store.plan().await?;
        if json {
            show!("{}", serde_json::json!({ "store": shown, "schema_version": plan.version, "steps": plan.steps }));
        } else if plan.steps.is_empty() {
            show!("{shown}: up to date at schema version {}, nothing to do", plan.version);
        } else {
            show!("{shown}: at schema version {}; `postroom migrate` would apply, in one transaction:", plan.version);
            for step in plan.steps {
                show!("  {:04} {}; locks {}", step.number, step.name, step.locks);
            }
        }
        return Ok(());
    }
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
            MigrateError::Lanes(_) | MigrateError::OtherLanes { .. } => Self::of(exit::USAGE, &error),
            MigrateError::Changed { .. }
            | MigrateError::Newer { .. }
            | MigrateError::Owner { .. }
            | MigrateError::Failed { .. } => Self::of(exit::FAILURE, &error),
        }
    }
}
