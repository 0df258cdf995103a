//! Operations on many messages. Time passes here only by the steps that the tests take.

use std::sync::Arc;
use std::time::Duration;

use postroom::{
    DeadDeed, DeadFilter, Grouping, NewOperation, OperationFilter, OperationId, OperationKind, OperationState, Outcome,
    Place, ReplayPlace, ShownOperation, Side, Source, Steer, Survey,
};

use super::super::source::{claim_all, dead, drain, holding, ids, ids_of, message, retry, settle};
use super::{Operated, deed, written};

fn replay(filter: OperationFilter) -> NewOperation {
    NewOperation {
        kind: OperationKind::Replay,
        side: Side::Out,
        route: "orders".to_owned(),
        filter,
        planned: None,
        canary: None,
        goes_on: false,
        rate: None,
        place: ReplayPlace::Before,
        new_ids: false,
    }
}

async fn begun<F: Operated>(store: &F, operation: &NewOperation) -> OperationId {
    let id = OperationId::new();
    store.operator().begin_operation(id, operation, &deed()).await.expect("begin");
    id
}

async fn surveyed<F: Operated>(store: &F, operation: &NewOperation) -> Survey {
    let mut survey = Survey::default();
    while !survey.complete {
        store.operator().survey_operation(operation, &mut survey).await.expect("survey");
    }
    survey
}

async fn shown<F: Operated>(store: &F, id: OperationId) -> ShownOperation {
    let found = store.operator().operations(Some(id), 10).await.expect("operations");
    found.into_iter().next().expect("the operation")
}

/// Steps until nothing more is given out; returns how many were.
async fn stepped<F: Operated>(store: &F) -> u64 {
    let mut given = 0;
    loop {
        let stepped = store.operator().step_operations().await.expect("step");
        given += stepped.given_out;
        if stepped.given_out == 0 && stepped.going_on == 0 {
            return given;
        }
    }
}

/// Everything that can be claimed is sent; returns it in its order.
async fn sent<F: Operated>(store: &F, source: &Arc<dyn Source>) -> Vec<postroom::MessageId> {
    store.make_due().await;
    let out = drain(source).await;
    written(source).await;
    out
}

/// M70, I18.
pub async fn what_was_sent_is_replayed_in_order_with_its_id_and_nothing_else_is<F: Operated>(store: F) {
    let source = holding(&store, "relay").await;
    let finished = [message("a"), message("b"), message("a"), message("a")];
    let doomed = message("c");
    store.commit(&finished).await;
    store.commit(std::slice::from_ref(&doomed)).await;
    let out = claim_all(&source).await;
    let outcome = |id| if id == doomed.id { dead(false) } else { Outcome::Done };
    settle(&source, out.iter().map(|delivery| (delivery.token, outcome(delivery.message.id)))).await;
    written(&source).await;
    let unread = message("a");
    store.commit(std::slice::from_ref(&unread)).await;

    let operation = replay(OperationFilter { topic: Some("orders".to_owned()), ..OperationFilter::default() });
    let survey = surveyed(&store, &operation).await;
    assert_eq!((survey.matching, survey.not_ready, survey.samples.len()), (6, 2, 4), "{survey:?}");
    let id = begun(&store, &operation).await;
    // What comes later is not meant.
    let later = message("b");
    store.commit(std::slice::from_ref(&later)).await;
    assert_eq!(stepped(&store).await, 4);
    assert_eq!(shown(&store, id).await.pending, 4);
    // Of what is replayed, nothing is late: it was sent before.
    let status = store.operator().status().await.expect("status");
    let unsent = status.routes[0].oldest_unsent_seconds.zip(status.routes[0].oldest_unread_seconds);
    assert!(unsent.is_some_and(|(unsent, unread)| (unsent - unread).abs() < 0.5), "{status:?}");
    let out = sent(&store, &source).await;
    let of_key = |key: &str| {
        let of = |message: &&postroom::Message| message.key.as_deref() == Some(key);
        finished.iter().chain([&unread, &later]).filter(of).map(|message| message.id).collect::<Vec<_>>()
    };
    for key in ["a", "b"] {
        let expected = of_key(key);
        let got: Vec<_> = out.iter().copied().filter(|id| expected.contains(id)).collect();
        assert_eq!(got, expected, "I4, and each once: {out:?}");
    }
    assert!(!out.contains(&doomed.id), "dead letters are retried, not replayed");
    stepped(&store).await;
    let report = shown(&store, id).await;
    assert_eq!(report.state, OperationState::Done, "{report:?}");
    assert_eq!((report.matched, report.left_alone, report.given_out, report.done), (6, 2, 4, 4), "{report:?}");
    assert!(report.failed.is_empty() && report.pending == 0 && report.removed == 0, "{report:?}");
    assert_eq!(report.coverage, Some(4.0 / 6.0));
    let audit: Vec<(String, usize)> = store.audit().await.into_iter().map(|row| (row.1, row.3)).collect();
    assert_eq!(audit, [("operation.begin".to_owned(), 0), ("replay".to_owned(), 4)], "I20");
    assert_eq!(stepped(&store).await, 0, "it is over");

    // By id, and with a new one.
    let one = replay(OperationFilter { ids: vec![finished[1].id], ..OperationFilter::default() });
    let again = begun(&store, &NewOperation { new_ids: true, ..one }).await;
    assert_eq!(stepped(&store).await, 1);
    let out = sent(&store, &source).await;
    assert!(out.len() == 1 && out[0] != finished[1].id, "no inbox recognises it");
    stepped(&store).await;
    assert_eq!(shown(&store, again).await.done, 1);
}

/// A sink that recognises what it has stored must know that a replay is another time.
pub async fn what_is_replayed_says_of_which_operation_it_is<F: Operated>(store: F) {
    let source = holding(&store, "relay").await;
    let finished = [message("a"), message("a"), message("b")];
    store.commit(&finished).await;
    let out = claim_all(&source).await;
    assert!(out.iter().all(|delivery| delivery.replay.is_none()), "{out:?}");
    settle(&source, out.iter().map(|delivery| (delivery.token, Outcome::Done))).await;
    written(&source).await;
    let filter = OperationFilter { topic: Some("orders".to_owned()), ..OperationFilter::default() };
    let id = begun(&store, &replay(filter)).await;
    assert_eq!(stepped(&store).await, 3);
    store.make_due().await;
    store.commit(&[message("c")]).await;
    let (mut replayed, mut fresh) = (0, 0);
    while replayed + fresh < 4 {
        let out = claim_all(&source).await;
        assert!(!out.is_empty(), "{replayed} of a replay and {fresh} others came");
        for delivery in &out {
            if finished.iter().any(|message| message.id == delivery.message.id) {
                assert_eq!(delivery.replay, Some(id), "{delivery:?}");
                replayed += 1;
            } else {
                assert_eq!(delivery.replay, None, "{delivery:?}");
                fresh += 1;
            }
        }
        settle(&source, out.iter().map(|delivery| (delivery.token, Outcome::Done))).await;
    }
    assert_eq!((replayed, fresh), (3, 1));
}

/// A replay that goes behind leaves the place of what waits in its key, and does not confuse a store about how far it has come.
pub async fn what_is_replayed_behind_waits_for_what_waits<F: Operated>(store: F) {
    let source = holding(&store, "relay").await;
    let first = [message("a"), message("a")];
    store.commit(&first).await;
    drain(&source).await;
    written(&source).await;
    let waiting = [message("a"), message("a")];
    store.commit(&waiting).await;
    let out = claim_all(&source).await;
    settle(&source, [(out[0].token, retry(1)), (out[1].token, Outcome::Queue)]).await;
    written(&source).await;
    let behind = NewOperation {
        place: ReplayPlace::Behind,
        ..replay(OperationFilter { ids: ids_of(&first), ..OperationFilter::default() })
    };
    let id = OperationId::new();
    if store.operator().begin_operation(id, &behind, &deed()).await.is_err() {
        // A store may refuse this, in words.
        return;
    }
    assert_eq!(stepped(&store).await, 2);
    let expected: Vec<_> = ids_of(&waiting).into_iter().chain(ids_of(&first)).collect();
    assert_eq!(sent(&store, &source).await, expected, "I4");
    stepped(&store).await;
    assert_eq!(shown(&store, id).await.done, 2);
    // One that dies there stays dead, and what is written later has its place.
    begun(&store, &behind).await;
    stepped(&store).await;
    let copy_is = async |what: &str| {
        let places = store.operator().whereabouts(first[0].id).await.expect("whereabouts");
        let told = places[0].because.iter().any(|line| line.contains("a replay") && line.contains(what));
        assert!(places[0].state == Place::Acked && told, "{places:?}");
    };
    copy_is("has not been sent yet").await;
    store.make_due().await;
    let out = claim_all(&source).await;
    settle(&source, out.iter().map(|delivery| (delivery.token, dead(false)))).await;
    written(&source).await;
    copy_is("is dead").await;
    source.release().await.expect("release");
    let source = holding(&store, "another").await;
    let later = [message("a"), message("a")];
    store.commit(&later).await;
    assert_eq!(sent(&store, &source).await, ids_of(&later));
}

/// A canary goes first, and what follows waits for a word, or for the canary to survive.
pub async fn a_canary_goes_first_and_the_rest_waits<F: Operated>(store: F) {
    let source = holding(&store, "relay").await;
    let messages: Vec<_> = (0..30).map(|n| message(&format!("key-{n}"))).collect();
    store.commit(&messages).await;
    drain(&source).await;
    written(&source).await;
    let canary = NewOperation { canary: Some(3), ..replay(OperationFilter::default()) };
    let told = begun(&store, &canary).await;
    assert_eq!(stepped(&store).await, 3);
    assert_eq!(shown(&store, told).await.state, OperationState::Running, "its canary has no outcome yet");
    assert_eq!(sent(&store, &source).await.len(), 3);
    assert_eq!(stepped(&store).await, 0);
    let waiting = shown(&store, told).await;
    assert_eq!((waiting.state, waiting.done), (OperationState::Waiting, 3), "{waiting:?}");
    assert!(waiting.note.is_some_and(|note| note.contains("all 3 canary messages")));
    let operator = store.operator();
    assert!(operator.steer_operation(told, Steer::Resume, &deed()).await.expect("resume"));
    assert!(!operator.steer_operation(told, Steer::Resume, &deed()).await.expect("resume"), "it runs already");
    assert_eq!(stepped(&store).await, 27);
    assert_eq!(sent(&store, &source).await.len(), 27);
    stepped(&store).await;
    assert_eq!(shown(&store, told).await.state, OperationState::Done);

    // One of which a message dies waits even if it may go on.
    let going_on = begun(&store, &NewOperation { goes_on: true, ..canary }).await;
    assert_eq!(stepped(&store).await, 3);
    store.make_due().await;
    let out = claim_all(&source).await;
    let outcome = |place| if place == 1 { dead(false) } else { Outcome::Done };
    settle(&source, out.iter().enumerate().map(|(place, delivery)| (delivery.token, outcome(place)))).await;
    written(&source).await;
    stepped(&store).await;
    let waiting = shown(&store, going_on).await;
    assert_eq!((waiting.state, waiting.done), (OperationState::Waiting, 2), "{waiting:?}");
    assert_eq!(waiting.failed.get("exhausted"), Some(&1), "{waiting:?}");
    assert!(operator.steer_operation(going_on, Steer::Cancel, &deed()).await.expect("cancel"));
    assert_eq!(stepped(&store).await, 0);
    let cancelled = shown(&store, going_on).await;
    assert_eq!((cancelled.state, cancelled.coverage), (OperationState::Cancelled, None), "{cancelled:?}");
    assert!(!operator.steer_operation(going_on, Steer::Resume, &deed()).await.expect("resume"), "it is over");
}

/// What somebody paused gives out nothing; who dies between two steps leaves nothing half done.
pub async fn a_paused_operation_gives_out_nothing_until_it_is_resumed<F: Operated>(store: F) {
    let source = holding(&store, "relay").await;
    let messages: Vec<_> = (0..900).map(|n| message(&format!("key-{}", n % 50))).collect();
    store.commit(&messages).await;
    drain(&source).await;
    written(&source).await;
    let id = begun(&store, &replay(OperationFilter::default())).await;
    let operator = store.operator();
    let first = operator.step_operations().await.expect("step").given_out;
    assert!((1..900).contains(&first), "one bounded step: {first}");
    assert!(operator.steer_operation(id, Steer::Pause, &deed()).await.expect("pause"));
    assert_eq!(stepped(&store).await, 0);
    assert!(operator.steer_operation(id, Steer::Resume, &deed()).await.expect("resume"));
    // Two processes at once: each message is given out once.
    let (one, other) = tokio::join!(stepped(&store), stepped(&store));
    assert_eq!(first + one + other + stepped(&store).await, 900);
    let mut out = sent(&store, &source).await;
    out.extend(sent(&store, &source).await);
    assert_eq!(out.len(), 900);
    for key in 0..50 {
        let expected: Vec<_> = messages.iter().skip(key).step_by(50).map(|message| message.id).collect();
        let got: Vec<_> = out.iter().copied().filter(|id| expected.contains(id)).collect();
        assert_eq!(got, expected, "I4");
    }
    stepped(&store).await;
    assert_eq!(shown(&store, id).await.done, 900);
}

/// At most a second's messages are saved up, and a clock that was ahead holds nothing up.
pub async fn an_operation_keeps_to_its_rate_whatever_the_clock_does<F: Operated>(store: F) {
    let source = holding(&store, "relay").await;
    let messages: Vec<_> = (0..200).map(|n| message(&format!("key-{n}"))).collect();
    store.commit(&messages).await;
    drain(&source).await;
    written(&source).await;
    begun(&store, &NewOperation { rate: Some(20), ..replay(OperationFilter::default()) }).await;
    let operator = store.operator();
    let step = async |seconds: f64| {
        store.stepped_ago(seconds).await;
        operator.step_operations().await.expect("step").given_out
    };
    assert_eq!(step(60.0).await, 20, "a second is saved up, and no more");
    assert!((10..=20).contains(&step(0.5).await));
    // The first step notices it, and from then on it keeps to its rate.
    let mut given = step(-3600.0).await;
    let going_on = async {
        while given == 0 {
            given = operator.step_operations().await.expect("step").given_out;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), going_on).await.expect("it waits for the clock");
    assert!(given <= 20);
}

/// Dead letters as incidents: groups by what they died of, retried and discarded as a whole.
pub async fn dead_letters_are_grouped_and_acted_on_by_group<F: Operated>(store: F) {
    let source = holding(&store, "relay").await;
    let messages: Vec<_> = (0..12).map(|n| message(&format!("key-{n}"))).collect();
    store.commit(&messages).await;
    let out = claim_all(&source).await;
    let dies_of =
        |error: String| Outcome::Dead { attempts: 1, cause: postroom::Cause::Permanent, error, blocks_key: false };
    let outcomes = out.iter().map(|delivery| {
        let n = messages.iter().position(|message| message.id == delivery.message.id).expect("one of ours");
        let error = if n < 8 { format!("order {n} is unknown") } else { format!("no stock of item {n}") };
        (delivery.token, dies_of(error))
    });
    settle(&source, outcomes.collect::<Vec<_>>()).await;
    written(&source).await;

    let operator = store.operator();
    let mut grouping = Grouping::new(Side::Out);
    let mut after = None;
    loop {
        let page = operator.dead_headlines(Side::Out, after.as_ref(), 5).await.expect("headlines");
        page.iter().for_each(|letter| grouping.add(letter));
        match page.last() {
            Some(last) => after = Some(last.cursor()),
            None => break,
        }
    }
    let (groups, others) = grouping.end();
    let shapes: Vec<(&str, u64)> = groups.iter().map(|group| (group.error.as_str(), group.messages)).collect();
    assert_eq!((shapes, others), (vec![("order # is unknown", 8), ("no stock of item #", 4)], 0));
    let [unknown, no_stock] = [&groups[0].group, &groups[1].group];
    operator.note_dead(unknown, "fixed in 1.2", &deed()).await.expect("note");
    let notes = operator.dead_notes(&[unknown.clone(), no_stock.clone()]).await.expect("notes");
    assert!(notes.len() == 1 && notes[0].0 == *unknown && notes[0].1.note == "fixed in 1.2", "{notes:?}");

    let of_group = |kind, group: &String| NewOperation {
        kind,
        ..replay(OperationFilter { group: Some(group.clone()), ..OperationFilter::default() })
    };
    let retry = of_group(OperationKind::Retry, unknown);
    assert_eq!(surveyed(&store, &retry).await.matching, 8);
    let day = 86_400_000;
    let died = surveyed(&store, &retry).await.oldest_ms.expect("they died");
    for (since_ms, until_ms, matching) in [
        (Some(died - day), None, 8),
        (Some(died + day), None, 0),
        (None, Some(died - day), 0),
        (None, Some(died + day), 8),
    ] {
        let filter = OperationFilter { since_ms, until_ms, ..retry.filter.clone() };
        assert_eq!(surveyed(&store, &NewOperation { filter, ..retry.clone() }).await.matching, matching);
    }
    let retried = begun(&store, &retry).await;
    assert_eq!(stepped(&store).await, 8);
    // What died was never sent.
    let status = operator.status().await.expect("status");
    assert!(status.routes[0].oldest_unsent_seconds.is_some(), "{status:?}");
    let mut out = sent(&store, &source).await;
    out.sort_unstable();
    let mut expected = ids_of(&messages[..8]);
    expected.sort_unstable();
    assert_eq!(out, expected);
    // A canary holds back what is deleted too.
    let discard = NewOperation { canary: Some(1), ..of_group(OperationKind::Discard, no_stock) };
    let discarded = begun(&store, &discard).await;
    assert_eq!(stepped(&store).await, 1);
    assert_eq!(shown(&store, discarded).await.state, OperationState::Waiting);
    assert!(operator.steer_operation(discarded, Steer::Resume, &deed()).await.expect("resume"));
    assert_eq!(stepped(&store).await, 3);
    stepped(&store).await;
    for (id, messages) in [(retried, 8), (discarded, 4)] {
        let report = shown(&store, id).await;
        assert_eq!((report.state, report.done, report.left_alone), (OperationState::Done, messages, 0), "{report:?}");
    }
    assert!(operator.dead_headlines(Side::Out, None, 5).await.expect("headlines").is_empty());
    let actions: Vec<(String, usize)> = store.audit().await.into_iter().map(|row| (row.1, row.3)).collect();
    let expected = [
        ("dead.note", 0),
        ("operation.begin", 0),
        ("dead.retry", 8),
        ("operation.begin", 0),
        ("dead.discard", 1),
        ("operation.resume", 0),
        ("dead.discard", 3),
    ];
    assert_eq!(actions, expected.map(|(action, ids)| (action.to_owned(), ids)));
    assert!(ids(&claim_all(&source).await).is_empty());
}

/// The report says what became of each message, whatever others do meanwhile: one that died and was discarded failed, and what was gone
/// before its turn is told. One whose route is gone ends, and paused ones keep nobody waiting.
pub async fn a_report_is_true_whatever_others_do_meanwhile<F: Operated>(store: F) {
    let source = holding(&store, "relay").await;
    let messages = [message("a"), message("b"), message("c")];
    store.commit(&messages).await;
    drain(&source).await;
    written(&source).await;
    let operator = store.operator();
    for _ in 0..25 {
        let paused = begun(&store, &replay(OperationFilter::default())).await;
        assert!(operator.steer_operation(paused, Steer::Pause, &deed()).await.expect("pause"));
    }
    let planned = NewOperation { planned: Some(5), ..replay(OperationFilter::default()) };
    let id = begun(&store, &planned).await;
    assert_eq!(stepped(&store).await, 3, "paused ones take nobody's turn");
    store.make_due().await;
    let out = claim_all(&source).await;
    let doomed = messages[1].id;
    let outcome = |id| if id == doomed { dead(false) } else { Outcome::Done };
    settle(&source, out.iter().map(|delivery| (delivery.token, outcome(delivery.message.id)))).await;
    written(&source).await;
    let all = DeadFilter::default();
    let gone =
        operator.act_on_dead(DeadDeed::Discard, Side::Out, &all, 10, &deed(), &mut |_| ()).await.expect("discard");
    assert_eq!(gone.len(), 1);
    stepped(&store).await;
    let report = shown(&store, id).await;
    assert_eq!((report.state, report.done, report.removed), (OperationState::Done, 2, 0), "{report:?}");
    assert_eq!((report.failed.get("exhausted"), report.gone, report.coverage), (Some(&1), 2, Some(0.4)), "{report:?}");

    let late = begun(&store, &replay(OperationFilter::default())).await;
    source.release().await.expect("release");
    operator.forget_route("orders", true, &deed()).await.expect("forget");
    stepped(&store).await;
    let ended = shown(&store, late).await;
    assert_eq!((ended.state, ended.given_out), (OperationState::Cancelled, 0), "{ended:?}");
    assert!(ended.note.is_some_and(|note| note.contains("route is gone")));
}
