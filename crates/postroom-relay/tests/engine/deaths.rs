//! Messages that relays may have died over: they travel alone, and the store has a note about them.

use super::*;

/// An engine that learns that so many relays died, and goes in steps of one message.
fn after_deaths(deaths: u32) -> Engine {
    let mut engine = Engine::new(options());
    engine.next(NOW);
    engine.on(NOW, Input::Renewed(Some(Standing { held: 16, deaths, ..Standing::default() })));
    engine.on(NOW, Input::Probed(Ok(())));
    let actions = engine.next(NOW);
    assert!(actions.iter().any(|action| matches!(action, Action::Claim(Want { messages: 1, single: true, .. }))));
    engine
}

/// An engine that has had a message stored, so that the sink is known to work.
fn after_a_success() -> Engine {
    let mut engine = started();
    engine.on(NOW, claimed(vec![delivery(1, "a")]));
    for (id, batch) in published(&engine.next(NOW)) {
        engine.on(NOW, Input::Published(id, Ok(all(batch, &Verdict::Stored))));
    }
    engine.next(NOW);
    engine.on(NOW, Input::Settled(Some(Settled::default())));
    engine
}

/// What the engine notes next, if it notes anything.
fn noted(actions: &[Action]) -> Option<(Token, bool)> {
    actions.iter().find_map(|action| match action {
        Action::Note { token, proven } => Some((*token, *proven)),
        _ => None,
    })
}

#[test]
fn a_message_that_relays_may_have_died_over_lets_others_show_first_that_the_sink_works() {
    let mut engine = after_deaths(9);
    let suspect = delivery(1, "a");
    engine.on(NOW, claimed(vec![suspect.clone(), delivery(2, "a")]));
    assert_eq!(noted(&engine.next(NOW)), Some((Token(1), false)), "nothing was stored yet");
    engine.on(NOW, Input::Noted(Noted { doubts: 2, ..Noted::default() }));
    let actions = engine.next(NOW);
    assert!(published(&actions).is_empty());
    let outcomes = settled(&actions);
    assert!(
        matches!(&outcomes[0], Settlement { token: Token(1), outcome: Outcome::Retry { attempts: 0, .. } }),
        "set aside, no attempt burned: {outcomes:?}"
    );
    assert!(outcomes.contains(&Settlement { token: Token(2), outcome: Outcome::Queue }), "its key waits: {outcomes:?}");
    engine.on(NOW, Input::Settled(Some(Settled::default())));
    // It comes back before anything else was there: it goes out, or it would never.
    engine.on(NOW, claimed(vec![Delivery { origin: Origin::Parked, doubts: 2, ..suspect }]));
    assert_eq!(noted(&engine.next(NOW)), Some((Token(1), false)));
    engine.on(NOW, Input::Noted(Noted { doubts: 2, ..Noted::default() }));
    assert_eq!(published(&engine.next(NOW)).len(), 1);
}

#[test]
fn a_suspect_from_the_parked_ones_travels_alone_and_noted_also_in_a_large_window() {
    let mut engine = after_a_success();
    let suspect = Delivery { origin: Origin::Parked, deaths: 1, ..delivery(2, "b") };
    engine.on(NOW, claimed(vec![suspect, delivery(3, "c")]));
    assert_eq!(noted(&engine.next(NOW)), Some((Token(2), true)), "the sink works: a death now is over this message");
    assert!(published(&engine.next(NOW)).is_empty(), "nothing beside it");
    engine.on(NOW, Input::Noted(Noted { deaths: 1, proven: true, ..Noted::default() }));
    let actions = engine.next(NOW);
    let (id, batch) = published(&actions)[0];
    assert_eq!((published(&actions).len(), batch.messages().len()), (1, 1));
    engine.on(NOW, Input::Published(id, Ok(all(batch, &Verdict::Stored))));
    let actions = engine.next(NOW);
    assert_eq!(settled(&actions), [Settlement { token: Token(2), outcome: Outcome::Done }]);
    assert!(
        published(&actions).is_empty(),
        "I7: the note stands until this is settled, and a death would count against it"
    );
    engine.on(NOW, Input::Settled(Some(Settled::default())));
    assert_eq!(published(&engine.next(NOW)).len(), 1);
}

#[test]
fn the_note_about_a_message_that_came_back_is_taken_off_before_others_go() {
    let mut engine = after_a_success();
    let suspect = Delivery { origin: Origin::Parked, deaths: 1, ..delivery(2, "b") };
    engine.on(NOW, claimed(vec![suspect, delivery(3, "c")]));
    assert_eq!(noted(&engine.next(NOW)), Some((Token(2), true)));
    engine.on(NOW, Input::Noted(Noted { deaths: 1, proven: true, ..Noted::default() }));
    let actions = engine.next(NOW);
    let (id, _) = published(&actions)[0];
    engine.on(NOW, Input::Published(id, Err("connection closed".to_owned())));
    let later = NOW + Duration::from_secs(10);
    let probing = |engine: &mut Engine, now| {
        let actions = engine.next(now);
        if actions.iter().any(|action| matches!(action, Action::Probe)) {
            engine.on(now, Input::Probed(Ok(())));
            return [actions, engine.next(now)].into_iter().flatten().collect();
        }
        actions
    };
    let clears = |actions: &[Action]| actions.iter().filter(|action| matches!(action, Action::ClearNote)).count();
    let actions: Vec<Action> = probing(&mut engine, later);
    assert_eq!((clears(&actions), published(&actions).len()), (1, 0), "I7: {actions:?}");
    engine.on(later, Input::NoteCleared(false));
    let actions = engine.next(later);
    assert_eq!((clears(&actions), published(&actions).len()), (0, 0), "a moment later: {actions:?}");
    let again = engine.wake_at().unwrap();
    let actions = engine.next(again);
    assert_eq!((clears(&actions), published(&actions).len()), (1, 0), "{actions:?}");
    engine.on(again, Input::NoteCleared(true));
    let actions = engine.next(again);
    let keys: Vec<_> =
        published(&actions).iter().flat_map(|(_, batch)| batch.messages()).map(|m| m.key.clone()).collect();
    assert_eq!(keys, [Some("c".to_owned())], "others go first: {actions:?}");
}

#[test]
fn a_lane_that_is_lost_while_a_message_is_noted_takes_it_away() {
    let mut engine = after_deaths(9);
    engine.on(NOW, claimed(vec![delivery(1, "a")]));
    assert!(noted(&engine.next(NOW)).is_some());
    engine.on(
        NOW,
        Input::Renewed(Some(Standing {
            held: 15,
            lost_lanes: vec![LostLane { lane: 0, before: Token(u64::MAX) }],
            deaths: 9,
            ..Standing::default()
        })),
    );
    engine.on(NOW, Input::Noted(Noted::default()));
    assert!(published(&engine.next(NOW)).is_empty() && engine.in_flight() == 0);
    engine.on(NOW, claimed(vec![Delivery { lane: 1, ..delivery(2, "b") }]));
    assert!(noted(&engine.next(NOW)).is_some(), "and others go on");
}

#[test]
fn each_relay_that_died_makes_the_steps_smaller() {
    let mut wants: Vec<Want> = Vec::new();
    for deaths in [0, 1, 2, 3, 4] {
        let mut engine = Engine::new(EngineOptions { in_flight_max: 2000, ..options() });
        engine.next(NOW);
        engine.on(NOW, Input::Renewed(Some(Standing { held: 16, deaths, ..Standing::default() })));
        engine.on(NOW, Input::Probed(Ok(())));
        wants.extend(engine.next(NOW).iter().find_map(|action| match action {
            Action::Claim(want) => Some(*want),
            _ => None,
        }));
    }
    assert_eq!(wants.iter().map(|want| want.messages).collect::<Vec<_>>(), [2000, 2000, 250, 31, 3]);
    let mut engine = after_deaths(9);
    // As many messages as they can have had in flight are through: the next renewal says so.
    let mut now = NOW;
    for n in 0..=100 {
        engine.on(now, claimed(vec![delivery(n, "a")]));
        if let Some((_, proven)) = noted(&engine.next(now)) {
            assert_eq!(proven, n > 0, "something was stored");
            engine.on(now, Input::Noted(Noted { proven, ..Noted::default() }));
        }
        for (id, batch) in published(&engine.next(now)) {
            engine.on(now, Input::Published(id, Ok(all(batch, &Verdict::Stored))));
        }
        now += Duration::from_millis(1);
        let _ = engine.next(now);
        engine.on(now, Input::Settled(Some(Settled::default())));
        now += Duration::from_millis(200);
        for action in engine.next(now) {
            if let Action::Renew(report) = action {
                assert!(!report.survived);
                engine.on(now, Input::Renewed(Some(Standing { held: 16, deaths: 9, ..Standing::default() })));
            }
        }
    }
    let renewal = engine.next(now + Duration::from_secs(6));
    assert!(renewal.iter().any(|action| matches!(action, Action::Renew(report) if report.survived)));
}
