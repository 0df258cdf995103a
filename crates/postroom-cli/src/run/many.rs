//! `postroom run` with many stores: [`Fleet`] decides which of them are worked at, and this file does it. A store that is worked at has relays
//! and connections of its own; all others are looked at from time to time.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use postroom::{Live, MessageId, Wake};
use postroom_relay::{RouteNow, Summary};
use postroom_server::{Fleet, FleetLimits, FleetShown, FleetTask, Meter, Seen, StandingWord, StoreStanding, WorkEnded};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;

use super::looks::{self, Shared, Told, keep_houses};
use super::route::{Start, stop_of};
use super::{owner, wait_for_signals};
use crate::admin;
use crate::carrier;
use crate::config::{Config, Group, Stores, Taken};
use crate::exit::{self, Failure};
use crate::intake;
use crate::say::{say, show};
use crate::store;
use crate::stores::{self, Found, Listed};
use crate::supervise::supervise;

/// How often it is asked whether a store that is worked at has nothing to do.
const IDLE_LOOKS: Duration = Duration::from_millis(50);
/// A store that its relays have not reached for so long is left alone.
const AWAY_AFTER: Duration = Duration::from_secs(3);
/// How often it is shown how the stores stand.
const SHOWN_EVERY: Duration = Duration::from_millis(500);
/// A query for stores that takes longer waits for something that is gone.
const FOUND_WITHIN: Duration = Duration::from_secs(60);
const TELL_EVERY: Duration = Duration::from_secs(3600);

/// A store that is worked at.
struct AtWork {
    stop: watch::Sender<bool>,
    /// Of its routes.
    now: Vec<Live<RouteNow>>,
    /// Whether its intakes found nothing when they looked last.
    quiet: Vec<Arc<AtomicBool>>,
    /// Since when its relays have not reached it.
    away_since: Option<Instant>,
}

/// The counts of a route in all stores.
#[derive(Default)]
struct Total {
    acked: u64,
    retried: u64,
    dead: u64,
    fenced: u64,
    lanes_lost: u64,
    restarts: u64,
    unfinished: usize,
    unwritten: usize,
}

pub async fn run(config: Config, json: bool) -> Result<(), Failure> {
    let config = Arc::new(config);
    let Stores::Many(groups) = &config.stores else {
        return Err(Failure::new(exit::CONFIG, "there are no [[stores]]"));
    };
    let (routes, intakes) = (config.routes.len(), config.intakes.len());
    // A URL that cannot be read ends the program, as with one store.
    let mut cost = 1;
    for group in groups {
        let urls: Vec<String> = match group {
            Group::Named { url, .. } => vec![url.clone()],
            // The database that is asked may be of another kind than those that it names.
            Group::Discovered(discovery) => match discovery.url_of("name", None) {
                Ok(url) => vec![discovery.store.clone(), url],
                Err(_) => vec![discovery.store.clone(), "postgres://any/any".into(), "mysql://any/any".into()],
            },
        };
        for url in urls {
            let opened = store::open_frugal(&url, routes, intakes);
            let (opened, connections) = opened.map_err(|failure| Failure { code: exit::CONFIG, ..failure })?;
            if intakes > 0 {
                crate::presets::intakes_of(opened.as_ref())?;
            }
            cost = cost.max(connections);
        }
    }
    let limits = limits(&config, cost)?;
    let unique = MessageId::new();
    let owner = owner(&config, unique);
    let (stop, stopped) = watch::channel(false);
    wait_for_signals(stop)?;
    let meter = Meter::new();
    let shown = FleetShown::new();
    admin::serve_many(&config, &meter, &shown).await?;
    let (tell, told) = mpsc::unbounded_channel();
    let is_watched = config.admin.is_some() || admin::exports();
    let shared = Arc::new(Shared {
        config: config.clone(),
        owner: owner.clone(),
        unique,
        meter,
        shown,
        tell,
        is_watched,
        times: AtomicU64::new(0),
        told: Mutex::default(),
        up: Mutex::default(),
    });
    for index in 0..groups.len() {
        tokio::spawn(keep_finding(shared.clone(), index));
    }
    tokio::spawn(keep_houses(shared.clone()));
    show_on_signal(shared.shown.clone())?;
    say!(
        "postroom: running {} route(s) over {} as {owner}; at most {} stores at the same time, with {} connections in all",
        routes,
        if groups.len() == 1 {
            "1 entry of [[stores]]".to_owned()
        } else {
            format!("{} entries of [[stores]]", groups.len())
        },
        limits.places,
        config.relay.connections_max
    );
    let mut work = Loop {
        shared,
        fleet: Fleet::new(limits, unique.as_uuid().as_u64_pair().1),
        began: Instant::now(),
        found: BTreeMap::new(),
        of_group: vec![None; groups.len()],
        at_work: HashMap::new(),
        down: HashMap::new(),
        totals: BTreeMap::new(),
    };
    work.run(told, stopped).await;
    work.report(json)
}

/// How the connections are shared out: some for looks and for asking for stores, the rest for stores that are worked at.
fn limits(config: &Config, cost: usize) -> Result<FleetLimits, Failure> {
    let all = config.relay.connections_max;
    let looks = (all / 8).clamp(1, 16);
    let slow_looks = (looks / 4).max(1);
    // Housekeeping, which keeps a second one where it marks rows, and asking for stores.
    let for_looks = looks + slow_looks + if config.intakes.is_empty() { 1 } else { 2 } + 1;
    let places = all.saturating_sub(for_looks) / cost;
    if places == 0 {
        let text = format!(
            "relay.connections_max is {all}: a store needs {cost} connections while messages of it are sent, and {} are for looking at the \
             others; set it to {} or more",
            for_looks,
            cost + for_looks
        );
        return Err(Failure::new(exit::CONFIG, text));
    }
    Ok(FleetLimits {
        places,
        looks,
        slow_looks,
        slow_after: Duration::from_millis(1500),
        look_every: config.relay.look_every,
        linger: Duration::from_millis(100),
        slice: Duration::from_secs(10),
        retry: (Duration::from_secs(1), Duration::from_secs(15)),
    })
}

/// Asks for the databases of a group: once if they are named, else for ever.
async fn keep_finding(shared: Arc<Shared>, index: usize) {
    let Stores::Many(groups) = &shared.config.stores else { return };
    let group = &groups[index];
    loop {
        let found = tokio::time::timeout(FOUND_WITHIN, stores::of_group(group)).await;
        let found = found.unwrap_or_else(|_| Err(format!("no answer within {} s", FOUND_WITHIN.as_secs())));
        if shared.tell.send(Told::Found(index, found)).is_err() {
            return;
        }
        let Group::Discovered(discovery) = group else { return };
        tokio::time::sleep(discovery.every).await;
    }
}

struct Loop {
    shared: Arc<Shared>,
    fleet: Fleet,
    began: Instant,
    /// All stores by name.
    found: BTreeMap<Arc<str>, Found>,
    /// What each group had last; none: it was never asked successfully.
    of_group: Vec<Option<Listed>>,
    at_work: HashMap<Arc<str>, AtWork>,
    /// Why each store that is down was told to be, and when.
    down: HashMap<Arc<str>, (String, Instant)>,
    totals: BTreeMap<String, Total>,
}

impl Loop {
    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    async fn run(&mut self, mut told: mpsc::UnboundedReceiver<Told>, stopped: watch::Receiver<bool>) {
        let mut idle_looks = tokio::time::interval(IDLE_LOOKS);
        idle_looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut looks: Vec<AbortHandle> = Vec::new();
        let mut stop = std::pin::pin!(stop_of(stopped));
        let mut shown_at = None;
        loop {
            let now = self.now();
            for task in self.fleet.next(now) {
                match task {
                    FleetTask::Look(name) => {
                        looks.retain(|look| !look.is_finished());
                        looks.extend(self.look(name));
                    }
                    FleetTask::Work(name) => self.work(name),
                    FleetTask::Stop(name) => {
                        if let Some(at_work) = self.at_work.get(&name) {
                            let _ = at_work.stop.send(true);
                        }
                    }
                }
            }
            if shown_at.is_none_or(|at: Instant| at.elapsed() >= SHOWN_EVERY) {
                shown_at = Some(Instant::now());
                let standing: Vec<StoreStanding> = self.fleet.standing(now).collect();
                self.shared.are_up(
                    standing
                        .iter()
                        .filter(|one| one.state != StandingWord::Down)
                        .filter_map(|one| self.found.get(&one.store)),
                );
                self.shared.shown.set(standing);
            }
            let wait = self.fleet.wake_at().map_or(SHOWN_EVERY, |at| at.saturating_sub(self.now()).min(SHOWN_EVERY));
            tokio::select! {
                biased;
                () = &mut stop => break,
                Some(told) = told.recv() => self.on(told),
                _ = idle_looks.tick(), if !self.at_work.is_empty() => self.ask_who_is_idle(),
                () = tokio::time::sleep(wait.max(Duration::from_millis(5))) => {}
            }
        }
        // A look can be given up at any point; the relays finish what they have in flight.
        looks.iter().for_each(AbortHandle::abort);
        for at_work in self.at_work.values() {
            let _ = at_work.stop.send(true);
        }
        while !self.at_work.is_empty() {
            match told.recv().await {
                Some(told) => self.on(told),
                None => break,
            }
        }
        while let Ok(told) = told.try_recv() {
            self.on(told);
        }
    }

    fn on(&mut self, told: Told) {
        let now = self.now();
        match told {
            Told::Looked(name, seen) => {
                self.fleet.looked(now, &name, seen);
                self.tell_of(&name);
            }
            Told::Ended(name, how) => {
                let away = self.at_work.remove(&name).and_then(|at_work| at_work.away_since);
                let how = match (how, away) {
                    (WorkEnded::Done | WorkEnded::Interrupted, Some(_)) => {
                        WorkEnded::Failed("it could not be reached any more while messages of it were sent".to_owned())
                    }
                    (how, _) => how,
                };
                self.fleet.ended(now, &name, how);
                self.tell_of(&name);
                // One that moved meanwhile is begun where it is now.
                if self.found.contains_key(&name) {
                    self.know();
                }
            }
            Told::HasWork(name) => self.fleet.has_work(&name),
            Told::Found(group, Ok(listed)) => {
                self.of_group[group] = Some(listed);
                self.know();
            }
            Told::Found(group, Err(why)) => {
                let Stores::Many(groups) = &self.shared.config.stores else { return };
                let known = if self.of_group[group].is_some() { "; those that are known are kept" } else { "" };
                tracing::error!("the databases of {} could not be asked for: {why}{known}", groups[group].name());
            }
            Told::Counted(route, ended) => {
                let total = self.totals.entry(route).or_default();
                total.restarts += ended.restarts;
                let Some(Summary { counters, unfinished, unwritten, .. }) = ended.last else { return };
                total.acked += counters.stored;
                total.retried += counters.retried;
                total.dead += counters.dead;
                total.fenced += counters.fenced;
                total.lanes_lost += counters.lanes_lost;
                total.unfinished += unfinished;
                total.unwritten += unwritten;
            }
        }
    }

    /// The stores have changed.
    fn know(&mut self) {
        let Stores::Many(groups) = &self.shared.config.stores else { return };
        let listed =
            groups.iter().zip(&self.of_group).filter_map(|(group, listed)| Some((group.name(), listed.as_ref()?)));
        let (all, left_out) = stores::merged(listed);
        for what in left_out.iter().filter(|what| self.shared.is_news(&"".into(), what)) {
            tracing::error!("{what}");
        }
        self.shared.shown.set_left_out(left_out);
        // One that moved is stopped where it was, and begun where it is once nothing is done with it any more.
        let moved =
            |name: &Arc<str>| self.found.get(name).zip(all.get(name)).is_some_and(|(was, is)| was.url != is.url);
        let stay = all.values().filter(|found| !(moved(&found.name) && self.at_work.contains_key(&found.name)));
        let names: BTreeMap<Arc<str>, Arc<str>> =
            stay.map(|found| (found.name.clone(), server_of(&found.url).into())).collect();
        let (new, gone) = self.fleet.know(self.now(), &names);
        if !new.is_empty() {
            tracing::info!("{} stores, of which {} are new", names.len(), new.len());
        }
        for name in gone {
            tracing::info!(store = %name, "the store is not among those of the configuration any more, or it moved");
            self.down.remove(&name);
        }
        self.found = all;
    }

    /// Says once that a store is down, and once that it is back; a reason that stays is told again after an hour.
    fn tell_of(&mut self, name: &Arc<str>) {
        match (self.fleet.trouble(name), self.down.get(name)) {
            (None, None) => {}
            (None, Some(_)) => {
                self.down.remove(name);
                tracing::info!(store = %name, "the store is back");
            }
            (Some(why), Some((known, at))) if known == why && at.elapsed() < TELL_EVERY => {}
            (Some(why), _) => {
                tracing::error!(store = %name, "the store is left alone and tried again later: {why}");
                self.down.insert(name.clone(), (why.to_owned(), Instant::now()));
            }
        }
    }

    fn ask_who_is_idle(&mut self) {
        let now = self.began.elapsed();
        let mut reached = Vec::new();
        for (name, at_work) in &mut self.at_work {
            let routes: Vec<RouteNow> = at_work.now.iter().map(Live::now).collect();
            let idle = routes.iter().all(|route| route.idle)
                && at_work.quiet.iter().all(|quiet| quiet.load(Ordering::Relaxed));
            self.fleet.is_idle(now, name, idle);
            if routes.iter().any(|route| route.store_away) {
                // It takes no place from others, and is tried again as any other that is down.
                if at_work.away_since.get_or_insert_with(Instant::now).elapsed() >= AWAY_AFTER {
                    let _ = at_work.stop.send(true);
                }
            } else {
                at_work.away_since = None;
                if routes.iter().any(|route| route.lanes > 0) && self.fleet.trouble(name).is_some() {
                    reached.push(name.clone());
                }
            }
        }
        for name in reached {
            self.fleet.works(&name);
            self.tell_of(&name);
        }
    }

    fn work(&mut self, name: Arc<str>) {
        let Some(found) = self.found.get(&name).cloned() else {
            self.fleet.ended(self.now(), &name, WorkEnded::Done);
            return;
        };
        let (routes, intakes) = self.shared.of_store(&name);
        let (stop, stopped) = watch::channel(false);
        let now: Vec<Live<RouteNow>> = routes.iter().map(|_| Live::new()).collect();
        let quiet: Vec<Arc<AtomicBool>> = intakes.iter().map(|_| Arc::default()).collect();
        let job = Job {
            shared: self.shared.clone(),
            found,
            routes,
            intakes,
            now: now.clone(),
            quiet: quiet.clone(),
            stopped,
        };
        self.at_work.insert(name.clone(), AtWork { stop, now, quiet, away_since: None });
        let tell = self.shared.tell.clone();
        tokio::spawn(async move {
            // A task of its own, so that a panic in one store ends only the work at it.
            let how = match tokio::spawn(job.done()).await {
                Ok(how) => how,
                Err(error) => WorkEnded::Failed(format!("it ended unexpectedly: {error}")),
            };
            let _ = tell.send(Told::Ended(name, how));
        });
    }

    fn look(&mut self, name: Arc<str>) -> Option<AbortHandle> {
        let Some(found) = self.found.get(&name).cloned() else {
            self.fleet.looked(self.now(), &name, Seen::Nothing);
            return None;
        };
        let shared = self.shared.clone();
        let task = tokio::spawn(async move {
            let seen = looks::look(&shared, &found).await;
            let _ = shared.tell.send(Told::Looked(name, seen));
        });
        Some(task.abort_handle())
    }

    fn report(&self, json: bool) -> Result<(), Failure> {
        let unwritten: usize = self.totals.values().map(|total| total.unwritten).sum();
        if json {
            let shown = |(route, total): (&String, &Total)| {
                serde_json::json!({
                    "route": route, "acked": total.acked, "retried": total.retried, "dead": total.dead, "fenced": total.fenced,
                    "lanes_lost": total.lanes_lost, "restarts": total.restarts, "unfinished": total.unfinished, "unwritten": total.unwritten,
                })
            };
            let routes: Vec<_> = self.totals.iter().map(shown).collect();
            show!("{}", serde_json::json!({ "stores": self.found.len(), "routes": routes, "inboxes": [] }));
        } else {
            for (route, total) in &self.totals {
                say!(
                    "postroom: route {route}: acked {}, retried {}, dead {}, fenced {}, lanes lost {}, restarts {}, unfinished {}, unwritten {}",
                    total.acked,
                    total.retried,
                    total.dead,
                    total.fenced,
                    total.lanes_lost,
                    total.restarts,
                    total.unfinished,
                    total.unwritten
                );
            }
        }
        if unwritten > 0 {
            let text = format!("stopped, and {unwritten} messages whose outcome is not recorded may be sent again");
            return Err(Failure { answered: json, ..Failure::new(exit::UNREACHABLE, text) });
        }
        Ok(())
    }
}

/// The work at one store, until it is told to stop.
struct Job {
    shared: Arc<Shared>,
    found: Found,
    routes: Vec<usize>,
    intakes: Vec<Taken>,
    now: Vec<Live<RouteNow>>,
    quiet: Vec<Arc<AtomicBool>>,
    stopped: watch::Receiver<bool>,
}

/// Ends a task with the work that it belongs to.
struct Beside(AbortHandle);

impl Drop for Beside {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Job {
    async fn done(self) -> WorkEnded {
        match self.relayed().await {
            Ok(how) => how,
            Err(failure) => WorkEnded::Failed(failure.text),
        }
    }

    async fn relayed(self) -> Result<WorkEnded, Failure> {
        let Self { shared, found, routes, intakes, now, quiet, stopped } = self;
        let (store, _) = store::open_frugal(&found.url, shared.config.routes.len(), shared.config.intakes.len())?;
        let wakes: Vec<Wake> = routes.iter().map(|_| Wake::new()).collect();
        let time = shared.times.fetch_add(1, Ordering::Relaxed);
        let owner = format!("{}/{time}", shared.owner);
        let starts = routes.iter().zip(&wakes).zip(&now).map(|((index, wake), live)| Start {
            config: shared.config.clone(),
            store: store.clone(),
            index: *index,
            owner: owner.clone(),
            wake: wake.clone(),
            live: live.clone(),
            meter: shared.meter.clone(),
            unique: shared.unique,
            stopped: stopped.clone(),
            brief: true,
        });
        // All of them, or none.
        let mut opened = Vec::with_capacity(routes.len());
        for start in starts {
            let relay = tokio::select! {
                biased;
                () = stop_of(stopped.clone()) => return Ok(WorkEnded::Interrupted),
                relay = start.open(0) => relay?,
            };
            opened.push((start, relay));
        }
        let mut relays = Vec::with_capacity(routes.len());
        for (start, opened) in opened {
            let route = &shared.config.routes[start.index].route;
            let first = start.clone().relay(opened);
            let name = format!("store {}, route {}", found.name, route.name);
            let again = start.clone();
            let relay = supervise(name, stopped.clone(), first, move |restart| {
                let start = again.clone();
                Box::pin(async move {
                    let relay = tokio::select! {
                        () = stop_of(start.stopped.clone()) => return Err(super::not_running()),
                        relay = start.open(restart) => relay?,
                    };
                    start.relay(relay).await
                })
            });
            relays.push((route.name.clone(), relay));
        }
        let mut beside: Vec<Beside> = Vec::new();
        for (taken, quiet) in intakes.iter().zip(&quiet) {
            let taking = intake::keep_taking(taken.clone(), store.clone(), wakes.clone(), Some(quiet.clone()));
            beside.push(Beside(tokio::spawn(taking).abort_handle()));
        }
        beside.push(Beside(tokio::spawn(carrier::carry_out(store.clone())).abort_handle()));
        stop_of(stopped.clone()).await;
        let was_idle =
            now.iter().all(|live| live.now().idle) && quiet.iter().all(|quiet| quiet.load(Ordering::Relaxed));
        for (route, relay) in relays {
            let _ = shared.tell.send(Told::Counted(route, relay.ended().await));
        }
        drop(beside);
        intake::finish(&intakes, store.as_ref()).await;
        Ok(if was_idle { WorkEnded::Done } else { WorkEnded::Interrupted })
    }
}

/// Host and port; for a file the file.
fn server_of(url: &str) -> &str {
    let Some((_, rest)) = url.split_once("://") else { return url };
    let authority = rest.split(['/', '?']).next().unwrap_or(rest);
    authority.rsplit('@').next().unwrap_or(authority)
}

/// SIGUSR1 prints how the stores stand, as one line of JSON on standard error.
fn show_on_signal(shown: FleetShown) -> Result<(), Failure> {
    let mut asked = signal(SignalKind::user_defined1())
        .map_err(|error| Failure::new(exit::FAILURE, format!("failed to listen for signals: {error}")))?;
    tokio::spawn(async move {
        while asked.recv().await.is_some() {
            let standing = shown.standing();
            let count = |word: StandingWord| standing.iter().filter(|one| one.state == word).count();
            let mut counts = serde_json::Map::new();
            for word in StandingWord::ALL {
                counts.insert(word.as_str().to_owned(), count(word).into());
            }
            let of = |word: StandingWord| {
                let some = standing.iter().filter(move |one| one.state == word).take(100);
                some.map(|one| {
                    let since = one.since.map(|since| since.as_secs());
                    serde_json::json!({ "store": &*one.store, "for_seconds": since, "problem": one.why })
                })
                .collect::<Vec<_>>()
            };
            let (working, down) = (of(StandingWord::Working), of(StandingWord::Down));
            let left_out: Vec<String> = shown.left_out().into_iter().take(100).collect();
            say!("{}", serde_json::json!({ "stores": counts, "working": working, "down": down, "left_out": left_out }));
        }
    });
    Ok(())
}
