//! What can happen to one cell: the list, and one function for each.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use postroom_testkit::judge::Violation;
use postroom_testkit::proxy::Link;

use crate::cell::Cell;
use crate::outbox_dump::{self, OutboxDump};
use crate::pooled::{self, Behind};
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
    Fault { name: RESTORED, weight: 2, inflict: restore_in_place },
    Fault { name: "topics added by a rolling restart", weight: 2, inflict: add_a_topic },
    Fault { name: "relay started behind a pooler", weight: 1, inflict: start_behind_a_pooler },
    Fault { name: DISK_FULL, weight: 2, inflict: fill_the_disk_of_the_file },
    Fault { name: ROTATED, weight: 2, inflict: rotate_the_file },
];

const RESTORED: &str = "outbox restored in place";
const DISK_FULL: &str = "disk of the file sink full";
const ROTATED: &str = "file of the file sink rotated";
/// Nothing that a fault waits for takes as long as this unless it is stuck.
const STUCK: Duration = Duration::from_secs(90);

/// One of them, by chance.
pub fn inflict_one(cell: &mut Cell) -> &'static str {
    let has_a_file = cell.audit.is_some();
    let possible =
        |fault: &&Fault| !left_out(fault.name) && (has_a_file || ![DISK_FULL, ROTATED].contains(&fault.name));
    let possible: Vec<&Fault> = FAULTS.iter().filter(possible).collect();
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
    terminate(cell, index);
    cell.relays[index].start(&cell.rig, &[]);
    "relay SIGTERM"
}

fn terminate(cell: &mut Cell, index: usize) {
    if let Some(process) = cell.relays[index].process.take() {
        let (code, _) = process.terminate();
        if !stopped_well(code, cell.restored) {
            violated(cell, "I12", format!("a relay told to stop ended with {code:?}"));
        }
    }
}

fn violated(cell: &mut Cell, invariant: &'static str, found: String) {
    cell.outcome.violations.push(Violation { invariant, found });
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
    cell.everything_may_come_again();
    "sequence set back"
}

/// An operator who restores the outbox from a backup under running relays. Writers are at rest from the backup to the end of
/// the restore, so nothing committed is forgotten.
fn restore_in_place(cell: &mut Cell) -> &'static str {
    let url = cell.rig.database.url().to_owned();
    let runtime = tokio::runtime::Handle::current();
    let closing = tokio::time::timeout(STUCK, cell.shared.gate.clone().write_owned());
    let Ok(_closed) = runtime.block_on(closing) else { return kill(cell) };
    if !runtime.block_on(outbox_dump::at_rest(&url)) {
        return kill(cell);
    }
    let Some(dump) = OutboxDump::take(&url, &cell.rig.dir) else { return kill(cell) };
    std::thread::sleep(short(cell));
    cell.everything_may_come_again();
    cell.restored = true;
    let began = Instant::now();
    let mut at_once = cell.chance.percent(40);
    loop {
        match dump.restore(&url, at_once) {
            Ok(()) => return RESTORED,
            Err(why) if began.elapsed() > STUCK => {
                violated(cell, "I8", format!("a restore does not come to its end: {why}"));
                return RESTORED;
            }
            Err(why) => println!("seed {}: a restore is done again: {why}", cell.seed),
        }
        // What relays write into half-restored tables must not keep the schedule from its end.
        at_once = cell.chance.percent(50);
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// One relay gets a longer list of topics, the others keep the old one; from then on messages of the new topic are written.
fn add_a_topic(cell: &mut Cell) -> &'static str {
    if cell.shared.billing.load(Ordering::Relaxed) {
        return stop_gracefully(cell);
    }
    let index = any_relay(cell);
    terminate(cell, index);
    cell.relays[index].topics = &["orders", "billing"];
    cell.relays[index].start(&cell.rig, &[]);
    let began = Instant::now();
    while !tokio::runtime::Handle::current().block_on(relays_billing(cell.rig.database.url())) {
        if began.elapsed() > STUCK {
            violated(cell, "I8", "the topic of a relay that was restarted is not in the store".to_owned());
            return "topics added by a rolling restart";
        }
        let relay = &mut cell.relays[index];
        // What a supervisor does with one that could not begin while the database was away.
        if relay.process.as_mut().is_none_or(|process| !process.lives()) {
            relay.start(&cell.rig, &[]);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    cell.shared.billing.store(true, Ordering::Relaxed);
    "topics added by a rolling restart"
}

async fn relays_billing(url: &str) -> bool {
    let Ok((client, connection)) = tokio_postgres::connect(url, tokio_postgres::NoTls).await else { return false };
    tokio::spawn(connection);
    let sql = "select from postroom.routes where name = 'orders' and 'billing' = any(topics)";
    client.query_opt(sql, &[]).await.is_ok_and(|row| row.is_some())
}

/// Somebody gives a relay the pooler's address. It says so and ends; the sessions that writers share are as they were.
fn start_behind_a_pooler(cell: &mut Cell) -> &'static str {
    let index = any_relay(cell);
    let pooled = cell.pooled[cell.chance.below(2) as usize].clone();
    if let Some(mut process) = cell.relays[index].process.take() {
        process.kill();
    }
    let began = Instant::now();
    let mut happened = "relay kill -9";
    while began.elapsed() < STUCK {
        let log = cell.rig.dir.join("relay.log");
        let written = std::fs::metadata(&log).map_or(0, |about| about.len()) as usize;
        let mut process = cell.relays[index].begin(&cell.rig, &pooled, &[]);
        // One that began while the server behind the pooler was away runs on, and says what it finds when that is back.
        let says_so = || {
            let log = std::fs::read(&log).unwrap_or_default();
            String::from_utf8_lossy(log.get(written..).unwrap_or_default()).contains("a connection pooler answered")
        };
        let since = Instant::now();
        let mut ended = false;
        while !ended && !says_so() && since.elapsed() < STUCK {
            ended = process.dies_within(Duration::from_millis(100));
        }
        ended = ended || process.dies_within(Duration::from_secs(2));
        let said = !ended && says_so();
        if said {
            process.kill();
            happened = "relay started behind a pooler";
            break;
        }
        match Behind::of(ended.then(|| process.terminate())) {
            Behind::Refused => {
                happened = "relay started behind a pooler";
                break;
            }
            // The database was away; the next one gets to see the pooler.
            Behind::Unreachable => {}
            Behind::Wrong(found) => {
                violated(cell, "I28", found);
                break;
            }
        }
    }
    cell.relays[index].start(&cell.rig, &[]);
    for found in tokio::runtime::Handle::current().block_on(pooled::changed_settings(&pooled)) {
        violated(cell, "I28", found);
    }
    happened
}

fn fill_the_disk_of_the_file(cell: &mut Cell) -> &'static str {
    let while_ = short(cell);
    let Some(audit) = &cell.audit else { return kill(cell) };
    audit.fill_disk();
    std::thread::sleep(while_);
    audit.free_disk();
    DISK_FULL
}

fn rotate_the_file(cell: &mut Cell) -> &'static str {
    // There is none before the first message.
    if cell.audit.as_mut().is_some_and(|audit| audit.rotate()) { ROTATED } else { kill(cell) }
}
