//! Pure: what is tried on rows that wait, and rolled back, before any row is taken: a value that the table refuses would show only when the
//! message was sent.

use super::{Done, DoneWhen, Intake, Literal, Row, Setting};
use crate::store::Finding;

/// Changes of one row, one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trial {
    /// The part of the mapping that it is about.
    pub place: &'static str,
    /// What the row gets.
    pub steps: Vec<Vec<(String, Setting)>>,
}

/// Fewer rows of which no message can be made may be the exception.
const ALL_REFUSED_FROM: usize = 3;

impl Trial {
    /// So many rows are tried, at most: some may refuse what others take.
    pub const ROWS: usize = 20;
    /// What stands for an error.
    pub const ERROR: &'static str = "a trial that is rolled back";

    /// None of these rows took it; the last one said why.
    pub fn refused(&self, named: &str, rows: usize, told: &str) -> Finding {
        let found = format!("{named}: {}: {} that wait refuse it: {told}", self.place, counted(rows));
        let advice = "change [[intake]] in the configuration, or the constraint or trigger of the table; until then no row is taken";
        Finding::bad(found, advice)
    }
}

fn counted(rows: usize) -> String {
    if rows == 1 { "the one row".to_owned() } else { format!("all {rows} rows tried of those") }
}

impl Intake {
    /// What is tried on each row until one takes it.
    pub fn trials(&self) -> Vec<Trial> {
        let mut trials = Vec::new();
        let mut tried = |place, steps: Vec<&Vec<(String, Setting)>>| {
            if steps.last().is_some_and(|last| !last.is_empty()) {
                let steps = steps.into_iter().filter(|step| !step.is_empty()).cloned().collect();
                trials.push(Trial { place, steps });
            }
        };
        tried("taken", vec![&self.taken]);
        if let Done::Set(sent) = &self.sent {
            // A row that is done when it is taken gets no mark before.
            match self.done {
                DoneWhen::Sent => tried("sent", vec![&self.taken, sent]),
                DoneWhen::Taken => tried("sent", vec![sent]),
            }
        }
        tried("dead", vec![&self.taken, &self.dead]);
        trials
    }

    /// Of these rows, which wait, none is a message; why.
    pub fn none_is_a_message(&self, named: &str, rows: &[Row], now_us: i64) -> Option<Finding> {
        let mut last = None;
        for row in rows {
            match self.message.message(&self.table, row, now_us) {
                Ok(_) => return None,
                Err(error) => last = Some(error),
            }
        }
        let error = last.filter(|_| rows.len() >= ALL_REFUSED_FROM)?;
        let found =
            format!("{named}: message: none of the first {} rows that wait can be a message: {error}", rows.len());
        Some(Finding::bad(found, "change [intake.message] in the configuration; until then no row is taken"))
    }

    /// Values that the mapping compares a column with, each with its column.
    pub fn states(&self) -> impl Iterator<Item = (&str, &str)> {
        self.pending.iter().flat_map(|(name, values)| {
            values.iter().filter_map(move |value| match value {
                Literal::Text(text) => Some((name.as_str(), text.as_str())),
                Literal::Null | Literal::NotNull => None,
            })
        })
    }

    /// No row can have a state that the mapping looks for.
    pub fn no_such_state(named: &str, column: &str, value: &str, why: &str) -> Finding {
        let found = format!("{named}: pending: column {column:?} is never {value:?}: {why}");
        Finding::bad(found, "change `pending` of [[intake]] in the configuration; until then no row is taken")
    }
}
