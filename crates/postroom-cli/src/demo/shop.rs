//! The order service: business rows and messages in one transaction, some of which roll back.

use std::time::Duration;

use postroom::{Event, RaisesEvents, UnitOfWork, Wake};
use postroom_sqlite::{Sqlite, connect};
use rusqlite::{Connection, TransactionBehavior, params};
use tokio::sync::oneshot;

use super::ledger::{Files, failed};
use crate::exit::{self, Failure};

const CUSTOMERS: u64 = 40;
/// Pace of the orders, so that a person can follow.
const PAUSE: Duration = Duration::from_millis(2);

/// An order as an aggregate: it raises an event, the unit of work collects it.
struct Order {
    customer: String,
    cents: i64,
    number: i64,
    events: Vec<postroom::Message>,
}

#[derive(serde::Serialize)]
struct OrderPlaced<'a> {
    customer: &'a str,
    cents: i64,
    number: i64,
}

impl Event for OrderPlaced<'_> {
    const TOPIC: &'static str = "orders";
    const TYPE: &'static str = "order.placed";
    const AGGREGATE_TYPE: &'static str = "customer";

    fn aggregate_id(&self) -> String {
        self.customer.to_owned()
    }

    fn aggregate_version(&self) -> i64 {
        self.number
    }
}

impl Order {
    fn place(customer: String, cents: i64, number: i64) -> Result<Self, Failure> {
        let event = OrderPlaced { customer: &customer, cents, number }.to_message();
        let event = event.map_err(|error| Failure::of(exit::FAILURE, &error))?;
        Ok(Self { customer, cents, number, events: vec![event] })
    }
}

impl RaisesEvents for Order {
    fn take_events(&mut self) -> Vec<postroom::Message> {
        std::mem::take(&mut self.events)
    }
}

/// Tables of the shop, of postroom, and of the journal that notes what is going to be tried.
pub fn prepare(files: &Files) -> Result<(), Failure> {
    let mut shop = connect(&files.shop)?;
    postroom_sqlite::migrate(&mut shop).map_err(|error| Failure::of(exit::FAILURE, &error))?;
    shop.execute_batch(
        "create table orders (customer text, number integer, cents integer, primary key (customer, number));
         create table committed (message_id text primary key, key text, number integer);",
    )
    .map_err(failed)?;
    let journal = connect(&files.journal)?;
    journal.execute_batch("create table tried (message_id text primary key);").map_err(failed)
}

/// Takes orders until the shop is closed.
pub fn sell(files: &Files, wake: &Wake, mut closed: oneshot::Receiver<()>) -> Result<(), Failure> {
    let mut shop = connect(&files.shop)?;
    // A demo on a laptop: the file stays consistent in a crash of the process, which is what is shown here.
    shop.pragma_update(None, "synchronous", "normal").map_err(failed)?;
    let journal = connect(&files.journal)?;
    journal.pragma_update(None, "synchronous", "off").map_err(failed)?;
    let mut number = 0u64;
    while closed.try_recv().is_err() {
        number += 1;
        let customer = format!("customer-{:02}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % CUSTOMERS);
        place_order(&mut shop, &journal, customer, number, wake)?;
        #[allow(clippy::disallowed_methods, reason = "the pace of the orders is for the eye; nothing waits for it")]
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

fn place_order(
    shop: &mut Connection,
    journal: &Connection,
    customer: String,
    number: u64,
    wake: &Wake,
) -> Result<(), Failure> {
    let tx = shop.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    let last: i64 = tx
        .query_row("select coalesce(max(number), 0) from orders where customer = ?1", [&customer], |row| row.get(0))
        .map_err(failed)?;
    let mut order = Order::place(customer, (number % 9000) as i64 + 1000, last + 1)?;
    tx.execute("insert into orders values (?1, ?2, ?3)", params![order.customer, order.number, order.cents])
        .map_err(failed)?;
    let mut work = UnitOfWork::new();
    work.collect(&mut order);
    let messages = work.into_messages();
    Sqlite.enqueue_blocking(&tx, &messages).map_err(|error| Failure::of(exit::FAILURE, &error))?;
    for message in &messages {
        let id = message.id.to_string();
        tx.execute("insert into committed values (?1, ?2, ?3)", params![id, order.customer, order.number])
            .map_err(failed)?;
        journal.execute("insert into tried values (?1)", [id]).map_err(failed)?;
    }
    if number % 10 == 7 {
        return tx.rollback().map_err(failed);
    }
    tx.commit().map_err(failed)?;
    wake.notify();
    Ok(())
}
