//! Writers that commit in every way that PostgreSQL knows: plainly, after a partial rollback, and in two phases.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use postroom::MessageId;
use postroom_testkit::chance::Chance;
use tokio::sync::{OwnedRwLockReadGuard, RwLock};
use tokio::task::JoinHandle;
use tokio_postgres::{Client, Error, Statement};

use crate::rig::KEYS;

/// Nothing here takes as long as this unless it is stuck.
pub const STUCK: Duration = Duration::from_secs(240);
const WRITERS: u64 = 8;
/// By which a writer's sessions are told from others.
pub const APPLICATION: &str = "chaos-writer";
/// One message: takes the key's row lock and number, notes them, enqueues.
const WRITE: &str = "with k as (update numbers set n = n + 1 where key = $1 returning n),
                          l as (insert into ledger select $2, $1, n from k)
                     select postroom.enqueue($3, 'order.placed', int8send(n), key => $1, id => $2,
                                             routing_key => 'orders.placed') from k";

/// Eight writers that commit `messages` messages in all; a tenth of their transactions roll back.
pub fn write(url: &str, messages: usize, seed: u64) -> (Shared, Vec<JoinHandle<()>>) {
    println!("seed {seed}");
    let shared = Shared::default();
    let writers = (0..WRITERS).map(|number| {
        let writer = Writer {
            number,
            url: url.to_owned(),
            chance: Chance::new(seed * 100 + number),
            shared: shared.clone(),
            messages,
            prepared: 0,
            inside: None,
        };
        tokio::spawn(writer.run())
    });
    (shared.clone(), writers.collect())
}

/// What all writers of a cell share with its faults.
#[derive(Clone, Default)]
pub struct Shared {
    /// Messages committed so far.
    pub committed: Arc<AtomicUsize>,
    /// Held for reading over every transaction, two-phase commit included; who holds it for writing has the outbox at rest.
    pub gate: Arc<RwLock<()>>,
    /// From now on half of the messages have the topic `billing`.
    pub billing: Arc<AtomicBool>,
}

struct Writer {
    number: u64,
    url: String,
    chance: Chance,
    shared: Shared,
    messages: usize,
    /// How many transactions it has prepared.
    prepared: u64,
    /// From before a transaction begins until it is known how it ended.
    inside: Option<OwnedRwLockReadGuard<()>>,
}

impl Writer {
    async fn run(mut self) {
        let mut reached = Instant::now();
        loop {
            // A database that is restarted under a writer costs it its transaction, as it would an application. One that is
            // prepared it must end, or its rows stay locked.
            match self.resolve().await {
                Ok(_) if self.enough() => return,
                Ok(client) => {
                    self.inside = None;
                    let _ = self.write_until_it_fails(&client).await;
                    reached = Instant::now();
                }
                Err(error) if reached.elapsed() > STUCK => panic!("the database does not come back: {error}"),
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    fn enough(&self) -> bool {
        self.shared.committed.load(Ordering::Relaxed) >= self.messages
    }

    async fn connect(&self) -> Result<Client, Error> {
        let mut config: tokio_postgres::Config = self.url.parse()?;
        config.application_name(APPLICATION);
        let (client, connection) = config.connect(tokio_postgres::NoTls).await?;
        tokio::spawn(connection);
        Ok(client)
    }

    /// A connection, after committing what this writer prepared and then lost sight of: a coordinator that decided to commit must hold to it.
    async fn resolve(&self) -> Result<Client, Error> {
        let client = self.connect().await?;
        // A standby does not show what is prepared, and looks as if there were nothing to end; there this fails.
        client.batch_execute("create temporary table takes_writes ()").await?;
        let sql = "select gid from pg_prepared_xacts where database = current_database() and gid like $1";
        for row in client.query(sql, &[&format!("{}-%", self.number_in_gid())]).await? {
            let gid: String = row.get(0);
            client.batch_execute(&format!("commit prepared '{gid}'")).await?;
        }
        Ok(client)
    }

    fn number_in_gid(&self) -> String {
        // A gid is unique on the server, not in the database.
        let database = self.url.rsplit_once('/').map_or("", |(_, database)| database);
        format!("{database}-{}", self.number)
    }

    async fn write_until_it_fails(&mut self, client: &Client) -> Result<(), Error> {
        let write = client.prepare(WRITE).await?;
        while !self.enough() {
            self.inside = None;
            self.inside = Some(self.shared.gate.clone().read_owned().await);
            client.batch_execute("begin").await?;
            let messages = 1 + self.chance.below(9) as usize;
            let kept = if self.chance.percent(20) {
                self.write_with_savepoints(client, &write, messages).await?
            } else {
                self.write_some(client, &write, messages).await?;
                messages
            };
            if self.chance.percent(10) {
                client.batch_execute("rollback").await?;
                continue;
            }
            let stays = !self.chance.percent(15) || self.commit_in_two_phases(client).await?;
            if stays {
                // After "commit prepared" there is no transaction, and this is a warning.
                client.batch_execute("commit").await?;
                self.shared.committed.fetch_add(kept, Ordering::Relaxed);
            }
        }
        self.inside = None;
        Ok(())
    }

    async fn write_some(&mut self, client: &Client, write: &Statement, messages: usize) -> Result<(), Error> {
        let mut keys: Vec<u64> = (0..messages).map(|_| self.chance.below(KEYS)).collect();
        keys.sort_unstable();
        for key in keys {
            let billing = self.shared.billing.load(Ordering::Relaxed) && self.chance.percent(50);
            let topic = if billing { "billing" } else { "orders" };
            client.query(write, &[&format!("key-{key}"), MessageId::new().as_uuid(), &topic]).await?;
        }
        Ok(())
    }

    /// Some messages before a savepoint, some after it that are taken back, some that stay. Returns how many stay.
    ///
    /// Keys are not taken in one order here, so that writers deadlock now and then.
    async fn write_with_savepoints(
        &mut self,
        client: &Client,
        write: &Statement,
        messages: usize,
    ) -> Result<usize, Error> {
        self.write_some(client, write, messages).await?;
        client.batch_execute("savepoint a").await?;
        self.write_some(client, write, 1).await?;
        client.batch_execute("savepoint b").await?;
        self.write_some(client, write, 2).await?;
        let (back, kept) = match self.chance.below(3) {
            0 => ("rollback to savepoint a", messages),
            1 => ("rollback to savepoint b", messages + 1),
            _ => ("release savepoint a", messages + 3),
        };
        client.batch_execute(back).await?;
        self.write_some(client, write, 1).await?;
        Ok(kept + 1)
    }

    /// Whether it was committed in the end.
    async fn commit_in_two_phases(&mut self, client: &Client) -> Result<bool, Error> {
        self.prepared += 1;
        let gid = format!("{}-{}", self.number_in_gid(), self.prepared);
        client.batch_execute(&format!("prepare transaction '{gid}'")).await?;
        tokio::time::sleep(Duration::from_millis(self.chance.below(300))).await;
        let stays = !self.chance.percent(20);
        let end = if stays { "commit" } else { "rollback" };
        client.batch_execute(&format!("{end} prepared '{gid}'")).await?;
        Ok(stays)
    }
}
