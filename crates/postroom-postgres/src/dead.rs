//! What operators do about dead letters. Every deed and the audit row about it are one transaction.

use postroom::{BoxError, DeadFilter, DeadLetter, Deed, StoreError, headers_from_json};
use tokio_postgres::{Client, GenericClient, Row};

use crate::connect::Connector;
use crate::link::store_error;

/// Dead letters by filter, oldest first, at most `limit`.
pub async fn dead_letters(
    connector: &Connector,
    filter: &DeadFilter,
    limit: i64,
) -> Result<Vec<DeadLetter>, StoreError> {
    let client = connector.connect().await?;
    chosen(&client, filter, limit).await
}

/// The payload of one dead letter.
pub async fn dead_payload(connector: &Connector, route: &str, seq: i64) -> Result<Option<Vec<u8>>, StoreError> {
    let client = connector.connect().await?;
    let sql = "select payload from postroom.dead_letters where route = $1 and seq = $2";
    let row = client.query_opt(sql, &[&route, &seq]).await.map_err(|error| store_error("read a dead letter", error))?;
    Ok(row.map(|row| row.get(0)))
}

/// Gives dead letters back to their relay, with their ids and all their attempts before them. Returns what was moved.
pub async fn retry_dead(
    connector: &Connector,
    filter: &DeadFilter,
    limit: i64,
    deed: &Deed,
) -> Result<Vec<DeadLetter>, StoreError> {
    act(connector, filter, limit, deed, "dead.retry").await
}

/// Deletes dead letters for good; the audit row keeps their ids. Returns what was deleted.
pub async fn discard_dead(
    connector: &Connector,
    filter: &DeadFilter,
    limit: i64,
    deed: &Deed,
) -> Result<Vec<DeadLetter>, StoreError> {
    act(connector, filter, limit, deed, "dead.discard").await
}

async fn act(
    connector: &Connector,
    filter: &DeadFilter,
    limit: i64,
    deed: &Deed,
    action: &str,
) -> Result<Vec<DeadLetter>, StoreError> {
    let failed = |error| store_error("act on dead letters; nothing was changed", error);
    let mut client: Client = connector.connect().await?;
    let tx = client.transaction().await.map_err(failed)?;
    // Two operators at once would otherwise both see the same letters and both report them.
    tx.batch_execute("lock table postroom.audit in share row exclusive mode").await.map_err(failed)?;
    let letters = chosen(&tx, filter, limit).await?;
    let routes: Vec<&str> = letters.iter().map(|letter| letter.route.as_str()).collect();
    let seqs: Vec<i64> = letters.iter().map(|letter| letter.seq).collect();
    if action == "dead.retry" {
        tx.execute(include_str!("sql/dead_retry.sql"), &[&routes, &seqs]).await.map_err(failed)?;
        let mut distinct: Vec<&str> = routes.clone();
        distinct.sort_unstable();
        distinct.dedup();
        for route in distinct {
            let of_route = letters.iter().filter(|letter| letter.route == route);
            let keys: Vec<&str> = of_route.filter_map(|letter| letter.key.as_deref()).collect();
            tx.execute(include_str!("sql/promote.sql"), &[&route, &keys]).await.map_err(failed)?;
        }
    } else {
        let sql = "delete from postroom.dead_letters d using unnest($1::text[], $2::bigint[]) as c (route, seq)
                    where d.route = c.route and d.seq = c.seq";
        tx.execute(sql, &[&routes, &seqs]).await.map_err(failed)?;
    }
    let ids: Vec<&str> = letters.iter().map(|letter| letter.id.as_str()).collect();
    let conditions = serde_json::to_string(filter).unwrap_or_default();
    let sql = "insert into postroom.audit (actor, action, reason, filter, message_ids)
               values ($1, $2, $3, $4::text::jsonb, $5::text[]::uuid[])";
    tx.execute(sql, &[&deed.actor, &action, &deed.reason, &conditions, &ids]).await.map_err(failed)?;
    tx.commit().await.map_err(failed)?;
    Ok(letters)
}

async fn chosen(client: &impl GenericClient, filter: &DeadFilter, limit: i64) -> Result<Vec<DeadLetter>, StoreError> {
    let id = filter.id.map(uuid::Uuid::from);
    let newer = filter.newer_than.map(|age| age.as_secs_f64());
    let older = filter.older_than.map(|age| age.as_secs_f64());
    let rows = client
        .query(
            include_str!("sql/dead_chosen.sql"),
            &[
                &filter.route,
                &id,
                &filter.topic,
                &filter.kind,
                &filter.tenant_id,
                &filter.aggregate_id,
                &filter.error,
                &newer,
                &older,
                &limit,
            ],
        )
        .await
        .map_err(|error| store_error("read the dead letters", error))?;
    rows.iter().map(letter).collect()
}

fn letter(row: &Row) -> Result<DeadLetter, StoreError> {
    let read = || -> Result<DeadLetter, tokio_postgres::Error> {
        Ok(DeadLetter {
            route: row.try_get(0)?,
            seq: row.try_get(1)?,
            id: row.try_get::<_, uuid::Uuid>(2)?.to_string(),
            topic: row.try_get(3)?,
            kind: row.try_get(4)?,
            key: row.try_get(5)?,
            tenant_id: row.try_get(6)?,
            aggregate_id: row.try_get(7)?,
            attempts: row.try_get(8)?,
            cause: row.try_get(9)?,
            error: row.try_get(10)?,
            died_seconds_ago: row.try_get(11)?,
            payload_bytes: row.try_get(12)?,
            headers: headers_from_json(row.try_get(13)?),
        })
    };
    read().map_err(|error| StoreError::Refused { what: "read a dead letter", source: BoxError::from(error) })
}
