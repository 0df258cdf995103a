//! The engine's decisions, driven input by input: no store, no broker, no clock.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use postroom::{
    Batch, Claimed, Delivery, FailureKind, Message, Origin, Outcome, RetryPolicy, Settled, Settlement, SinkLimits,
    Standing, Token, Verdict, Verdicts,
};
use postroom_relay::{Action, BatchId, Engine, EngineOptions, Input};

const NOW: Duration = Duration::from_secs(1);

fn options() -> EngineOptions {
    EngineOptions {
        in_flight_max: 100,
        poll_idle: Duration::from_millis(200),
        retry: RetryPolicy::default(),
        renew_every: Duration::from_secs(5),
        sink: SinkLimits { batch_messages_max: 10, batches_in_flight_max: 4 },
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
        message: Message::new("orders", "order.placed", "x").key(key),
    }
}

/// An engine that holds its lanes, whose sink is up, and that waits for its first claim.
fn started() -> Engine {
    let mut engine = Engine::new(options());
    engine.next(NOW);
    engine.on(NOW, Input::Renewed(Some(Standing { held: 16, lost_lanes: vec![], settled_ahead: 0 })));
    engine.on(NOW, Input::Probed(true));
    assert!(engine.next(NOW).iter().any(|action| matches!(action, Action::Claim(_))));
    engine
}

fn claimed(deliveries: Vec<Delivery>) -> Input {
    Input::Claimed(Some(Claimed { deliveries, more: false, lost_lanes: vec![] }))
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
    for message in batch.messages() {
        verdicts.judge(message.id, verdict.clone());
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
    verdicts.judge(batch.messages()[0].id, Verdict::Stored);
    engine.on(NOW, Input::Published(id, Some(verdicts)));
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
            engine.on(NOW, Input::Published(id, Some(all(batch, &Verdict::Stored))));
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
    verdicts.judge(batch.messages()[0].id, Verdict::failed(FailureKind::Transient, "no route"));
    engine.on(NOW, Input::Published(id, Some(verdicts)));
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
    engine.on(NOW, Input::Published(id, Some(all(batch, &Verdict::failed(FailureKind::Transient, "no")))));
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
    for _ in 0..50 {
        let actions = engine.next(now);
        assert!(settled(&actions).is_empty(), "an outage settles nothing");
        for (id, _) in published(&actions) {
            engine.on(now, Input::Published(id, None));
        }
        now += Duration::from_secs(6);
        for action in engine.next(now) {
            match action {
                Action::Probe => engine.on(now, Input::Probed(true)),
                Action::Renew => {
                    engine.on(now, Input::Renewed(Some(Standing { held: 16, lost_lanes: vec![], settled_ahead: 0 })))
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
            engine.on(now, Input::Published(id, Some(all(batch, &Verdict::Stored))));
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
    engine.on(NOW, Input::Published(id, Some(batch.silent())));
    let later = NOW + Duration::from_secs(1);
    engine.next(later);
    engine.on(later, Input::Probed(true));
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
    engine.on(NOW, Input::Published(id, Some(all(batch, &Verdict::Stored))));
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
                Action::Publish(id, batch) => engine.on(NOW, Input::Published(id, Some(all(&batch, &Verdict::Stored)))),
                Action::Settle(_) => engine.on(NOW, Input::Settled(Some(Settled::default()))),
                Action::Claim(_) => panic!("claimed after the stop"),
                Action::Finish => finished = true,
                Action::Renew | Action::Probe => {}
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
    let lost = Claimed { deliveries: vec![], more: false, lost_lanes: vec![0] };
    engine.on(NOW, Input::Claimed(Some(lost)));
    engine.on(NOW, Input::Published(id, Some(all(batch, &Verdict::Stored))));
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
    engine.on(NOW, Input::Published(id, Some(all(batch, &Verdict::Stored))));
    engine.next(NOW);
    engine.on(NOW, Input::Settled(Some(Settled { settled_ahead: 90, ..Settled::default() })));
    // The lane is lost with all that waited; nothing is left to settle, and so nothing would tell that the 90 are gone.
    let now = NOW + Duration::from_secs(10);
    for action in engine.next(now) {
        if let Action::Publish(id, _) = action {
            engine.on(now, Input::Published(id, None));
        }
    }
    let standing = Standing { held: 15, lost_lanes: vec![0], settled_ahead: 0 };
    engine.on(now, Input::Renewed(Some(standing)));
    assert!(engine.next(now).iter().any(|action| matches!(action, Action::Claim(_))));
}
