//! Medians, spread and ratios.

use std::fmt::Write;

use serde_json::{Value, json};

/// Everything measured, table by table.
#[derive(Debug, Default)]
pub struct Report {
    tables: Vec<Table>,
}

#[derive(Debug)]
struct Table {
    title: String,
    unit: &'static str,
    rows: Vec<Row>,
    notes: Vec<String>,
}

#[derive(Debug)]
struct Row {
    name: String,
    samples: Vec<f64>,
    /// Each round against the first row's same round.
    ratios: Vec<f64>,
}

impl Report {
    /// A table of rows with one sample a round; ratios are against the first row, round by round.
    pub fn table(&mut self, title: impl Into<String>, unit: &'static str, rows: Vec<(String, Vec<f64>)>) {
        let first = rows.first().map(|(_, samples)| samples.clone()).unwrap_or_default();
        let rows = rows
            .into_iter()
            .map(|(name, samples)| {
                let ratios = samples.iter().zip(&first).map(|(sample, first)| sample / first).collect();
                Row { name, samples, ratios }
            })
            .collect();
        self.tables.push(Table { title: title.into(), unit, rows, notes: Vec::new() });
        eprint!("{}", self.tables.last().map(Table::text).unwrap_or_default());
    }

    /// A line under the last table.
    pub fn note(&mut self, note: impl Into<String>) {
        let note = note.into();
        eprintln!("  {note}");
        if let Some(table) = self.tables.last_mut() {
            table.notes.push(note);
        }
    }

    /// For people.
    pub fn tables(&self) -> String {
        self.tables.iter().map(Table::text).collect()
    }

    /// For programs.
    pub fn json(&self) -> Value {
        let tables: Vec<Value> = self
            .tables
            .iter()
            .map(|table| {
                let rows: Vec<Value> = table
                    .rows
                    .iter()
                    .map(|row| {
                        json!({ "name": row.name, "median": median(&row.samples), "samples": row.samples,
                                "ratio": median(&row.ratios), "ratios": row.ratios })
                    })
                    .collect();
                json!({ "title": table.title, "unit": table.unit, "rows": rows, "notes": table.notes })
            })
            .collect();
        json!({ "tables": tables })
    }
}

impl Table {
    fn text(&self) -> String {
        let mut text = format!("\n{} ({})\n", self.title, self.unit);
        let width = self.rows.iter().map(|row| row.name.len()).max().unwrap_or(0);
        let _ = writeln!(text, "  {:width$}  {:>12}  {:>25}  {:>7}", "", "median", "from – to", "ratio");
        for row in &self.rows {
            let (low, high) = span(&row.samples);
            let spread = format!("{} – {}", shown(low), shown(high));
            let (middle, ratio) = (shown(median(&row.samples)), median(&row.ratios));
            let _ = writeln!(text, "  {:width$}  {middle:>12}  {spread:>25}  {ratio:>7.2}", row.name);
        }
        for note in &self.notes {
            let _ = writeln!(text, "  {note}");
        }
        text
    }
}

fn shown(value: f64) -> String {
    if value >= 1000.0 { format!("{value:.0}") } else { format!("{value:.3}") }
}

pub fn median(samples: &[f64]) -> f64 {
    percentile(samples, 0.5)
}

/// The value below which so large a part of the samples lies.
pub fn percentile(samples: &[f64], part: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let index = ((sorted.len() as f64 * part) as usize).min(sorted.len().saturating_sub(1));
    sorted.get(index).copied().unwrap_or(f64::NAN)
}

fn span(samples: &[f64]) -> (f64, f64) {
    samples.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), sample| (low.min(*sample), high.max(*sample)))
}
