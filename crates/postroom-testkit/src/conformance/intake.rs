//! What every store promises of tables that already exist.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{
    DeadDeed, DeadFilter, Deed, Done, DoneWhen, Intake, Intakes, Literal, Mapping, MarkedRows, MessageId, Outcome,
    Setting, Side, Source, Store, Stuck, Template, TookIn,
};

use super::operator::{Operated, deed};
use super::source::{claim_all, dead, drain, holding, settle};

/// A store beside tables of an application. `shop_outbox` is one of them, empty: `n` is a number that grows and the primary key; `id`, `topic`,
/// `body` and `k` are texts, `status` a number, 0 if nothing else is said, `at` and `sent_at` times, `error` a text of up to 20 characters.
#[async_trait]
pub trait Taking: Operated {
    /// A transaction that is open. `()` where writers take turns.
    type Held: Send;

    /// The store.
    fn store(&self) -> Arc<dyn Store>;

    /// Runs a statement on the application's tables, and commits it.
    async fn run(&self, sql: &str);

    /// One text or null for each row.
    async fn read(&self, sql: &str) -> Vec<Option<String>>;

    /// Runs a statement in a transaction that stays open; none: writers take turns here.
    async fn hold(&self, sql: &str) -> Option<Self::Held>;

    /// Commits it.
    async fn let_go(&self, held: Self::Held);

    /// As if retention had removed everything from the outbox.
    async fn empty_outbox(&self);
}

/// The tests of one implementation.
#[macro_export]
macro_rules! intake_conforms {
    ($fixture:ty) => {
        $crate::conformance_cases!(
            $fixture,
            intake: rows_become_messages_in_their_order_and_are_marked_when_they_were_sent
            rows_are_deleted_when_they_were_sent_or_when_they_were_taken
            a_row_that_is_no_message_is_set_aside_and_the_others_go_on
            a_row_that_refuses_to_be_changed_holds_up_nobody
            a_row_that_is_locked_holds_up_its_key_alone
            rows_behind_many_that_are_locked_are_found
            what_was_rolled_back_is_never_taken_and_what_commits_late_is
            a_dead_message_is_marked_and_what_becomes_of_it_too
            what_is_not_known_to_be_sent_is_not_called_sent
            what_no_route_takes_waits
            two_processes_take_each_row_once
            a_mapping_that_does_not_fit_is_told_before_anything_is_taken
            a_value_that_no_row_takes_is_told_before_anything_is_taken
            a_preview_a_count_and_a_search_change_nothing
            rows_that_nothing_marks_are_taken_up_to_a_bound
            rows_that_a_former_relay_left_behind_are_given_back_and_no_others
        );
    };
}

fn template(text: &str) -> Option<Template> {
    Some(text.parse().expect("a template"))
}

fn text(text: &str) -> Literal {
    Literal::Text(text.to_owned())
}

fn set(column: &str, to: Setting) -> (String, Setting) {
    (column.to_owned(), to)
}

fn to(column: &str, value: &str) -> (String, Setting) {
    set(column, Setting::Text(value.to_owned()))
}

fn shop() -> Intake {
    Intake {
        name: "shop".to_owned(),
        table: "shop_outbox".parse().expect("a name"),
        row: None,
        order: vec!["at".to_owned()],
        pending: vec![("status".to_owned(), vec![text("0"), text("9")])],
        taken: vec![to("status", "9")],
        sent: Done::Set(vec![to("status", "1"), set("sent_at", Setting::Now)]),
        dead: vec![to("status", "3"), set("error", Setting::Error)],
        done: DoneWhen::Sent,
        message: Mapping {
            id: template("${id}"),
            topic: template("${topic}").expect("a topic"),
            kind: template("order.placed").expect("a type"),
            payload: template("${body}").expect("a payload"),
            key: template("${k}"),
            routing_key: None,
            content_type: None,
            headers: None,
            header: BTreeMap::new(),
            tenant_id: None,
            aggregate_type: None,
            aggregate_id: None,
            aggregate_version: None,
            occurred_at: template("${at}"),
            visible_at: None,
        },
    }
}

/// Writes rows with these keys; returns their ids.
async fn write<F: Taking>(store: &F, keys: &[&str]) -> Vec<MessageId> {
    let mut ids = Vec::new();
    for key in keys {
        let id = MessageId::new();
        store.run(&row(id, key)).await;
        ids.push(id);
    }
    ids
}

fn row(id: MessageId, key: &str) -> String {
    format!("insert into shop_outbox (id, topic, body, k) values ('{id}', 'orders', 'body of {id}', '{key}')")
}

async fn take<F: Taking>(store: &F, intake: &Intake) -> TookIn {
    let of = store.store();
    intakes(of.as_ref()).take_in(intake, 100).await.expect("take")
}

fn intakes(store: &dyn Store) -> &dyn Intakes {
    store.intakes().expect("this store takes rows")
}

async fn mark<F: Taking>(store: &F, intake: &Intake) -> MarkedRows {
    let of = store.store();
    let marked = intakes(of.as_ref()).mark_rows(intake, 0, 1000).await.expect("mark");
    assert_eq!((marked.next, marked.others), (None, false));
    marked
}

async fn states<F: Taking>(store: &F) -> Vec<String> {
    let rows = store.read("select status from shop_outbox order by n").await;
    rows.into_iter().map(Option::unwrap_or_default).collect()
}

async fn written(source: &Arc<dyn Source>) {
    while source.settle(&[]).await.expect("settle").unwritten {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

/// I1, I2, I4, I25.
pub async fn rows_become_messages_in_their_order_and_are_marked_when_they_were_sent<F: Taking>(store: F) {
    let source = holding(&store, "relay").await;
    let mut ids = write(&store, &["a"]).await;
    assert_eq!(take(&store, &shop()).await.taken, 1);
    let first = claim_all(&source).await;
    ids.extend(write(&store, &["b", "a", "a"]).await);
    let took = take(&store, &shop()).await;
    assert_eq!((took.taken, took.refused, took.held, took.others), (3, 0, 0, false));
    assert_eq!(take(&store, &shop()).await.taken, 0, "once");
    assert_eq!(states(&store).await, ["9", "9", "9", "9"]);
    assert_eq!(mark(&store, &shop()).await.sent, 0, "nothing was sent yet");
    let others = claim_all(&source).await;
    let came: Vec<_> = first.iter().chain(&others).map(|delivery| &delivery.message).collect();
    let of = |key: &str| {
        came.iter().filter(|message| message.key.as_deref() == Some(key)).map(|message| message.id).collect::<Vec<_>>()
    };
    assert_eq!((of("a"), of("b")), (vec![ids[0], ids[2], ids[3]], vec![ids[1]]));
    assert_eq!(came[0].payload.as_ref(), format!("body of {}", ids[0]).as_bytes());
    settle(&source, first.iter().map(|delivery| (delivery.token, Outcome::Done))).await;
    written(&source).await;
    mark(&store, &shop()).await;
    assert_eq!(states(&store).await, ["1", "9", "9", "9"], "only what the broker confirmed");
    settle(&source, others.iter().map(|delivery| (delivery.token, Outcome::Done))).await;
    written(&source).await;
    assert_eq!(mark(&store, &shop()).await.sent, 3);
    assert_eq!(states(&store).await, ["1", "1", "1", "1"]);
    assert!(store.read("select sent_at from shop_outbox").await.iter().all(Option::is_some));
    let status = intakes(store.store().as_ref()).intake_status(&shop()).await.expect("status");
    assert_eq!((status.pending, status.taken, status.refused, status.unclear), (0, 0, 0, 0));
}

pub async fn rows_are_deleted_when_they_were_sent_or_when_they_were_taken<F: Taking>(store: F) {
    let source = holding(&store, "relay").await;
    let when_sent = Intake { pending: Vec::new(), taken: Vec::new(), sent: Done::Delete, ..shop() };
    let ids = write(&store, &["a", "b"]).await;
    assert_eq!(take(&store, &when_sent).await.taken, 2);
    assert_eq!(take(&store, &when_sent).await.taken, 0, "once, though nothing in the row says so");
    assert_eq!(states(&store).await.len(), 2, "not before they were sent");
    let mut sent = drain(&source).await;
    sent.sort_unstable();
    assert_eq!(sent, ids);
    written(&source).await;
    assert_eq!(mark(&store, &when_sent).await.sent, 2);
    assert!(states(&store).await.is_empty());

    let when_taken = Intake { done: DoneWhen::Taken, ..when_sent };
    let ids = write(&store, &["a", "b"]).await;
    assert_eq!(take(&store, &when_taken).await.taken, 2);
    assert!(states(&store).await.is_empty());
    let mut sent = drain(&source).await;
    sent.sort_unstable();
    assert_eq!(sent, ids);
}

/// I7, I26.
pub async fn a_row_that_is_no_message_is_set_aside_and_the_others_go_on<F: Taking>(store: F) {
    let source = holding(&store, "relay").await;
    let good = write(&store, &["a"]).await;
    store.run("insert into shop_outbox (id, topic, body, k) values ('r-1', 'orders', null, 'a')").await;
    store
        .run(&format!("insert into shop_outbox (id, topic, body, k) values ('{}', 'orders', 'x', 'a')", good[0]))
        .await;
    let more = write(&store, &["a"]).await;
    let took = take(&store, &shop()).await;
    assert_eq!((took.taken, took.refused), (2, 2));
    assert_eq!(states(&store).await, ["9", "3", "3", "9"]);
    let errors = store.read("select error from shop_outbox where status = 3 order by n").await;
    assert_eq!(errors[0].as_deref(), Some("payload: ${body} is "), "cut off to what the column holds");
    let of = store.store();
    let status = intakes(of.as_ref()).intake_status(&shop()).await.expect("status");
    assert_eq!((status.pending, status.taken, status.refused), (0, 2, 2));
    let told: Vec<&str> = status.set_aside.iter().map(|aside| aside.error.as_str()).collect();
    assert!(told.iter().any(|error| error.contains("${body} is null")), "{told:?}");
    assert!(told.iter().any(|error| error.contains("already in the outbox")), "{told:?}");
    assert_eq!(drain(&source).await, [good[0], more[0]]);
    // Mended, and taken again.
    store.run("update shop_outbox set body = 'mended' where id = 'r-1'").await;
    let deed = Deed { actor: "ann".to_owned(), reason: "mended".to_owned() };
    let row = status.set_aside.iter().find(|aside| aside.error.contains("is null")).expect("the row").row.clone();
    assert_eq!(intakes(of.as_ref()).take_again(&shop(), Some(&row), &deed).await.expect("again"), 1);
    assert_eq!(intakes(of.as_ref()).take_again(&shop(), Some(&row), &deed).await.expect("again"), 0);
    assert_eq!(take(&store, &shop()).await.taken, 1);
    let again = claim_all(&source).await;
    assert_eq!(again[0].message.payload.as_ref(), b"mended");
    assert_eq!(store.audit().await.iter().map(|row| row.1.as_str()).collect::<Vec<_>>(), ["intake.again"]);
}

/// I7, I25, I26: a constraint or a trigger of the application's that one row runs into.
pub async fn a_row_that_refuses_to_be_changed_holds_up_nobody<F: Taking>(store: F) {
    let source = holding(&store, "relay").await;
    store.run("create unique index shop_outbox_error on shop_outbox (error)").await;
    let when_sent = Intake { sent: Done::Set(vec![to("status", "1"), to("error", "once")]), ..shop() };
    let ids = write(&store, &["a", "b", "c"]).await;
    assert_eq!(take(&store, &when_sent).await.taken, 3);
    let mut sent = drain(&source).await;
    sent.sort_unstable();
    assert_eq!(sent, ids);
    written(&source).await;
    let marked = mark(&store, &when_sent).await;
    assert_eq!((marked.sent, marked.unmarked), (1, 2));
    assert_eq!(states(&store).await, ["1", "9", "9"]);
    assert_eq!(mark(&store, &when_sent).await, MarkedRows::default(), "it is not tried for ever");
    let of = store.store();
    let status = intakes(of.as_ref()).intake_status(&when_sent).await.expect("status");
    assert_eq!((status.taken, status.unmarked, status.unclear), (0, 2, 0));
    assert!(status.set_aside[0].error.starts_with("its message was sent"), "{status:?}");
    store.run("update shop_outbox set error = null").await;
    let deed = Deed { actor: "ann".to_owned(), reason: "mended".to_owned() };
    let row = status.set_aside[0].row.clone();
    assert_eq!(intakes(of.as_ref()).take_again(&when_sent, Some(&row), &deed).await.expect("again"), 1);
    assert_eq!(mark(&store, &when_sent).await.sent, 1, "marked, and not sent again");
    assert_eq!(take(&store, &when_sent).await.taken, 0);

    store.run("delete from shop_outbox").await;
    let when_taken = Intake { taken: vec![to("status", "9"), to("error", "once")], ..shop() };
    let ids = write(&store, &["d", "e", "f"]).await;
    let took = take(&store, &when_taken).await;
    assert_eq!((took.taken, took.refused), (1, 2));
    assert_eq!(drain(&source).await, [ids[0]]);
    assert_eq!(states(&store).await, ["9", "3", "0"], "where the error is refused too, the row stays as it is");
}

/// I4.
pub async fn a_row_that_is_locked_holds_up_its_key_alone<F: Taking>(store: F) {
    let source = holding(&store, "relay").await;
    let ids = write(&store, &["a", "b", "a", "c"]).await;
    let Some(held) = store.hold("update shop_outbox set error = 'x' where n = 1").await else {
        return;
    };
    let took = take(&store, &shop()).await;
    assert_eq!((took.taken, took.held, took.more), (2, 2, false));
    let mut sent = drain(&source).await;
    sent.sort_unstable();
    assert_eq!(sent, [ids[1], ids[3]]);
    assert_eq!(take(&store, &shop()).await.held, 2);
    store.let_go(held).await;
    assert_eq!(take(&store, &shop()).await.taken, 2);
    assert_eq!(drain(&source).await, [ids[0], ids[2]]);
}

/// However many there are at the front, and however many of the key of one that is locked: the others go on.
pub async fn rows_behind_many_that_are_locked_are_found<F: Taking>(store: F) {
    let source = holding(&store, "relay").await;
    let ids = write(&store, &["a", "a", "a", "a", "a", "a", "a", "b", "c"]).await;
    let of = store.store();
    let Some(held) = store.hold("update shop_outbox set error = 'x' where n = 1").await else {
        return;
    };
    let took = intakes(of.as_ref()).take_in(&shop(), 2).await.expect("take");
    assert_eq!((took.taken, took.held), (2, 7));
    let mut sent = drain(&source).await;
    sent.sort_unstable();
    assert_eq!(sent, ids[7..]);
    store.let_go(held).await;
    let many = "update shop_outbox set error = 'x' where n <= 7";
    let Some(held) = store.hold(many).await else { return };
    let last = write(&store, &["d"]).await;
    assert_eq!(intakes(of.as_ref()).take_in(&shop(), 2).await.expect("take").taken, 1);
    assert_eq!(drain(&source).await, last);
    store.let_go(held).await;
    assert_eq!(take(&store, &shop()).await.taken, 7);
    assert_eq!(drain(&source).await, ids[..7], "I4");
}

/// I1, I2.
pub async fn what_was_rolled_back_is_never_taken_and_what_commits_late_is<F: Taking>(store: F) {
    let source = holding(&store, "relay").await;
    let late = MessageId::new();
    let Some(open) = store.hold(&row(late, "late")).await else { return };
    let early = write(&store, &["early"]).await;
    assert_eq!(take(&store, &shop()).await.taken, 1);
    assert_eq!(drain(&source).await, early);
    store.let_go(open).await;
    assert_eq!(take(&store, &shop()).await.taken, 1);
    assert_eq!(drain(&source).await, [late]);
    drop(store.hold(&row(MessageId::new(), "never")).await);
    assert_eq!(take(&store, &shop()).await.taken, 0);
}

/// I6, I25.
pub async fn a_dead_message_is_marked_and_what_becomes_of_it_too<F: Taking>(store: F) {
    let source = holding(&store, "relay").await;
    let ids = write(&store, &["a", "b"]).await;
    take(&store, &shop()).await;
    let out = claim_all(&source).await;
    settle(&source, out.iter().map(|delivery| (delivery.token, dead(false)))).await;
    written(&source).await;
    let marked = mark(&store, &shop()).await;
    assert_eq!((marked.sent, marked.dead), (0, 2));
    assert_eq!(mark(&store, &shop()).await.dead, 0, "once");
    assert_eq!(states(&store).await, ["3", "3"]);
    assert_eq!(store.read("select error from shop_outbox").await[0].as_deref(), Some("the broker said no"));
    let operator = store.operator();
    let deed = Deed { actor: "ann".to_owned(), reason: "why not".to_owned() };
    let one = |id: MessageId| DeadFilter { id: Some(id), ..DeadFilter::default() };
    operator.act_on_dead(DeadDeed::Retry, Side::Out, &one(ids[0]), 10, &deed, &mut |_| ()).await.expect("retry");
    operator.act_on_dead(DeadDeed::Discard, Side::Out, &one(ids[1]), 10, &deed, &mut |_| ()).await.expect("discard");
    let marked = mark(&store, &shop()).await;
    assert_eq!((marked.sent, marked.unclear), (0, 0), "one waits, and one was discarded");
    assert_eq!(drain(&source).await, [ids[0]]);
    written(&source).await;
    assert_eq!(mark(&store, &shop()).await.sent, 1);
    assert_eq!(states(&store).await, ["1", "3"], "what was discarded was not sent");
    assert_eq!(take(&store, &shop()).await.taken, 0);
}

/// I25.
pub async fn what_is_not_known_to_be_sent_is_not_called_sent<F: Taking>(store: F) {
    let source = holding(&store, "relay").await;
    write(&store, &["a"]).await;
    take(&store, &shop()).await;
    drain(&source).await;
    written(&source).await;
    store.empty_outbox().await;
    let marked = mark(&store, &shop()).await;
    assert_eq!((marked.sent, marked.unclear), (0, 1));
    assert_eq!(states(&store).await, ["9"]);
    let of = store.store();
    let status = intakes(of.as_ref()).intake_status(&shop()).await.expect("status");
    assert_eq!((status.taken, status.unclear, status.set_aside[0].state.as_str()), (0, 1, "unclear"));
    let deed = Deed { actor: "ann".to_owned(), reason: "the receiver has none".to_owned() };
    assert_eq!(intakes(of.as_ref()).take_again(&shop(), None, &deed).await.expect("again"), 0, "only by its key");
    let row = status.set_aside[0].row.clone();
    assert_eq!(intakes(of.as_ref()).take_again(&shop(), Some(&row), &deed).await.expect("again"), 1);
    assert_eq!(take(&store, &shop()).await.taken, 1);
}

pub async fn what_no_route_takes_waits<F: Taking>(store: F) {
    write(&store, &["a"]).await;
    assert_eq!(take(&store, &shop()).await.taken, 1);
    assert_eq!(mark(&store, &shop()).await, MarkedRows::default());
    let source = holding(&store, "relay").await;
    assert_eq!(mark(&store, &shop()).await, MarkedRows::default());
    drain(&source).await;
    written(&source).await;
    assert_eq!(mark(&store, &shop()).await.sent, 1);
}

/// I3, I4.
pub async fn two_processes_take_each_row_once<F: Taking>(store: F) {
    let source = holding(&store, "relay").await;
    let ids = write(&store, &["a"; 40]).await;
    let (one, other) = (store.store(), store.store());
    let all = async |of: &dyn Store| {
        let mut taken = 0;
        for _ in 0..200 {
            let took = intakes(of).take_in(&shop(), 3).await.expect("take");
            taken += took.taken;
            if took.taken == 0 && !took.others {
                break;
            }
        }
        taken
    };
    let (one, other) = tokio::join!(all(one.as_ref()), all(other.as_ref()));
    assert_eq!(one + other, 40);
    assert_eq!(drain(&source).await, ids);
}

pub async fn a_mapping_that_does_not_fit_is_told_before_anything_is_taken<F: Taking>(store: F) {
    write(&store, &["a"]).await;
    let mut mapping = shop().message;
    mapping.key = template("${customer}");
    let mut no_time = shop().message;
    no_time.occurred_at = template("${k}");
    for (wrong, told) in [
        (Intake { table: "shop_outbx".parse().expect("a name"), ..shop() }, "no such table"),
        (Intake { message: mapping, ..shop() }, "message.key: there is no column \"customer\""),
        (Intake { message: no_time, ..shop() }, "message.occurred_at: column \"k\""),
        (Intake { order: vec!["when".to_owned()], ..shop() }, "order: there is no column \"when\""),
        (Intake { row: Some("k".to_owned()), ..shop() }, "no unique index"),
        (Intake { dead: vec![to("state", "3")], ..shop() }, "dead: there is no column \"state\""),
        (
            Intake { pending: vec![("state".to_owned(), vec![text("0")])], ..shop() },
            "pending: there is no column \"state\"",
        ),
        (Intake { sent: Done::Set(vec![set("status", Setting::Null)]), ..shop() }, "cannot be set to $null"),
        (Intake { sent: Done::Set(vec![set("k", Setting::Now)]), ..shop() }, "cannot be set to $now"),
        (Intake { sent: Done::Set(vec![to("n", "7")]), ..shop() }, "sent: column \"n\""),
        (
            Intake { dead: vec![to("status", "1"), set("sent_at", Setting::Now)], ..shop() },
            "would pass for one that was sent",
        ),
    ] {
        let of = store.store();
        let found = intakes(of.as_ref()).check_intake(&wrong).await.expect("check");
        assert!(found.iter().any(|found| !found.ok && found.found.contains(told)), "{told}: {found:?}");
        let refused = intakes(of.as_ref()).take_in(&wrong, 10).await.expect_err("it does not fit");
        let source = std::error::Error::source(&refused).map(ToString::to_string).unwrap_or_default();
        assert!(!refused.is_transient() && source.contains(told), "{refused}: {source}");
    }
    assert_eq!(states(&store).await, ["0"]);
    let found = intakes(store.store().as_ref()).check_intake(&shop()).await.expect("check");
    assert!(found[0].ok, "{found:?}");
}

/// A constraint or a trigger would show only when the message was sent: it is tried before, on rows that wait, and rolled back.
pub async fn a_value_that_no_row_takes_is_told_before_anything_is_taken<F: Taking>(store: F) {
    store.run("create unique index shop_outbox_error on shop_outbox (error)").await;
    write(&store, &["a"]).await;
    store.run("update shop_outbox set status = 1, error = 'once'").await;
    let once = to("error", "once");
    let when_sent = Intake { sent: Done::Set(vec![to("status", "1"), once.clone()]), ..shop() };
    let of = store.store();
    let check = async |intake: &Intake| intakes(of.as_ref()).check_intake(intake).await.expect("check");
    let found = check(&when_sent).await;
    assert!(found[0].ok, "no row waits, so none can be tried: {found:?}");
    write(&store, &["b", "c"]).await;
    for (place, wrong) in [
        ("taken", Intake { taken: vec![once.clone()], ..shop() }),
        ("sent", when_sent),
        ("dead", Intake { dead: vec![to("status", "3"), once], ..shop() }),
    ] {
        let found = check(&wrong).await;
        let told = format!(": {place}: all 2 rows tried");
        assert!(!found[0].ok && found[0].found.contains(&told), "{place}: {found:?}");
    }
    assert!(check(&shop()).await[0].ok);
    assert_eq!(states(&store).await, ["1", "0", "0"], "all of it was rolled back");
    write(&store, &["d"]).await;
    store.run("update shop_outbox set body = null where status = 0").await;
    let found = check(&shop()).await;
    assert!(!found[0].ok && found[0].found.contains("none of the first 3 rows"), "{found:?}");
    store.run("update shop_outbox set body = 'x' where k = 'd'").await;
    assert!(check(&shop()).await[0].ok, "one row that is no message is set aside later");
}

pub async fn a_preview_a_count_and_a_search_change_nothing<F: Taking>(store: F) {
    let ids = write(&store, &["a", "b"]).await;
    store.run("insert into shop_outbox (id, topic, body, k) values ('r-1', '', 'x', 'a')").await;
    let of = store.store();
    let rows = intakes(of.as_ref()).preview_intake(&shop(), 10).await.expect("preview");
    let made: Vec<_> = rows.iter().map(|row| row.message.as_ref().map(|message| message.id).ok()).collect();
    assert_eq!(made, [Some(ids[0]), Some(ids[1]), None]);
    let status = intakes(of.as_ref()).intake_status(&shop()).await.expect("status");
    assert_eq!((status.pending, status.pending_is_bound, status.taken), (3, false, 0));
    assert!(status.oldest_seconds.is_some_and(|age| (-5.0..600.0).contains(&age)), "{status:?}");
    let columns = ["n", "topic", "body"].map(str::to_owned);
    let found = intakes(of.as_ref()).tables_with(&columns).await.expect("tables");
    assert_eq!(found.iter().map(|table| table.table.name.as_str()).collect::<Vec<_>>(), ["shop_outbox"]);
    assert_eq!(found[0].columns[0].0, "n");
    let nowhere = intakes(of.as_ref()).tables_with(&["nowhere".to_owned()]).await.expect("tables");
    assert!(nowhere.is_empty());
    assert_eq!(states(&store).await, ["0", "0", "0"]);
}

/// I19: a look at such rows reads those that are taken again.
pub async fn rows_that_nothing_marks_are_taken_up_to_a_bound<F: Taking>(store: F) {
    const ROWS: u64 = 10_100;
    let unmarked = Intake { taken: Vec::new(), ..shop() };
    let values: Vec<String> = (0..ROWS).map(|n| format!("('r-{n}', 'orders', 'x', 'k{n}')")).collect();
    for chunk in values.chunks(1_000) {
        store.run(&format!("insert into shop_outbox (id, topic, body, k) values {}", chunk.join(", "))).await;
    }
    let of = store.store();
    let mut taken = 0;
    loop {
        let took = intakes(of.as_ref()).take_in(&unmarked, 2_000).await.expect("take");
        taken += took.taken;
        if took.taken == 0 {
            break;
        }
    }
    assert_eq!(taken, 10_000);
    let source = holding(&store, "relay").await;
    assert_eq!(drain(&source).await.len(), 10_000);
    written(&source).await;
    let (mut after, mut sent) = (0, 0);
    loop {
        let marked = intakes(of.as_ref()).mark_rows(&unmarked, after, 3_000).await.expect("mark");
        sent += marked.sent;
        let Some(next) = marked.next else { break };
        after = next;
    }
    assert_eq!(sent, 10_000);
    assert_eq!(intakes(of.as_ref()).take_in(&unmarked, 2_000).await.expect("take").taken, ROWS - 10_000);
}

/// Old rows that another relay has claimed become pending again; those that are young, locked, or taken here stay, and there is an audit row.
pub async fn rows_that_a_former_relay_left_behind_are_given_back_and_no_others<F: Taking>(store: F) {
    let hour = Duration::from_secs(3600);
    let intake = Intake { pending: vec![("status".to_owned(), vec![text("0")])], ..shop() };
    let stuck = Stuck { rows: vec![("status".to_owned(), vec![text("9")])], set: vec![to("status", "0")] };
    let ids = write(&store, &["taken", "old", "locked", "young"]).await;
    store.run("update shop_outbox set at = '2001-01-01 00:00:00'").await;
    store.run(&format!("update shop_outbox set status = 5 where id <> '{}'", ids[0])).await;
    assert_eq!(take(&store, &intake).await.taken, 1);
    store.run(&format!("update shop_outbox set status = 9 where id <> '{}'", ids[0])).await;
    store.run(&format!("update shop_outbox set at = '2999-01-01 00:00:00' where id = '{}'", ids[3])).await;
    let of = store.store();
    let free = async |of: &dyn Intakes| of.free_rows(&intake, &stuck, hour, 100, &deed()).await.expect("free");
    let held = store.hold("update shop_outbox set error = 'x' where n = 3").await;
    let is_held = held.is_some();
    assert_eq!(free(intakes(of.as_ref())).await, if is_held { 1 } else { 2 });
    if let Some(held) = held {
        store.let_go(held).await;
        assert_eq!(free(intakes(of.as_ref())).await, 1);
    }
    assert_eq!(free(intakes(of.as_ref())).await, 0);
    let states = store.read("select cast(status as char(1)) from shop_outbox order by n").await;
    let states: Vec<&str> = states.iter().flatten().map(String::as_str).collect();
    assert_eq!(states, ["9", "0", "0", "9"]);
    let audited = store.audit().await.into_iter().filter(|row| row.1 == "intake.again").count();
    assert_eq!(audited, if is_held { 2 } else { 1 }, "I20");

    let ageless = Intake { message: Mapping { occurred_at: None, ..intake.message.clone() }, ..intake.clone() };
    let refused = intakes(of.as_ref()).free_rows(&ageless, &stuck, hour, 100, &deed()).await.expect_err("no time");
    assert!(std::error::Error::source(&refused).expect("why").to_string().contains("occurred_at"), "{refused:?}");
    let indexes = intakes(of.as_ref()).indexes_of(&intake.table).await.expect("indexes");
    assert!(indexes.iter().all(|index| !index.columns.is_empty()), "{indexes:?}");
    intakes(of.as_ref()).senders_to(&intake.table).await.expect("sessions");
}
