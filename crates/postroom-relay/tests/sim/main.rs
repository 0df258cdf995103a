//! The simulation: the engine's own code in a world that a seed decides, with every invariant watched at every step.
//!
//! `cargo xtask sim --seed N` runs one seed again and prints its last events; `POSTROOM_SIM_SEEDS=FROM..TO` chooses the range.

#![allow(clippy::unwrap_used)]

mod database;
mod side;
mod world;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use world::Tally;

/// Seeds of a run of the test suite.
const SEEDS: u64 = 3000;

fn range() -> std::ops::Range<u64> {
    let Ok(text) = std::env::var("POSTROOM_SIM_SEEDS") else { return 0..SEEDS };
    let (from, to) = text.split_once("..").expect("POSTROOM_SIM_SEEDS wants FROM..TO");
    from.parse().unwrap()..to.parse().unwrap()
}

#[test]
fn no_seed_breaks_an_invariant() {
    let seeds = range();
    let next = AtomicU64::new(seeds.start);
    let total = Mutex::new(Tally::default());
    let failures = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end || failures.lock().unwrap().len() >= 3 {
                        return;
                    }
                    match world::run(seed) {
                        Ok(tally) => add(&mut total.lock().unwrap(), tally),
                        Err(failure) => failures.lock().unwrap().push((seed, failure)),
                    }
                }
            });
        }
    });
    let tally = total.into_inner().unwrap();
    println!("seeds {}..{}: {tally:?}", seeds.start, seeds.end);
    let failures = failures.into_inner().unwrap();
    for (seed, (violation, log)) in &failures {
        println!("seed {seed}: {} at {:?}: {}", violation.invariant, violation.at, violation.found);
        let tail = if seeds.end - seeds.start == 1 { 2000 } else { 20 };
        log.iter().rev().take(tail).rev().for_each(|line| println!("  {line}"));
        println!("  again: cargo xtask sim --seed {seed}");
    }
    assert!(failures.is_empty(), "invariants were broken");
    if seeds.end - seeds.start >= 500 {
        let Tally { kills, pauses, outages, duplicates, dead, kills_in_alarms, poison, removed, .. } = tally;
        let quiet = [kills, pauses, outages, duplicates, dead, kills_in_alarms, poison, removed].contains(&0);
        assert!(!quiet, "a simulation in which nothing happens proves nothing: {tally:?}");
    }
}

fn add(total: &mut Tally, one: Tally) {
    total.messages += one.messages;
    total.faults += one.faults;
    total.kills += one.kills;
    total.pauses += one.pauses;
    total.outages += one.outages;
    total.duplicates += one.duplicates;
    total.dead += one.dead;
    total.fenced += one.fenced;
    total.steps += one.steps;
    total.slips += one.slips;
    total.alarms += one.alarms;
    total.kills_in_alarms += one.kills_in_alarms;
    total.poison += one.poison;
    total.removed += one.removed;
}
