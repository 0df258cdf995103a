//! Chaos: random schedules of faults against real relays, PostgreSQL and RabbitMQ, judged by the independent judge.
//!
//! `cargo xtask chaos --schedules N --seed S` runs more of them and notes the result in `docs/chaos-ledger.jsonl`. The faults
//! are listed in `faults.rs` (one cell's) and `server_faults.rs` (those of the servers under all cells);
//! `POSTROOM_CHAOS_WITHOUT=NAME,NAME` leaves some out, which tells what a violation comes from.

// The length of a pause, an outage or a dead link is the fault itself; everything else waits for signals.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, dead_code)]

mod audit_file;
mod cell;
mod faults;
mod outbox_dump;
mod pooled;
mod relay;
#[path = "../relay/rig.rs"]
mod rig;
mod server_faults;
mod servers;
mod tally;
mod writers;

use std::panic::AssertUnwindSafe;

use futures_util::FutureExt;
use futures_util::future::join_all;
use postroom_testkit::chance::Chance;

use cell::Cell;
use servers::Servers;
use tally::Tally;

/// Cells that run beside each other; server faults meet all of them.
const CELLS: usize = 4;

fn number(variable: &str, usual: u64) -> u64 {
    std::env::var(variable).map_or(usual, |text| text.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_schedules_of_faults_break_no_invariant() {
    let (schedules, first) = (number("POSTROOM_CHAOS_SCHEDULES", 6), number("POSTROOM_CHAOS_SEED", 1));
    let mut servers = Servers::start();
    let mut tally = Tally::new(first);
    let mut seed = first;
    while seed < first + schedules {
        let seeds: Vec<u64> = (seed..(first + schedules).min(seed + CELLS as u64)).collect();
        seed += seeds.len() as u64;
        let cells = join_all(seeds.iter().map(|seed| Cell::begin(*seed, &servers))).await;
        let mut chance = Chance::new(seeds[0]);
        // Server faults fall among those of the cells; every cell has at least five of its own.
        let trouble = tokio::task::spawn_blocking(move || {
            let happened = servers.trouble(&mut chance);
            (servers, happened)
        });
        let (mut cells, troubled) = tokio::join!(join_all(cells.into_iter().map(Cell::trouble)), trouble);
        let happened;
        (servers, happened) = troubled.unwrap();
        happened.iter().for_each(|fault| tally.fault(fault));
        let server_faults = happened.len();
        for cell in &mut cells {
            cell.heal();
        }
        let judged = join_all(cells.into_iter().map(|cell| {
            let seed = cell.seed;
            async move { (seed, AssertUnwindSafe(cell.judge(server_faults)).catch_unwind().await) }
        }))
        .await;
        for (seed, judged) in judged {
            match judged {
                Ok(result) => tally.add(seed, result),
                Err(panic) => {
                    let text = panic.downcast_ref::<String>().cloned();
                    tally.stuck(seed, &text.unwrap_or_else(|| "it panicked".to_owned()));
                }
            }
        }
        println!("{}", tally.line());
        // After each round, so that a run that is interrupted has said what it saw.
        if let Ok(file) = std::env::var("POSTROOM_CHAOS_SUMMARY") {
            std::fs::write(file, tally.json()).unwrap();
        }
    }
    assert!(tally.violations.is_empty(), "{:#?}", tally.violations);
}

/// Each place at which a relay can die is reached, and nothing is lost by it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_that_dies_at_any_of_its_crash_points_loses_nothing() {
    let servers = Servers::start();
    let mut tally = Tally::new(0);
    let cell = Cell::begin_with(4242, &servers, usize::MAX / 4).await;
    let (cell, missed) = cell.die_at_every_crash_point().await;
    assert!(missed.is_empty(), "these were never reached: {missed:?}");
    tally.add(4242, cell.judge(0).await);
    assert!(tally.violations.is_empty(), "{:#?}", tally.violations);
}
