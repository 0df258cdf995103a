//! Pure: which of many stores is worked at, which is looked at, and which waits. A store that is worked at has one of a bounded number of
//! places; the others are looked at from time to time, and get a place when something waits in them. One that cannot be reached is tried
//! again after longer and longer waits, and takes no place.
//!
//! Times are durations since any beginning.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// How many stores get how much.
#[derive(Debug, Clone, Copy)]
pub struct FleetLimits {
    /// Stores that are worked at together, at least one.
    pub places: usize,
    /// Stores that are looked at together, at least one.
    pub looks: usize,
    /// How often a store without a place is looked at.
    pub look_every: Duration,
    /// How often one that is worked at is looked at too, for what is not the relays' work.
    pub housekeeping_every: Duration,
    /// A store in which nothing has been found for so long leaves its place to one that waits.
    pub linger: Duration,
    /// So does one that has been worked at for so long, even if it is not done; it waits for its next turn.
    pub slice: Duration,
    /// Between two tries to reach a store: the first wait and the longest.
    pub retry: (Duration, Duration),
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FleetTask {
    /// Look whether something waits; answered by [`Fleet::looked`].
    Look(Arc<str>),
    /// Begin to work at it; its end is told by [`Fleet::ended`], now and then its state by [`Fleet::is_idle`].
    Work(Arc<str>),
    /// Stop the work at it gracefully.
    Stop(Arc<str>),
}

/// What a look found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// Something waits.
    Work,
    /// Nothing waits.
    Nothing,
    /// It could not be looked at: why.
    Down(String),
}

/// How the work at a store ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkEnded {
    /// Nothing was left.
    Done,
    /// Something may be left.
    Interrupted,
    /// It could not be begun, or went wrong: why.
    Failed(String),
}

#[derive(Debug)]
enum State {
    /// Nothing is known to wait.
    Resting,
    /// In the queue for a place.
    Waiting,
    Working {
        since: Duration,
        idle_since: Option<Duration>,
        stopping: bool,
    },
    Down {
        why: String,
        since: Duration,
        wait: Duration,
    },
}

#[derive(Debug)]
struct One {
    state: State,
    looking: bool,
    look_at: Duration,
    /// It is not among the stores any more, and forgotten as soon as nothing is done with it.
    gone: bool,
}

/// How a store stands, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreStanding {
    /// Its name.
    pub store: Arc<str>,
    /// In one word.
    pub state: StandingWord,
    /// Why it is down.
    pub why: Option<String>,
    /// For how long it has been worked at or down.
    pub since: Option<Duration>,
}

/// How a store stands, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StandingWord {
    /// It has a place.
    Working,
    /// Something waits in it, and it waits for a place.
    Waiting,
    /// Nothing was found in it when it was looked at last.
    Resting,
    /// It cannot be reached.
    Down,
}

impl StandingWord {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Working, Self::Waiting, Self::Resting, Self::Down];

    /// The word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Working => "working",
            Self::Waiting => "waiting",
            Self::Resting => "resting",
            Self::Down => "down",
        }
    }
}

/// Stores that share places. See the top of the file.
#[derive(Debug)]
pub struct Fleet {
    limits: FleetLimits,
    stores: BTreeMap<Arc<str>, One>,
    queue: VecDeque<Arc<str>>,
}

impl Fleet {
    /// No store yet.
    pub fn new(limits: FleetLimits) -> Self {
        let limits = FleetLimits { places: limits.places.max(1), looks: limits.looks.max(1), ..limits };
        Self { limits, stores: BTreeMap::new(), queue: VecDeque::new() }
    }

    /// These are the stores from now on: new ones are looked at at once, and what is done with others is stopped. Returns the new ones and
    /// those that are gone.
    pub fn know(&mut self, now: Duration, names: &BTreeSet<Arc<str>>) -> (Vec<Arc<str>>, Vec<Arc<str>>) {
        let mut new = Vec::new();
        for name in names {
            let mut is_new = false;
            let one = self.stores.entry(name.clone()).or_insert_with(|| {
                is_new = true;
                One { state: State::Resting, looking: false, look_at: now, gone: false }
            });
            is_new |= std::mem::take(&mut one.gone);
            if is_new {
                new.push(name.clone());
            }
        }
        let mut gone = Vec::new();
        for (name, one) in &mut self.stores {
            if !one.gone && !names.contains(name) {
                one.gone = true;
                gone.push(name.clone());
            }
        }
        self.queue.retain(|name| names.contains(name));
        for one in self.stores.values_mut() {
            if one.gone && matches!(one.state, State::Waiting) {
                one.state = State::Resting;
            }
        }
        self.stores.retain(|_, one| !one.gone || one.looking || matches!(one.state, State::Working { .. }));
        (new, gone)
    }

    /// What a look found.
    pub fn looked(&mut self, now: Duration, name: &str, seen: Seen) {
        let has_free_place = self.free_places() > 0;
        let (first_wait, longest_wait) = self.limits.retry;
        let Some((name, one)) = self.of(name) else { return };
        one.looking = false;
        let mut waits = false;
        match (&one.state, seen) {
            (State::Working { .. }, _) => {}
            (State::Down { since, wait, .. }, Seen::Down(why)) => {
                let (since, wait) = (*since, (*wait * 2).min(longest_wait));
                one.state = State::Down { why, since, wait };
            }
            (_, Seen::Down(why)) => one.state = State::Down { why, since: now, wait: first_wait },
            (State::Waiting, _) => {}
            (_, Seen::Work) => waits = true,
            // With a place to spare it is worked at although nothing waits: its next message is sent sooner.
            (_, Seen::Nothing) => {
                waits = has_free_place;
                one.state = State::Resting;
            }
        }
        if waits {
            one.state = State::Waiting;
            self.queue.push_back(name.clone());
        }
        self.plan_look(now, &name);
    }

    /// Whether the relays of a store that is worked at found nothing when they looked last.
    pub fn is_idle(&mut self, now: Duration, name: &str, idle: bool) {
        let Some((_, one)) = self.of(name) else { return };
        if let State::Working { idle_since, .. } = &mut one.state {
            *idle_since = if idle { Some(idle_since.unwrap_or(now)) } else { None };
        }
    }

    /// The work at a store has ended, asked to or not.
    pub fn ended(&mut self, now: Duration, name: &str, how: WorkEnded) {
        let first_wait = self.limits.retry.0;
        let Some((name, one)) = self.of(name) else { return };
        if !matches!(one.state, State::Working { .. }) {
            return;
        }
        match how {
            WorkEnded::Done => one.state = State::Resting,
            WorkEnded::Interrupted => {
                one.state = State::Waiting;
                self.queue.push_back(name.clone());
            }
            WorkEnded::Failed(why) => one.state = State::Down { why, since: now, wait: first_wait },
        }
        self.plan_look(now, &name);
    }

    /// What is to be done now.
    pub fn next(&mut self, now: Duration) -> Vec<FleetTask> {
        let (mut tasks, housekeeping_every) = (Vec::new(), self.limits.housekeeping_every);
        while self.free_places() > 0
            && let Some(name) = self.queue.pop_front()
        {
            if let Some((name, one)) = self.of(&name) {
                one.state = State::Working { since: now, idle_since: None, stopping: false };
                one.look_at = now + housekeeping_every;
                tasks.push(FleetTask::Work(name));
            }
        }
        for name in self.leavers(now) {
            if let Some((name, One { state: State::Working { stopping, .. }, .. })) = self.of(&name) {
                *stopping = true;
                tasks.push(FleetTask::Stop(name));
            }
        }
        let looking = self.stores.values().filter(|one| one.looking).count();
        let mut due: Vec<(Duration, Arc<str>)> = self.due().filter(|(at, _)| *at <= now).collect();
        due.sort();
        for (_, name) in due.into_iter().take(self.limits.looks.saturating_sub(looking)) {
            if let Some((name, one)) = self.of(&name) {
                one.looking = true;
                tasks.push(FleetTask::Look(name));
            }
        }
        tasks
    }

    /// When [`next`](Self::next) may have something to do, if nothing is told before. None: never.
    pub fn wake_at(&self) -> Option<Duration> {
        let looking = self.stores.values().filter(|one| one.looking).count();
        let look = if looking < self.limits.looks { self.due().map(|(at, _)| at).min() } else { None };
        let leave = if self.queue.is_empty() {
            None
        } else {
            self.stores.values().filter_map(|one| self.may_leave_at(one)).min()
        };
        [look, leave].into_iter().flatten().min()
    }

    /// Nothing is being done with any store.
    pub fn is_quiet(&self) -> bool {
        self.stores.values().all(|one| !one.looking && !matches!(one.state, State::Working { .. }))
    }

    /// How each store stands, by name.
    pub fn standing(&self, now: Duration) -> impl Iterator<Item = StoreStanding> {
        self.stores.iter().filter(|(_, one)| !one.gone).map(move |(name, one)| {
            let (state, why, since) = match &one.state {
                State::Resting => (StandingWord::Resting, None, None),
                State::Waiting => (StandingWord::Waiting, None, None),
                State::Working { since, .. } => (StandingWord::Working, None, Some(*since)),
                State::Down { why, since, .. } => (StandingWord::Down, Some(why.clone()), Some(*since)),
            };
            StoreStanding { store: name.clone(), state, why, since: since.map(|since| now.saturating_sub(since)) }
        })
    }

    fn of(&mut self, name: &str) -> Option<(Arc<str>, &mut One)> {
        let name = self.stores.get_key_value(name)?.0.clone();
        let one = self.stores.get_mut(&name)?;
        Some((name, one))
    }

    fn free_places(&self) -> usize {
        let working = self.stores.values().filter(|one| matches!(one.state, State::Working { .. })).count();
        self.limits.places.saturating_sub(working)
    }

    /// Forgets a store that is gone and with which nothing is done; plans the next look at any other.
    fn plan_look(&mut self, now: Duration, name: &str) {
        let limits = self.limits;
        let Some((name, one)) = self.of(name) else { return };
        if one.gone && !one.looking && !matches!(one.state, State::Working { .. }) {
            self.queue.retain(|queued| *queued != name);
            self.stores.remove(&name);
            return;
        }
        let wait = match &one.state {
            State::Working { .. } => limits.housekeeping_every,
            State::Down { wait, .. } => *wait,
            State::Resting | State::Waiting => limits.look_every,
        };
        one.look_at = now + wait;
    }

    /// Stores that may be looked at, and from when on. One that waits for a place is not: what is in it is known.
    fn due(&self) -> impl Iterator<Item = (Duration, Arc<str>)> {
        let may = |one: &One| !one.looking && !one.gone && !matches!(one.state, State::Waiting);
        self.stores.iter().filter(move |(_, one)| may(one)).map(|(name, one)| (one.look_at, name.clone()))
    }

    fn may_leave_at(&self, one: &One) -> Option<Duration> {
        match &one.state {
            State::Working { since, idle_since, stopping: false } => {
                let slice = *since + self.limits.slice;
                Some(idle_since.map_or(slice, |idle| (idle + self.limits.linger).min(slice)))
            }
            _ => None,
        }
    }

    /// Who leaves: all that are gone, and for each one in the queue one whose time is over, those that have nothing to do first.
    fn leavers(&self, now: Duration) -> Vec<Arc<str>> {
        let working = |one: &One| matches!(one.state, State::Working { stopping: false, .. });
        let mut leavers: Vec<Arc<str>> =
            self.stores.iter().filter(|(_, one)| one.gone && working(one)).map(|(name, _)| name.clone()).collect();
        let leaving = self.stores.values().filter(|one| matches!(one.state, State::Working { stopping: true, .. }));
        let wanted = self.queue.len().saturating_sub(leaving.count() + leavers.len());
        let mut over: Vec<(bool, Duration, &Arc<str>)> = self
            .stores
            .iter()
            .filter(|(_, one)| !one.gone)
            .filter_map(|(name, one)| match &one.state {
                State::Working { since, idle_since, .. } => {
                    let at = self.may_leave_at(one).filter(|at| *at <= now)?;
                    Some((idle_since.is_none(), at.min(*since + self.limits.slice), name))
                }
                _ => None,
            })
            .collect();
        over.sort();
        leavers.extend(over.into_iter().take(wanted).map(|(_, _, name)| name.clone()));
        leavers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: FleetLimits = FleetLimits {
        places: 2,
        looks: 2,
        look_every: Duration::from_secs(5),
        housekeeping_every: Duration::from_secs(60),
        linger: Duration::from_millis(500),
        slice: Duration::from_secs(10),
        retry: (Duration::from_secs(1), Duration::from_secs(60)),
    };

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn names(of: impl IntoIterator<Item = &'static str>) -> BTreeSet<Arc<str>> {
        of.into_iter().map(Arc::from).collect()
    }

    fn words(tasks: &[FleetTask]) -> Vec<String> {
        let word = |task: &FleetTask| match task {
            FleetTask::Look(name) => format!("look {name}"),
            FleetTask::Work(name) => format!("work {name}"),
            FleetTask::Stop(name) => format!("stop {name}"),
        };
        tasks.iter().map(word).collect()
    }

    #[test]
    fn with_places_for_all_each_store_is_worked_at_for_good() {
        let mut fleet = Fleet::new(LIMITS);
        fleet.know(s(0), &names(["a", "b"]));
        assert_eq!(words(&fleet.next(s(0))), ["look a", "look b"]);
        fleet.looked(s(0), "a", Seen::Nothing);
        fleet.looked(s(0), "b", Seen::Work);
        assert_eq!(words(&fleet.next(s(0))), ["work a", "work b"]);
        fleet.is_idle(s(1), "a", true);
        fleet.is_idle(s(1), "b", true);
        assert_eq!(words(&fleet.next(s(30))), Vec::<String>::new());
        // They are looked at too, for what is not the relays' work.
        assert_eq!(words(&fleet.next(s(60))), ["look a", "look b"]);
    }

    #[test]
    fn who_has_nothing_to_do_leaves_first_and_only_if_somebody_waits() {
        let mut fleet = Fleet::new(LIMITS);
        fleet.know(s(0), &names(["a", "b", "c"]));
        fleet.next(s(0));
        fleet.looked(s(0), "a", Seen::Work);
        fleet.looked(s(0), "b", Seen::Work);
        assert_eq!(words(&fleet.next(s(0))), ["work a", "work b", "look c"]);
        fleet.is_idle(s(2), "b", true);
        fleet.looked(s(2), "c", Seen::Nothing);
        assert_eq!(words(&fleet.next(s(4))), Vec::<String>::new());
        assert_eq!(words(&fleet.next(s(7))), ["look c"]);
        fleet.looked(s(7), "c", Seen::Work);
        assert_eq!(words(&fleet.next(s(7))), ["stop b"]);
        assert_eq!(words(&fleet.next(s(7))), Vec::<String>::new(), "one place is enough for one");
        fleet.ended(s(8), "b", WorkEnded::Done);
        assert_eq!(words(&fleet.next(s(8))), ["work c"]);
    }

    #[test]
    fn a_busy_store_leaves_after_its_slice_and_comes_back() {
        let mut fleet = Fleet::new(FleetLimits { places: 1, ..LIMITS });
        fleet.know(s(0), &names(["a", "b"]));
        fleet.next(s(0));
        fleet.looked(s(0), "a", Seen::Work);
        fleet.looked(s(0), "b", Seen::Work);
        assert_eq!(words(&fleet.next(s(0))), ["work a"]);
        assert_eq!(fleet.wake_at(), Some(s(10)));
        assert_eq!(words(&fleet.next(s(9))), Vec::<String>::new());
        assert_eq!(words(&fleet.next(s(10))), ["stop a"]);
        fleet.ended(s(11), "a", WorkEnded::Interrupted);
        assert_eq!(words(&fleet.next(s(11))), ["work b"]);
        assert_eq!(words(&fleet.next(s(21))), ["stop b"]);
        fleet.ended(s(21), "b", WorkEnded::Interrupted);
        assert_eq!(words(&fleet.next(s(21))), ["work a"]);
    }

    #[test]
    fn one_that_is_down_takes_no_place_and_is_tried_less_and_less() {
        let housekeeping_every = s(100_000);
        let mut fleet = Fleet::new(FleetLimits { places: 1, looks: 1, housekeeping_every, ..LIMITS });
        fleet.know(s(0), &names(["a", "b"]));
        assert_eq!(words(&fleet.next(s(0))), ["look a"]);
        fleet.looked(s(0), "a", Seen::Down("refused".to_owned()));
        assert_eq!(words(&fleet.next(s(0))), ["look b"]);
        fleet.looked(s(0), "b", Seen::Work);
        assert_eq!(words(&fleet.next(s(0))), ["work b"]);
        let mut now = s(0);
        for wait in [1, 2, 4, 8, 16, 32, 60, 60] {
            assert_eq!(fleet.wake_at(), Some(now + s(wait)));
            now += s(wait);
            assert_eq!(words(&fleet.next(now)), ["look a"], "{wait}");
            fleet.looked(now, "a", Seen::Down("refused".to_owned()));
        }
        let standing: Vec<_> = fleet.standing(now).map(|one| (one.store.to_string(), one.state, one.why)).collect();
        assert_eq!(standing[0], ("a".to_owned(), StandingWord::Down, Some("refused".to_owned())));
        now += s(60);
        fleet.next(now);
        fleet.looked(now, "a", Seen::Nothing);
        assert_eq!(fleet.standing(now).next().map(|one| one.state), Some(StandingWord::Resting));
    }

    #[test]
    fn stores_come_and_go() {
        let mut fleet = Fleet::new(LIMITS);
        let (new, gone) = fleet.know(s(0), &names(["a", "b"]));
        assert_eq!((new.len(), gone.len()), (2, 0));
        fleet.next(s(0));
        fleet.looked(s(0), "a", Seen::Work);
        fleet.next(s(0));
        let (new, gone) = fleet.know(s(1), &names(["c"]));
        assert_eq!((new, gone), (vec!["c".into()], vec!["a".into(), "b".into()]));
        assert_eq!(words(&fleet.next(s(1))), ["stop a", "look c"]);
        fleet.looked(s(1), "b", Seen::Work);
        fleet.ended(s(2), "a", WorkEnded::Interrupted);
        fleet.looked(s(2), "c", Seen::Nothing);
        assert_eq!(words(&fleet.next(s(2))), ["work c"], "what is gone gets no place");
        assert_eq!(fleet.standing(s(2)).count(), 1);
        // One that comes back while it is being stopped is worked at again.
        fleet.know(s(3), &names([]));
        assert_eq!(words(&fleet.next(s(3))), ["stop c"]);
        fleet.know(s(3), &names(["c"]));
        fleet.ended(s(4), "c", WorkEnded::Interrupted);
        assert_eq!(words(&fleet.next(s(4))), ["work c"]);
    }

    /// Two hundred stores on three places, of which some always have something to do, some now and then, and some are down: whoever has something
    /// to do gets a place within the time that the slices of all others take, and never more than three have one.
    #[test]
    fn nobody_starves() {
        let mut fleet = Fleet::new(FleetLimits { places: 3, ..LIMITS });
        let all: Vec<Arc<str>> = (0..200).map(|n| format!("s{n:03}").into()).collect();
        fleet.know(s(0), &all.iter().cloned().collect());
        let mut state = 7_u64;
        let mut chance = move |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % n
        };
        // Tenths of a second; what each has to do, in tenths of work; since when it has.
        let mut todo: BTreeMap<Arc<str>, u64> = BTreeMap::new();
        let mut since: BTreeMap<Arc<str>, u64> = BTreeMap::new();
        let (mut working, mut stopping): (BTreeSet<Arc<str>>, BTreeSet<Arc<str>>) = Default::default();
        let (mut looking, mut longest, mut served) = (Vec::<Arc<str>>::new(), 0, 0);
        for tick in 0..12_000_u64 {
            let now = Duration::from_millis(tick * 100);
            for (n, name) in all.iter().enumerate() {
                let comes = if n < 5 { true } else { n < 150 && chance(3_000) == 0 };
                if comes && !todo.contains_key(name) {
                    todo.insert(name.clone(), if n < 5 { u64::MAX } else { 1 + chance(5) });
                    since.entry(name.clone()).or_insert(tick);
                }
            }
            for name in std::mem::take(&mut looking) {
                let down = &*name >= "s190";
                let seen = if down {
                    Seen::Down("no".to_owned())
                } else if todo.contains_key(&name) {
                    Seen::Work
                } else {
                    Seen::Nothing
                };
                fleet.looked(now, &name, seen);
            }
            for name in std::mem::take(&mut stopping) {
                working.remove(&name);
                let left = todo.contains_key(&name);
                if left {
                    since.insert(name.clone(), tick);
                }
                fleet.ended(now, &name, if left { WorkEnded::Interrupted } else { WorkEnded::Done });
            }
            for name in &working {
                if let Some(begin) = since.remove(name) {
                    longest = longest.max(tick - begin);
                    served += 1;
                }
                if let Some(left) = todo.get_mut(name) {
                    *left -= 1;
                    if *left == 0 {
                        todo.remove(name);
                    }
                }
                fleet.is_idle(now, name, !todo.contains_key(name));
            }
            for task in fleet.next(now) {
                match task {
                    FleetTask::Look(name) => looking.push(name),
                    FleetTask::Work(name) => assert!(working.insert(name)),
                    FleetTask::Stop(name) => assert!(stopping.insert(name)),
                }
            }
            assert!(working.len() <= 3 && looking.len() <= 2);
        }
        assert!(served > 400, "{served}");
        assert!(longest < 1_500, "one waited for {longest} tenths of a second");
    }
}
