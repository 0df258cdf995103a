//! What the schedules did, for people and for the ledger.

use std::collections::BTreeMap;

use postroom_testkit::judge::Violation;

/// What one schedule did.
#[derive(Debug, Default)]
pub struct Outcome {
    pub messages: usize,
    pub duplicates: usize,
    pub faults: Vec<&'static str>,
    pub crashed_at: Vec<&'static str>,
    pub violations: Vec<Violation>,
}

#[derive(Debug, Default)]
pub struct Tally {
    first: u64,
    schedules: u64,
    messages: usize,
    duplicates: usize,
    faults: BTreeMap<&'static str, u64>,
    crashed_at: BTreeMap<&'static str, u64>,
    pub violations: Vec<String>,
}

impl Tally {
    pub fn new(first: u64) -> Self {
        Self { first, ..Self::default() }
    }

    pub fn fault(&mut self, what: &'static str) {
        *self.faults.entry(what).or_default() += 1;
    }

    pub fn add(&mut self, seed: u64, outcome: Outcome) {
        self.schedules += 1;
        self.messages += outcome.messages;
        self.duplicates += outcome.duplicates;
        outcome.faults.iter().for_each(|fault| self.fault(fault));
        if !outcome.violations.is_empty() {
            println!("seed {seed}, violated, had these faults in this order: {}", outcome.faults.join(", "));
        }
        for place in outcome.crashed_at {
            *self.crashed_at.entry(place).or_default() += 1;
        }
        if outcome.faults.len() < 5 {
            self.violations.push(format!("seed {seed}: only {} faults", outcome.faults.len()));
        }
        for violation in outcome.violations {
            self.violations.push(format!("seed {seed}: {violation}"));
        }
    }

    pub fn stuck(&mut self, seed: u64, what: &str) {
        self.schedules += 1;
        self.violations.push(format!("seed {seed}: I8: {what}"));
    }

    pub fn line(&self) -> String {
        let faults: u64 = self.faults.values().sum();
        format!(
            "{} schedules, {} messages, {faults} faults, {} duplicates, {} violations",
            self.schedules,
            self.messages,
            self.duplicates,
            self.violations.len()
        )
    }

    pub fn json(&self) -> String {
        serde_json::json!({
            "seeds": [self.first, self.first + self.schedules - 1],
            "schedules": self.schedules,
            "messages": self.messages,
            "duplicates": self.duplicates,
            "faults": self.faults,
            "crashed_at": self.crashed_at,
            "violations": self.violations,
        })
        .to_string()
    }
}
