//! Versions of aggregates: older ones, gaps, and what comes after its window.

use std::time::Duration;

use async_trait::async_trait;
use postroom::{Message, Transactions};
use postroom_consumer::{
    Compensate, Handle, HandlerError, Handlers, Incoming, InvalidHandlers, OutOfOrder, Stale, Versions,
};
use postroom_postgres::{Postgres, PostgresSession};
use postroom_testkit::chance::Chance;
use tokio_postgres::{Client, Transaction};

use crate::setup::{EFFECT, Running, assert_once, broker, done, postgres, publish, receiver, until};

fn version(order: &str, version: i64) -> Message {
    Message::json("orders", "changed", &version).unwrap().aggregate("order", order, version)
}

/// Notes which version was handled, and into what it was merged.
struct Notes;

#[async_trait]
impl Handle<Postgres, i64> for Notes {
    async fn handle(&self, tx: &mut Transaction<'_>, changed: &Incoming<i64>) -> Result<(), HandlerError> {
        tx.execute(EFFECT, &[&changed.message.id.to_string()]).await?;
        let what = match changed.merge_into {
            Some(stored) => format!("{} into {stored}", changed.body),
            None => changed.body.to_string(),
        };
        tx.execute("insert into done (key, what) values ($1, $2)", &[&changed.message.aggregate_id, &what]).await?;
        Ok(())
    }
}

#[async_trait]
impl Compensate<Postgres> for Notes {
    async fn compensate(
        &self,
        tx: &mut <Postgres as Transactions>::Tx<'_>,
        what: &OutOfOrder<'_>,
    ) -> Result<(), HandlerError> {
        let (id, what) = match what {
            OutOfOrder::Missing { aggregate, versions, .. } => {
                (aggregate.id.clone(), format!("missing {} to {}", versions.start(), versions.end()))
            }
            OutOfOrder::Late { aggregate, message, handled } => {
                let version = message.aggregate_version.unwrap_or_default();
                (aggregate.id.clone(), format!("late {version} after {handled}"))
            }
        };
        tx.execute("insert into done (key, what) values ($1, $2)", &[&id, &what]).await?;
        Ok(())
    }
}

fn handlers(versions: Versions) -> Handlers<Postgres> {
    Handlers::new().on("changed", Notes).versions("order", versions).compensation(Notes)
}

async fn all_of(client: &Client, key: &str, count: usize) -> Vec<String> {
    until(client, &format!("select count(*) >= {count} from done where key = '{key}'")).await;
    done(client, key).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_older_version_is_ignored_merged_or_handed_over() {
    for (stale, expected) in [
        (Stale::Ignore, vec!["2", "5"]),
        (Stale::Merge, vec!["2", "1 into 2", "5"]),
        (Stale::Compensate, vec!["2", "late 1 after 2", "5"]),
    ] {
        let (database, broker) = (postgres().await, broker());
        let client = database.connect().await;
        publish(&broker, vec![version("o", 2), version("o", 1), version("o", 5)]).await;
        let handlers = handlers(Versions::Newer(stale));
        let running = Running::start(receiver(&database, broker.subscribe("q", 9), handlers));
        while broker.unsettled("q") > 0 {
            tokio::task::yield_now().await;
        }
        let counters = running.stop().await;
        assert_eq!(counters.ignored + counters.merged + counters.late, 1, "{counters:?}");
        assert_eq!(done(&client, "o").await, expected);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn early_versions_wait_for_those_before_them_and_hold_up_nobody_else() {
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    publish(&broker, vec![version("o", 3), version("o", 1), version("o", 4), version("p", 1)]).await;
    let handlers = handlers(Versions::in_order(Duration::from_secs(60)));
    let running = Running::start(receiver(&database, broker.subscribe("q", 9), handlers));
    assert_eq!(all_of(&client, "p", 1).await, ["1"]);
    assert_eq!(all_of(&client, "o", 1).await, ["1"]);
    assert_eq!(broker.unsettled("q"), 0);
    publish(&broker, vec![version("o", 2)]).await;
    assert_eq!(all_of(&client, "o", 4).await, ["1", "2", "3", "4"]);
    let counters = running.stop().await;
    assert_eq!((counters.applied, counters.early, counters.missing), (5, 2, 0), "{counters:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gap_that_outlives_its_window_goes_to_the_compensation_and_so_does_what_comes_later() {
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    publish(&broker, vec![version("o", 1), version("o", 7), version("o", 4), version("o", 5)]).await;
    let handlers = handlers(Versions::in_order(Duration::from_millis(300)));
    let running = Running::start(receiver(&database, broker.subscribe("q", 9), handlers));
    assert_eq!(all_of(&client, "o", 6).await, ["1", "missing 2 to 3", "4", "5", "missing 6 to 6", "7"]);
    publish(&broker, vec![version("o", 3)]).await;
    assert_eq!(all_of(&client, "o", 7).await[6], "late 3 after 7");
    let counters = running.stop().await;
    assert_eq!((counters.missing, counters.late, counters.applied), (3, 1, 4), "{counters:?}");
    assert_once(&client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shuffled_versions_with_some_missing_are_handled_in_order_by_two_receivers() {
    const ORDERS: i64 = 40;
    const VERSIONS: i64 = 25;
    let (database, broker) = (postgres().await, broker());
    let client = database.connect().await;
    let mut chance = Chance::new(41);
    let mut missing = std::collections::BTreeSet::new();
    let mut messages = Vec::new();
    for order in 0..ORDERS {
        for number in 1..=VERSIONS {
            // One that nothing comes after is not missed by anybody.
            if number < VERSIONS && chance.percent(1) {
                missing.insert((order, number));
            } else {
                messages.push(version(&format!("o{order}"), number));
            }
        }
    }
    assert!(!missing.is_empty());
    // Each is delivered twice.
    messages.extend(messages.clone());
    for n in (1..messages.len()).rev() {
        messages.swap(n, chance.below(n as u64 + 1) as usize);
    }
    publish(&broker, messages).await;
    let start = || {
        let handlers = handlers(Versions::in_order(Duration::from_secs(10)));
        Running::start(receiver(&database, broker.subscribe("q", 50), handlers))
    };
    let two = [start(), start()];
    let expected = ORDERS * VERSIONS - missing.len() as i64;
    until(&client, &format!("select count(*) = {expected} from effects")).await;
    let mut counted = 0;
    for running in two {
        counted += running.stop().await.missing;
    }
    assert_eq!(counted, missing.len() as u64);
    assert_once(&client).await;
    for order in 0..ORDERS {
        let mut next = 1;
        for what in done(&client, &format!("o{order}")).await {
            if let Some(range) = what.strip_prefix("missing ") {
                let (from, to) = range.split_once(" to ").unwrap();
                let (from, to): (i64, i64) = (from.parse().unwrap(), to.parse().unwrap());
                assert_eq!(from, next);
                assert!((from..=to).all(|number| missing.contains(&(order, number))), "{what}");
                next = to + 1;
            } else {
                assert_eq!(what.parse::<i64>().unwrap(), next, "order {order}");
                next += 1;
            }
        }
        assert_eq!(next, VERSIONS + 1);
    }
}

#[test]
fn a_compensation_that_is_wanted_has_to_be_there() {
    let handlers = Handlers::<Postgres>::new().versions("order", Versions::in_order(Duration::from_secs(60)));
    let broker = broker();
    let consumer = postroom::Consumer::new("totals").unwrap();
    let open = || PostgresSession::new(postroom_postgres::Connector::new("postgres://nowhere/x").unwrap());
    let refused =
        postroom_consumer::Receiver::new(std::sync::Arc::new(broker.subscribe("q", 1)), consumer, handlers, open);
    assert!(matches!(refused.err(), Some(InvalidHandlers::NoCompensation(kind)) if kind == "order"));
}
