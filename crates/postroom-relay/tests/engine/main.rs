//! The engine's decisions, driven input by input: no store, no broker, no clock.

#![allow(clippy::unwrap_used)]

mod deaths;

use std::collections::HashMap;
use std::time::Duration;

use postroom::{
    Batch, Cause, Claimed, Delivery, FailureKind, LostLane, Message, Noted, OnDead, Order, Origin, Outcome,
    RetryPolicy, Settled, Settlement, SinkLimits, Standing, Token, Verdict, Verdicts, Want,
};
use postroom_relay::{Action, BatchId, Engine, EngineOptions, Input};

const NOW: Duration = Duration::from_secs(1);

fn options() -> EngineOptions {
    EngineOptions {
        in_flight_max: 100,
        in_flight_bytes_max: 1 << 20,
        order: Order::Key,
        on_dead: OnDead::Skip,
        rate: None,
        breaker_after: 20,
        poll_idle: Duration::from_millis(200),
        retry: RetryPolicy::default(),
        renew_every: Duration::from_secs(5),
        sink: SinkLimits { batch_messages_max: 10, batch_bytes_max: 500_000, batches_in_flight_max: 4 },
        seed: 1,
    }
}

fn delivery(token: u64, key: &str) -> Delivery {
    Delivery {
        token: Token(token),
        lane: 0,
        origin: Origin::Outbox,
        attempts: 0,
        scheduled: false,
        behind: false,
        deaths: 0,
        unreadable: None,
        doubts: 0,
        replay: None,
        message: Message::new("orders", "order.placed", "x").key(key).into(),
    }
}

/// An engine that holds its lanes, whose sink is up, and that waits for its first claim.
fn started() -> Engine {
    started_with(options())
}

fn started_with(options: EngineOptions) -> Engine {
    let mut engine = Engine::new(options);
    engine.next(NOW);
    engine.on(NOW, Input::Renewed(Some(Standing { held: 16, lost_lanes: vec![], ..Standing::default() })));
    engine.on(NOW, Input::Probed(Ok(())));
    assert!(engine.next(NOW).iter().any(|action| matches!(action, Action::Claim(_))));
    engine
}

fn claimed(deliveries: Vec<Delivery>) -> Input {
    Input::Claimed(Some(Claimed { deliveries, ..Claimed::default() }))
}

fn published(actions: &[Action]) -> Vec<(BatchId, &Batch)> {
    actions
        .iter()
        .filter_map(|action| match action {
            Action::Publish(id, batch) => Some((*id, batch)),
            _ => None,
        })
        .collect()
}

fn settled(actions: &[Action]) -> Vec<Settlement> {
    actions
        .iter()
        .filter_map(|action| match action {
            Action::Settle(settlements) => Some(settlements.clone()),
            _ => None,
        })
        .flatten()
        .collect()
}

fn all(batch: &Batch, verdict: &Verdict) -> Verdicts {
    let mut verdicts = batch.silent();
    for place in 0..batch.messages().len() {
        verdicts.judge(place, verdict.clone());
    }
    verdicts
}

#[test]
fn a_message_is_settled_only_after_the_broker_confirmed_it() {
    let mut engine = started();
    engine.on(NOW, claimed(vec![delivery(1, "a"), delivery(2, "b")]));
    let actions = engine.next(NOW);
    let (id, batch) = published(&actions)[0];
    assert!(settled(&actions).is_empty(), "I1a: settled before any verdict");
    assert!(settled(&engine.next(NOW)).is_empty());
    // One confirmed, one about which the sink is silent.
    let mut verdicts = batch.silent();
    verdicts.judge(0, Verdict::Stored);
    engine.on(NOW, Input::Published(id, Ok(verdicts)));
    let done = settled(&engine.next(NOW));
    assert_eq!(done, [Settlement { token: Token(1), outcome: Outcome::Done }]);
}

#[test]
fn at_most_one_message_of_a_key_is_with_the_sink() {
    let mut engine = started();
    engine.on(NOW, claimed((0..6).map(|n| delivery(n, if n % 2 == 0 { "a" } else { "b" })).collect()));
    let mut order = Vec::new();
    for _ in 0..3 {
        let actions = engine.next(NOW);
        let batches = published(&actions);
        assert_eq!(batches.iter().map(|(_, batch)| batch.messages().len()).sum::<usize>(), 2, "one of each key");
        for (id, batch) in batches {
            order.extend(batch.messages().iter().map(|message| message.key.clone().unwrap()));
            engine.on(NOW, Input::Published(id, Ok(all(batch, &Verdict::Stored))));
        }
    }
    assert_eq!(order, ["a", "b", "a", "b", "a", "b"]);
}

#[test]
fn a_failed_message_parks_its_key_and_others_flow() {
    let mut engine = started();
    engine.on(NOW, claimed(vec![delivery(1, "a"), delivery(2, "a"), delivery(3, "b"), delivery(4, "a")]));
    let actions = engine.next(NOW);
    let (id, batch) = published(&actions)[0];
    let mut verdicts = all(batch, &Verdict::Stored);
    verdicts.judge(0, Verdict::failed(FailureKind::Transient, "no route"));
    engine.on(NOW, Input::Published(id, Ok(verdicts)));
    let outcomes = settled(&engine.next(NOW));
    assert!(matches!(&outcomes[0], Settlement { token: Token(1), outcome: Outcome::Retry { attempts: 1, .. } }));
    let queued = |token| Settlement { token: Token(token), outcome: Outcome::Queue };
    assert!(outcomes.contains(&queued(2)) && outcomes.contains(&queued(4)));
    assert!(outcomes.contains(&Settlement { token: Token(3), outcome: Outcome::Done }));
}

#[test]
fn what_a_read_brings_that_began_before_the_parking_queues_up_too() {
    let mut engine = started();
    engine.on(NOW, claimed(vec![delivery(1, "a")]));
    let actions = engine.next(NOW + Duration::from_millis(10));
    let (id, batch) = published(&actions)[0];
    assert!(actions.iter().any(|action| matches!(action, Action::Claim(_))), "the next read begins before the failure");
    engine.on(NOW, Input::Published(id, Ok(all(batch, &Verdict::failed(FailureKind::Transient, "no")))));
    assert_eq!(settled(&engine.next(NOW)).len(), 1);
    engine.on(NOW, Input::Settled(Some(Settled::default())));
    // The read took its snapshot before the parking was recorded: it says that nothing is in the way.
    engine.on(NOW, claimed(vec![delivery(2, "a")]));
    let actions = engine.next(NOW);
    assert!(published(&actions).is_empty(), "I4: it would overtake the parked one");
    assert_eq!(settled(&actions), [Settlement { token: Token(2), outcome: Outcome::Queue }]);
}

#[test]
fn an_unreachable_sink_burns_no_attempt_and_keeps_the_order() {
    let mut engine = started();
    engine.on(NOW, claimed(vec![delivery(1, "a"), delivery(2, "a"), delivery(3, "b")]));
    let mut now = NOW;
    for round in 0..50 {
        let actions = engine.next(now);
        assert!(settled(&actions).is_empty(), "an outage settles nothing");
        for (id, _) in published(&actions) {
            engine.on(now, Input::Published(id, Err("cut".to_owned())));
        }
        now += Duration::from_secs(6);
        for action in engine.next(now) {
            match action {
                Action::Probe if round < 49 => engine.on(now, Input::Probed(Err("connection refused".to_owned()))),
                Action::Probe => engine.on(now, Input::Probed(Ok(()))),
                Action::ClearNote => engine.on(now, Input::NoteCleared(true)),
                Action::Renew(_) => {
                    let standing = Standing { held: 16, ..Standing::default() };
                    engine.on(now, Input::Renewed(Some(standing)));
                }
                _ => {}
            }
        }
    }
    let mut order = Vec::new();
    for _ in 0..6 {
        let actions = engine.next(now);
        for (id, batch) in published(&actions) {
            order.extend(batch.messages().iter().map(|message| message.key.clone().unwrap()));
            engine.on(now, Input::Published(id, Ok(all(batch, &Verdict::Stored))));
        }
    }
    order.sort();
    assert_eq!(order, ["a", "a", "b"]);
    assert_eq!(engine.counters().dead + engine.counters().retried, 0);
}

#[test]
fn an_unknown_outcome_is_published_again_before_what_follows_it() {
    let mut engine = started();
    let first = delivery(1, "a");
    let expected = first.message.id;
    engine.on(NOW, claimed(vec![first, delivery(2, "a")]));
    let actions = engine.next(NOW);
    let (id, batch) = published(&actions)[0];
    engine.on(NOW, Input::Published(id, Ok(batch.silent())));
    let later = NOW + Duration::from_secs(1);
    engine.next(later);
    engine.on(later, Input::Probed(Ok(())));
    let actions = engine.next(later);
    assert_eq!(published(&actions)[0].1.messages()[0].id, expected);
    assert!(settled(&actions).is_empty());
}

#[test]
fn no_more_is_claimed_than_may_be_in_flight() {
    let mut engine = started();
    engine.on(NOW, claimed((0..100).map(|n| delivery(n, &format!("k{n}"))).collect()));
    let later = NOW + Duration::from_secs(10);
    assert!(!engine.next(later).iter().any(|action| matches!(action, Action::Claim(_))));
    assert_eq!(engine.in_flight(), 100);
}

#[test]
fn a_store_that_cannot_settle_is_asked_again_with_the_same() {
    let mut engine = started();
    engine.on(NOW, claimed(vec![delivery(1, "a")]));
    let actions = engine.next(NOW);
    let (id, batch) = published(&actions)[0];
    engine.on(NOW, Input::Published(id, Ok(all(batch, &Verdict::Stored))));
    let first = settled(&engine.next(NOW));
    engine.on(NOW, Input::Settled(None));
    let second = settled(&engine.next(NOW + Duration::from_secs(5)));
    assert_eq!(first, second);
}

#[test]
fn a_stop_claims_nothing_more_and_finishes_what_is_in_flight() {
    let mut engine = started();
    engine.on(NOW, claimed((0..30).map(|n| delivery(n, &format!("k{}", n % 3))).collect()));
    engine.on(NOW, Input::Stop);
    let mut finished = false;
    for _ in 0..100 {
        for action in engine.next(NOW + Duration::from_secs(1)) {
            match action {
                Action::Publish(id, batch) => engine.on(NOW, Input::Published(id, Ok(all(&batch, &Verdict::Stored)))),
                Action::Settle(_) => engine.on(NOW, Input::Settled(Some(Settled::default()))),
                Action::Claim(_) => panic!("claimed after the stop"),
                Action::Finish => finished = true,
                Action::Renew(_) | Action::Probe | Action::Note { .. } | Action::ClearNote => {}
            }
        }
    }
    assert!(finished && engine.in_flight() == 0);
    assert_eq!(engine.counters().stored, 30);
}

#[test]
fn a_lost_lane_takes_its_waiting_messages_with_it() {
    let mut engine = started();
    engine.on(NOW, claimed(vec![delivery(1, "a"), delivery(2, "a")]));
    let actions = engine.next(NOW);
    let (id, batch) = published(&actions)[0];
    let lost = Claimed { lost_lanes: vec![LostLane { lane: 0, before: Token(u64::MAX) }], ..Claimed::default() };
    engine.on(NOW, Input::Claimed(Some(lost)));
    engine.on(NOW, Input::Published(id, Ok(all(batch, &Verdict::Stored))));
    let actions = engine.next(NOW);
    assert!(published(&actions).is_empty(), "the second is somebody else's now");
    assert_eq!(settled(&actions).len(), 1, "the first ends as fenced, by the store's word");
    engine.on(NOW, Input::Settled(Some(Settled { fenced: 1, ..Settled::default() })));
    assert_eq!((engine.counters().fenced, engine.in_flight()), (1, 0));
}

#[test]
fn what_a_lost_lane_had_settled_does_not_hold_up_the_others() {
    let mut engine = started();
    engine.on(NOW, claimed((0..100).map(|n| delivery(n, "a")).collect()));
    let actions = engine.next(NOW);
    let (id, batch) = published(&actions)[0];
    engine.on(NOW, Input::Published(id, Ok(all(batch, &Verdict::Stored))));
    engine.next(NOW);
    engine.on(NOW, Input::Settled(Some(Settled { settled_ahead: 90, ..Settled::default() })));
    // The lane is lost with all that waited; nothing is left to settle, and so nothing would tell that the 90 are gone.
    let now = NOW + Duration::from_secs(10);
    for action in engine.next(now) {
        if let Action::Publish(id, _) = action {
            engine.on(now, Input::Published(id, Err("cut".to_owned())));
        }
    }
    let standing =
        Standing { held: 15, lost_lanes: vec![LostLane { lane: 0, before: Token(u64::MAX) }], ..Standing::default() };
    engine.on(now, Input::Renewed(Some(standing)));
    assert!(engine.next(now).iter().any(|action| matches!(action, Action::Claim(_))));
}

/// Runs for a long time with a store that hands out again what was parked; `sink` judges each batch. Returns the keys in the
/// order of publishing, and all settlements.
fn run(
    engine: &mut Engine,
    deliveries: Vec<Delivery>,
    sink: impl FnMut(&Batch) -> Result<Verdicts, String>,
) -> (Vec<Vec<String>>, Vec<Settlement>) {
    run_with(engine, deliveries, Duration::ZERO, sink)
}

/// The same, with other traffic only after a while.
fn run_with(
    engine: &mut Engine,
    deliveries: Vec<Delivery>,
    alone_for: Duration,
    mut sink: impl FnMut(&Batch) -> Result<Verdicts, String>,
) -> (Vec<Vec<String>>, Vec<Settlement>) {
    let (mut published, mut settlements) = (Vec::new(), Vec::new());
    let mut now = NOW;
    let mut fresh = 1000..1300;
    let mut known: HashMap<Token, Delivery> = HashMap::new();
    known.extend(deliveries.iter().map(|delivery| (delivery.token, delivery.clone())));
    engine.on(now, claimed(deliveries));
    let mut back: Vec<Delivery> = Vec::new();
    let mut tokens = 10_000..;
    for _ in 0..2000 {
        now += Duration::from_secs(1);
        for action in engine.next(now) {
            match action {
                Action::Publish(id, batch) => {
                    published.push(batch.messages().iter().map(|message| message.key.clone().unwrap()).collect());
                    engine.on(now, Input::Published(id, sink(&batch)));
                }
                Action::Settle(settled) => {
                    for Settlement { token, outcome } in &settled {
                        let parked = Delivery {
                            token: Token(tokens.next().unwrap()),
                            origin: Origin::Parked,
                            ..known[token].clone()
                        };
                        match outcome {
                            Outcome::Retry { attempts, .. } => back.push(Delivery { attempts: *attempts, ..parked }),
                            Outcome::Queue | Outcome::Release => back.push(parked),
                            _ => {}
                        }
                    }
                    settlements.extend(settled);
                    engine.on(now, Input::Settled(Some(Settled::default())));
                }
                Action::Probe => engine.on(now, Input::Probed(Ok(()))),
                Action::Note { token, proven } => {
                    let Delivery { deaths, doubts, .. } = known[&token];
                    engine.on(now, Input::Noted(Noted { deaths, doubts, proven }));
                }
                Action::ClearNote => engine.on(now, Input::NoteCleared(true)),
                Action::Renew(_) => {
                    let standing = Standing { held: 16, ..Standing::default() };
                    engine.on(now, Input::Renewed(Some(standing)));
                }
                // There is other traffic: another message comes now and then.
                Action::Claim(_) => {
                    let begun = now > NOW + alone_for;
                    let another = begun.then(|| fresh.next()).flatten().map(|n| delivery(n, &format!("fresh-{n}")));
                    let brought: Vec<Delivery> = std::mem::take(&mut back).into_iter().chain(another).collect();
                    known.extend(brought.iter().map(|delivery| (delivery.token, delivery.clone())));
                    engine.on(now, claimed(brought));
                }
                Action::Finish => {}
            }
        }
    }
    (published, settlements)
}

fn dead(settlements: &[Settlement]) -> Vec<(u64, Cause)> {
    let of = |settlement: &Settlement| match &settlement.outcome {
        Outcome::Dead { cause, .. } => Some((settlement.token.0, *cause)),
        _ => None,
    };
    settlements.iter().filter_map(of).collect()
}

#[test]
fn a_message_that_kills_its_connection_is_found_and_the_others_are_stored() {
    let mut engine = started();
    let deliveries = (0..60).map(|n| delivery(n, &format!("k{n}"))).collect();
    let mut kills = 0;
    let (_, settlements) = run(&mut engine, deliveries, |batch| {
        if batch.messages().iter().any(|message| message.key.as_deref() == Some("k17")) {
            kills += 1;
            return Err("connection closed: frame too large".to_owned());
        }
        Ok(all(batch, &Verdict::Stored))
    });
    assert_eq!(dead(&settlements).iter().map(|(_, cause)| *cause).collect::<Vec<_>>(), [Cause::Poison], "I7");
    assert_eq!(engine.counters().stored, 359);
    assert!(kills <= 12, "{kills} connections were lost over it");
}

#[test]
fn an_outage_that_comes_back_again_and_again_makes_no_poison() {
    let mut engine = started();
    let deliveries = (0..3).map(|n| delivery(n, &format!("k{n}"))).collect();
    let mut calls = 0;
    let (_, settlements) = run_with(&mut engine, deliveries, Duration::from_secs(1000), |batch| {
        calls += 1;
        if calls <= 100 { Err("connection refused".to_owned()) } else { Ok(all(batch, &Verdict::Stored)) }
    });
    assert!(calls > 100, "the outage has ended");
    assert_eq!((dead(&settlements), engine.counters().stored), (vec![], 303));
}

#[test]
fn a_message_over_which_relays_died_is_poison_and_travels_alone_before() {
    let mut engine = started();
    let doomed = Delivery { deaths: 3, ..delivery(1, "a") };
    let suspected = Delivery { deaths: 2, ..delivery(2, "b") };
    let deliveries = vec![doomed, suspected, delivery(3, "c"), delivery(4, "d")];
    let (published, settlements) = run(&mut engine, deliveries, |batch| Ok(all(batch, &Verdict::Stored)));
    assert_eq!(dead(&settlements), [(1, Cause::Poison)]);
    assert!(published.contains(&vec!["b".to_owned()]), "alone: {published:?}");
    assert!(!published.iter().flatten().any(|key| key == "a"));
}

#[test]
fn a_blocked_key_waits_and_a_skipped_one_goes_on() {
    for (on_dead, expected) in [(OnDead::Skip, Outcome::Done), (OnDead::Block, Outcome::Queue)] {
        let mut engine = started_with(EngineOptions { on_dead, ..options() });
        let deliveries = vec![delivery(1, "a"), delivery(2, "a"), delivery(3, "b")];
        let mut first = true;
        let (_, settlements) = run(&mut engine, deliveries, |batch| {
            let mut verdicts = all(batch, &Verdict::Stored);
            if std::mem::take(&mut first) {
                verdicts.judge(0, Verdict::failed(FailureKind::Permanent, "never"));
            }
            Ok(verdicts)
        });
        assert_eq!(dead(&settlements), [(1, Cause::Permanent)]);
        assert!(settlements.contains(&Settlement { token: Token(2), outcome: expected }), "{settlements:?}");
        assert!(settlements.contains(&Settlement { token: Token(3), outcome: Outcome::Done }));
    }
}

#[test]
fn pipelined_order_sends_a_key_in_one_batch_and_keeps_what_follows_a_failure_behind_it() {
    let mut engine = started_with(EngineOptions { order: Order::Pipelined, ..options() });
    engine.on(NOW, claimed((0..5).map(|n| delivery(n, "a")).collect()));
    let actions = engine.next(NOW);
    let batches = published(&actions);
    assert_eq!((batches.len(), batches[0].1.messages().len()), (1, 5));
    let (id, batch) = batches[0];
    // The second fails, the third is unknown: the third has to go back behind the second.
    let mut verdicts = all(batch, &Verdict::Stored);
    verdicts.judge(1, Verdict::failed(FailureKind::Transient, "no"));
    verdicts.judge(2, Verdict::Unknown("cut".to_owned()));
    engine.on(NOW, Input::Published(id, Ok(verdicts)));
    let outcomes = settled(&engine.next(NOW));
    assert!(matches!(outcomes[1], Settlement { token: Token(1), outcome: Outcome::Retry { .. } }), "{outcomes:?}");
    assert!(outcomes.contains(&Settlement { token: Token(2), outcome: Outcome::Queue }), "{outcomes:?}");
}

/// What a sink keeps back says nothing about the sink, unless it keeps back everything.
#[test]
fn what_was_not_sent_goes_back_to_its_place_and_the_sink_is_not_taken_for_lost() {
    let mut engine = started_with(EngineOptions { order: Order::Pipelined, ..options() });
    let deliveries = vec![delivery(0, "a"), delivery(1, "a"), delivery(2, "a"), delivery(3, "b")];
    let expected: Vec<_> = deliveries[1..3].iter().map(|delivery| delivery.message.id).collect();
    engine.on(NOW, claimed(deliveries));
    let actions = engine.next(NOW);
    let (id, batch) = published(&actions)[0];
    let mut verdicts = all(batch, &Verdict::NotSent);
    verdicts.judge(0, Verdict::failed(FailureKind::Permanent, "never"));
    verdicts.judge(3, Verdict::Stored);
    engine.on(NOW, Input::Published(id, Ok(verdicts)));
    let actions = engine.next(NOW);
    assert!(!actions.iter().any(|action| matches!(action, Action::Probe)), "{actions:?}");
    assert_eq!(dead(&settled(&actions)), [(0, Cause::Permanent)]);
    assert_eq!((engine.counters().unknown, engine.counters().sink_outages), (0, 0));
    engine.on(NOW, Input::Settled(Some(Settled::default())));
    let actions = engine.next(NOW);
    let (id, batch) = published(&actions)[0];
    assert_eq!(batch.messages().iter().map(|message| message.id).collect::<Vec<_>>(), expected, "I4");
    engine.on(NOW, Input::Published(id, Ok(all(batch, &Verdict::NotSent))));
    assert!(published(&engine.next(NOW)).is_empty(), "it would be tried without a pause");
    let actions = engine.next(NOW + Duration::from_secs(60));
    assert!(actions.iter().any(|action| matches!(action, Action::Probe)), "{actions:?}");
}

#[test]
fn without_order_a_failure_holds_up_nothing() {
    let mut engine = started_with(EngineOptions { order: Order::None, ..options() });
    engine.on(NOW, claimed((0..4).map(|n| Delivery { behind: n == 3, ..delivery(n, "a") }).collect()));
    let actions = engine.next(NOW);
    let (id, batch) = published(&actions)[0];
    assert_eq!(batch.messages().len(), 4);
    let mut verdicts = all(batch, &Verdict::Stored);
    verdicts.judge(0, Verdict::failed(FailureKind::Transient, "no"));
    engine.on(NOW, Input::Published(id, Ok(verdicts)));
    let outcomes = settled(&engine.next(NOW));
    assert_eq!(outcomes.iter().filter(|settlement| settlement.outcome == Outcome::Done).count(), 3);
}

#[test]
fn a_sink_that_refuses_everything_is_left_alone() {
    let mut engine = started();
    let deliveries = (0..80).map(|n| delivery(n, &format!("k{n}"))).collect();
    let mut refused = 0;
    run(&mut engine, deliveries, |batch| {
        refused += batch.messages().len();
        Ok(all(batch, &Verdict::failed(FailureKind::Transient, "maintenance")))
    });
    assert!(refused < 300, "{refused} attempts were burned, of 640");
    assert!(engine.counters().sink_outages >= 1);
}

#[test]
fn what_a_read_of_the_parked_ones_brings_goes_back_when_its_key_failed_meanwhile() {
    let mut engine = started();
    engine.on(NOW, claimed(vec![delivery(1, "a")]));
    let actions = engine.next(NOW + Duration::from_millis(10));
    let (id, batch) = published(&actions)[0];
    engine.on(NOW, Input::Published(id, Ok(all(batch, &Verdict::failed(FailureKind::Transient, "no")))));
    engine.next(NOW);
    engine.on(NOW, Input::Settled(Some(Settled::default())));
    // An older message of the key was given back by an operator, with one that queued up behind it.
    let parked = |token| Delivery { origin: Origin::Parked, ..delivery(token, "a") };
    engine.on(NOW, claimed(vec![parked(2), parked(3)]));
    let actions = engine.next(NOW);
    assert!(published(&actions).is_empty(), "I4: the second would overtake the one that failed");
    let release = |token| Settlement { token: Token(token), outcome: Outcome::Release };
    assert_eq!(settled(&actions), [release(2), release(3)]);
}

#[test]
fn bytes_in_flight_are_bounded_like_messages() {
    let mut engine = started();
    let big = |n| Delivery {
        message: Message::new("orders", "order.placed", vec![0; 200_000]).key(format!("k{n}")).into(),
        ..delivery(n, "")
    };
    engine.on(NOW, claimed((0..4).map(big).collect()));
    let later = NOW + Duration::from_secs(10);
    assert!(!engine.next(later).iter().any(|action| matches!(action, Action::Claim(_))), "a quarter is not free");
}

#[test]
fn a_rate_limit_holds() {
    let mut engine = started_with(EngineOptions { rate: Some(50), ..options() });
    engine.on(NOW, claimed((0..90).map(|n| delivery(n, &format!("k{n}"))).collect()));
    let mut sent = 0;
    let mut now = NOW;
    while now < NOW + Duration::from_secs(1) {
        for (id, batch) in published(&engine.next(now)) {
            sent += batch.messages().len();
            engine.on(now, Input::Published(id, Ok(all(batch, &Verdict::Stored))));
        }
        now = engine.wake_at().unwrap_or(now).max(now + Duration::from_millis(1));
    }
    assert!((45..=55).contains(&sent), "{sent}");
}

#[test]
fn a_rate_limit_does_not_keep_the_relay_awake_while_the_sink_is_down() {
    let mut engine = started_with(EngineOptions { rate: Some(5), ..options() });
    engine.on(NOW, claimed((0..20).map(|n| delivery(n, &format!("k{n}"))).collect()));
    for (id, _) in published(&engine.next(NOW)) {
        engine.on(NOW, Input::Published(id, Err("cut".to_owned())));
    }
    let later = NOW + Duration::from_millis(50);
    engine.next(later);
    assert!(engine.wake_at().unwrap() > later, "it would be called again and again");
}

#[test]
fn what_was_claimed_after_a_lane_came_back_stays_when_its_loss_is_told_late() {
    let mut engine = started();
    let claimed = Claimed { deliveries: vec![delivery(7, "a")], ..Claimed::default() };
    engine.on(NOW, Input::Claimed(Some(claimed)));
    let lost_lanes = vec![LostLane { lane: 0, before: Token(7) }];
    engine.on(NOW, Input::Renewed(Some(Standing { held: 16, lost_lanes, ..Standing::default() })));
    assert_eq!(engine.in_flight(), 1, "I8: the source waits for it");
}

#[test]
fn a_position_that_could_not_be_written_is_asked_for_again_although_nothing_else_is_to_be_settled() {
    let mut engine = started();
    engine.on(NOW, claimed(vec![delivery(1, "a")]));
    for (id, batch) in published(&engine.next(NOW)) {
        engine.on(NOW, Input::Published(id, Ok(all(batch, &Verdict::Stored))));
    }
    engine.next(NOW);
    let unwritten = || Settled { unwritten: true, settled_ahead: 1, ..Settled::default() };
    engine.on(NOW, Input::Settled(Some(unwritten())));
    let settles = |actions: &[Action]| actions.iter().any(|action| matches!(action, Action::Settle(_)));
    let later = NOW + Duration::from_secs(1);
    assert!(settles(&engine.next(later)));
    engine.on(later, Input::Settled(None));
    assert!(settles(&engine.next(later + Duration::from_secs(3))), "it fills the window until it is written");
}

#[test]
fn two_messages_with_one_id_are_judged_each_for_itself() {
    let mut engine = started();
    let mut twin = delivery(2, "b");
    let one = delivery(1, "a");
    twin.message = Message::clone(&twin.message).id(one.message.id).into();
    engine.on(NOW, claimed(vec![one, twin]));
    let actions = engine.next(NOW);
    let (id, batch) = published(&actions)[0];
    let mut verdicts = batch.silent();
    verdicts.judge(0, Verdict::Stored);
    verdicts.judge(1, Verdict::failed(FailureKind::Permanent, "never"));
    engine.on(NOW, Input::Published(id, Ok(verdicts)));
    let outcomes = settled(&engine.next(NOW));
    assert_eq!(outcomes[0], Settlement { token: Token(1), outcome: Outcome::Done });
    assert!(matches!(outcomes[1], Settlement { token: Token(2), outcome: Outcome::Dead { .. } }), "{outcomes:?}");
}

#[test]
fn a_batch_has_no_more_bytes_than_the_sink_likes_and_a_larger_message_goes_by_itself() {
    for order in [Order::Key, Order::Pipelined] {
        let mut engine = started_with(EngineOptions { order, in_flight_bytes_max: 64 << 20, ..options() });
        let sized = |n: u64, bytes: usize| Delivery {
            message: Message::new("orders", "order.placed", vec![0; bytes]).key(format!("k{}", n / 2)).into(),
            ..delivery(n, "")
        };
        let sizes = [200_000, 200_000, 200_000, 200_000, 900_000, 100, 100, 100];
        engine.on(NOW, claimed((0..).zip(sizes).map(|(n, bytes)| sized(n, bytes)).collect()));
        let mut sent = Vec::new();
        for _ in 0..20 {
            let actions = engine.next(NOW);
            for (id, batch) in published(&actions) {
                let bytes: usize = batch.messages().iter().map(|message| message.payload.len()).sum();
                assert!(bytes <= 500_000 || batch.messages().len() == 1, "{bytes} in {}", batch.messages().len());
                sent.extend(batch.messages().iter().map(|message| message.id));
                engine.on(NOW, Input::Published(id, Ok(all(batch, &Verdict::Stored))));
            }
            if !settled(&actions).is_empty() {
                engine.on(NOW, Input::Settled(Some(Settled::default())));
            }
        }
        assert_eq!(sent.len(), sizes.len(), "{order:?}");
    }
}
