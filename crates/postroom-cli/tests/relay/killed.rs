//! A route and an inbox over one broker, while relays, fillers and the broker are killed and frozen.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Instant;

use postroom_testkit::chance::Chance;
use postroom_testkit::services::{NatsServer, RedisServer};

use crate::rig::Rig;

/// A broker that can be killed and frozen.
pub trait Victim {
    fn kill(&mut self);
    fn start_again(&mut self);
    fn pause(&self);
    fn resume(&self);
}

macro_rules! victim {
    ($server:ty) => {
        impl Victim for $server {
            fn kill(&mut self) {
                self.kill().unwrap();
            }
            fn start_again(&mut self) {
                self.start_again().unwrap();
            }
            fn pause(&self) {
                self.pause().unwrap();
            }
            fn resume(&self) {
                self.resume().unwrap();
            }
        }
    };
}
victim!(NatsServer);
victim!(RedisServer);
/// Mosquitto loses what it has when it is killed, so it is ended in order.
#[cfg(feature = "mqtt")]
impl Victim for postroom_testkit::services::MosquittoServer {
    fn kill(&mut self) {
        self.stop().unwrap();
    }
    fn start_again(&mut self) {
        self.start_again().unwrap();
    }
    fn pause(&self) {
        self.pause().unwrap();
    }
    fn resume(&self) {
        self.resume().unwrap();
    }
}
#[cfg(feature = "amqp10")]
victim!(postroom_testkit::services::RabbitServer);
#[cfg(feature = "kafka")]
victim!(postroom_testkit::services::KafkaServer);

/// Two processes with this configuration carry so many messages from the outbox into the inbox, through so many faults. Returns the ids in the
/// inbox, in its order, when it has all of them.
pub async fn carry(
    rig: &Rig,
    server: &mut impl Victim,
    (program, text): (&Path, &str),
    (messages, seed): (usize, u64),
    faults: usize,
) -> Vec<String> {
    let start = |name: &str| rig.relay_with(program, name, text, &[]);
    let mut processes = vec![start("one"), start("two")];
    let (committed, writers) = rig.write(messages, seed);
    let mut chance = Chance::new(seed);
    let client = rig.database.connect().await;
    let kept =
        async || -> i64 { client.query_one("select count(*) from postroom.inbox_messages", &[]).await.unwrap().get(0) };
    for fault in 0..faults {
        // Something is on its way.
        let (before, written) = (kept().await, committed.load(Ordering::Relaxed));
        rig.until("more was written and has arrived", async || {
            let now = committed.load(Ordering::Relaxed);
            now >= messages || (now > written + messages / 20 && kept().await > before)
        })
        .await;
        match fault % 4 {
            0 => {
                let victim = chance.below(2) as usize;
                processes[victim].kill();
                processes[victim] = start("again");
            }
            1 => {
                server.kill();
                server.start_again();
            }
            2 => {
                // Longer than the sink waits for an answer.
                server.pause();
                let since = Instant::now();
                rig.until("the sink has given up", async || since.elapsed().as_secs() >= 5).await;
                server.resume();
            }
            _ => {
                processes[0].signal("STOP");
                let since = Instant::now();
                rig.until("its lease is over", async || since.elapsed().as_secs() >= 3).await;
                processes[0].signal("CONT");
            }
        }
    }
    for writer in writers {
        writer.await.unwrap();
    }
    rig.drained().await;
    rig.until("the inbox has all of them", async || kept().await >= messages as i64).await;
    for process in processes {
        assert_eq!(process.terminate().0, Some(0));
    }
    let rows = client.query("select message_id from postroom.inbox_messages order by seq", &[]).await.unwrap();
    rows.iter().map(|row| row.get::<_, uuid::Uuid>(0).to_string()).collect()
}
