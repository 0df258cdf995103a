//! The judge: compares what the writers committed, what the broker stored, and what the shipping service did.

use std::collections::{HashMap, HashSet};

use postroom::{BoxError, MessageId};
use serde::Serialize;
use tokio_postgres::Client;

/// What happened, counted in messages.
#[derive(Debug, Serialize)]
pub struct Ledger {
    committed: usize,
    rolled_back: usize,
    acked: usize,
    effects: i64,
    duplicates_suppressed: i64,
    lost: usize,
    ghosts: usize,
    repeated_effects: usize,
    out_of_order: usize,
    seconds: f64,
}

impl Ledger {
    /// From the database and the broker's log; `tried` is what the writers wrote, committed or not.
    pub async fn compute(
        client: &Client,
        tried: &HashSet<MessageId>,
        stored: &[MessageId],
        seconds: f64,
    ) -> Result<Self, BoxError> {
        let rows = client.query("select message_id, customer, number from orders_example.committed", &[]).await?;
        let committed: HashMap<MessageId, (String, i64)> =
            rows.iter().map(|row| (row.get::<_, uuid::Uuid>(0).into(), (row.get(1), row.get(2)))).collect();
        let rows = client.query("select message_id, times from orders_example.effects", &[]).await?;
        let effects: HashMap<MessageId, i32> =
            rows.iter().map(|row| (row.get::<_, uuid::Uuid>(0).into(), row.get(1))).collect();

        let mut acked = HashSet::new();
        let mut newest: HashMap<&str, i64> = HashMap::new();
        let mut out_of_order = 0;
        for id in stored {
            if acked.insert(*id)
                && let Some((customer, number)) = committed.get(id)
            {
                let newest = newest.entry(customer).or_default();
                out_of_order += usize::from(number < newest);
                *newest = (*newest).max(*number);
            }
        }
        let total: i64 = effects.values().map(|times| i64::from(*times)).sum();
        Ok(Self {
            committed: committed.len(),
            rolled_back: tried.iter().filter(|id| !committed.contains_key(id)).count(),
            acked: acked.len(),
            effects: total,
            duplicates_suppressed: stored.len() as i64 - total,
            lost: committed.keys().filter(|id| !acked.contains(id) || !effects.contains_key(id)).count(),
            ghosts: acked.iter().chain(effects.keys()).filter(|id| !committed.contains_key(id)).count(),
            repeated_effects: effects.values().filter(|times| **times != 1).count(),
            out_of_order,
            seconds,
        })
    }

    pub fn balances(&self) -> bool {
        self.committed > 0
            && self.acked == self.committed
            && self.effects == self.committed as i64
            && self.duplicates_suppressed >= 0
            && [self.lost, self.ghosts, self.repeated_effects, self.out_of_order] == [0; 4]
    }

    pub fn json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    pub fn table(&self) -> String {
        let rows = [
            ("committed", self.committed as i64, "orders, each with its message, in transactions that committed"),
            ("rolled back", self.rolled_back as i64, "messages of transactions that did not"),
            ("acked", self.acked as i64, "different messages in the broker's queue"),
            ("effects", self.effects, "orders shipped"),
            ("duplicates suppressed", self.duplicates_suppressed, "stored again by the broker, without an effect"),
            ("lost", self.lost as i64, "committed, but not stored or not shipped"),
            ("ghosts", self.ghosts as i64, "stored or shipped, but never committed"),
            ("repeated effects", self.repeated_effects as i64, "shipped more than once"),
            ("out of order", self.out_of_order as i64, "first occurrences after a later one of their customer"),
        ];
        let mut text = String::new();
        for (name, count, meaning) in rows {
            text.push_str(&format!("{name:<22} {count:>8}   {meaning}\n"));
        }
        let rate = self.committed as f64 / self.seconds.max(0.001);
        text.push_str(&format!(
            "\n{:.1} s, {rate:.0} orders/s from the first write to the last effect\n",
            self.seconds
        ));
        text.push_str(if self.balances() { "the ledger balances\n" } else { "THE LEDGER DOES NOT BALANCE\n" });
        text
    }
}
