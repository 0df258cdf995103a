//! Others that do the same work: a bare client, and the algorithms of the articles, as they are written there.

use std::time::{Duration, Instant};

use futures_util::future::{join_all, try_join_all};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions};
use lapin::types::{FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties, ExchangeKind};
use postroom::{BoxError, MessageId};
use postroom_testkit::postgres::Database;
use postroom_testkit::surroundings;
use tokio_postgres::Client;
use uuid::Uuid;

use crate::setup::PAYLOAD;

async fn connection() -> Result<Connection, BoxError> {
    Ok(Connection::connect(&surroundings::rabbitmq_url(), ConnectionProperties::default()).await?)
}

async fn confirming(connection: &Connection) -> Result<Channel, BoxError> {
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    Ok(channel)
}

fn properties(id: &str) -> BasicProperties {
    BasicProperties::default()
        .with_delivery_mode(2)
        .with_message_id(ShortString::from(id))
        .with_type("order.placed".into())
        .with_content_type("application/json".into())
        .with_headers(FieldTable::default())
}

/// Publishes all of them, then waits for all their confirms.
async fn publish_together(channel: &Channel, exchange: &str, batch: &[(String, Vec<u8>)]) -> Result<(), BoxError> {
    let options = BasicPublishOptions { mandatory: true, ..Default::default() };
    let mut confirms = Vec::with_capacity(batch.len());
    for (id, payload) in batch {
        let sent = channel.basic_publish(exchange.into(), "orders.placed".into(), options, payload, properties(id));
        confirms.push(sent.await?);
    }
    for confirm in join_all(confirms).await {
        if !matches!(confirm?, Confirmation::Ack(None)) {
            return Err("a message was not confirmed".into());
        }
    }
    Ok(())
}

pub fn body(number: usize) -> Vec<u8> {
    let mut text = format!("{{\"n\": {number}, \"text\": \"");
    text.extend(std::iter::repeat_n('x', PAYLOAD.saturating_sub(text.len() + 2)));
    text.push_str("\"}");
    text.into_bytes()
}

/// The same bytes from memory, four channels, 250 under way on each.
pub async fn bare_client(exchange: &str, messages: usize) -> Result<Duration, BoxError> {
    let batches: Vec<Vec<(String, Vec<u8>)>> = (1..=messages)
        .map(|number| (MessageId::new().to_string(), body(number)))
        .collect::<Vec<_>>()
        .chunks(250)
        .map(<[_]>::to_vec)
        .collect();
    let connection = connection().await?;
    let began = Instant::now();
    let workers = (0..4).map(|worker| {
        let (connection, batches) = (&connection, &batches);
        async move {
            let channel = confirming(connection).await?;
            for batch in batches.iter().skip(worker).step_by(4) {
                publish_together(&channel, exchange, batch).await?;
            }
            Ok::<_, BoxError>(())
        }
    });
    try_join_all(workers).await?;
    Ok(began.elapsed())
}

async fn table_a(messages: usize) -> Result<(Database, Client), BoxError> {
    let database = Database::create().await;
    let client = database.connect().await;
    client
        .batch_execute(
            "create table outbox_messages (id uuid primary key, type varchar(255) not null, content jsonb not null,
                 occurred_on_utc timestamptz not null, processed_on_utc timestamptz, error text)",
        )
        .await?;
    let sql = "insert into outbox_messages (id, type, content, occurred_on_utc)
               select gen_random_uuid(), 'order.placed', (rpad('{\"n\": ' || n || ', \"text\": \"', $2 - 2, 'x') || '\"}')::jsonb,
                      now() + n * interval '1 microsecond'
                 from generate_series(1, $1::bigint) n";
    client.execute(sql, &[&(messages as i64), &(PAYLOAD as i32)]).await?;
    client.batch_execute("analyze; checkpoint").await?;
    Ok((database, client))
}

/// One job: a hundred messages by their time, published and updated one by one inside the transaction that read them.
pub async fn article_a(exchange: &str, messages: usize) -> Result<Duration, BoxError> {
    let (_database, mut client) = table_a(messages).await?;
    let connection = connection().await?;
    let channel = confirming(&connection).await?;
    let began = Instant::now();
    loop {
        let tx = client.transaction().await?;
        let rows = tx
            .query(
                "select id, type, content::text from outbox_messages where processed_on_utc is null
                  order by occurred_on_utc limit 100",
                &[],
            )
            .await?;
        if rows.is_empty() {
            return Ok(began.elapsed());
        }
        for row in &rows {
            let id: Uuid = row.get(0);
            let content: serde_json::Value = serde_json::from_str(row.get(2))?;
            publish_together(&channel, exchange, &[(id.to_string(), content.to_string().into_bytes())]).await?;
            tx.execute("update outbox_messages set processed_on_utc = now() where id = $1", &[&id]).await?;
        }
        tx.commit().await?;
    }
}

/// As the article advises for more: five workers that skip each other's rows, larger batches, a covering index, one update
/// a batch, and confirms awaited together.
pub async fn article_a_scaled(exchange: &str, messages: usize) -> Result<Duration, BoxError> {
    let (database, client) = table_a(messages).await?;
    client
        .batch_execute(
            "create index on outbox_messages (occurred_on_utc, processed_on_utc) include (id, type, content)
              where processed_on_utc is null",
        )
        .await?;
    client.batch_execute("vacuum analyze outbox_messages").await?;
    let connection = connection().await?;
    let began = Instant::now();
    let workers = (0..5).map(|_| {
        let (database, connection) = (&database, &connection);
        async move {
            let mut client = database.connect().await;
            let channel = confirming(connection).await?;
            loop {
                let tx = client.transaction().await?;
                let rows = tx
                    .query(
                        "select id, type, content::text from outbox_messages where processed_on_utc is null
                          order by occurred_on_utc limit 1000 for update skip locked",
                        &[],
                    )
                    .await?;
                if rows.is_empty() {
                    return Ok::<_, BoxError>(());
                }
                let ids: Vec<Uuid> = rows.iter().map(|row| row.get(0)).collect();
                let batch: Vec<(String, Vec<u8>)> = rows
                    .iter()
                    .map(|row| (row.get::<_, Uuid>(0).to_string(), row.get::<_, String>(2).into_bytes()))
                    .collect();
                publish_together(&channel, exchange, &batch).await?;
                tx.execute(
                    "update outbox_messages o set processed_on_utc = now() from unnest($1::uuid[]) as done (id)
                      where o.id = done.id",
                    &[&ids],
                )
                .await?;
                tx.commit().await?;
            }
        }
    });
    try_join_all(workers).await?;
    Ok(began.elapsed())
}

/// Two hundred claimed by a state, then one by one: exchange declared, published, confirmed, updated.
pub async fn article_d(exchange: &str, messages: usize) -> Result<Duration, BoxError> {
    let database = Database::create().await;
    let client = database.connect().await;
    client
        .batch_execute(
            "create table outbox_messages (id uuid primary key, aggregate_id text, aggregate_type text, aggregate_version bigint,
                 type text not null, payload jsonb not null, headers jsonb, tenant_id text, occurred_at timestamptz not null,
                 visible_at timestamptz not null, attempts int not null default 0, status smallint not null default 0,
                 last_error text, routing_key text, partition_key text);
             create index on outbox_messages (status, visible_at)",
        )
        .await?;
    let sql = "insert into outbox_messages (id, type, payload, occurred_at, visible_at, routing_key)
               select gen_random_uuid(), 'order.placed', (rpad('{\"n\": ' || n || ', \"text\": \"', $2 - 2, 'x') || '\"}')::jsonb,
                      now(), now() - interval '1 hour' + n * interval '1 microsecond', 'orders.placed'
                 from generate_series(1, $1::bigint) n";
    client.execute(sql, &[&(messages as i64), &(PAYLOAD as i32)]).await?;
    client.batch_execute("analyze; checkpoint").await?;
    let connection = connection().await?;
    let channel = connection.create_channel().await?;
    let began = Instant::now();
    loop {
        let rows = client
            .query(
                "with cte as (select id from outbox_messages where status = 0 and visible_at <= now() order by visible_at
                              for update skip locked limit 200)
                 update outbox_messages o set status = 9 from cte where o.id = cte.id
                 returning o.id, o.payload::text, o.attempts",
                &[],
            )
            .await?;
        if rows.is_empty() {
            return Ok(began.elapsed());
        }
        for row in rows {
            let (id, payload, attempts): (Uuid, String, i32) = (row.get(0), row.get(1), row.get(2));
            let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
            channel.exchange_declare(exchange.into(), ExchangeKind::Topic, durable, FieldTable::default()).await?;
            channel.confirm_select(ConfirmSelectOptions::default()).await?;
            publish_together(&channel, exchange, &[(id.to_string(), payload.into_bytes())]).await?;
            let sql = "update outbox_messages set status = 1, attempts = $2, last_error = null where id = $1";
            client.execute(sql, &[&id, &(attempts + 1)]).await?;
        }
    }
}
