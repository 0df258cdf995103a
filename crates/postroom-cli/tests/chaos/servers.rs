//! The servers that all cells of a round share, and what happens to them.

use std::time::Duration;

use postroom_testkit::chance::Chance;
use postroom_testkit::services::{PostgresServer, RabbitServer};
use postroom_testkit::surroundings;

use crate::tally::Tally;

pub struct Servers {
    pub postgres: PostgresServer,
    pub rabbit: RabbitServer,
}

impl Servers {
    pub fn start() -> Self {
        let dir = surroundings::scratch("chaos");
        let (postgres, rabbit) = std::thread::scope(|scope| {
            let rabbit = scope.spawn(|| RabbitServer::start(&dir.join("rabbitmq")).unwrap());
            (PostgresServer::start(&dir.join("postgres")).unwrap(), rabbit.join().unwrap())
        });
        Self { postgres, rabbit }
    }

    /// One or two faults; returns how many.
    pub async fn trouble(&mut self, chance: &mut Chance, tally: &mut Tally) -> usize {
        let faults = 1 + chance.below(2) as usize;
        for _ in 0..faults {
            tokio::time::sleep(Duration::from_millis(300 + chance.below(1500))).await;
            match chance.below(10) {
                0..=2 => {
                    tally.fault("postgres kill -9");
                    self.postgres.kill().unwrap();
                    tokio::time::sleep(Duration::from_millis(chance.below(1500))).await;
                    self.postgres.start_again().unwrap();
                }
                3 => {
                    tally.fault("postgres restarted");
                    self.postgres.stop().unwrap();
                    self.postgres.start_again().unwrap();
                }
                4 | 5 => {
                    tally.fault("every database connection ended by the server");
                    let (client, connection) =
                        tokio_postgres::connect(&self.postgres.url("postgres"), tokio_postgres::NoTls).await.unwrap();
                    tokio::spawn(connection);
                    let sql = "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()";
                    client.batch_execute(sql).await.unwrap();
                }
                6 => {
                    tally.fault("rabbitmq killed");
                    self.rabbit.kill().unwrap();
                    tokio::time::sleep(Duration::from_millis(chance.below(1500))).await;
                    self.rabbit.start_again().unwrap();
                }
                7 => {
                    tally.fault("rabbitmq paused");
                    self.rabbit.pause().unwrap();
                    tokio::time::sleep(Duration::from_millis(500 + chance.below(2500))).await;
                    self.rabbit.resume().unwrap();
                }
                8 => {
                    tally.fault("rabbitmq memory alarm");
                    self.rabbit.memory_alarm(true).unwrap();
                    tokio::time::sleep(Duration::from_millis(500 + chance.below(2500))).await;
                    self.rabbit.memory_alarm(false).unwrap();
                }
                _ => {
                    tally.fault("every connection closed by rabbitmq");
                    self.rabbit.ctl(&["close_all_connections", "chaos"]).unwrap();
                }
            }
        }
        faults
    }

    /// Everything runs again.
    pub fn heal(&mut self) {
        let _ = self.rabbit.resume();
    }
}
