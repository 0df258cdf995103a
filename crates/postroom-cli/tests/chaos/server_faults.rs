//! What can happen to the servers under all cells: the list, and one function for each.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use postroom_testkit::chance::Chance;
use postroom_testkit::surroundings;

use crate::faults::left_out;
use crate::servers::Servers;

/// One kind of fault.
struct ServerFault {
    name: &'static str,
    /// How often it is chosen, beside the others.
    weight: u64,
    /// It blocks, and leaves the server running.
    inflict: fn(&mut Servers, &mut Chance),
}

pub const CLOCK_STEPPED: &str = "postgres clock stepped";

const FAULTS: &[ServerFault] = &[
    ServerFault { name: "postgres kill -9", weight: 3, inflict: kill_postgres },
    ServerFault { name: "postgres restarted", weight: 1, inflict: restart_postgres },
    ServerFault { name: "every database connection ended by the server", weight: 2, inflict: end_backends },
    ServerFault { name: "postgres disk full", weight: 2, inflict: fill_the_disk },
    ServerFault { name: "postgres failed over to its standby", weight: 2, inflict: fail_over },
    ServerFault { name: CLOCK_STEPPED, weight: 2, inflict: step_the_clock },
    ServerFault { name: "rabbitmq killed", weight: 1, inflict: kill_rabbitmq },
    ServerFault { name: "rabbitmq paused", weight: 1, inflict: pause_rabbitmq },
    ServerFault { name: "rabbitmq memory alarm", weight: 1, inflict: alarm },
    ServerFault { name: "rabbitmq memory alarm with kills of relays", weight: 1, inflict: alarm_with_kills },
    ServerFault { name: "every connection closed by rabbitmq", weight: 1, inflict: close_connections },
];

/// One of them, by chance; returns its name.
pub fn inflict_one(servers: &mut Servers, chance: &mut Chance) -> &'static str {
    let possible =
        |fault: &&ServerFault| !left_out(fault.name) && (servers.small_disk || fault.name != "postgres disk full");
    let possible: Vec<&ServerFault> = FAULTS.iter().filter(possible).collect();
    let weights: Vec<u64> = possible.iter().map(|fault| fault.weight).collect();
    let Some(fault) = possible.get(chance.one_of(&weights)) else { return "none" };
    (fault.inflict)(servers, chance);
    fault.name
}

fn wait(from: u64, below: u64, chance: &mut Chance) {
    std::thread::sleep(Duration::from_millis(from + chance.below(below)));
}

fn kill_postgres(servers: &mut Servers, chance: &mut Chance) {
    servers.postgres.kill().unwrap();
    wait(0, 1500, chance);
    servers.postgres.start_again().unwrap();
}

fn restart_postgres(servers: &mut Servers, _: &mut Chance) {
    servers.postgres.stop().unwrap();
    servers.postgres.start_again().unwrap();
}

fn end_backends(servers: &mut Servers, _: &mut Chance) {
    let sql = "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()";
    servers.postgres.sql(sql).unwrap();
}

fn fill_the_disk(servers: &mut Servers, chance: &mut Chance) {
    servers.postgres.fill_disk().unwrap();
    wait(500, 2500, chance);
    servers.postgres.free_disk().unwrap();
    // One that could not write its log ends a moment later and recovers; a checkpoint has everything behind it.
    let began = Instant::now();
    while servers.postgres.sql("checkpoint").is_err() && began.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// The standby has every commit that was waited for, and not each of those that asked not to wait.
fn fail_over(servers: &mut Servers, chance: &mut Chance) {
    let standby = servers.postgres.standby(&surroundings::scratch("standby")).unwrap();
    wait(200, 1000, chance);
    let primary = std::mem::replace(&mut servers.postgres, standby);
    servers.postgres.take_the_place_of(primary).unwrap();
}

/// An hour back or forth, sometimes while no relay can write that it is alive.
fn step_the_clock(servers: &mut Servers, chance: &mut Chance) {
    let seconds = if chance.percent(70) { -3600 } else { 3600 };
    let dead = chance.percent(30);
    println!("the clock is set by {seconds} s{}", if dead { " while the server is down" } else { "" });
    if dead {
        servers.postgres.kill().unwrap();
    }
    servers.postgres.set_clock(seconds).unwrap();
    if dead {
        servers.postgres.start_again().unwrap();
    } else {
        end_lock_waits(servers);
    }
    wait(500, 2500, chance);
}

/// PostgreSQL looks for deadlocks, and ends what waits too long, by its clock. Whoever waits for a lock when that goes back waits
/// for as long as it went back, and so it is for an operator to end (docs/operating.md). Writers here deadlock on purpose.
pub fn end_lock_waits(servers: &mut Servers) {
    let sql = "select pg_terminate_backend(pid) from pg_stat_activity where wait_event_type = 'Lock'";
    servers.postgres.sql(sql).unwrap();
}

fn kill_rabbitmq(servers: &mut Servers, chance: &mut Chance) {
    servers.rabbit.kill().unwrap();
    wait(0, 1500, chance);
    servers.rabbit.start_again().unwrap();
    // RabbitMQ 3.10 may bring a quorum queue of one node back without a leader, and then waits for one for ever.
    let elect = "[catch ra:trigger_election(amqqueue:get_pid(Q)) || Q <- rabbit_amqqueue:list(), \
                  amqqueue:get_type(Q) == rabbit_quorum_queue].";
    servers.rabbit.ctl(&["eval", elect]).unwrap();
}

fn pause_rabbitmq(servers: &mut Servers, chance: &mut Chance) {
    servers.rabbit.pause().unwrap();
    wait(500, 2500, chance);
    servers.rabbit.resume().unwrap();
}

fn alarm(servers: &mut Servers, chance: &mut Chance) {
    servers.rabbit.memory_alarm(true).unwrap();
    wait(500, 2500, chance);
    servers.rabbit.memory_alarm(false).unwrap();
}

/// As an orchestrator does with a program that does not get on.
fn alarm_with_kills(servers: &mut Servers, chance: &mut Chance) {
    servers.under_alarm.store(true, Ordering::Relaxed);
    servers.rabbit.memory_alarm(true).unwrap();
    wait(3000, 5000, chance);
    servers.under_alarm.store(false, Ordering::Relaxed);
    servers.rabbit.memory_alarm(false).unwrap();
}

fn close_connections(servers: &mut Servers, _: &mut Chance) {
    servers.rabbit.ctl(&["close_all_connections", "chaos"]).unwrap();
}
