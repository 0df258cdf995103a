//! Compares what the writers committed with what the service did, and looks what became of the rows.

use std::collections::{HashMap, HashSet};

use serde::Serialize;
use uuid::Uuid;

/// A message that was committed: its key and its number within it.
pub type Committed = HashMap<Uuid, (String, i64)>;

/// What happened, counted in messages.
#[derive(Debug, Serialize)]
pub struct Ledger {
    pub system: &'static str,
    pub committed: usize,
    pub rolled_back: usize,
    pub effects: usize,
    pub duplicates_suppressed: u64,
    pub lost: usize,
    pub ghosts: usize,
    pub repeated_effects: usize,
    pub out_of_order: usize,
    /// Rows of the article's table that do not say that they were sent.
    pub unmarked: i64,
    /// What else was done with it, in words.
    pub also: Vec<String>,
}

impl Ledger {
    /// `effects` are those of the service, in its order.
    pub fn of(
        system: &'static str,
        committed: &Committed,
        rolled_back: usize,
        effects: &[(Uuid, String, i64)],
        (duplicates_suppressed, unmarked): (u64, i64),
        also: Vec<String>,
    ) -> Self {
        let mut seen: HashSet<Uuid> = HashSet::new();
        let mut newest: HashMap<&str, i64> = HashMap::new();
        let (mut repeated_effects, mut out_of_order, mut ghosts) = (0, 0, 0);
        for (id, key, n) in effects {
            if !seen.insert(*id) {
                repeated_effects += 1;
                continue;
            }
            ghosts += usize::from(!committed.contains_key(id));
            let newest = newest.entry(key).or_default();
            out_of_order += usize::from(n < newest);
            *newest = (*newest).max(*n);
        }
        let lost = committed.keys().filter(|id| !seen.contains(id)).count();
        Self {
            system,
            committed: committed.len(),
            rolled_back,
            effects: effects.len(),
            duplicates_suppressed,
            lost,
            ghosts,
            repeated_effects,
            out_of_order,
            unmarked,
            also,
        }
    }

    /// Nothing was lost, repeated, invented, out of order, or forgotten.
    pub fn balances(&self) -> bool {
        self.committed > 0
            && self.lost + self.ghosts + self.repeated_effects + self.out_of_order == 0
            && self.unmarked == 0
    }
}

/// For people.
pub fn table(ledgers: &[Ledger]) -> String {
    let columns = [
        "system",
        "committed",
        "rolled back",
        "effects",
        "suppressed",
        "lost",
        "ghosts",
        "repeated",
        "out of order",
        "unmarked",
    ];
    let rows = ledgers.iter().map(|of| {
        [
            of.system.to_owned(),
            of.committed.to_string(),
            of.rolled_back.to_string(),
            of.effects.to_string(),
            of.duplicates_suppressed.to_string(),
            of.lost.to_string(),
            of.ghosts.to_string(),
            of.repeated_effects.to_string(),
            of.out_of_order.to_string(),
            of.unmarked.to_string(),
        ]
    });
    let rows: Vec<[String; 10]> = std::iter::once(columns.map(str::to_owned)).chain(rows).collect();
    let widths: Vec<usize> = (0..10).map(|n| rows.iter().map(|row| row[n].len()).max().unwrap_or(0)).collect();
    let mut text = String::new();
    for row in &rows {
        for (n, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let cell = if n == 0 { format!("{cell:width$}") } else { format!("  {cell:>width$}") };
            text.push_str(&cell);
        }
        text.push('\n');
    }
    for ledger in ledgers {
        for also in &ledger.also {
            text.push_str(&format!("{}: {also}\n", ledger.system));
        }
    }
    text
}
