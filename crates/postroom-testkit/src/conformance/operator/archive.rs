//! Messages that leave for an archive, and come back. No archive is needed for that: a test is trusted with what it has read.

use std::time::{Duration, SystemTime};

use postroom::{
    ArchivedMessage, Expired, NewOperation, OperationFilter, OperationKind, Operator, Part, Place, ReplayPlace,
    Retention, Segment, Side, Sweep, Turn,
};

use super::super::source::{claim_all, drain, holding, ids, ids_of, message};
use super::{DAY, Operated, deed, places, written};

const WEEK: Retention = Retention {
    outbox: Some(Duration::from_secs(7 * 24 * 3600)),
    topics: Vec::new(),
    dead: None,
    inbox: None,
    audit: None,
};
/// A segment is left to its process for less than this.
const LATER: Duration = Duration::from_secs(120);

async fn expired(operator: &dyn Operator) -> Vec<Expired> {
    let (mut sweep, mut found) = (Sweep::begin(&WEEK), Vec::new());
    assert_eq!(sweep.parts, [Part::Outbox]);
    while !sweep.is_over() {
        found.extend(operator.find_expired(&WEEK, &mut sweep).await.expect("look"));
    }
    found
}

fn old(key: &str) -> postroom::Message {
    postroom::Message { occurred_at: SystemTime::now().checked_sub(10 * DAY), ..message(key) }
}

fn same(archived: &ArchivedMessage, message: &postroom::Message) -> bool {
    let occurred = message.occurred_at.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
    let occurred_us = occurred.map(|since| i64::try_from(since.as_micros()).expect("now"));
    archived.id == *message.id.as_uuid()
        && archived.topic == message.topic
        && archived.kind == message.kind
        && archived.payload == message.payload
        && archived.key == message.key
        && archived.routing_key == message.routing_key
        && archived.content_type == message.content_type
        && postroom::headers_from_json(archived.headers.as_deref()) == message.headers
        && archived.tenant_id == message.tenant_id
        && archived.aggregate_type == message.aggregate_type
        && archived.aggregate_id == message.aggregate_id
        && archived.aggregate_version == message.aggregate_version
        // A store may keep milliseconds.
        && occurred_us.is_some_and(|us| us.abs_diff(archived.occurred_us) < 1000)
        && archived.unreadable.is_empty()
}

fn replay_of(messages: &[postroom::Message]) -> NewOperation {
    NewOperation {
        kind: OperationKind::Replay,
        side: Side::Out,
        route: "orders".to_owned(),
        filter: OperationFilter { ids: ids_of(messages), ..OperationFilter::default() },
        planned: None,
        canary: None,
        goes_on: false,
        rate: None,
        place: ReplayPlace::Before,
        new_ids: false,
    }
}

async fn replayed<F: Operated>(store: &F, messages: &[postroom::Message]) -> u64 {
    let id = postroom::OperationId::new();
    store.operator().begin_operation(id, &replay_of(messages), &deed()).await.expect("begin");
    let mut given = 0;
    loop {
        let stepped = store.operator().step_operations().await.expect("step");
        given += stepped.given_out;
        if stepped.given_out == 0 && stepped.going_on == 0 {
            return given;
        }
    }
}

/// M72, I13: a segment is written down before anything leaves, is taken over from a process that died, and only its end removes messages.
pub async fn what_leaves_for_an_archive_leaves_once_and_nothing_else_does<F: Operated>(store: F) {
    let source = holding(&store, "relay").await;
    let rich = postroom::Message {
        payload: vec![0, 159, 146, 150].into(),
        routing_key: Some("orders.eu".to_owned()),
        content_type: "application/octet-stream".to_owned(),
        headers: [("trace".to_owned(), "a\nb".to_owned())].into(),
        tenant_id: Some("acme".to_owned()),
        aggregate_type: Some("order".to_owned()),
        aggregate_id: Some("o-1".to_owned()),
        aggregate_version: Some(7),
        ..old("a")
    };
    let leaving = [old("a"), rich, old("b"), old("c"), old("a")];
    let (young, last) = (message("d"), message("e"));
    store.commit(&leaving).await;
    store.commit(&[young, last]).await;
    let operator = store.operator();
    assert!(expired(operator.as_ref()).await.is_empty(), "not sent yet");
    drain(&source).await;
    written(&source).await;

    let found = expired(operator.as_ref()).await;
    assert_eq!(found.len(), 5);
    assert!(found.iter().all(|found| found.bytes > 0), "{found:?}");
    let segment = operator.begin_segment(&found).await.expect("begin").expect("nobody else is at it");
    assert!(operator.begin_segment(&found).await.expect("begin").is_none(), "once");
    assert!(expired(operator.as_ref()).await.is_empty(), "on its way");
    assert_eq!(operator.take_segment().await.expect("take"), Turn::Others, "its process lives, for all that is known");
    let refused = operator.retain(&WEEK, &mut Sweep::begin(&WEEK)).await;
    assert!(refused.is_err_and(|error| !error.is_transient()), "nothing is removed that is not archived");

    // The process died.
    store.grow_older(LATER).await;
    assert_eq!(operator.take_segment().await.expect("take"), Turn::Ours(segment), "nobody works on it");
    let archived = operator.segment_messages(segment.id).await.expect("messages");
    assert_eq!(archived, operator.segment_messages(segment.id).await.expect("messages"), "in a fixed order");
    assert_eq!(archived.len(), 5);
    for message in &leaving {
        assert!(archived.iter().any(|one| same(one, message)), "{message:?} in {archived:?}");
    }

    // One is replayed meanwhile: it stays until it is sent.
    assert_eq!(replayed(&store, &leaving[2..3]).await, 1);
    assert_eq!(operator.end_segment(segment.id).await.expect("end"), 4);
    assert_eq!(operator.take_segment().await.expect("take"), Turn::Nobodys, "what is left waits for its route");
    store.grow_older(LATER).await;
    let rest = Segment { stored: true, ..segment };
    assert_eq!(operator.take_segment().await.expect("take"), Turn::Ours(rest));
    assert_eq!(operator.end_segment(segment.id).await.expect("end"), 0, "still not sent");
    store.make_due().await;
    assert_eq!(drain(&source).await, [leaving[2].id]);
    written(&source).await;
    operator.step_operations().await.expect("step");
    assert!(expired(operator.as_ref()).await.is_empty(), "the archive has it");
    assert_eq!(operator.end_segment(segment.id).await.expect("end"), 1);
    store.grow_older(LATER).await;
    assert_eq!(operator.take_segment().await.expect("take"), Turn::Nobodys, "it is over");
    for gone in &leaving {
        assert!(operator.message(gone.id).await.expect("look").is_none());
    }
    assert!(operator.begin_segment(&found).await.expect("begin").is_none(), "nothing of it is there any more");
}

/// M72, M70: what comes back has its id and its old place, is sent by nobody, can be replayed, and goes again without being archived twice.
pub async fn what_comes_back_is_sent_only_by_a_replay<F: Operated>(store: F) {
    let source = holding(&store, "relay").await;
    let leaving = [old("a"), old("b"), old("a"), old("a")];
    store.commit(&leaving).await;
    let stays = [message("a"), message("z")];
    store.commit(&stays).await;
    drain(&source).await;
    written(&source).await;
    let operator = store.operator();
    let found = expired(operator.as_ref()).await;
    let segment = operator.begin_segment(&found).await.expect("begin").expect("a segment");
    let archived = operator.segment_messages(segment.id).await.expect("messages");
    assert_eq!(operator.end_segment(segment.id).await.expect("end"), 4);

    let back = operator.restore(&archived, 7 * DAY, &deed()).await.expect("restore");
    assert_eq!((back.restored, back.present, back.ahead, back.taken), (4, 0, 0, 0), "{back:?}");
    let mut restored = back.ids;
    restored.sort_unstable();
    let mut expected = ids_of(&leaving);
    expected.sort_unstable();
    assert_eq!(restored, expected);
    let again = operator.restore(&archived, 7 * DAY, &deed()).await.expect("restore");
    assert_eq!((again.restored, again.present), (0, 4), "once");
    let audit: Vec<(String, usize)> = store.audit().await.into_iter().map(|row| (row.1, row.3)).collect();
    assert_eq!(audit, [("archive.restore".to_owned(), 4)], "I20");
    assert!(ids(&claim_all(&source).await).is_empty(), "nobody sends them");
    assert_eq!(places(&store, leaving[0].id).await, [Place::Passed], "a route that is newer never had it");
    assert!(expired(operator.as_ref()).await.is_empty(), "they are not archived twice");
    assert_eq!(operator.forget_restored().await.expect("forget"), 0, "they stay for a while");

    // In front of what waits, in the order of their key.
    let new = message("a");
    store.commit(std::slice::from_ref(&new)).await;
    assert_eq!(replayed(&store, &leaving).await, 4);
    store.grow_older(8 * DAY).await;
    assert_eq!(operator.forget_restored().await.expect("forget"), 0, "they wait to be sent");
    store.make_due().await;
    let sent = drain(&source).await;
    written(&source).await;
    let of_a: Vec<_> = sent.iter().copied().filter(|id| *id != leaving[1].id).collect();
    assert_eq!(of_a, [leaving[0].id, leaving[2].id, leaving[3].id, new.id], "I4, I18");
    operator.step_operations().await.expect("step");
    assert_eq!(operator.forget_restored().await.expect("forget"), 4);
    for gone in &leaving {
        assert!(operator.message(gone.id).await.expect("look").is_none());
    }

    // What would be sent as new, or has no place.
    let there = operator.restore(&archived[..1], DAY, &deed()).await.expect("restore");
    assert_eq!(there.restored, 1, "a second time");
    let elsewhere = |seq: i64, mut one: ArchivedMessage| {
        (one.seq, one.id) = (seq, *postroom::MessageId::new().as_uuid());
        one
    };
    let others = [elsewhere(archived[0].seq, archived[0].clone()), elsewhere(i64::MAX / 8, archived[1].clone())];
    let refused = operator.restore(&others, DAY, &deed()).await.expect("restore");
    assert_eq!((refused.restored, refused.taken, refused.ahead), (0, 1, 1), "{refused:?}");
    assert!(ids(&claim_all(&source).await).is_empty());
}
