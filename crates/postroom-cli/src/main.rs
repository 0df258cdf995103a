//! The `postroom` binary. Every command is a module; this file is the table of contents and the exit codes.

mod actor;
mod admin;
mod archive;
mod archiver;
mod brokers;
mod carrier;
mod check;
mod config;
mod dead;
mod dead_groups;
mod demo;
mod doctor;
mod doctor_tables;
mod environment;
mod exit;
mod health;
mod inbox;
mod inbox_sink;
mod init;
mod intake;
mod keys;
mod messages;
mod migrate;
mod operations;
#[cfg(feature = "otlp")]
mod otlp;
mod presets;
mod progress;
mod reconcile;
mod retention;
mod routes;
mod run;
mod say;
mod send;
mod sizes;
mod status;
mod store;
mod stores;
mod supervise;
mod swallowed;
mod table;
mod telemetry;
mod token;
mod why;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, Parser, Subcommand};
use postroom::{Store, redact_text};

use crate::config::Stores;
use crate::exit::Failure;
use crate::say::{say, show};

/// Transactional outbox and inbox: messages written in your database transaction, delivered to your broker in order and
/// without loss.
#[derive(Debug, Parser)]
#[command(name = "postroom", version, about, max_term_width = 120)]
struct Cli {
    /// Print one JSON object instead of text for people
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show how postroom works in about twelve seconds, on SQLite and an in-process broker; needs no server and no configuration
    Demo(demo::DemoArgs),
    /// Write a commented configuration file to start from
    Init(init::InitArgs),
    /// Create or update the tables; safe to repeat
    Migrate(migrate::MigrateArgs),
    /// Check whether everything that `run` needs is there: rights, schema, brokers, exchanges, queues, TLS
    Check(ConfigArgs),
    /// Examine a whole installation: settings that lose data, missing relays, growth, brokers; and say what to do
    Doctor(doctor::DoctorArgs),
    /// Explain a code that `doctor` shows
    Explain(doctor::ExplainArgs),
    /// Relay messages and fill inboxes as configured, until SIGTERM or ctrl-c
    Run(ConfigArgs),
    /// Show what is waiting, which relays run, which sinks are up, and what needs attention
    Status(status::StatusArgs),
    /// Show every store of a configuration with many: which are up, and what waits in them
    Stores(stores::StoresArgs),
    /// Ask a running postroom whether it is ready; for probes of containers
    Health(health::HealthArgs),
    /// Show how large the tables are, how fast they grow, and when the store is full
    Sizes(sizes::SizesArgs),
    /// List messages by topic, key, state and age, or show one
    Messages(messages::MessagesArgs),
    /// Write one test message, as an application would
    Send(send::SendArgs),
    /// List dead letters of both sides, retry them, or discard them
    Dead(Box<dead::DeadArgs>),
    /// Send messages once more that a route has sent already, by filter, step by step
    Replay(Box<operations::ReplayArgs>),
    /// Show, pause, resume or cancel what is done to many messages: replays, and retries and discards of dead letters
    Operations(operations::OperationsArgs),
    /// Delete what is finished and old: messages, dead letters, inbox rows, audit rows
    Prune(retention::PruneArgs),
    /// List and verify what was archived, or put messages back for a replay
    Archive(Box<archive::ArchiveArgs>),
    /// Compare messages with the changes before them and the effects behind them
    Reconcile(Box<reconcile::ReconcileArgs>),
    /// Take rows of tables that already exist: how they stand, what would be made of them, and what was set aside
    Intake(Box<intake::IntakeArgs>),
    /// List known layouts of outbox tables, or look for them in a database
    Presets(presets::PresetsArgs),
    /// Prune the inbox
    Inbox(inbox::InboxArgs),
    /// List keys that wait, park or unpark a key, or skip the dead message that blocks it
    Keys(keys::KeysArgs),
    /// List routes, change a route's settings, or forget a route that is no longer used
    Routes(routes::RoutesArgs),
    /// Show where one message is, what it waits for, and what happens next
    Why(why::WhyArgs),
    /// Make a token for the admin listener
    Token(token::TokenArgs),
}

/// Where the configuration is.
#[derive(Debug, Clone, Args)]
struct ConfigArgs {
    /// Configuration file
    #[arg(long, default_value = "postroom.toml", value_name = "FILE")]
    config: PathBuf,
}

/// Which store: given by its URL or by the configuration.
#[derive(Debug, Clone, Args)]
struct StoreArgs {
    /// Store URL, `postgres://…`, `mysql://…`, `sqlserver://…` or `sqlite:FILE`; the scheme chooses the store. Other users of the machine can read arguments,
    /// so do not put a password here: set POSTROOM_STORE_URL, or set POSTROOM_STORE_URL_FILE to the name of a file that contains the
    /// URL, or name a password file in PGPASSFILE. Or the name of one of the configuration's [[stores]]
    #[arg(long, value_name = "URL|NAME")]
    store: Option<String>,
    /// Configuration file to read the store URL from, if no URL is given
    #[arg(long, default_value = "postroom.toml", value_name = "FILE")]
    config: PathBuf,
}

impl StoreArgs {
    /// Connects to nothing, unless a database has to be asked where the named one is.
    async fn open(&self) -> Result<Arc<dyn Store>, Failure> {
        let url = match &self.store {
            Some(name) if !name.contains(':') && self.config.exists() => match config::load(&self.config)?.stores {
                Stores::Many(groups) => stores::named(&groups, name).await?.url,
                Stores::One(_) => name.clone(),
            },
            Some(url) => url.clone(),
            None => match environment::store_url().map_err(|problem| Failure::new(exit::CONFIG, problem))? {
                Some(url) => url,
                None => config::load(&self.config)?.stores.one()?.to_owned(),
            },
        };
        store::open(&url)
    }

    /// Nothing says which store is meant.
    fn is_unnamed(&self) -> Result<bool, Failure> {
        let variable = environment::store_url().map_err(|problem| Failure::new(exit::CONFIG, problem))?;
        Ok(self.store.is_none() && variable.is_none() && !self.config.exists())
    }

    /// All stores of a configuration with many, if none of them is named.
    fn many(&self) -> Result<Option<Vec<config::Group>>, Failure> {
        let variable = environment::store_url().map_err(|problem| Failure::new(exit::CONFIG, problem))?;
        if self.store.is_some() || variable.is_some() || !self.config.exists() {
            return Ok(None);
        }
        Ok(match config::load(&self.config)?.stores {
            Stores::Many(groups) => Some(groups),
            Stores::One(_) => None,
        })
    }

    /// It is one of many, and so has a relay only while something waits in it.
    fn is_one_of_many(&self) -> bool {
        let named = self.store.as_ref().is_some_and(|name| !name.contains(':')) && self.config.exists();
        named && config::load(&self.config).is_ok_and(|config| matches!(config.stores, Stores::Many(_)))
    }

    /// The store is one of the configuration file, which says what else belongs to it.
    fn is_from_the_configuration(&self) -> bool {
        self.store.as_ref().is_none_or(|name| !name.contains(':'))
    }
}

fn main() -> ExitCode {
    // Clients of HTTP, for traces and archives, take the one of the process.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // clap knows whether this is help, the version or a usage error. An error quotes the argument, which may be a URL at the wrong
            // place.
            if !error.use_stderr() {
                let _ = error.print();
                return ExitCode::from(exit::OK);
            }
            let text = redact_text(error.to_string().trim_end());
            text.lines().for_each(|line| say!("{line}"));
            if std::env::args().any(|argument| argument == "--json") {
                show!("{}", serde_json::json!({ "error": text, "exit_code": exit::USAGE }));
            }
            return ExitCode::from(exit::USAGE);
        }
    };
    // The demo prints what happens; the outage that it causes itself needs no warning as well.
    let usual = if matches!(cli.command, Command::Demo(_)) {
        "error"
    } else {
        "warn,postroom=info,postroom_relay=info,postroom_consumer=info"
    };
    // Dropped after the runtime: it sends the remaining traces.
    let _telemetry = telemetry::start(usual);

    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            say!("postroom: failed to start the runtime: {error}");
            return ExitCode::from(exit::FAILURE);
        }
    };
    let result = runtime.block_on(async {
        match cli.command {
            Command::Demo(args) => demo::demo(args, cli.json).await,
            Command::Init(args) => init::init(&args, cli.json),
            Command::Check(args) => check::check(&args, cli.json).await,
            Command::Doctor(args) => doctor::doctor(&args, cli.json).await,
            Command::Explain(args) => doctor::explain(&args, cli.json),
            Command::Messages(args) => messages::messages(args, cli.json).await,
            Command::Send(args) => send::send(args, cli.json).await,
            Command::Migrate(args) => migrate::migrate(args, cli.json).await,
            Command::Run(args) => run::run(&args.config, cli.json).await,
            Command::Stores(args) => stores::stores(args, cli.json).await,
            Command::Status(args) => status::status(&args, cli.json).await,
            Command::Dead(args) => dead::dead(*args, cli.json).await,
            Command::Replay(args) => operations::replay(*args, cli.json).await,
            Command::Operations(args) => operations::operations(args, cli.json).await,
            Command::Prune(args) => retention::prune(args, cli.json).await,
            Command::Archive(args) => archive::archive(*args, cli.json).await,
            Command::Reconcile(args) => reconcile::reconcile(*args, cli.json).await,
            Command::Intake(args) => intake::intake(*args, cli.json).await,
            Command::Presets(args) => presets::presets(args, cli.json).await,
            Command::Inbox(args) => inbox::inbox(args, cli.json).await,
            Command::Keys(args) => keys::keys(args, cli.json).await,
            Command::Routes(args) => routes::routes(args, cli.json).await,
            Command::Health(args) => health::health(&args, cli.json).await,
            Command::Sizes(args) => sizes::sizes(&args, cli.json).await,
            Command::Token(args) => token::token(&args, cli.json),
            Command::Why(args) => why::why(args, cli.json).await,
        }
    });
    match result {
        Ok(()) => ExitCode::from(exit::OK),
        Err(failure) => {
            report(&failure, cli.json);
            ExitCode::from(failure.code)
        }
    }
}

fn report(failure: &Failure, json: bool) {
    if json && !failure.answered {
        show!("{}", serde_json::json!({ "error": failure.text, "exit_code": failure.code }));
    }
    say!("postroom: {}", failure.text);
}
