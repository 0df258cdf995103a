//! Pure: which of the rows that wait are taken in one step. Rows that somebody else has locked are passed over, and so are those behind them
//! with their key.

use std::collections::{HashMap, HashSet, VecDeque};

use super::{Intake, Row};

/// Rows are taken at once as long as they are no larger than this together; one at least.
const BYTES_MAX: i64 = 8 << 20;
/// So many rows are looked at, at most, for some that are free.
const LOOK_MAX: usize = 32_000;
/// Each look that found too few is followed by one at so many times as many rows.
const FURTHER: usize = 4;

/// One step of taking. The store reads rows, without a lock, for as long as [`reads`](Self::reads) asks for some, and locks those of
/// [`locks`](Self::locks).
pub struct Search<'i> {
    intake: &'i Intake,
    max: usize,
    /// How many rows the last look was for, and whether it found as many.
    look: usize,
    is_full: bool,
    seen: HashSet<String>,
    /// Rows to be locked, each with its size in bytes.
    rows: VecDeque<(Row, i64)>,
    sizes: HashMap<String, i64>,
    /// Keys of rows that are not free.
    waits: HashSet<String>,
    whole: Vec<Row>,
    bytes: i64,
    held: u64,
}

/// What a search found.
pub struct Searched {
    /// Rows that are free and locked now, in their order.
    pub whole: Vec<Row>,
    /// Rows that are not, or that are behind one of those with their key.
    pub held: u64,
    /// There may be more.
    pub more: bool,
}

impl Intake {
    /// Begins to look for up to so many rows.
    pub fn search(&self, max: usize) -> Search<'_> {
        Search {
            intake: self,
            max,
            look: 0,
            is_full: true,
            seen: HashSet::new(),
            rows: VecDeque::new(),
            sizes: HashMap::new(),
            waits: HashSet::new(),
            whole: Vec::new(),
            bytes: 0,
            held: 0,
        }
    }
}

impl Search<'_> {
    /// How many of the next rows are to be read, from the first on; none: enough was found, or nothing more is there.
    pub fn reads(&mut self) -> Option<usize> {
        let found_enough = self.whole.len() > self.max / 2 || self.bytes >= BYTES_MAX;
        if self.max == 0 || found_enough || !self.is_full || self.look >= LOOK_MAX.max(self.max) {
            return None;
        }
        self.look = if self.look == 0 { self.max } else { (self.look * FURTHER).min(LOOK_MAX.max(self.max)) };
        Some(self.look)
    }

    /// These were read, each with its size in bytes.
    pub fn read(&mut self, next: Vec<(Row, i64)>) {
        self.is_full = next.len() >= self.look;
        let seen = &mut self.seen;
        self.rows.extend(next.into_iter().filter(|(row, _)| seen.insert(row.row.clone())));
    }

    /// Which rows are to be locked now; none: all were tried, or no more are to be taken at once.
    pub fn locks(&mut self) -> Option<Vec<Row>> {
        let mut chunk = Vec::new();
        let mut bytes = self.bytes;
        self.sizes.clear();
        while self.whole.len() + chunk.len() < self.max {
            let Some((row, size)) = self.rows.front() else { break };
            // A key that cannot be read is no key: the row is refused later, for the same reason.
            let key = self.intake.message.key_of(row).unwrap_or_default();
            if key.is_some_and(|key| self.waits.contains(&key)) {
                self.held += 1;
                self.rows.pop_front();
                continue;
            }
            bytes = bytes.saturating_add((*size).max(0));
            if bytes > BYTES_MAX && !(self.whole.is_empty() && chunk.is_empty()) {
                break;
            }
            self.sizes.insert(row.row.clone(), *size);
            chunk.extend(self.rows.pop_front().map(|(row, _)| row));
        }
        (!chunk.is_empty()).then_some(chunk)
    }

    /// Of the rows of `chunk` these were free, and are locked now.
    pub fn locked(&mut self, chunk: &[Row], free: Vec<Row>) {
        let mut free: HashMap<String, Row> = free.into_iter().map(|row| (row.row.clone(), row)).collect();
        for row in chunk {
            let key = self.intake.message.key_of(row).unwrap_or_default();
            match free.remove(&row.row) {
                Some(found) if key.as_ref().is_none_or(|key| !self.waits.contains(key)) => {
                    self.bytes = self.bytes.saturating_add(self.sizes.get(&row.row).copied().unwrap_or(0).max(0));
                    self.whole.push(found);
                }
                _ => {
                    self.held += 1;
                    self.waits.extend(key);
                }
            }
        }
    }

    /// What was found.
    pub fn end(self) -> Searched {
        Searched { more: self.is_full || !self.rows.is_empty(), whole: self.whole, held: self.held }
    }
}

/// How many of the next rows are read at once, by their sizes in bytes: one at least.
pub fn rows_within(sizes: impl IntoIterator<Item = i64>) -> usize {
    let mut bytes = 0_i64;
    let fits = |size: &i64| {
        bytes = bytes.saturating_add((*size).max(0));
        bytes <= BYTES_MAX
    };
    sizes.into_iter().take_while(fits).count().max(1)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::{Cell, Done, DoneWhen, Mapping};
    use super::*;

    fn intake() -> Intake {
        let template = |text: &str| text.parse().ok();
        Intake {
            name: "shop".to_owned(),
            table: "t".parse().unwrap(),
            row: None,
            order: Vec::new(),
            pending: Vec::new(),
            taken: Vec::new(),
            sent: Done::Delete,
            dead: Vec::new(),
            done: DoneWhen::Sent,
            message: Mapping {
                id: None,
                topic: template("t").unwrap(),
                kind: template("k").unwrap(),
                payload: template("${body}").unwrap(),
                key: template("${k}"),
                routing_key: None,
                content_type: None,
                headers: None,
                header: BTreeMap::new(),
                tenant_id: None,
                aggregate_type: None,
                aggregate_id: None,
                aggregate_version: None,
                occurred_at: None,
                visible_at: None,
            },
        }
    }

    /// Rows `0..` with these keys.
    fn table(keys: &[&str]) -> Vec<(Row, i64)> {
        let row = |(n, key): (usize, &&str)| {
            let cells = BTreeMap::from([("k".to_owned(), Cell::Text((*key).to_owned()))]);
            (Row { row: n.to_string(), cells }, 10)
        };
        keys.iter().enumerate().map(row).collect()
    }

    /// What is found in a table where some rows are locked, and how many rows were tried to be locked.
    fn found(table: &[(Row, i64)], is_locked: impl Fn(usize) -> bool, max: usize) -> (Searched, usize) {
        let intake = intake();
        let (mut search, mut tried) = (intake.search(max), 0);
        while let Some(many) = search.reads() {
            search.read(table.iter().take(many).cloned().collect());
            while let Some(chunk) = search.locks() {
                tried += chunk.len();
                let free = chunk.iter().filter(|row| !is_locked(row.row.parse().unwrap())).cloned().collect();
                search.locked(&chunk, free);
            }
        }
        (search.end(), tried)
    }

    fn rows(found: &Searched) -> Vec<usize> {
        found.whole.iter().map(|row| row.row.parse().unwrap()).collect()
    }

    #[test]
    fn a_locked_row_holds_up_its_key_alone() {
        let (searched, _) = found(&table(&["a", "b", "a", "b", "c"]), |n| n == 0, 10);
        assert_eq!((rows(&searched), searched.held, searched.more), (vec![1, 3, 4], 2, false));
    }

    #[test]
    fn rows_behind_many_that_are_locked_are_found() {
        let mut keys = vec!["a"; 3_000];
        keys.extend(["b"; 5]);
        let (searched, tried) = found(&table(&keys), |n| n == 0, 500);
        assert_eq!((rows(&searched), searched.held), ((3_000..3_005).collect(), 3_000));
        assert!(tried <= 505, "{tried}: those behind a locked one are not locked too");
        let keys: Vec<String> = (0..710).map(|n| n.to_string()).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let (searched, _) = found(&table(&keys), |n| n < 600, 500);
        assert_eq!((rows(&searched), searched.held), ((600..710).collect(), 600));
    }

    #[test]
    fn a_search_has_an_end() {
        let keys = vec!["a"; 40_000];
        let (searched, _) = found(&table(&keys), |_| true, 500);
        assert!(searched.whole.is_empty() && searched.held == LOOK_MAX as u64);
        let (searched, _) = found(&table(&["a"; 20]), |_| false, 8);
        assert_eq!((rows(&searched), searched.more), ((0..8).collect(), true));
        let (searched, _) = found(&table(&[]), |_| false, 8);
        assert!(searched.whole.is_empty() && !searched.more);
    }

    #[test]
    fn large_rows_are_taken_a_few_at_a_time() {
        let mut large = table(&["a", "b", "c", "d"]);
        large.iter_mut().for_each(|(_, size)| *size = 3 << 20);
        let (searched, _) = found(&large, |_| false, 100);
        assert_eq!((rows(&searched), searched.more), (vec![0, 1], true));
        large.iter_mut().for_each(|(_, size)| *size = i64::MAX);
        let (searched, _) = found(&large, |_| false, 100);
        assert_eq!((rows(&searched), searched.more), (vec![0], true));
        let (searched, _) = found(&large, |n| n == 0, 100);
        assert_eq!(rows(&searched), [1]);
    }
}
