//! Operators' deeds beside what a relay records at the same moment.

use std::sync::Arc;
use std::time::Duration;

use mysql_async::TxOpts;
use mysql_async::prelude::Queryable;
use postroom::{
    Archivable, Cause, DeadDeed, DeadFilter, Deed, Delivery, KeyDeed, Message, NewOperation, OperationFilter,
    OperationId, OperationKind, Operator, Outcome, ReplayPlace, Report, RouteChange, Settlement, Side, Source, Want,
};
use postroom_mysql::Database;
use postroom_testkit::conformance::Fixture;
use postroom_testkit::conformance::source::{Outbox as _, route};

use crate::fixture::Shop;

fn deed() -> Deed {
    Deed { actor: "ann".to_owned(), reason: "ticket 7".to_owned() }
}

async fn holding(shop: &Shop, owner: &str) -> Arc<dyn Source> {
    let source = shop.open(&route(), owner).await;
    source.renew(&Report::default()).await.unwrap();
    source
}

async fn claimed(source: &Arc<dyn Source>) -> Vec<Delivery> {
    source.claim(Want::up_to(100)).await.unwrap().deliveries
}

/// What is done while the relay's transaction is open, and how many messages it is about.
#[derive(Debug, Clone, Copy)]
enum Beside {
    Retry,
    Replay,
    Park,
}

async fn act(store: &Database, beside: Beside) {
    match beside {
        Beside::Retry => {
            let everything = DeadFilter::default();
            let done = store.act_on_dead(DeadDeed::Retry, Side::Out, &everything, 10, &deed(), &mut |_| ()).await;
            assert_eq!(done.unwrap().len(), 1);
        }
        Beside::Replay => {
            let operation = NewOperation {
                kind: OperationKind::Replay,
                side: Side::Out,
                route: "orders".to_owned(),
                filter: OperationFilter::default(),
                planned: None,
                canary: None,
                goes_on: false,
                rate: None,
                place: ReplayPlace::Before,
                new_ids: false,
            };
            store.begin_operation(OperationId::new(), &operation, &deed()).await.unwrap();
            assert_eq!(store.step_operations().await.unwrap().given_out, 1);
        }
        Beside::Park => {
            assert!(store.act_on_key("orders", "a", KeyDeed::Park, &deed()).await.unwrap());
            assert!(store.act_on_key("orders", "a", KeyDeed::Unpark, &deed()).await.unwrap());
        }
    }
}

/// The relay's transaction sees nobody who could be the head, and the operator's sees a head that is about to go: one of them waits.
#[tokio::test]
async fn what_is_given_out_while_the_relay_records_about_its_key_is_not_forgotten() {
    for beside in [Beside::Retry, Beside::Replay, Beside::Park] {
        let shop = Shop::create().await;
        let source = holding(&shop, "relay").await;
        // The first one waits, the second one is dead or was sent.
        let message = || Message::new("orders", "order.placed", "x").key("a");
        shop.commit(&[message(), message()]).await;
        let out = claimed(&source).await;
        let error = || "no".to_owned();
        let first = Outcome::Retry { after: Duration::from_secs(3600), attempts: 1, error: error() };
        let second = match beside {
            Beside::Retry => Outcome::Dead { attempts: 1, cause: Cause::Permanent, error: error(), blocks_key: false },
            Beside::Replay | Beside::Park => Outcome::Done,
        };
        let settled = |at: usize, outcome| Settlement { token: out[at].token, outcome };
        source.settle(&[settled(0, first), settled(1, second)]).await.unwrap();
        while source.settle(&[]).await.unwrap().unwritten {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        drop(source);

        // As the relay records that the first one is through, at its isolation level: it locks no gaps.
        let mut conn = shop.connect().await;
        conn.query_drop("set session transaction isolation level read committed").await.unwrap();
        let mut relay = conn.start_transaction(TxOpts::default()).await.unwrap();
        relay.query_drop("select lane from postroom_lanes order by lane lock in share mode").await.unwrap();
        relay.query_drop("delete from postroom_parked").await.unwrap();
        let store = Database::new(&shop.url).unwrap();
        let operator = tokio::spawn({
            let store = store.clone();
            async move { act(&store, beside).await }
        });
        // The signal: the operator waits for a lock, or is through already. The server shows the same for a tenth of a second.
        let mut looks = shop.connect().await;
        let waits = "select count(*) from information_schema.innodb_trx where trx_state = 'LOCK WAIT'";
        while !operator.is_finished() && looks.query_first::<i64, _>(waits).await.unwrap() == Some(0) {
            tokio::time::sleep(Duration::from_millis(150)).await;
        }
        assert!(!operator.is_finished(), "{beside:?}: it did not wait for the relay");
        relay.commit().await.unwrap();
        operator.await.unwrap();
        shop.expire().await;
        let another = holding(&shop, "another").await;
        let expected: &[_] = if matches!(beside, Beside::Park) { &[] } else { &[out[1].message.id] };
        let ids: Vec<_> = claimed(&another).await.into_iter().map(|delivery| delivery.message.id).collect();
        assert_eq!(ids, expected, "I8: {beside:?}: what has no head waits for ever");
    }
}

/// Whoever has nothing to do leaves no lock behind.
#[tokio::test]
async fn a_deed_that_does_nothing_keeps_nobody_waiting() {
    let shop = Shop::create().await;
    let source = holding(&shop, "relay").await;
    let store = Database::new(&shop.url).unwrap();
    assert!(!store.act_on_key("orders", "a", KeyDeed::Unpark, &deed()).await.unwrap());
    assert!(store.set_route("nobody", &RouteChange::default(), &deed()).await.unwrap().is_none());
    assert!(store.begin_segment(&[]).await.unwrap().is_none());
    let mut conn = shop.connect().await;
    conn.query_drop("set session innodb_lock_wait_timeout = 1").await.unwrap();
    conn.query_drop("update postroom_lanes set settled_at = utc_timestamp(6)").await.unwrap();
    conn.query_drop("update postroom_settings set archives = archives").await.unwrap();
    conn.query_drop("update postroom_settings set redelivery_horizon_us = redelivery_horizon_us + 1").await.unwrap();
    drop(source);
}
