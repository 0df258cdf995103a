//! Pure: which of many stores is worked at, which is looked at, and which waits. A store that is worked at has one of a bounded number of
//! places; the others are looked at from time to time, and get a place when something waits in them. One that cannot be reached, or at which
//! work cannot begin, is tried again after longer and longer waits, and takes no place meanwhile. A server that answers nobody holds up only looks
//! at its own stores: what takes long is counted apart from the looks that do not, and so is every look at a server that was silent.
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
    /// And stores whose servers do not answer, at least one.
    pub slow_looks: usize,
    /// A look that takes longer is one at a server that does not answer.
    pub slow_after: Duration,
    /// How often a store without a place is looked at.
    pub look_every: Duration,
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
    /// It could not be looked at.
    Down {
        /// Why.
        why: String,
        /// Nobody answered in time.
        silent: bool,
    },
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
    Down,
}

/// What is wrong with a store.
#[derive(Debug)]
struct Trouble {
    why: String,
    since: Duration,
    /// Until the next try.
    wait: Duration,
    /// It can be looked at, but not worked at: only work that begins ends the trouble.
    of_work: bool,
}

#[derive(Debug)]
struct Looking {
    since: Duration,
    /// It is counted among those at servers that do not answer.
    slow: bool,
}

#[derive(Debug)]
struct One {
    state: State,
    trouble: Option<Trouble>,
    looking: Option<Looking>,
    look_at: Duration,
    /// Which server it is on.
    server: Arc<str>,
    /// Decides among those that are due at the same time, so that the same ones are not the last after every start.
    turn: u64,
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
    /// Servers that did not answer when they were asked last.
    silent: BTreeSet<Arc<str>>,
    seed: u64,
}

impl Fleet {
    /// No store yet. The seed is another one in each process.
    pub fn new(limits: FleetLimits, seed: u64) -> Self {
        let limits = FleetLimits {
            places: limits.places.max(1),
            looks: limits.looks.max(1),
            slow_looks: limits.slow_looks.max(1),
            ..limits
        };
        Self { limits, stores: BTreeMap::new(), queue: VecDeque::new(), silent: BTreeSet::new(), seed }
    }

    /// These are the stores from now on, with the servers that they are on: new ones are looked at at once, and what is done with others is
    /// stopped. Returns the new ones and those that are gone.
    pub fn know(&mut self, now: Duration, names: &BTreeMap<Arc<str>, Arc<str>>) -> (Vec<Arc<str>>, Vec<Arc<str>>) {
        let mut new = Vec::new();
        for (name, server) in names {
            let mut is_new = false;
            let turn = turn(self.seed, name);
            let one = self.stores.entry(name.clone()).or_insert_with(|| {
                is_new = true;
                One {
                    state: State::Resting,
                    trouble: None,
                    looking: None,
                    look_at: now,
                    server: server.clone(),
                    turn,
                    gone: false,
                }
            });
            one.server = server.clone();
            is_new |= std::mem::take(&mut one.gone);
            if is_new {
                new.push(name.clone());
            }
        }
        let mut gone = Vec::new();
        for (name, one) in &mut self.stores {
            if !one.gone && !names.contains_key(name) {
                one.gone = true;
                gone.push(name.clone());
            }
        }
        self.queue.retain(|name| names.contains_key(name));
        for one in self.stores.values_mut() {
            if one.gone && matches!(one.state, State::Waiting) {
                one.state = State::Resting;
            }
        }
        self.stores.retain(|_, one| !one.gone || one.looking.is_some() || matches!(one.state, State::Working { .. }));
        (new, gone)
    }

    /// What a look found.
    pub fn looked(&mut self, now: Duration, name: &str, seen: Seen) {
        let has_free_place = self.free_places() > 0;
        let (first_wait, longest_wait) = self.limits.retry;
        let Some((name, one)) = self.of(name) else { return };
        one.looking = None;
        let server = one.server.clone();
        let is_silent = matches!(seen, Seen::Down { silent: true, .. });
        let mut waits = false;
        match (&one.state, seen) {
            (State::Working { .. }, _) => {}
            (_, Seen::Down { why, .. }) => {
                let (since, wait) = match &one.trouble {
                    Some(known) => (known.since, (known.wait * 2).min(longest_wait)),
                    None => (now, first_wait),
                };
                one.trouble = Some(Trouble { why, since, wait, of_work: false });
                one.state = State::Down;
            }
            (State::Waiting, _) => {}
            (_, seen) => {
                one.trouble.take_if(|trouble| !trouble.of_work);
                one.state = State::Resting;
                // With a place to spare it is worked at although nothing waits: its next message is sent sooner.
                waits = seen == Seen::Work || has_free_place;
            }
        }
        if waits {
            one.state = State::Waiting;
            self.queue.push_back(name.clone());
        }
        if is_silent {
            self.silent.insert(server);
        } else {
            self.silent.remove(&server);
        }
        self.plan_look(now, &name);
    }

    /// Something is to be done in a store that was not found by a look.
    pub fn has_work(&mut self, name: &str) {
        let Some((name, one)) = self.of(name) else { return };
        if matches!(one.state, State::Resting) && !one.gone {
            one.state = State::Waiting;
            self.queue.push_back(name);
        }
    }

    /// Whether the relays of a store that is worked at found nothing when they looked last.
    pub fn is_idle(&mut self, now: Duration, name: &str, idle: bool) {
        let Some((_, one)) = self.of(name) else { return };
        if let State::Working { idle_since, .. } = &mut one.state {
            *idle_since = if idle { Some(idle_since.unwrap_or(now)) } else { None };
        }
    }

    /// The relays of a store that is worked at have reached it: whatever was wrong is over.
    pub fn works(&mut self, name: &str) {
        if let Some((_, one)) = self.of(name)
            && matches!(one.state, State::Working { .. })
        {
            one.trouble = None;
        }
    }

    /// The work at a store has ended, asked to or not.
    pub fn ended(&mut self, now: Duration, name: &str, how: WorkEnded) {
        let (first_wait, longest_wait) = self.limits.retry;
        let Some((name, one)) = self.of(name) else { return };
        if !matches!(one.state, State::Working { .. }) {
            return;
        }
        match how {
            WorkEnded::Done => {
                one.trouble = None;
                one.state = State::Resting;
            }
            WorkEnded::Interrupted => {
                one.trouble = None;
                one.state = State::Waiting;
                self.queue.push_back(name.clone());
            }
            WorkEnded::Failed(why) => {
                let (since, wait) = match &one.trouble {
                    Some(known) => (known.since, (known.wait * 2).min(longest_wait)),
                    None => (now, first_wait),
                };
                one.trouble = Some(Trouble { why, since, wait, of_work: true });
                one.state = State::Down;
            }
        }
        self.plan_look(now, &name);
    }

    /// What is wrong with a store; none: nothing is known to be.
    pub fn trouble(&self, name: &str) -> Option<&str> {
        self.stores.get(name)?.trouble.as_ref().map(|trouble| trouble.why.as_str())
    }

    /// What is to be done now.
    pub fn next(&mut self, now: Duration) -> Vec<FleetTask> {
        let mut tasks = Vec::new();
        while self.free_places() > 0
            && let Some(name) = self.queue.pop_front()
        {
            if let Some((name, one)) = self.of(&name) {
                one.state = State::Working { since: now, idle_since: None, stopping: false };
                tasks.push(FleetTask::Work(name));
            }
        }
        for name in self.leavers(now) {
            if let Some((name, One { state: State::Working { stopping, .. }, .. })) = self.of(&name) {
                *stopping = true;
                tasks.push(FleetTask::Stop(name));
            }
        }
        self.notice_silence(now);
        let mut free = self.free_looks();
        let mut due: Vec<(Duration, u64, Arc<str>, bool)> = self.due().filter(|(at, ..)| *at <= now).collect();
        due.sort();
        for (_, _, name, silent) in due {
            let free = &mut free[usize::from(silent)];
            if *free > 0
                && let Some((name, one)) = self.of(&name)
            {
                *free -= 1;
                one.looking = Some(Looking { since: now, slow: silent });
                tasks.push(FleetTask::Look(name));
            }
        }
        tasks
    }

    /// When [`next`](Self::next) may have something to do, if nothing is told before. None: never.
    pub fn wake_at(&self) -> Option<Duration> {
        let free = self.free_looks();
        let look = self.due().filter(|(.., silent)| free[usize::from(*silent)] > 0).map(|(at, ..)| at).min();
        let slow = self.stores.values().filter_map(|one| one.looking.as_ref().filter(|look| !look.slow));
        let slow = slow.map(|look| look.since + self.limits.slow_after).min();
        let leave = if self.queue.is_empty() {
            None
        } else {
            self.stores.values().filter_map(|one| self.may_leave_at(one)).min()
        };
        [look, slow, leave].into_iter().flatten().min()
    }

    /// Nothing is being done with any store.
    pub fn is_quiet(&self) -> bool {
        self.stores.values().all(|one| one.looking.is_none() && !matches!(one.state, State::Working { .. }))
    }

    /// How each store stands, by name.
    pub fn standing(&self, now: Duration) -> impl Iterator<Item = StoreStanding> {
        self.stores.iter().filter(|(_, one)| !one.gone).map(move |(name, one)| {
            let (state, since) = match (&one.trouble, &one.state) {
                (Some(trouble), _) => (StandingWord::Down, Some(trouble.since)),
                (None, State::Resting | State::Down) => (StandingWord::Resting, None),
                (None, State::Waiting) => (StandingWord::Waiting, None),
                (None, State::Working { since, .. }) => (StandingWord::Working, Some(*since)),
            };
            let why = one.trouble.as_ref().map(|trouble| trouble.why.clone());
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

    /// How many more looks there may be: at servers that answer, and at others.
    fn free_looks(&self) -> [usize; 2] {
        let looking = |slow: bool| {
            let of = |one: &&One| one.looking.as_ref().is_some_and(|look| look.slow == slow);
            self.stores.values().filter(of).count()
        };
        [self.limits.looks.saturating_sub(looking(false)), self.limits.slow_looks.saturating_sub(looking(true))]
    }

    /// Looks that take too long are counted among those at servers that do not answer, as long as there is room among them.
    fn notice_silence(&mut self, now: Duration) {
        let [_, mut free] = self.free_looks();
        for one in self.stores.values_mut() {
            if let Some(look) = one.looking.as_mut().filter(|look| !look.slow)
                && now >= look.since + self.limits.slow_after
            {
                self.silent.insert(one.server.clone());
                if free > 0 {
                    free -= 1;
                    look.slow = true;
                }
            }
        }
    }

    /// Forgets a store that is gone and with which nothing is done; plans the next look at any other.
    fn plan_look(&mut self, now: Duration, name: &str) {
        let limits = self.limits;
        let Some((name, one)) = self.of(name) else { return };
        if one.gone && one.looking.is_none() && !matches!(one.state, State::Working { .. }) {
            self.queue.retain(|queued| *queued != name);
            self.stores.remove(&name);
            return;
        }
        let wait = match &one.state {
            // Not before it is over.
            State::Working { .. } => return,
            State::Resting | State::Waiting | State::Down => {
                one.trouble.as_ref().map_or(limits.look_every, |trouble| trouble.wait)
            }
        };
        one.look_at = now + wait;
    }

    /// Stores that may be looked at, from when on, in which order, and whether their servers are silent. Not one that waits for a place or has it:
    /// what is in it is known.
    fn due(&self) -> impl Iterator<Item = (Duration, u64, Arc<str>, bool)> {
        let may = |one: &One| one.looking.is_none() && !one.gone && matches!(one.state, State::Resting | State::Down);
        let due =
            |(name, one): (&Arc<str>, &One)| (one.look_at, one.turn, name.clone(), self.silent.contains(&one.server));
        self.stores.iter().filter(move |(_, one)| may(one)).map(due)
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

/// Another order for each seed.
fn turn(seed: u64, name: &str) -> u64 {
    let mut hasher = std::hash::DefaultHasher::new();
    std::hash::Hash::hash(&(seed, name), &mut hasher);
    std::hash::Hasher::finish(&hasher)
}

#[cfg(test)]
mod tests;
