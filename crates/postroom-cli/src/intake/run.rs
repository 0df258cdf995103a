//! Takes rows of one table for as long as the process runs, and marks those whose messages were sent. In shadow mode it only looks, and
//! tells what another relay does with the rows.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use postroom::{DoneWhen, Intake, Intakes, Store, StoreError, Wake, lasting};

use crate::config::{Mode, Taken};
use crate::exit::{self, Failure};

/// Rows of one step.
const TAKE: usize = 500;
const MARK: usize = 1_000;
/// Between two looks for rows that were sent: the first while there are some, the last while there are none.
const MARK_FIRST: Duration = Duration::from_millis(200);
const MARK_LAST: Duration = Duration::from_secs(5);
/// Another process takes.
const OTHERS: Duration = Duration::from_secs(1);
/// After an error that a person has to fix.
const REFUSED: Duration = Duration::from_secs(10);
const TELL_EVERY: Duration = Duration::from_secs(3600);
/// What a shadow tells how often, of how many rows at most.
const SHADOW_TELLS: Duration = Duration::from_secs(60);
const SHADOW_ROWS: usize = 2_000;

/// Rows that are held for so long are told.
const HELD_LONG: Duration = Duration::from_secs(60);

/// Goes on for ever. `quiet` says whether the last look found nothing to take.
pub async fn keep_taking(taken: Taken, store: Arc<dyn Store>, wakes: Vec<Wake>, quiet: Option<Arc<AtomicBool>>) {
    let quiet = quiet.unwrap_or_default();
    let Some(intakes) = store.intakes() else { return };
    if taken.mode == Mode::Shadow {
        quiet.store(true, Ordering::Relaxed);
        return shadow(&taken, intakes).await;
    }
    let intake = &taken.intake;
    let (mut taking, mut marking, mut held) = (Told::new("taken"), Told::new("marked"), Held::default());
    let (mut marked, mut mark_wait, mut fits) = (Instant::now(), MARK_FIRST, false);
    loop {
        let mut wait = taken.every;
        // What cannot be marked later must not be taken.
        if !fits {
            match intakes.check_intake(intake).await {
                Ok(found) => match found.first() {
                    Some(first) if !first.ok => {
                        let advice = first.advice.as_deref().unwrap_or_default();
                        quiet.store(true, Ordering::Relaxed);
                        wait = taking.refused(intake, &format!("{}; {advice}", first.found));
                    }
                    _ => {
                        fits = true;
                        taking.answered(intake);
                        tracing::info!(intake = %intake.name, "rows of {} are taken", intake.table);
                    }
                },
                Err(error) => wait = taking.failed(intake, &error),
            }
        }
        if fits {
            match intakes.take_in(intake, TAKE).await {
                Ok(took) => {
                    taking.answered(intake);
                    quiet.store(took.taken == 0 && !took.more, Ordering::Relaxed);
                    held.note(intake, took.held);
                    if took.taken > 0 {
                        wakes.iter().for_each(Wake::notify);
                        mark_wait = MARK_FIRST;
                    }
                    if took.refused > 0 {
                        tracing::error!(
                            intake = %intake.name,
                            "{} rows of {} were set aside; `postroom intake list` tells why",
                            took.refused,
                            intake.table
                        );
                    }
                    if took.more {
                        wait = Duration::ZERO;
                    }
                    if took.others {
                        wait = wait.max(OTHERS);
                    }
                }
                Err(error) => {
                    quiet.store(true, Ordering::Relaxed);
                    fits = error.is_transient();
                    wait = taking.failed(intake, &error);
                }
            }
        }
        if intake.done == DoneWhen::Sent && marked.elapsed() >= mark_wait {
            match sweep(intake, intakes).await {
                Ok(0) => mark_wait = (mark_wait * 2).min(MARK_LAST),
                Ok(_) => mark_wait = MARK_FIRST,
                Err(error) => mark_wait = marking.failed(intake, &error),
            }
            marked = Instant::now();
        }
        tokio::time::sleep(wait).await;
    }
}

/// Since when each look finds rows that cannot be locked.
#[derive(Default)]
struct Held {
    since: Option<Instant>,
    told: bool,
}

impl Held {
    fn note(&mut self, intake: &Intake, held: u64) {
        if held == 0 {
            *self = Self::default();
            return;
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        if since.elapsed() >= HELD_LONG && !std::mem::replace(&mut self.told, true) {
            tracing::warn!(
                intake = %intake.name,
                "for a minute, rows of {} could not be locked, {held} of them now: another transaction has them, or one of their key, or this role may not change them; the others go on",
                intake.table
            );
        }
    }
}

/// Looks at all rows that are taken and not done; returns how many changed.
async fn sweep(intake: &Intake, intakes: &dyn Intakes) -> Result<u64, StoreError> {
    let (mut after, mut changed) = (0, 0);
    loop {
        let marked = intakes.mark_rows(intake, after, MARK).await?;
        changed += marked.sent + marked.dead + marked.unclear + marked.unmarked;
        if marked.dead > 0 {
            tracing::warn!(intake = %intake.name, "messages of {} rows of {} are dead; `postroom dead list` shows them", marked.dead, intake.table);
        }
        if marked.unclear > 0 {
            tracing::error!(
                intake = %intake.name,
                "whether the messages of {} rows of {} were sent is not known; `postroom intake list` tells why",
                marked.unclear,
                intake.table
            );
        }
        if marked.unmarked > 0 {
            tracing::error!(
                intake = %intake.name,
                "{} rows of {} were sent and cannot be marked; `postroom intake list` tells why",
                marked.unmarked,
                intake.table
            );
        }
        match marked.next {
            Some(next) => after = next,
            None => return Ok(changed),
        }
    }
}

/// Marks what the relays sent last, before the process ends.
pub async fn finish(taken: &[Taken], store: &dyn Store) {
    const WITHIN: Duration = Duration::from_secs(5);
    let Some(intakes) = store.intakes() else { return };
    let active = taken.iter().filter(|taken| taken.mode == Mode::Active && taken.intake.done == DoneWhen::Sent);
    let work = async {
        for taken in active {
            // What is not marked now is marked by the next process.
            let _ = sweep(&taken.intake, intakes).await;
        }
    };
    let _ = tokio::time::timeout(WITHIN, work).await;
}

/// What was told already.
struct Told {
    /// What is not done with rows.
    what: &'static str,
    away: bool,
    refused: Option<Instant>,
}

impl Told {
    fn new(what: &'static str) -> Self {
        Self { what, away: false, refused: None }
    }

    fn answered(&mut self, intake: &Intake) {
        if std::mem::take(&mut self.away) || self.refused.take().is_some() {
            tracing::info!(intake = %intake.name, "rows of {} are {} again", intake.table, self.what);
        }
    }

    fn failed(&mut self, intake: &Intake, error: &StoreError) -> Duration {
        let text = Failure::of(exit::FAILURE, error).text;
        if error.is_transient() {
            if !std::mem::replace(&mut self.away, true) {
                tracing::warn!(intake = %intake.name, "rows of {} are {} later: {text}", intake.table, self.what);
            }
            return OTHERS;
        }
        self.refused(intake, &text)
    }

    fn refused(&mut self, intake: &Intake, text: &str) -> Duration {
        if self.refused.is_none_or(|at| at.elapsed() >= TELL_EVERY) {
            self.refused = Some(Instant::now());
            tracing::error!(intake = %intake.name, "rows of {} are not {}: {text}; tried again every {} s", intake.table, self.what, REFUSED.as_secs());
        }
        REFUSED
    }
}

/// What a shadow has seen.
#[derive(Default)]
struct Seen {
    /// When each row that waits was seen first.
    waiting: HashMap<String, Instant>,
    /// How long the rows waited that another relay is done with, since the last report.
    done: Vec<Duration>,
    refused: HashMap<String, String>,
}

impl Seen {
    fn note(&mut self, rows: Vec<postroom::Previewed>, whole: bool, now: Instant) {
        let mut waiting = HashMap::new();
        for row in rows {
            if let Err(error) = &row.message {
                self.refused.entry(row.row.clone()).or_insert_with(|| error.clone());
            }
            let since = self.waiting.remove(&row.row).unwrap_or(now);
            waiting.insert(row.row, since);
        }
        // A row that is gone from among those that wait was sent by the other relay, unless the look did not reach it.
        if whole {
            self.done.extend(self.waiting.values().map(|since| now.duration_since(*since)));
        } else {
            waiting.extend(self.waiting.drain());
        }
        self.waiting = waiting;
    }

    /// What is told, and forgotten.
    fn told(&mut self, now: Instant) -> String {
        self.done.sort_unstable();
        let median = self
            .done
            .get(self.done.len() / 2)
            .map_or_else(String::new, |waited| format!(", half of them within {}", lasting(waited.as_secs_f64())));
        let oldest = self.waiting.values().min().map_or_else(String::new, |since| {
            format!(", one of them for {}", lasting(now.duration_since(*since).as_secs_f64()))
        });
        let refused = self.refused.iter().next().map_or_else(String::new, |(row, error)| {
            format!("; of {} rows no message could be made, such as row {row}: {error}", self.refused.len())
        });
        let told = format!(
            "another relay is done with {} rows{median}; {} wait{oldest}{refused}",
            self.done.len(),
            self.waiting.len()
        );
        self.done.clear();
        self.refused.clear();
        told
    }
}

async fn shadow(taken: &Taken, intakes: &dyn Intakes) {
    let intake = &taken.intake;
    tracing::info!(intake = %intake.name, "shadow: rows of {} are looked at, and none is taken", intake.table);
    let (mut seen, mut told, mut last, mut marked) = (Seen::default(), Told::new("looked at"), Instant::now(), None);
    loop {
        let mut wait = taken.every.max(Duration::from_secs(1));
        match intakes.preview_intake(intake, SHADOW_ROWS).await {
            Ok(rows) => {
                let whole = rows.len() < SHADOW_ROWS;
                seen.note(rows, whole, Instant::now());
            }
            Err(error) => wait = told.failed(intake, &error),
        }
        // What was taken before is marked when it is sent.
        if marked.is_none_or(|at: Instant| at.elapsed() >= MARK_LAST) {
            marked = Some(Instant::now());
            if let Err(error) = mark_taken(intake, intakes).await {
                wait = wait.max(told.failed(intake, &error));
            }
        }
        if last.elapsed() >= SHADOW_TELLS {
            last = Instant::now();
            tracing::info!(intake = %intake.name, "shadow of {}: {}", intake.table, seen.told(last));
        }
        tokio::time::sleep(wait).await;
    }
}

async fn mark_taken(intake: &Intake, intakes: &dyn Intakes) -> Result<(), StoreError> {
    if intakes.intake_status(intake).await?.taken > 0 {
        sweep(intake, intakes).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use postroom::{Message, Previewed};

    use super::*;

    fn row(key: &str) -> Previewed {
        Previewed { row: key.to_owned(), message: Ok(Message::new("t", "k", "x")) }
    }

    #[test]
    fn a_shadow_tells_what_another_relay_did() {
        let (mut seen, begin) = (Seen::default(), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        seen.note(vec![row("1"), row("2")], true, begin);
        seen.note(
            vec![row("2"), Previewed { row: "3".to_owned(), message: Err("payload: is null".to_owned()) }],
            true,
            at(4),
        );
        let told = seen.told(at(10));
        assert_eq!(
            told,
            "another relay is done with 1 rows, half of them within 4.0s; 2 wait, one of them for 10s; of 1 rows no message could be made, such as row 3: payload: is null"
        );
        // A look that did not reach the end says nothing about the rows behind it.
        seen.note(vec![row("2")], false, at(11));
        assert_eq!(seen.told(at(11)), "another relay is done with 0 rows; 2 wait, one of them for 11s");
    }
}
