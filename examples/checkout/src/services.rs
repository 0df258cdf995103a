//! The three services: what each does with a message, in its own database, together with what it tells the others.

use async_trait::async_trait;
use postroom::{BoxError, Event, Outbox};
use postroom_consumer::{Handle, HandlerError, Handlers, Incoming};
use postroom_postgres::Postgres;
use tokio_postgres::Transaction;

use crate::events::{OrderPlaced, PaymentRefused, PaymentTaken, StockReserved};

/// One of the services.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Service {
    Orders,
    Payments,
    Inventory,
}

impl Service {
    pub const ALL: [Self; 3] = [Self::Orders, Self::Payments, Self::Inventory];

    pub fn name(self) -> &'static str {
        match self {
            Self::Orders => "orders",
            Self::Payments => "payments",
            Self::Inventory => "inventory",
        }
    }

    /// Types of the messages that it wants; their routing keys are the types.
    pub fn wants(self) -> &'static [&'static str] {
        match self {
            Self::Orders => &[PaymentRefused::TYPE, StockReserved::TYPE],
            Self::Payments => &[OrderPlaced::TYPE],
            Self::Inventory => &[PaymentTaken::TYPE],
        }
    }

    pub fn tables(self) -> &'static str {
        match self {
            Self::Orders => {
                "create table orders (id text primary key, cents bigint not null, state text not null default 'placed',
                                      changes int not null default 0)"
            }
            Self::Payments => {
                "create table payments (order_id text not null, cents bigint not null, taken boolean not null)"
            }
            Self::Inventory => "create table reservations (order_id text not null)",
        }
    }

    pub fn handlers(self) -> Handlers<Postgres> {
        match self {
            Self::Orders => Handlers::new()
                .on::<PaymentRefused>(PaymentRefused::TYPE, Ends("cancelled"))
                .on::<StockReserved>(StockReserved::TYPE, Ends("confirmed")),
            Self::Payments => Handlers::new().on(OrderPlaced::TYPE, TakesMoney),
            Self::Inventory => Handlers::new().on(PaymentTaken::TYPE, Reserves),
        }
    }
}

/// Places an order: the row and the message in one transaction.
pub async fn place(tx: &mut Transaction<'_>, order: String, cents: i64) -> Result<(), BoxError> {
    tx.execute("insert into orders (id, cents) values ($1, $2)", &[&order, &cents]).await?;
    Postgres.enqueue(tx, &[OrderPlaced { order, cents }.to_message()?]).await?;
    Ok(())
}

struct TakesMoney;

#[async_trait]
impl Handle<Postgres, OrderPlaced> for TakesMoney {
    async fn handle(&self, tx: &mut Transaction<'_>, placed: &Incoming<OrderPlaced>) -> Result<(), HandlerError> {
        let OrderPlaced { order, cents } = &placed.body;
        // Every tenth customer has no money.
        let taken = cents % 10 != 0;
        tx.execute("insert into payments values ($1, $2, $3)", &[order, cents, &taken]).await?;
        let (order, cents) = (order.clone(), *cents);
        let told = if taken {
            PaymentTaken { order, cents }.to_message()?
        } else {
            PaymentRefused { order, cents }.to_message()?
        };
        Postgres.enqueue(tx, &[told]).await?;
        Ok(())
    }
}

struct Reserves;

#[async_trait]
impl Handle<Postgres, PaymentTaken> for Reserves {
    async fn handle(&self, tx: &mut Transaction<'_>, paid: &Incoming<PaymentTaken>) -> Result<(), HandlerError> {
        let PaymentTaken { order, cents } = &paid.body;
        tx.execute("insert into reservations values ($1)", &[order]).await?;
        Postgres.enqueue(tx, &[StockReserved { order: order.clone(), cents: *cents }.to_message()?]).await?;
        Ok(())
    }
}

/// The end of an order, as its service sees it.
struct Ends(&'static str);

impl Ends {
    async fn end(&self, tx: &mut Transaction<'_>, order: &str) -> Result<(), HandlerError> {
        let sql = "update orders set state = $2, changes = changes + 1 where id = $1 and state = 'placed'";
        match tx.execute(sql, &[&order, &self.0]).await? {
            1 => Ok(()),
            _ => Err(HandlerError::reject(format!("order {order} is not there, or ended before"))),
        }
    }
}

#[async_trait]
impl Handle<Postgres, PaymentRefused> for Ends {
    async fn handle(&self, tx: &mut Transaction<'_>, told: &Incoming<PaymentRefused>) -> Result<(), HandlerError> {
        self.end(tx, &told.body.order).await
    }
}

#[async_trait]
impl Handle<Postgres, StockReserved> for Ends {
    async fn handle(&self, tx: &mut Transaction<'_>, told: &Incoming<StockReserved>) -> Result<(), HandlerError> {
        self.end(tx, &told.body.order).await
    }
}
