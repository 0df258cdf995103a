//! `postroom migrate`.

use std::sync::Arc;

use clap::Args;
use postroom::{MigrateError, Migrated};

use crate::StoreArgs;
use crate::config::Group;
use crate::exit::{self, Failure};
use crate::progress::Progress;
use crate::say::show;
use crate::store;
use crate::stores;

#[derive(Debug, Args)]
pub struct MigrateArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Number of lanes of a new schema (not on SQLite): the partitions of the outbox, which the relays of a route share; cannot be changed later
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
    let nameless = args.print_sql && args.store.is_unnamed()?;
    if let Some(groups) = args.store.many()?
        && !args.print_sql
    {
        return migrate_all(&groups, &args, json).await;
    }
    let store = if nameless { store::open("postgres://localhost")? } else { args.store.open().await? };
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

/// Every store of a configuration with many, one after the other. One that fails is told, and the others are brought up to date all the same.
async fn migrate_all(groups: &[Group], args: &MigrateArgs, json: bool) -> Result<(), Failure> {
    let (all, troubles) = stores::all(groups).await;
    /// Name of a store, and its version and steps.
    type Outcome = (Arc<str>, Result<(i64, Vec<String>), Failure>);
    let (mut shown, mut failed): (Vec<Outcome>, usize) = (Vec::new(), troubles.len());
    let mut progress = Progress::new("stores");
    for (done, one) in all.iter().enumerate() {
        let outcome = async {
            let store = store::open(&one.url)?;
            Ok::<_, Failure>(if args.plan {
                let plan = store.plan().await?;
                (plan.version, plan.steps.iter().map(|step| format!("{:04} {}", step.number, step.name)).collect())
            } else {
                let Migrated { applied, version } = store.migrate(args.lanes).await?;
                (version, applied.iter().map(|(number, name)| format!("{number:04} {name}")).collect::<Vec<String>>())
            })
        };
        let outcome = outcome.await;
        failed += usize::from(outcome.is_err());
        shown.push((one.name.clone(), outcome));
        progress.at(done as u64 + 1);
    }
    progress.end();
    let what = if args.plan { "would apply" } else { "applied" };
    if json {
        let of = |(name, outcome): &Outcome| match outcome {
            Ok((version, steps)) => {
                serde_json::json!({ "store": &**name, "schema_version": version, "steps": steps, "problem": null })
            }
            Err(failure) => {
                serde_json::json!({ "store": &**name, "schema_version": null, "steps": [], "problem": failure.text })
            }
        };
        show!(
            "{}",
            serde_json::json!({ "plan": args.plan, "stores": shown.iter().map(of).collect::<Vec<_>>(), "problems": troubles })
        );
    } else {
        for (name, outcome) in &shown {
            match outcome {
                Ok((version, steps)) if steps.is_empty() => show!("{name}: up to date at schema version {version}"),
                Ok((version, steps)) => show!("{name}: at schema version {version}, {what} {}", steps.join(", ")),
                Err(failure) => show!("{name}: failed: {}", failure.text),
            }
        }
        troubles.iter().for_each(|trouble| show!("{trouble}"));
    }
    if failed > 0 {
        let text = format!("{failed} of {} could not be brought up to date", shown.len() + troubles.len());
        return Err(Failure { answered: true, ..Failure::new(exit::FAILURE, text) });
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
