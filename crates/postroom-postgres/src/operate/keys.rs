//! What operators see of keys that wait, and what they do about them.

use postroom::{BoxError, Deed, KeyDeed, Side, StoreError, WaitingKey, WaitsFor};
use tokio_postgres::Row;

use crate::connect::Connector;
use crate::link::store_error;
use crate::operate::dead::{ONE_OPERATOR, audit};
use crate::operate::session::OperatorSession;
use crate::text::{shown, shown_opt, word};

/// Keys that wait, longest first, at most `limit`.
pub(crate) async fn waiting_keys(
    connector: &Connector,
    side: Side,
    route: Option<&str>,
    limit: i64,
) -> Result<Vec<WaitingKey>, StoreError> {
    let failed = |error| store_error("read the waiting keys", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.look().await?;
    if side == Side::In {
        let rows = tx.query(include_str!("sql/keys_in.sql"), &[&route, &limit]).await.map_err(failed)?;
        let key = |row: &Row| {
            Ok(WaitingKey {
                route: shown(row, 0)?,
                key: shown(row, 1)?,
                waits_for: WaitsFor::Retry,
                head: row.try_get(2)?,
                messages: row.try_get(3)?,
                attempts: row.try_get(4)?,
                since_seconds: row.try_get(5)?,
                retry_in_seconds: row.try_get(6)?,
                reason: shown_opt(row, 7)?,
            })
        };
        return rows.iter().map(key).collect::<Result<_, _>>().map_err(failed);
    }
    let rows = tx.query(include_str!("sql/keys.sql"), &[&route, &limit]).await.map_err(failed)?;
    let keys: Result<Vec<WaitingKey>, BoxError> = rows
        .iter()
        .map(|row| {
            Ok(WaitingKey {
                route: shown(row, 0)?,
                key: shown(row, 1)?,
                waits_for: word(row, 2, WaitsFor::of)?,
                head: row.try_get(3)?,
                messages: row.try_get(4)?,
                attempts: row.try_get(5)?,
                since_seconds: row.try_get(6)?,
                retry_in_seconds: row.try_get(7)?,
                reason: shown_opt(row, 8)?,
            })
        })
        .collect();
    keys.map_err(|source| StoreError::Refused { what: "read the waiting keys", source })
}

/// Parks, unparks or skips a key of a route, with an audit row in the same transaction. False: there was nothing to do.
///
/// What a relay has claimed of a parked key already, at most its window, still goes out, in order.
pub(crate) async fn act_on_key(
    connector: &Connector,
    route: &str,
    key: &str,
    what: KeyDeed,
    deed: &Deed,
) -> Result<bool, StoreError> {
    let failed = |error| store_error("act on a key; nothing was changed", error);
    let mut session = OperatorSession::open(connector).await?;
    let tx = session.deed().await?;
    tx.batch_execute(ONE_OPERATOR).await.map_err(failed)?;
    let lane = tx
        .query_opt(
            "select (abs(hashtextextended($2, 0) % s.lanes))::smallint from postroom.settings s
              where exists (select from postroom.routes where name = $1)",
            &[&route, &key],
        )
        .await
        .map_err(failed)?;
    let Some(lane) = lane.map(|row| row.get::<_, i16>(0)) else {
        return Err(StoreError::Refused {
            what: "act on a key",
            source: format!("there is no route {route:?}; `postroom status` lists them").into(),
        });
    };
    // What a relay records about the key comes wholly before this or wholly after it.
    tx.execute(include_str!("sql/lock_lanes_of_deed.sql"), &[&vec![route], &vec![lane]]).await.map_err(failed)?;
    let mut ids = Vec::new();
    let changed = match what {
        KeyDeed::Park => {
            let sql = "insert into postroom.blocked_keys (route, ordering_key, seq, lane, reason)
                       values ($1, $2, 0, $3, $4) on conflict do nothing";
            tx.execute(sql, &[&route, &key, &lane, &deed.reason]).await
        }
        KeyDeed::Unpark => {
            let sql = "delete from postroom.blocked_keys where route = $1 and ordering_key = $2 and seq = 0";
            tx.execute(sql, &[&route, &key]).await
        }
        KeyDeed::Skip => {
            let sql = "with gone as (delete from postroom.blocked_keys where route = $1 and ordering_key = $2 and seq > 0
                                     returning route, seq)
                       select d.id::text from gone g left join postroom.dead_letters d on d.route = g.route and d.seq = g.seq";
            tx.query(sql, &[&route, &key]).await.map(|rows| {
                ids.extend(rows.iter().filter_map(|row| row.get::<_, Option<String>>(0)));
                rows.len() as u64
            })
        }
    };
    if changed.map_err(failed)? == 0 {
        return Ok(false);
    }
    tx.execute(include_str!("../log/sql/promote.sql"), &[&route, &vec![key]]).await.map_err(failed)?;
    let conditions = serde_json::json!({ "route": route, "key": key }).to_string();
    audit(&tx, deed, what.action(), &conditions, &ids.iter().map(String::as_str).collect::<Vec<_>>())
        .await
        .map_err(failed)?;
    tx.commit().await.map_err(failed)?;
    Ok(true)
}
