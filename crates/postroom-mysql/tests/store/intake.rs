//! Tables that already exist, with what only this family of servers has.

use std::collections::BTreeMap;

use mysql_async::prelude::Queryable;
use postroom::{Done, DoneWhen, Intake, Intakes, Literal, Mapping, Setting, Template};
use postroom_mysql::Database;

use crate::fixture::Shop;
use postroom_testkit::conformance::Fixture;

fn intake(table: &str, column: &str, pending: &str, sent: &str) -> Intake {
    let template = |text: &str| text.parse::<Template>().unwrap();
    Intake {
        name: "shop".to_owned(),
        table: table.parse().unwrap(),
        row: None,
        order: Vec::new(),
        pending: vec![(column.to_owned(), vec![Literal::Text(pending.to_owned())])],
        taken: Vec::new(),
        sent: Done::Set(vec![(column.to_owned(), Setting::Text(sent.to_owned()))]),
        dead: Vec::new(),
        done: DoneWhen::Taken,
        message: Mapping {
            id: None,
            topic: template("orders"),
            kind: template("order.placed"),
            payload: template("${p}"),
            key: None,
            routing_key: None,
            content_type: None,
            headers: None,
            header: BTreeMap::new(),
            tenant_id: None,
            aggregate_type: None,
            aggregate_id: None,
            aggregate_version: None,
            occurred_at: None,
            visible_at: None,
        },
    }
}

/// A text beside a number is compared as a float, or not at all.
#[tokio::test]
async fn truths_and_bits_are_what_they_say() {
    let shop = Shop::create().await;
    let store = Database::new(&shop.url).unwrap();
    for (kind, pending, sent) in [
        ("tinyint(1)", "false", "true"),
        ("boolean", "0", "1"),
        ("bit(1)", "false", "true"),
        ("bit(1)", "0", "1"),
        ("decimal(3, 1)", "0.0", "1.5"),
        ("enum('new', 'sent')", "new", "sent"),
    ] {
        for index in ["", ", key (done)"] {
            shop.run("drop table if exists box").await;
            shop.run(&format!("create table box (id int primary key, p text, done {kind}{index})")).await;
            let value = |text: &str| match kind.starts_with("enum") {
                true => format!("'{text}'"),
                false => text.to_owned(),
            };
            shop.run(&format!(
                "insert into box values (1, 'sent', {}), (2, 'to be sent', {})",
                value(sent),
                value(pending)
            ))
            .await;
            let box_ = intake("box", "done", pending, sent);
            let found = store.check_intake(&box_).await.unwrap();
            assert!(found[0].ok, "{kind}: {found:?}");
            assert_eq!(store.take_in(&box_, 10).await.unwrap().taken, 1, "{kind}{index}");
            let taken: Vec<String> =
                shop.connect().await.query("select cast(payload as char) from postroom_outbox").await.unwrap();
            assert_eq!(taken, ["to be sent"], "{kind}{index}");
            assert_eq!(store.take_in(&box_, 10).await.unwrap().taken, 0, "{kind}{index}");
            shop.run("delete from postroom_outbox").await;
            let nonsense = intake("box", "done", "perhaps", sent);
            if !kind.starts_with("enum") {
                assert!(!store.check_intake(&nonsense).await.unwrap()[0].ok, "{kind}");
            }
        }
    }
}

/// I1: a row must not be marked without its message.
#[tokio::test]
async fn a_table_without_transactions_is_refused() {
    let shop = Shop::create().await;
    let store = Database::new(&shop.url).unwrap();
    shop.run("create table loose (id int primary key, p text, done int) engine = MyISAM").await;
    shop.run("create table floats (id float primary key, p text, done int)").await;
    for (table, told) in [("loose", "has no transactions"), ("floats", "does not identify a row")] {
        let found = store.check_intake(&intake(table, "done", "0", "1")).await.unwrap();
        assert!(!found[0].ok && found[0].found.contains(told), "{found:?}");
        assert!(store.take_in(&intake(table, "done", "0", "1"), 10).await.is_err());
    }
}

/// A row of such a state never comes, so nothing would ever be taken.
#[tokio::test]
async fn a_state_that_no_row_can_have_is_told() {
    let shop = Shop::create().await;
    let store = Database::new(&shop.url).unwrap();
    shop.run("create table labels (id int primary key, p text, state enum('new', 'done'))").await;
    shop.run("create table checked (id int primary key, p text, state varchar(9) check (state in ('new', 'done')), key (state))").await;
    for (table, told) in [("labels", "its type is enum"), ("checked", "excludes it")] {
        let found = store.check_intake(&intake(table, "state", "nwe", "done")).await.unwrap();
        assert!(!found[0].ok && found[0].found.contains("never \"nwe\""), "{found:?}");
        assert!(found[0].found.contains(told), "{found:?}");
        assert!(store.check_intake(&intake(table, "state", "new", "done")).await.unwrap()[0].ok);
        shop.run(&format!("insert into {table} values (1, 'p', 'new')")).await;
        let found = store.check_intake(&intake(table, "state", "new", "dnoe")).await.unwrap();
        assert!(!found[0].ok && found[0].found.contains(": sent: the one row"), "{found:?}");
    }
}
