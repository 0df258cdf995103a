//! `postroom presets`: layouts of outbox tables that are known, as data, and which of them a database has.

use clap::{Args, Subcommand};
use postroom::{FoundTable, Intakes, Severity, Store, TableName, lasting};
use toml::Table;

use crate::StoreArgs;
use crate::config::{self, Taken};
use crate::doctor_tables::no_index;
use crate::exit::{self, Failure};
use crate::say::{printable, show};
use crate::table::counted;

/// One layout.
#[derive(Debug)]
pub struct Preset {
    pub name: &'static str,
    text: &'static str,
}

macro_rules! presets {
    ($($name:literal),* $(,)?) => {
        &[$(Preset { name: $name, text: include_str!(concat!("../presets/", $name, ".toml")) }),*]
    };
}

/// All of them; the file of each says what it is, and its limits.
pub const PRESETS: &[Preset] = presets![
    "cap",
    "debezium",
    "delete-when-sent",
    "masstransit",
    "namastack",
    "open-outbox",
    "processed-on",
    "spring-modulith-1",
    "spring-modulith-2",
    "status-codes",
    "task-states",
];

pub fn preset(name: &str) -> Option<&'static Preset> {
    PRESETS.iter().find(|preset| preset.name == name)
}

/// What a preset's file says besides the mapping.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct About {
    /// What it is.
    pub about: String,
    /// What it cannot do, or what to know.
    pub limits: Vec<String>,
    /// A table with all of these columns is taken for one of this kind.
    pub columns: Vec<String>,
    /// What its former relay, or nobody, does about rows.
    #[serde(default)]
    pub defects: Vec<Defect>,
    /// The part of the configuration.
    intake: Table,
}

/// Rows that show a defect of the system that the table is of.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Defect {
    /// What `postroom explain` knows it as.
    pub code: String,
    /// Columns and their values, as in `pending`.
    pub rows: Table,
    /// The statement that mends it; `{table}` is the table, and TIME for the reader to fill in.
    pub mend: String,
}

impl Preset {
    pub fn about(&self) -> Result<About, String> {
        toml::from_str(self.text).map_err(|error| format!("preset {}: {}", self.name, error.message()))
    }

    /// What it puts into `[[intake]]`.
    pub fn intake(&self) -> Result<Table, String> {
        Ok(self.about()?.intake)
    }
}

#[derive(Debug, Args)]
pub struct PresetsArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List the layouts of outbox tables that are known
    List,
    /// Show what a preset says, and its limits
    Show {
        /// Its name
        name: String,
    },
    /// Look for such tables in a database, and print a configuration for each; changes nothing
    Detect(StoreArgs),
}

pub async fn presets(args: PresetsArgs, json: bool) -> Result<(), Failure> {
    match args.verb {
        Verb::List => list(json),
        Verb::Show { name } => one(&name, json),
        Verb::Detect(store) => detect(store.open().await?.as_ref(), json).await,
    }
}

fn of(preset: &Preset) -> Result<About, Failure> {
    preset.about().map_err(|error| Failure::new(exit::FAILURE, error))
}

fn list(json: bool) -> Result<(), Failure> {
    let all = PRESETS.iter().map(|preset| Ok((preset.name, of(preset)?))).collect::<Result<Vec<_>, Failure>>()?;
    if json {
        let all: Vec<_> = all
            .iter()
            .map(|(name, about)| serde_json::json!({ "name": name, "about": about.about, "limits": about.limits }))
            .collect();
        show!("{}", serde_json::json!({ "presets": all }));
        return Ok(());
    }
    for (name, about) in all {
        show!("{name:18} {}", about.about);
    }
    Ok(())
}

fn one(name: &str, json: bool) -> Result<(), Failure> {
    let preset = preset(name).ok_or_else(|| {
        Failure::new(exit::USAGE, format!("there is no preset {name:?}; `postroom presets list` shows them"))
    })?;
    let about = of(preset)?;
    if json {
        let shown = serde_json::json!({ "name": name, "about": about.about, "limits": about.limits, "columns": about.columns, "intake": about.intake });
        show!("{shown}");
        return Ok(());
    }
    show!("{name}: {}", about.about);
    show!("");
    about.limits.iter().for_each(|limit| show!("- {limit}"));
    show!("");
    preset.text[preset.text.find("[intake]").unwrap_or_default()..].trim_end().lines().for_each(|line| show!("{line}"));
    Ok(())
}

/// A table that looks like one of a preset's.
#[derive(serde::Serialize)]
struct Detected {
    table: String,
    preset: &'static str,
    about: String,
    limits: Vec<String>,
    /// None: its rows could not be counted, for `problem`.
    pending: Option<i64>,
    pending_is_bound: bool,
    oldest_seconds: Option<f64>,
    problem: Option<String>,
    /// Why `postroom check` would not pass: each look would read the whole table.
    index: Option<String>,
    /// A section for the configuration.
    config: String,
}

/// A table that a preset fits.
pub struct Fitting {
    pub preset: &'static Preset,
    pub about: About,
    pub table: TableName,
    /// A section for the configuration, and what it says.
    pub config: String,
    pub taken: Taken,
}

/// Every table of the database that a preset fits, with the preset that fits best; changes nothing.
pub async fn fitting(intakes: &dyn Intakes) -> Result<Vec<Fitting>, Failure> {
    let mut found: Vec<Fitting> = Vec::new();
    // The preset that asks for most columns says most about a table.
    let mut presets = PRESETS.iter().map(|preset| Ok((preset, of(preset)?))).collect::<Result<Vec<_>, Failure>>()?;
    presets.sort_by_key(|(_, about)| std::cmp::Reverse(about.columns.len()));
    for (preset, about) in presets {
        for FoundTable { table, .. } in intakes.tables_with(&about.columns).await? {
            if found.iter().any(|other| other.table == table) {
                continue;
            }
            let text = |text: &str| serde_json::Value::from(text).to_string();
            // Two schemas may have a table of one name.
            let is_taken = |name: &str| found.iter().any(|other| other.taken.intake.name == name);
            let name = match (&table.schema, is_taken(&table.name)) {
                (Some(schema), true) => format!("{schema}_{}", table.name),
                _ => table.name.clone(),
            };
            let config = format!(
                "[[intake]]\nname = {}\npreset = \"{}\"\ntable = {}\nmode = \"shadow\"",
                text(&name),
                preset.name,
                text(&table.to_string())
            );
            let taken = config::intake_of(&config).map_err(|error| Failure::new(exit::FAILURE, error))?;
            found.push(Fitting { preset, about: of(preset)?, table, config, taken });
        }
    }
    Ok(found)
}

async fn detect(store: &dyn Store, json: bool) -> Result<(), Failure> {
    let intakes = intakes_of(store)?;
    let mut detected: Vec<Detected> = Vec::new();
    for Fitting { preset, about, table, config, taken } in fitting(intakes).await? {
        let (status, problem) = match intakes.intake_status(&taken.intake).await {
            Ok(status) => (Some(status), None),
            Err(error) => (None, Some(Failure::of(exit::FAILURE, &error).text)),
        };
        let mut index = None;
        if let (Some(status), Ok(indexes)) = (&status, intakes.indexes_of(&table).await) {
            let found = no_index(intakes, &taken.intake, &indexes, status);
            index = found.advice.filter(|_| found.severity != Severity::Fine);
        }
        detected.push(Detected {
            table: table.to_string(),
            preset: preset.name,
            about: about.about,
            limits: about.limits,
            pending: status.as_ref().map(|status| status.pending),
            pending_is_bound: status.as_ref().is_some_and(|status| status.pending_is_bound),
            oldest_seconds: status.as_ref().and_then(|status| status.oldest_seconds),
            problem,
            index,
            config,
        });
    }
    if json {
        show!("{}", serde_json::json!({ "tables": detected }));
        return Ok(());
    }
    if detected.is_empty() {
        show!(
            "no table of this database has the columns of a preset; docs/intake.md says how to write a mapping of your own"
        );
    }
    for one in detected {
        let waiting = match (&one.problem, one.pending) {
            (Some(problem), _) => problem.clone(),
            (None, pending) => {
                let age =
                    one.oldest_seconds.map_or_else(String::new, |age| format!(", the oldest {} old", lasting(age)));
                format!("{} to be sent{age}", counted(pending.unwrap_or_default(), one.pending_is_bound, "row"))
            }
        };
        show!("# table {} looks like {}: {}", printable(&one.table), one.preset, one.about);
        show!("# {}", printable(&waiting));
        one.limits.iter().for_each(|limit| show!("# - {limit}"));
        if let Some(index) = &one.index {
            show!(
                "# no index leads to the rows that are to be sent, and `postroom check` asks for one: {}",
                printable(index)
            );
        }
        one.config.lines().for_each(|line| show!("{line}"));
        show!("");
    }
    Ok(())
}

/// What the store can do with tables that exist.
pub fn intakes_of(store: &dyn Store) -> Result<&dyn Intakes, Failure> {
    store.intakes().ok_or_else(|| {
        Failure::new(
            exit::CONFIG,
            format!("{}: rows of existing tables cannot be taken from a store of this kind", store.shown()),
        )
    })
}
