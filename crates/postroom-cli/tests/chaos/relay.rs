//! A relay of a cell: a process behind two proxies.

use std::path::PathBuf;
use std::time::Duration;

use postroom_testkit::proxy::Proxy;
use postroom_testkit::surroundings;

use crate::rig::{RelayProcess, Rig};

/// Every place at which a relay can be told to die.
pub const CRASH_POINTS: &[&str] = &[
    "claim.read",
    "claim.parked",
    "publish.before",
    "publish.after",
    "settle.begin",
    "record.before_commit",
    "record.after_commit",
    "positions.before",
    "positions.after",
    "renew.after",
    "give_back.after",
    "release.before",
];

pub struct Relay {
    name: String,
    pub store: Proxy,
    pub broker: Proxy,
    store_url: String,
    broker_url: String,
    /// What its configuration says of the route `orders`.
    pub topics: &'static [&'static str],
    /// The file of its route `audit`; none: it has no such route.
    audit: Option<PathBuf>,
    pub process: Option<RelayProcess>,
}

/// The consumer whose inbox all relays fill, and the queue it is filled from.
pub const TABLE: &str = "table";

pub fn table_queue(rig: &Rig) -> String {
    format!("{TABLE}-{}", rig.exchange)
}

/// The URL with another `HOST:PORT`.
fn through(url: &str, address: &str) -> String {
    let (before, after) = url.split_once('@').unwrap();
    let (_, path) = after.split_once('/').unwrap();
    format!("{before}@{address}/{path}")
}

fn target(url: &str) -> String {
    url.split_once('@').unwrap().1.split_once('/').unwrap().0.to_owned()
}

impl Relay {
    pub async fn new(rig: &Rig, index: usize, audit: Option<PathBuf>) -> Self {
        let (store, broker) = (Proxy::to(&target(rig.database.url())).await, Proxy::to(&target(&rig.rabbitmq)).await);
        let (store_url, broker_url) =
            (through(rig.database.url(), &store.address()), through(&rig.rabbitmq, &broker.address()));
        let name = format!("relay-{index}");
        let topics = &["orders"];
        let mut relay = Self { name, store, broker, store_url, broker_url, topics, audit, process: None };
        relay.start(rig, &[]);
        relay
    }

    pub fn start(&mut self, rig: &Rig, variables: &[(&str, String)]) {
        self.process = Some(self.begin(rig, &self.store_url, variables));
    }

    /// Another process of this relay, which reaches its store by this URL.
    pub fn begin(&self, rig: &Rig, store: &str, variables: &[(&str, String)]) -> RelayProcess {
        let program = surroundings::postroom_binary();
        rig.relay_with(&program, &self.name, &self.configuration(rig, store), variables)
    }

    /// A route to the broker, one to a file, and an inbox that is filled with what the first one sends.
    fn configuration(&self, rig: &Rig, store: &str) -> String {
        let (topics, broker) = (self.topics, &self.broker_url);
        let audit = self.audit.as_ref().map_or_else(String::new, |path| {
            format!("[[routes]]\nname = \"audit\"\n[routes.sink]\nkind = \"file\"\npath = {path:?}\n")
        });
        format!(
            "[store]\nurl = {store:?}\n\
             [relay]\nin_flight_max = {}\nlease = \"1s\"\npoll_idle = \"50ms\"\n\
             [[routes]]\nname = \"orders\"\ntopics = {topics:?}\n\
             [routes.sink]\nkind = \"rabbitmq\"\nurl = {broker:?}\nexchange = {:?}\npublish_deadline_seconds = 3\n\
             {audit}\
             [[inboxes]]\nconsumer = {TABLE:?}\n\
             [inboxes.from]\nkind = \"rabbitmq\"\nurl = \"{broker}?heartbeat=2\"\nqueue = {:?}\nprefetch = 200\n",
            rig.in_flight_max,
            rig.exchange,
            table_queue(rig)
        )
    }

    /// One of its two links.
    pub fn link(&self, to_the_store: bool) -> &Proxy {
        if to_the_store { &self.store } else { &self.broker }
    }

    /// Starts again as a relay that will die at this place, and waits for that for a while; whether it did.
    pub fn die_at(&mut self, rig: &Rig, place: &str, times: u64, wait: Duration) -> bool {
        if let Some(mut process) = self.process.take() {
            process.kill();
        }
        let mark = rig.dir.join(format!("{}-{place}.mark", self.name));
        let _ = std::fs::remove_file(&mark);
        let variables =
            [("POSTROOM_CRASH_AT", format!("{place}:{times}")), ("POSTROOM_CRASH_MARK", mark.display().to_string())];
        self.start(rig, &variables);
        let Some(process) = &mut self.process else { return false };
        if place == "release.before" {
            // It dies on its way out. Sent before it has begun, the signal would just kill it.
            std::thread::sleep(wait / 2);
            process.signal("TERM");
        }
        let died = process.dies_within(wait);
        if !died {
            process.kill();
        }
        // It leaves its mark and aborts at once; the kill may come in between.
        let hit = mark.exists();
        self.start(rig, &[]);
        hit
    }
}

/// What `postroom run` says when it could not begin, and ended before it was told to; a supervisor starts it again.
/// 69: the database was away. 75: a restore was under way.
pub fn stopped_well(code: Option<i32>, restored: bool) -> bool {
    matches!(code, Some(0 | 69)) || (restored && code == Some(75))
}
