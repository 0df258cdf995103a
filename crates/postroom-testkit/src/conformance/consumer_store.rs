//! What every `ConsumerStore` promises to those who handle messages, through every driver.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{
    Admitted, Aggregate, Cause, Consumer, ConsumerStore, FillerStore, Keep, Message, MessageId, Session, Settle,
    StoreError, Waiting,
};

use super::Fixture;

const LEASE: Duration = Duration::from_secs(600);
const CLAIMS_MAX: u32 = 3;

/// A store with an inbox, through one driver.
#[async_trait]
pub trait Inbox: Fixture {
    /// The store and its driver.
    type Store: ConsumerStore;
    /// A worker's connection.
    type Session: Session<Self::Store>;

    /// A new connection.
    fn session(&self) -> Self::Session;

    /// As if every claim had been held for longer than its lease, and every wait were over.
    async fn make_due(&self);

    /// Ids among the dead of this consumer, oldest first, with their cause and error.
    async fn dead(&self, consumer: &Consumer) -> Vec<(MessageId, String, String)>;
}

/// The tests of one implementation.
#[macro_export]
macro_rules! consumer_store_conforms {
    ($fixture:ty) => {
        $crate::conformance_cases!(
            $fixture,
            consumer_store: a_message_is_admitted_once_for_each_consumer
            what_is_rolled_back_was_never_admitted
            what_is_kept_is_taken_whole_one_of_each_key_at_a_time
            a_message_behind_a_waiting_one_of_its_key_is_told_so
            a_retry_waits_and_its_key_with_it
            a_claim_that_lapsed_settles_nothing
            a_claim_that_is_renewed_stays
            what_is_given_back_costs_no_claim
            a_message_that_ends_its_workers_becomes_a_dead_letter
            what_ended_its_workers_too_often_is_never_handed_out_again
            a_dead_message_lets_its_key_go_on
            many_workers_drain_long_queues_in_order
            what_cannot_be_kept_is_kept_as_dead
            an_early_version_waits_for_its_predecessor
            one_filler_at_a_time
        );
    };
}

fn consumer() -> Consumer {
    Consumer::new("totals").expect("a name")
}

fn message(key: &str) -> Message {
    Message::new("orders", "order.placed", "x").key(key)
}

/// Runs this in a transaction of its own, and commits it.
macro_rules! committed {
    ($session:expr, $store:ty, |$tx:ident| $work:expr) => {{
        let mut $tx = $session.begin().await.expect("begin");
        let result = $work;
        <$store>::commit($tx).await.expect("commit");
        result
    }};
}

async fn keep<F: Inbox>(session: &mut F::Session, messages: &[Message], how: Keep<'_>) -> i64 {
    committed!(session, F::Store, |tx| {
        let arrivals: Vec<(MessageId, Option<String>)> =
            messages.iter().map(|message| (message.id, message.ordering_key().map(str::to_owned))).collect();
        F::Store::admit(&mut tx, &consumer(), &arrivals).await.expect("admit");
        F::Store::keep(&mut tx, &consumer(), messages, how).await.expect("keep")
    })
}

async fn take<F: Inbox>(session: &mut F::Session, max: usize) -> Vec<Waiting> {
    committed!(session, F::Store, |tx| {
        F::Store::take(&mut tx, &consumer(), "worker", max, LEASE, CLAIMS_MAX).await.expect("take")
    })
}

async fn settle<F: Inbox>(session: &mut F::Session, waiting: &Waiting, how: Settle) -> bool {
    let mut tx = session.begin().await.expect("begin");
    let held = F::Store::settle(&mut tx, &consumer(), waiting.message.id, waiting.claim, &how).await.expect("settle");
    if held {
        F::Store::commit(tx).await.expect("commit");
    }
    held
}

fn ids(waiting: &[Waiting]) -> Vec<MessageId> {
    waiting.iter().map(|waiting| waiting.message.id).collect()
}

/// I5.
pub async fn a_message_is_admitted_once_for_each_consumer<F: Inbox>(inbox: F) {
    let mut session = inbox.session();
    let (one, two) = (MessageId::new(), MessageId::new());
    let other = Consumer::new("other").expect("a name");
    let mut admit = async |consumer: &Consumer, ids: &[MessageId]| {
        let arrivals: Vec<(MessageId, Option<String>)> = ids.iter().map(|id| (*id, None)).collect();
        committed!(session, F::Store, |tx| F::Store::admit(&mut tx, consumer, &arrivals).await.expect("admit"))
    };
    assert_eq!(admit(&consumer(), &[one]).await, [Admitted::New]);
    assert_eq!(admit(&consumer(), &[two, one]).await, [Admitted::New, Admitted::Duplicate], "in the order asked for");
    assert_eq!(admit(&other, &[one]).await, [Admitted::New], "each consumer has its own");
    assert_eq!(admit(&consumer(), &[]).await, []);
}

pub async fn what_is_rolled_back_was_never_admitted<F: Inbox>(inbox: F) {
    let mut session = inbox.session();
    let message = message("a");
    {
        let mut tx = session.begin().await.expect("begin");
        let arrivals = [(message.id, Some("a".to_owned()))];
        F::Store::admit(&mut tx, &consumer(), &arrivals).await.expect("admit");
        F::Store::keep(&mut tx, &consumer(), std::slice::from_ref(&message), Keep::Ready).await.expect("keep");
        // Dropped.
    }
    assert!(take::<F>(&mut session, 10).await.is_empty());
    keep::<F>(&mut session, std::slice::from_ref(&message), Keep::Ready).await;
    assert_eq!(ids(&take::<F>(&mut session, 10).await), [message.id]);
}

/// I4 and I6.
pub async fn what_is_kept_is_taken_whole_one_of_each_key_at_a_time<F: Inbox>(inbox: F) {
    let mut session = inbox.session();
    let mut whole = message("a").tenant("t-1").aggregate("order", "o-1", 3).content_type("x/y").header("h", "v\0");
    whole.payload = vec![0, 0xff, 0xfe].into();
    whole.routing_key = Some("to.here".to_owned());
    let messages = [whole.clone(), message("a"), message("b"), message("b")];
    keep::<F>(&mut session, &messages, Keep::Ready).await;
    let first = take::<F>(&mut session, 10).await;
    assert_eq!(first.len(), 2, "of each key the first");
    let found = &first.iter().find(|waiting| waiting.message.id == whole.id).expect("the first of its key").message;
    assert!(found.payload == whole.payload && found.headers == whole.headers);
    assert_eq!((&found.topic, &found.kind, &found.key), (&whole.topic, &whole.kind, &whole.key));
    assert_eq!((&found.routing_key, &found.content_type), (&whole.routing_key, &whole.content_type));
    assert_eq!((&found.tenant_id, &found.aggregate_type), (&whole.tenant_id, &whole.aggregate_type));
    assert_eq!((&found.aggregate_id, found.aggregate_version), (&whole.aggregate_id, whole.aggregate_version));
    assert!(take::<F>(&mut session, 10).await.is_empty(), "the others wait for those");
    for waiting in &first {
        assert_eq!((waiting.claims, waiting.attempts, waiting.window_over), (1, 0, false));
        assert!(settle::<F>(&mut session, waiting, Settle::Done).await);
    }
    let second = take::<F>(&mut session, 1).await;
    assert_eq!(second.len(), 1, "no more than asked for");
    let third = take::<F>(&mut session, 10).await;
    let mut rest = [ids(&second), ids(&third)].concat();
    rest.sort_unstable();
    let mut expected = vec![messages[1].id, messages[3].id];
    expected.sort_unstable();
    assert_eq!(rest, expected);
}

pub async fn a_message_behind_a_waiting_one_of_its_key_is_told_so<F: Inbox>(inbox: F) {
    let mut session = inbox.session();
    keep::<F>(&mut session, &[message("a")], Keep::Ready).await;
    let arrivals =
        [(MessageId::new(), Some("a".to_owned())), (MessageId::new(), Some("b".to_owned())), (MessageId::new(), None)];
    let admitted =
        committed!(session, F::Store, |tx| F::Store::admit(&mut tx, &consumer(), &arrivals).await.expect("admit"));
    assert_eq!(admitted, [Admitted::Behind, Admitted::New, Admitted::New]);
}

pub async fn a_retry_waits_and_its_key_with_it<F: Inbox>(inbox: F) {
    let mut session = inbox.session();
    let messages = [message("a"), message("a")];
    keep::<F>(&mut session, &messages, Keep::Ready).await;
    let first = take::<F>(&mut session, 10).await.remove(0);
    let retry = Settle::Retry { after: LEASE, attempts: 2, error: "no".to_owned() };
    assert!(settle::<F>(&mut session, &first, retry).await);
    assert!(take::<F>(&mut session, 10).await.is_empty());
    inbox.make_due().await;
    let again = take::<F>(&mut session, 10).await;
    assert_eq!((ids(&again), again[0].attempts, again[0].claims), (vec![messages[0].id], 2, 1));
    assert!(again[0].claim != first.claim, "another claim");
}

/// I9: what a worker does that was taken for gone is undone.
pub async fn a_claim_that_lapsed_settles_nothing<F: Inbox>(inbox: F) {
    let mut session = inbox.session();
    let message = message("a");
    keep::<F>(&mut session, std::slice::from_ref(&message), Keep::Ready).await;
    let stale = take::<F>(&mut session, 10).await.remove(0);
    inbox.make_due().await;
    let owned = take::<F>(&mut session, 10).await.remove(0);
    assert_eq!((owned.message.id, owned.claims), (message.id, 2));
    for how in [Settle::Done, Settle::GivenBack, Settle::Early { window: LEASE }] {
        assert!(!settle::<F>(&mut session, &stale, how).await);
    }
    assert!(settle::<F>(&mut session, &owned, Settle::Done).await);
    assert!(!settle::<F>(&mut session, &owned, Settle::Done).await, "it is settled");
    inbox.make_due().await;
    assert!(take::<F>(&mut session, 10).await.is_empty());
}

pub async fn a_claim_that_is_renewed_stays<F: Inbox>(inbox: F) {
    let mut session = inbox.session();
    let messages = [message("a"), message("b")];
    keep::<F>(&mut session, &messages, Keep::Ready).await;
    let taken = take::<F>(&mut session, 10).await;
    inbox.make_due().await;
    committed!(session, F::Store, |tx| {
        let claims = [(taken[0].message.id, taken[0].claim), (taken[1].message.id, taken[1].claim + 1000)];
        F::Store::renew(&mut tx, &consumer(), &claims, LEASE).await.expect("renew");
    });
    let lapsed = take::<F>(&mut session, 10).await;
    assert_eq!(ids(&lapsed), [taken[1].message.id], "a claim that does not hold is not renewed");
    assert!(settle::<F>(&mut session, &taken[0], Settle::Done).await);
}

pub async fn what_is_given_back_costs_no_claim<F: Inbox>(inbox: F) {
    let mut session = inbox.session();
    keep::<F>(&mut session, &[message("a")], Keep::Ready).await;
    for _ in 0..2 * CLAIMS_MAX {
        let taken = take::<F>(&mut session, 10).await.remove(0);
        assert_eq!(taken.claims, 1);
        assert!(settle::<F>(&mut session, &taken, Settle::GivenBack).await);
    }
    assert!(inbox.dead(&consumer()).await.is_empty());
}

/// I10.
pub async fn a_message_that_ends_its_workers_becomes_a_dead_letter<F: Inbox>(inbox: F) {
    let mut session = inbox.session();
    let messages = [message("a"), message("a")];
    keep::<F>(&mut session, &messages, Keep::Ready).await;
    for claims in 1..=CLAIMS_MAX {
        assert_eq!(take::<F>(&mut session, 10).await[0].claims, claims);
        inbox.make_due().await;
    }
    // The take that finds it buries it; its key goes on with that one or with the next.
    let mut next = take::<F>(&mut session, 10).await;
    if next.is_empty() {
        next = take::<F>(&mut session, 10).await;
    }
    assert_eq!(ids(&next), [messages[1].id]);
    let dead = inbox.dead(&consumer()).await;
    assert_eq!((dead.len(), dead[0].0, dead[0].1.as_str()), (1, messages[0].id, Cause::Poison.as_str()));
}

/// I10. A take buries so many of them at most; the others wait for the next one.
pub async fn what_ended_its_workers_too_often_is_never_handed_out_again<F: Inbox>(inbox: F) {
    const MESSAGES: usize = 250;
    let mut session = inbox.session();
    let messages: Vec<Message> = (0..MESSAGES).map(|_| Message::new("orders", "order.placed", "x")).collect();
    keep::<F>(&mut session, &messages, Keep::Ready).await;
    for _ in 1..=CLAIMS_MAX {
        let mut taken = 0;
        while taken < MESSAGES {
            taken += take::<F>(&mut session, 1000).await.len();
        }
        inbox.make_due().await;
    }
    for _ in 0..MESSAGES {
        assert_eq!(ids(&take::<F>(&mut session, 1000).await), []);
        if inbox.dead(&consumer()).await.len() == MESSAGES {
            return;
        }
    }
    panic!("{} of {MESSAGES} are dead", inbox.dead(&consumer()).await.len());
}

pub async fn a_dead_message_lets_its_key_go_on<F: Inbox>(inbox: F) {
    let mut session = inbox.session();
    let messages = [message("a"), message("a")];
    keep::<F>(&mut session, &messages, Keep::Ready).await;
    let first = take::<F>(&mut session, 10).await.remove(0);
    let dead = Settle::Dead { attempts: 8, cause: Cause::Exhausted, error: "no".to_owned() };
    assert!(settle::<F>(&mut session, &first, dead).await);
    assert_eq!(ids(&take::<F>(&mut session, 10).await), [messages[1].id]);
    assert_eq!(inbox.dead(&consumer()).await, [(messages[0].id, "exhausted".to_owned(), "no".to_owned())]);
    let known = committed!(session, F::Store, |tx| {
        F::Store::admit(&mut tx, &consumer(), &[(messages[0].id, None)]).await.expect("admit")
    });
    assert_eq!(known, [Admitted::Duplicate], "a repeated delivery of it is no news");
}

/// I4, and no message is left waiting although its turn has come: workers settle and take at the same time.
pub async fn many_workers_drain_long_queues_in_order<F: Inbox>(inbox: F) {
    const KEYS: i64 = 6;
    const EACH: i64 = 40;
    let queued: Vec<Message> = (0..KEYS * EACH)
        .map(|n| message(&format!("key-{}", n % KEYS)).aggregate("queue", format!("key-{}", n % KEYS), n / KEYS))
        .collect();
    keep::<F>(&mut inbox.session(), &queued, Keep::Ready).await;
    let (left, handled) = (Mutex::new(queued.len()), Mutex::new(HashMap::<String, Vec<i64>>::new()));
    let worker = async |number: usize| {
        let mut session = inbox.session();
        let mut turn = number;
        while *left.lock().expect("unharmed") > 0 {
            let taken = {
                let mut tx = session.begin().await.expect("begin");
                match F::Store::take(&mut tx, &consumer(), "worker", 1 + number % 3, LEASE, CLAIMS_MAX).await {
                    Ok(taken) => F::Store::commit(tx).await.map(|()| taken).unwrap_or_default(),
                    Err(StoreError::Busy { .. }) => Vec::new(),
                    Err(error) => panic!("take: {error}"),
                }
            };
            for waiting in taken {
                let error = "no".to_owned();
                turn += 1;
                let how = match turn % 9 {
                    0 => Settle::GivenBack,
                    3 => Settle::Retry { after: Duration::ZERO, attempts: 1, error },
                    // The last key steps aside now and then, and is in no order any more.
                    6 if waiting.message.key.as_deref() == Some("key-5") => Settle::Early { window: Duration::ZERO },
                    7 => Settle::Dead { attempts: 1, cause: Cause::Permanent, error },
                    _ => Settle::Done,
                };
                // Before others see that it is settled: its answer may come later than what they do then.
                if matches!(how, Settle::Done | Settle::Dead { .. }) {
                    let mut handled = handled.lock().expect("unharmed");
                    let queue = handled.entry(waiting.message.key.clone().unwrap_or_default()).or_default();
                    queue.extend(waiting.message.aggregate_version);
                }
                // What was not settled is this worker's still.
                let ended = loop {
                    let mut tx = session.begin().await.expect("begin");
                    match F::Store::settle(&mut tx, &consumer(), waiting.message.id, waiting.claim, &how).await {
                        Ok(held) if F::Store::commit(tx).await.is_ok() => break held,
                        Ok(_) | Err(StoreError::Busy { .. }) => {}
                        Err(error) => panic!("settle: {error}"),
                    }
                };
                assert!(ended, "nobody else has it: {:?}", waiting.message.id);
                if matches!(how, Settle::Done | Settle::Dead { .. }) {
                    *left.lock().expect("unharmed") -= 1;
                }
            }
        }
    };
    let all = futures_util::future::join_all((0..6).map(worker));
    if tokio::time::timeout(Duration::from_secs(120), all).await.is_err() {
        panic!("{} of {} messages were left where nobody takes them", left.lock().expect("unharmed"), queued.len());
    }
    let mut handled = handled.into_inner().expect("unharmed");
    handled.remove("key-5");
    for (key, versions) in handled {
        assert!(versions.iter().copied().eq(0..EACH), "{key} was handled in the order {versions:?}");
    }
}

pub async fn what_cannot_be_kept_is_kept_as_dead<F: Inbox>(inbox: F) {
    let mut session = inbox.session();
    // Longer than any index takes.
    let mut message = message(&"k".repeat(100_000));
    message.topic = "t".repeat(5_000);
    committed!(session, F::Store, |tx| {
        let arrivals = [(message.id, None)];
        F::Store::admit(&mut tx, &consumer(), &arrivals).await.expect("admit");
        F::Store::keep_dead(&mut tx, &consumer(), &message, "its key is too long").await.expect("keep as dead");
    });
    let dead = inbox.dead(&consumer()).await;
    assert_eq!(dead, [(message.id, "permanent".to_owned(), "its key is too long".to_owned())]);
    assert!(take::<F>(&mut session, 10).await.is_empty());
}

pub async fn an_early_version_waits_for_its_predecessor<F: Inbox>(inbox: F) {
    let mut session = inbox.session();
    let aggregate = Aggregate { kind: "order".to_owned(), id: "o-1".to_owned() };
    let of = |version| Message::new("orders", "order.placed", "x").aggregate("order", "o-1", version);
    let early = of(3);
    keep::<F>(&mut session, std::slice::from_ref(&early), Keep::Early { window: LEASE }).await;
    assert!(take::<F>(&mut session, 10).await.is_empty());
    committed!(session, F::Store, |tx| {
        let known = F::Store::version(&mut tx, &consumer(), &aggregate).await.expect("the version");
        assert_eq!(known, None);
        F::Store::set_version(&mut tx, &consumer(), &aggregate, 1).await.expect("set the version");
        let waiting = F::Store::waiting_versions(&mut tx, &consumer(), &aggregate, 1, 9).await.expect("what waits");
        assert_eq!(waiting, [(3, true)]);
    });
    assert!(take::<F>(&mut session, 10).await.is_empty(), "2 is missing");
    committed!(session, F::Store, |tx| {
        let known = F::Store::version(&mut tx, &consumer(), &aggregate).await.expect("the version");
        assert_eq!(known, Some(1));
        F::Store::set_version(&mut tx, &consumer(), &aggregate, 2).await.expect("set the version");
    });
    let taken = take::<F>(&mut session, 10).await;
    assert_eq!((ids(&taken), taken[0].window_over), (vec![early.id], false), "its predecessor was handled");
    assert!(settle::<F>(&mut session, &taken[0], Settle::Done).await);
    let alone = of(7);
    keep::<F>(&mut session, std::slice::from_ref(&alone), Keep::Early { window: LEASE }).await;
    inbox.make_due().await;
    let taken = take::<F>(&mut session, 10).await;
    assert_eq!((ids(&taken), taken[0].window_over), (vec![alone.id], true), "the window is over");
}

/// I7 of the receiving side: two that kept messages at once would keep a key in any order.
pub async fn one_filler_at_a_time<F: Inbox>(inbox: F) {
    let (mut session, consumer) = (inbox.session(), consumer());
    let seen = committed!(session, F::Store, |tx| F::Store::filler(&mut tx, &consumer).await.expect("the filler"));
    assert_eq!(seen, None);
    let first = committed!(session, F::Store, |tx| {
        F::Store::take_inbox(&mut tx, &consumer, "first", LEASE, None).await.expect("take it").expect("it was free")
    });
    let late = committed!(session, F::Store, |tx| {
        F::Store::take_inbox(&mut tx, &consumer, "late", LEASE, None).await.expect("take it")
    });
    assert_eq!(late, None, "another was faster");
    let seen = committed!(session, F::Store, |tx| F::Store::filler(&mut tx, &consumer).await.expect("the filler"));
    let seen = seen.expect("there is one");
    assert_eq!((seen.owner.as_deref(), seen.epoch, seen.free), (Some("first"), first.epoch, false));
    let held = committed!(session, F::Store, |tx| {
        F::Store::renew_inbox(&mut tx, &consumer, &first, LEASE, &Default::default()).await.expect("renew")
    });
    assert!(held);
    let over = committed!(session, F::Store, |tx| {
        F::Store::take_inbox(&mut tx, &consumer, "second", LEASE, Some(&seen)).await.expect("take it")
    });
    assert_eq!(over, None, "it has renewed its lease since it was seen");
    let seen = committed!(session, F::Store, |tx| F::Store::filler(&mut tx, &consumer).await.expect("the filler"));
    let second = committed!(session, F::Store, |tx| {
        F::Store::take_inbox(&mut tx, &consumer, "second", LEASE, seen.as_ref()).await.expect("take it")
    });
    let second = second.expect("it was silent since it was seen");
    assert!(second.epoch > first.epoch);
    committed!(session, F::Store, |tx| {
        assert!(!F::Store::fence_inbox(&mut tx, &consumer, &first).await.expect("the fence"), "I9");
        assert!(F::Store::fence_inbox(&mut tx, &consumer, &second).await.expect("the fence"));
        assert!(!F::Store::renew_inbox(&mut tx, &consumer, &first, LEASE, &Default::default()).await.expect("renew"));
        F::Store::leave_inbox(&mut tx, &consumer, &first).await.expect("leave");
        assert!(F::Store::fence_inbox(&mut tx, &consumer, &second).await.expect("the fence"), "that changed nothing");
        F::Store::leave_inbox(&mut tx, &consumer, &second).await.expect("leave");
    });
    let seen = committed!(session, F::Store, |tx| F::Store::filler(&mut tx, &consumer).await.expect("the filler"));
    assert!(seen.is_some_and(|seen| seen.free && seen.owner.is_none()));
}
