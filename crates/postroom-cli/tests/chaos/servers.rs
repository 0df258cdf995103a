//! The servers that all cells of a round share, and what happens to them.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use postroom_testkit::chance::Chance;
use postroom_testkit::services::{PgBouncer, PostgresOptions, PostgresServer, RabbitServer, Tmpfs};
use postroom_testkit::surroundings;

use crate::server_faults;

/// Large enough for four cells, small enough to be filled in a moment.
const DISK_MIB: u64 = 1024;

pub struct Servers {
    pub postgres: PostgresServer,
    pub rabbit: RabbitServer,
    /// In front of PostgreSQL: one refuses the settings of a relay's sessions, the other drops them without a word.
    pub poolers: [PgBouncer; 2],
    /// Whether PostgreSQL's disk can be filled; only root may mount one.
    pub small_disk: bool,
    pub under_alarm: Arc<AtomicBool>,
}

impl Servers {
    pub fn start() -> Self {
        let dir = surroundings::scratch("chaos");
        let small_disk = Tmpfs::may_mount().unwrap();
        if !small_disk {
            println!("SKIPPED: a small disk can only be mounted by root; no disk will be full");
        }
        let options = PostgresOptions { clock: true, disk_mib: small_disk.then_some(DISK_MIB) };
        let (postgres, rabbit) = std::thread::scope(|scope| {
            let rabbit = scope.spawn(|| RabbitServer::start(&dir.join("rabbitmq")).unwrap());
            (PostgresServer::start_with(&dir.join("postgres"), options).unwrap(), rabbit.join().unwrap())
        });
        let pooler =
            |name: &str, ignored: &[&str]| PgBouncer::start(&dir.join(name), postgres.port(), ignored).unwrap();
        let poolers =
            [pooler("strict", &["extra_float_digits"]), pooler("lenient", &["extra_float_digits", "options"])];
        Self { postgres, rabbit, poolers, small_disk, under_alarm: Arc::default() }
    }

    /// One or two faults, after which everything runs again; returns what happened.
    pub fn trouble(&mut self, chance: &mut Chance) -> Vec<&'static str> {
        let mut happened = Vec::new();
        for _ in 0..1 + chance.below(2) {
            std::thread::sleep(Duration::from_millis(300 + chance.below(1500)));
            let fault = server_faults::inflict_one(self, chance);
            println!("under all cells: {fault}");
            happened.push(fault);
        }
        // A clock that was set stays so until the round is over: what relays wrote then must not hurt when it is right again.
        if happened.contains(&server_faults::CLOCK_STEPPED) {
            self.postgres.set_clock(0).unwrap();
            server_faults::end_lock_waits(self);
        }
        happened
    }
}
