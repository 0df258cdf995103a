//! The judge of the demo: compares what the shop committed, what the broker logged and what the projection holds. It asks
//! tables and the broker's log, never a counter of the code under test.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use postroom::MessageId;
use postroom_brokers::in_process::InProcessBroker;
use postroom_sqlite::connect;
use rusqlite::Connection;
use serde::Serialize;

use super::QUEUE;
use crate::exit::{self, Failure};

/// The database files of a demo.
#[derive(Debug, Clone)]
pub struct Files {
    pub shop: PathBuf,
    pub projection: PathBuf,
    pub journal: PathBuf,
}

impl Files {
    pub fn new(dir: &Path) -> Self {
        let file = |name: &str| dir.join(format!("{name}.db"));
        Self { shop: file("shop"), projection: file("projection"), journal: file("journal") }
    }
}

pub fn failed(error: rusqlite::Error) -> Failure {
    Failure::new(exit::FAILURE, format!("failed to use the demo's database: {error}"))
}

/// What happened, counted in messages.
#[derive(Debug, Serialize)]
pub struct Ledger {
    /// Written in transactions that committed.
    committed: usize,
    /// Written in transactions that rolled back.
    rolled_back: usize,
    /// Different messages that the broker stored.
    acked: usize,
    /// Effects in the projection.
    effects: i64,
    /// Deliveries that the inbox kept from having an effect again.
    duplicates_suppressed: i64,
    /// Committed, and without an effect.
    lost: usize,
    /// Stored by the broker, and not committed.
    ghosts: usize,
    /// Messages with more than one effect.
    repeated_effects: usize,
    /// First occurrences at the broker that came after a later one of their key.
    out_of_order: usize,
    /// Parked or dead at the end.
    unfinished: i64,
}

impl Ledger {
    pub fn compute(files: &Files, broker: &InProcessBroker) -> Result<Self, Failure> {
        let shop = connect(&files.shop)?;
        let committed = ids(&shop, "select message_id from committed")?;
        let tried = ids(&connect(&files.journal)?, "select message_id from tried")?;
        let projection = connect(&files.projection)?;
        let effects: HashMap<MessageId, i64> = rows(&projection, "select message_id, times from effects")?;
        let log = broker.log();
        let acked: HashSet<MessageId> = log.iter().map(|message| message.id).collect();

        let mut seen = HashSet::new();
        let mut newest: HashMap<String, i64> = HashMap::new();
        let mut out_of_order = 0;
        for message in log.iter().filter(|message| seen.insert(message.id)) {
            let number = message.aggregate_version.unwrap_or_default();
            let newest = newest.entry(message.ordering_key().unwrap_or_default().to_owned()).or_default();
            out_of_order += usize::from(number <= *newest);
            *newest = number.max(*newest);
        }
        let total: i64 = effects.values().sum();
        Ok(Self {
            committed: committed.len(),
            rolled_back: tried.difference(&committed).count(),
            acked: acked.len(),
            effects: total,
            duplicates_suppressed: broker.handed_out().len() as i64 - total,
            lost: committed.iter().filter(|id| !effects.contains_key(id) || !acked.contains(id)).count(),
            ghosts: acked.difference(&committed).count() + effects.keys().filter(|id| !committed.contains(id)).count(),
            repeated_effects: effects.values().filter(|times| **times != 1).count(),
            out_of_order,
            unfinished: one(
                &shop,
                "select (select count(*) from postroom_parked) + (select count(*) from postroom_dead_letters)",
            )?,
        })
    }

    pub fn balances(&self) -> bool {
        self.lost == 0
            && self.ghosts == 0
            && self.repeated_effects == 0
            && self.out_of_order == 0
            && self.unfinished == 0
            && self.committed > 0
            && self.acked == self.committed
            && self.effects == self.committed as i64
            && self.duplicates_suppressed >= 0
    }

    pub fn table(&self) -> String {
        let rows = [
            ("committed", self.committed as i64, "messages written in transactions that committed"),
            ("rolled back", self.rolled_back as i64, "messages written in transactions that did not"),
            ("acked", self.acked as i64, "different messages that the broker stored"),
            ("effects", self.effects, "orders that the consumer added to its totals"),
            ("duplicates suppressed", self.duplicates_suppressed, "deliveries that the inbox recognised"),
            ("lost", self.lost as i64, "messages that committed, but have no effect"),
            ("ghosts", self.ghosts as i64, "messages at the broker that were never committed"),
            ("repeated effects", self.repeated_effects as i64, "messages whose effect was applied more than once"),
            ("out of order", self.out_of_order as i64, "messages first stored after a later one of the same customer"),
        ];
        let mut text = String::new();
        for (name, count, meaning) in rows {
            text.push_str(&format!("{name:<22} {count:>6}   {meaning}\n"));
        }
        text.push_str(if self.balances() { "\nthe ledger balances\n" } else { "\nTHE LEDGER DOES NOT BALANCE\n" });
        text
    }
}

/// One line for the screen.
pub fn progress(files: &Files, broker: &InProcessBroker) -> Result<String, Failure> {
    let shop = connect(&files.shop)?;
    let committed = one(&shop, "select count(*) from committed")?;
    let waiting = waiting(&shop)?;
    let effects = one(&connect(&files.projection)?, "select count(*) from effects")?;
    Ok(format!(
        "orders {committed:>5}   waiting in the outbox {waiting:>5}   stored by the broker {:>5}   effects {effects:>5}",
        broker.log().len()
    ))
}

/// Nothing is left to relay, and nothing is left in the queue.
pub fn is_drained(files: &Files, broker: &InProcessBroker) -> Result<bool, Failure> {
    Ok(waiting(&connect(&files.shop)?)? == 0 && broker.unsettled(QUEUE) == 0)
}

fn waiting(shop: &Connection) -> Result<i64, Failure> {
    one(
        shop,
        "select (select count(*) from postroom_outbox where seq > (select max(position_seq) from postroom_lanes))
              + (select count(*) from postroom_parked)",
    )
}

fn one(connection: &Connection, sql: &str) -> Result<i64, Failure> {
    connection.query_row(sql, [], |row| row.get(0)).map_err(failed)
}

fn ids(connection: &Connection, sql: &str) -> Result<HashSet<MessageId>, Failure> {
    let mut statement = connection.prepare(sql).map_err(failed)?;
    let texts = statement.query_map([], |row| row.get::<_, String>(0)).map_err(failed)?;
    texts.map(|text| parse(text.map_err(failed)?)).collect()
}

fn rows(connection: &Connection, sql: &str) -> Result<HashMap<MessageId, i64>, Failure> {
    let mut statement = connection.prepare(sql).map_err(failed)?;
    let rows = statement.query_map([], |row| Ok((row.get::<_, String>(0)?, row.get(1)?))).map_err(failed)?;
    rows.map(|row| row.map_err(failed).and_then(|(id, times)| Ok((parse(id)?, times)))).collect()
}

fn parse(text: String) -> Result<MessageId, Failure> {
    text.parse().map_err(|_| Failure::new(exit::FAILURE, format!("the demo's database contains {text:?} as an id")))
}
