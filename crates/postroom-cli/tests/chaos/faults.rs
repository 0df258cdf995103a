//! What can happen to one cell: the list, and one function for each.

use std::time::Duration;

use postroom_testkit::judge::Violation;
use postroom_testkit::proxy::Link;

use crate::cell::Cell;
use crate::relay::{CRASH_POINTS, stopped_well};

/// One kind of fault.
pub struct Fault {
    pub name: &'static str,
    /// How often it is chosen, beside the others.
    pub weight: u64,
    /// Returns what really happened, for the ledger. It may block; cells run on threads for that.
    inflict: fn(&mut Cell) -> &'static str,
}

pub const FAULTS: &[Fault] = &[
    Fault { name: "relay kill -9", weight: 4, inflict: kill },
    Fault { name: "relay dead at a crash point", weight: 6, inflict: die_at_a_crash_point },
    Fault { name: "relay paused beyond its lease", weight: 2, inflict: pause_beyond_the_lease },
    Fault { name: "relay SIGTERM", weight: 2, inflict: stop_gracefully },
    Fault { name: "link reset", weight: 2, inflict: reset_a_link },
    Fault { name: "link black", weight: 2, inflict: blacken_a_link },
    Fault { name: "replies lost", weight: 4, inflict: lose_replies },
    Fault { name: "link throttled", weight: 2, inflict: throttle_a_link },
    Fault { name: "sequence set back", weight: 1, inflict: set_the_sequence_back },
];

/// One of them, by chance.
pub fn inflict_one(cell: &mut Cell) -> &'static str {
    let possible: Vec<&Fault> = FAULTS.iter().filter(|fault| !left_out(fault.name)).collect();
    let weights: Vec<u64> = possible.iter().map(|fault| fault.weight).collect();
    let Some(fault) = possible.get(cell.chance.one_of(&weights)) else { return "none" };
    (fault.inflict)(cell)
}

/// `POSTROOM_CHAOS_WITHOUT=NAME,NAME` leaves faults out, to see which one it is.
pub fn left_out(name: &str) -> bool {
    std::env::var("POSTROOM_CHAOS_WITHOUT").is_ok_and(|names| names.split(',').any(|left_out| left_out.trim() == name))
}

fn short(cell: &mut Cell) -> Duration {
    Duration::from_millis(200 + cell.chance.below(2300))
}

fn any_relay(cell: &mut Cell) -> usize {
    cell.chance.below(cell.relays.len() as u64) as usize
}

pub fn kill(cell: &mut Cell) -> &'static str {
    let index = any_relay(cell);
    let relay = &mut cell.relays[index];
    if let Some(mut process) = relay.process.take() {
        process.kill();
    }
    relay.start(&cell.rig, &[]);
    "relay kill -9"
}

fn die_at_a_crash_point(cell: &mut Cell) -> &'static str {
    let index = any_relay(cell);
    let place = CRASH_POINTS[cell.chance.below(CRASH_POINTS.len() as u64) as usize];
    let times = 1 + cell.chance.below(20);
    if cell.relays[index].die_at(&cell.rig, place, times, Duration::from_millis(1500)) {
        cell.outcome.crashed_at.push(place);
        "relay dead at a crash point"
    } else {
        "relay kill -9"
    }
}

fn pause_beyond_the_lease(cell: &mut Cell) -> &'static str {
    let index = any_relay(cell);
    if let Some(process) = &cell.relays[index].process {
        process.signal("STOP");
        std::thread::sleep(Duration::from_millis(1200 + cell.chance.below(1500)));
        process.signal("CONT");
    }
    "relay paused beyond its lease"
}

fn stop_gracefully(cell: &mut Cell) -> &'static str {
    let index = any_relay(cell);
    let relay = &mut cell.relays[index];
    if let Some(process) = relay.process.take() {
        let (code, _) = process.terminate();
        if !stopped_well(code) {
            let found = format!("a relay told to stop ended with {code:?}");
            cell.outcome.violations.push(Violation { invariant: "I12", found });
        }
    }
    relay.start(&cell.rig, &[]);
    "relay SIGTERM"
}

fn reset_a_link(cell: &mut Cell) -> &'static str {
    let (index, link) = any_link(cell);
    cell.relays[index].link(link).reset();
    "link reset"
}

fn blacken_a_link(cell: &mut Cell) -> &'static str {
    for_a_while(cell, Link::BlackHole);
    "link black"
}

fn lose_replies(cell: &mut Cell) -> &'static str {
    let (index, link) = for_a_while(cell, Link::RepliesLost);
    // What lost a reply never gets an answer again; the other end has to notice by itself, or be cut.
    if cell.chance.percent(70) {
        cell.relays[index].link(link).reset();
    }
    "replies lost"
}

fn throttle_a_link(cell: &mut Cell) -> &'static str {
    for_a_while(cell, Link::Throttled(20_000));
    "link throttled"
}

/// A relay, and whether it is its link to the store.
fn any_link(cell: &mut Cell) -> (usize, bool) {
    (any_relay(cell), cell.chance.percent(50))
}

fn for_a_while(cell: &mut Cell, state: Link) -> (usize, bool) {
    let (index, link) = any_link(cell);
    let while_ = short(cell);
    cell.relays[index].link(link).set(state);
    std::thread::sleep(while_);
    cell.relays[index].link(link).set(Link::Open);
    (index, link)
}

/// What a restored dump of the sequence alone does, or an operator who meant another table.
fn set_the_sequence_back(cell: &mut Cell) -> &'static str {
    let back = 1 + cell.chance.below(2000);
    let sql = format!(
        "do $$
         declare
             sequence regclass := pg_get_serial_sequence('postroom.outbox', 'seq');
             last bigint;
         begin
             execute 'select last_value from ' || sequence into last;
             perform setval(sequence, greatest(1, last - {back}));
         end $$"
    );
    let url = cell.rig.database.url().to_owned();
    let done = tokio::runtime::Handle::current().block_on(async {
        // The database may be away at this moment; then the operator cannot do it either.
        let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
        tokio::spawn(connection);
        client.batch_execute(&sql).await
    });
    if done.is_err() {
        return kill(cell);
    }
    cell.sequence_set_back = true;
    "sequence set back"
}
