//! Schedules of looks, work and trouble, step by step and at random.

use super::*;

const LIMITS: FleetLimits = FleetLimits {
    places: 2,
    looks: 2,
    slow_after: Duration::from_secs(2),
    look_every: Duration::from_secs(5),
    slow_looks: 1,
    linger: Duration::from_millis(500),
    slice: Duration::from_secs(10),
    retry: (Duration::from_secs(1), Duration::from_secs(60)),
};

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// All on one server.
fn names(of: impl IntoIterator<Item = &'static str>) -> BTreeMap<Arc<str>, Arc<str>> {
    of.into_iter().map(|name| (name.into(), "db-1".into())).collect()
}

/// Sorted, since those that are due together come in any order.
fn sorted(mut words: Vec<String>) -> Vec<String> {
    words.sort();
    words
}

fn down(why: &str) -> Seen {
    Seen::Down { why: why.to_owned(), silent: false }
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
    let mut fleet = Fleet::new(LIMITS, 1);
    fleet.know(s(0), &names(["a", "b"]));
    assert_eq!(sorted(words(&fleet.next(s(0)))), ["look a", "look b"]);
    fleet.looked(s(0), "a", Seen::Nothing);
    fleet.looked(s(0), "b", Seen::Work);
    assert_eq!(words(&fleet.next(s(0))), ["work a", "work b"]);
    fleet.is_idle(s(1), "a", true);
    fleet.is_idle(s(1), "b", true);
    assert_eq!(words(&fleet.next(s(30))), Vec::<String>::new());
    assert_eq!(words(&fleet.next(s(60))), Vec::<String>::new(), "what is in them is known");
}

#[test]
fn who_has_nothing_to_do_leaves_first_and_only_if_somebody_waits() {
    let mut fleet = Fleet::new(LIMITS, 1);
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
    let mut fleet = Fleet::new(FleetLimits { places: 1, ..LIMITS }, 1);
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
    let mut fleet = Fleet::new(FleetLimits { places: 1, looks: 1, ..LIMITS }, 1);
    fleet.know(s(0), &names(["a"]));
    assert_eq!(words(&fleet.next(s(0))), ["look a"]);
    fleet.looked(s(0), "a", down("refused"));
    fleet.know(s(0), &names(["a", "b"]));
    assert_eq!(words(&fleet.next(s(0))), ["look b"]);
    fleet.looked(s(0), "b", Seen::Work);
    assert_eq!(words(&fleet.next(s(0))), ["work b"]);
    let mut now = s(0);
    for wait in [1, 2, 4, 8, 16, 32, 60, 60] {
        assert_eq!(fleet.wake_at(), Some(now + s(wait)));
        now += s(wait);
        assert_eq!(words(&fleet.next(now)), ["look a"], "{wait}");
        fleet.looked(now, "a", down("refused"));
    }
    let standing: Vec<_> = fleet.standing(now).map(|one| (one.store.to_string(), one.state, one.why)).collect();
    assert_eq!(standing[0], ("a".to_owned(), StandingWord::Down, Some("refused".to_owned())));
    now += s(60);
    fleet.next(now);
    fleet.looked(now, "a", Seen::Nothing);
    assert_eq!(fleet.standing(now).next().map(|one| one.state), Some(StandingWord::Resting));
}

#[test]
fn a_silent_server_holds_up_looks_at_its_own_stores_alone() {
    let mut fleet = Fleet::new(FleetLimits { places: 1, looks: 1, ..LIMITS }, 1);
    let mut all = names(["a", "b"]);
    fleet.know(s(0), &all);
    assert_eq!(fleet.next(s(0)).len(), 1);
    // Whichever it is: it does not come back. More stores of its server follow, and one of another.
    let (hangs, other) = if fleet.stores["a"].looking.is_some() { ("a", "b") } else { ("b", "a") };
    all.extend([("c".into(), "db-1".into()), ("z".into(), "db-2".into())]);
    fleet.know(s(0), &all);
    assert_eq!(words(&fleet.next(s(1))), Vec::<String>::new());
    assert_eq!(fleet.wake_at(), Some(s(2)), "slow from then on");
    assert_eq!(words(&fleet.next(s(2))), ["look z"], "and nothing of the same server");
    fleet.looked(s(2), "z", Seen::Work);
    assert_eq!(words(&fleet.next(s(2))), ["work z"]);
    // One at a time of those that do not answer.
    fleet.looked(s(20), hangs, Seen::Down { why: "no answer".to_owned(), silent: true });
    let next = words(&fleet.next(s(20)));
    assert_eq!(next.len(), 1);
    assert!(next[0] == format!("look {other}") || next[0] == "look c", "{next:?}");
    assert_eq!(fleet.trouble(hangs), Some("no answer"));
}

#[test]
fn a_store_at_which_work_cannot_begin_is_in_trouble_until_it_can() {
    let mut fleet = Fleet::new(LIMITS, 1);
    fleet.know(s(0), &names(["a"]));
    let mut now = s(0);
    for wait in [1, 2, 4, 8, 16, 32, 60, 60] {
        assert_eq!(words(&fleet.next(now)), ["look a"]);
        fleet.looked(now, "a", Seen::Work);
        assert_eq!(words(&fleet.next(now)), ["work a"]);
        fleet.ended(now, "a", WorkEnded::Failed("no right".to_owned()));
        assert_eq!(fleet.trouble("a"), Some("no right"), "that it can be looked at says nothing");
        assert_eq!(words(&fleet.next(now)), Vec::<String>::new());
        assert_eq!(fleet.wake_at(), Some(now + s(wait)));
        now += s(wait);
    }
    assert_eq!(fleet.standing(now).next().map(|one| one.state), Some(StandingWord::Down));
    fleet.next(now);
    fleet.looked(now, "a", Seen::Work);
    fleet.next(now);
    fleet.ended(now, "a", WorkEnded::Interrupted);
    assert_eq!(fleet.trouble("a"), None);
}

#[test]
fn the_order_is_another_one_in_each_process() {
    let order = |seed: u64| {
        let mut fleet = Fleet::new(FleetLimits { looks: 20, ..LIMITS }, seed);
        fleet.know(s(0), &(0..20).map(|n| (format!("s{n:02}").into(), "db-1".into())).collect());
        words(&fleet.next(s(0)))
    };
    assert_eq!(order(1), order(1));
    assert_ne!(order(1), order(2));
}

#[test]
fn stores_come_and_go() {
    let mut fleet = Fleet::new(LIMITS, 1);
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
    let mut fleet = Fleet::new(FleetLimits { places: 3, ..LIMITS }, 1);
    let all: Vec<Arc<str>> = (0..200).map(|n| format!("s{n:03}").into()).collect();
    fleet.know(s(0), &all.iter().map(|name| (name.clone(), "db-1".into())).collect());
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
            let is_down = &*name >= "s190";
            let seen = if is_down {
                down("no")
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
