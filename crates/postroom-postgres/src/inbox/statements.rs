//! The receiving end in SQL, for every driver. The statements are in `sql/`; most call the functions that are the contract for other
//! languages.

use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use postroom::{
    Admitted, Aggregate, Consumer, FillerReport, FillerSeen, KEY_BYTES_MAX, Keep, Message, MessageId, Settle,
    StoreError, Tenure, Waiting, headers_from_json,
};
use uuid::Uuid;

use crate::inbox::driver::{Asked, Driver, Found, Value};
use crate::outbox::columns::{Columns, milliseconds};

pub(crate) async fn admit<D: Driver>(
    tx: &mut D::Tx<'_>,
    consumer: &Consumer,
    arrivals: &[(MessageId, Option<String>)],
) -> Result<Vec<Admitted>, StoreError> {
    const WHAT: &str = "claim messages in the inbox";
    let ids: Vec<Uuid> = arrivals.iter().map(|(id, _)| Uuid::from(*id)).collect();
    let mut keys: Vec<&str> = arrivals.iter().filter_map(|(_, key)| key.as_deref()).collect();
    keys.sort_unstable();
    keys.dedup();
    let of = Value::Text(consumer.as_str());
    let (claim, look) = ([of, Value::Uuids(&ids)], [of, Value::Texts(&keys)]);
    let claim = Asked { what: WHAT, sql: include_str!("sql/inbox_admit.sql"), values: &claim };
    let look = Asked { what: WHAT, sql: include_str!("sql/inbox_behind.sql"), values: &look };
    let (new, behind) = D::both(tx, claim, look).await?;
    let new: HashSet<Uuid> = new.iter().map(|row| row.uuid("message_id")).collect::<Result<_, _>>()?;
    let behind: HashSet<String> = behind.iter().map(|row| row.text("ordering_key")).collect::<Result<_, _>>()?;
    let admitted = |(id, key): &(MessageId, Option<String>)| {
        if !new.contains(id.as_uuid()) {
            Admitted::Duplicate
        } else if key.as_ref().is_some_and(|key| behind.contains(key)) {
            Admitted::Behind
        } else {
            Admitted::New
        }
    };
    let admitted: Vec<Admitted> = arrivals.iter().map(admitted).collect();
    if admitted.contains(&Admitted::Duplicate) {
        D::rows(tx, Asked { what: WHAT, sql: include_str!("sql/duplicate_found.sql"), values: &[] }).await?;
    }
    Ok(admitted)
}

pub(crate) async fn keep<D: Driver>(
    tx: &mut D::Tx<'_>,
    consumer: &Consumer,
    messages: &[Message],
    keep: Keep<'_>,
) -> Result<i64, StoreError> {
    const WHAT: &str = "keep received messages";
    let (state, owner, due) = match keep {
        Keep::Ready => ("new", None, Duration::ZERO),
        Keep::Claimed { owner, lease } => ("claimed", Some(owner), lease),
        Keep::Early { window } => ("early", None, window),
    };
    let c = Columns::as_they_are(messages).map_err(|error| StoreError::Refused { what: WHAT, source: error.into() })?;
    let values = [
        Value::Text(consumer.as_str()),
        Value::Text(state),
        Value::Float8(due.as_secs_f64()),
        Value::MaybeText(owner),
        Value::Uuids(&c.ids),
        Value::Texts(&c.topics),
        Value::Texts(&c.kinds),
        Value::Blobs(&c.payloads),
        Value::MaybeTexts(&c.keys),
        Value::MaybeTexts(&c.routing_keys),
        Value::Texts(&c.content_types),
        Value::MaybeStrings(&c.headers),
        Value::MaybeTexts(&c.tenant_ids),
        Value::MaybeTexts(&c.aggregate_types),
        Value::MaybeTexts(&c.aggregate_ids),
        Value::MaybeInt8s(&c.aggregate_versions),
        Value::MaybeInt8s(&c.occurred_ats),
    ];
    let rows = D::rows(tx, Asked { what: WHAT, sql: include_str!("sql/inbox_keep.sql"), values: &values }).await?;
    if rows.len() < messages.len() {
        all_there::<D>(tx, consumer, &c.ids).await?;
    }
    rows.last().map_or(Ok(0), |row| row.int8("claim"))
}

/// Those that were not inserted were there before, unless a trigger has left them out.
async fn all_there<D: Driver>(tx: &mut D::Tx<'_>, consumer: &Consumer, ids: &[uuid::Uuid]) -> Result<(), StoreError> {
    const WHAT: &str = "keep received messages";
    let values = [Value::Text(consumer.as_str()), Value::Uuids(ids)];
    let sql = "select a.id::text as id from unnest($2::uuid[]) a (id)
                where not exists (select from postroom.inbox_messages m where m.consumer = $1 and m.message_id = a.id) limit 1";
    let left_out = D::rows(tx, Asked { what: WHAT, sql, values: &values }).await?;
    let Some(row) = left_out.first() else { return Ok(()) };
    let problem = format!(
        "the database did not insert message {} and gave no error; look at the triggers of postroom.inbox_messages",
        row.text("id")?
    );
    Err(StoreError::Refused { what: WHAT, source: problem.into() })
}

pub(crate) async fn keep_dead<D: Driver>(
    tx: &mut D::Tx<'_>,
    consumer: &Consumer,
    message: &Message,
    error: &str,
) -> Result<(), StoreError> {
    const WHAT: &str = "keep a received message as a dead one";
    let c = Columns::as_they_are(std::slice::from_ref(message))
        .map_err(|error| StoreError::Refused { what: WHAT, source: error.into() })?;
    let values = [
        Value::Text(consumer.as_str()),
        Value::Text(error),
        Value::Int4(KEY_BYTES_MAX as i32),
        Value::Uuid(message.id.into()),
        Value::Text(&message.topic),
        Value::Text(&message.kind),
        Value::Bytes(&message.payload),
        Value::MaybeText(message.key.as_deref()),
        Value::MaybeText(message.routing_key.as_deref()),
        Value::Text(&message.content_type),
        Value::MaybeText(c.headers.first().and_then(Option::as_deref)),
        Value::MaybeText(message.tenant_id.as_deref()),
        Value::MaybeText(message.aggregate_type.as_deref()),
        Value::MaybeText(message.aggregate_id.as_deref()),
        Value::MaybeInt8(message.aggregate_version),
        Value::MaybeInt8(c.occurred_ats.first().copied().flatten()),
    ];
    D::changed(tx, Asked { what: WHAT, sql: include_str!("sql/inbox_keep_dead.sql"), values: &values }).await.map(drop)
}

pub(crate) async fn take<D: Driver>(
    tx: &mut D::Tx<'_>,
    consumer: &Consumer,
    owner: &str,
    max: usize,
    lease: Duration,
    claims_max: u32,
) -> Result<Vec<Waiting>, StoreError> {
    // It must see what others have settled a moment ago, whatever level the server gives to a transaction.
    let level =
        Asked { what: "take waiting messages", sql: "set transaction isolation level read committed", values: &[] };
    D::changed(tx, level).await?;
    let values = [
        Value::Text(consumer.as_str()),
        Value::Int4(max.clamp(1, 10_000) as i32),
        Value::Text(owner),
        Value::Float8(lease.as_secs_f64()),
        Value::Int4(claims_max as i32),
    ];
    let asked = Asked { what: "take waiting messages", sql: include_str!("sql/inbox_take.sql"), values: &values };
    let rows = D::rows(tx, asked).await?;
    let waiting = |row: &D::Row| {
        Ok(Waiting {
            claim: row.int8("claim")?,
            claims: row.int4("claims")?.max(0) as u32,
            attempts: row.int4("attempts")?.max(0) as u32,
            window_over: row.flag("window_over")?,
            message: message_of(row)?,
        })
    };
    rows.iter().map(waiting).collect()
}

fn message_of(row: &impl Found) -> Result<Message, StoreError> {
    let occurred = |us: i64| SystemTime::UNIX_EPOCH.checked_add(Duration::from_micros(us.max(0) as u64));
    Ok(Message {
        id: MessageId::from(row.uuid("id")?),
        topic: row.text("topic")?,
        kind: row.text("type")?,
        key: row.maybe_text("key")?,
        routing_key: row.maybe_text("routing_key")?,
        payload: row.bytes("payload")?.into(),
        content_type: row.text("content_type")?,
        headers: headers_from_json(row.maybe_text("headers")?.as_deref()),
        tenant_id: row.maybe_text("tenant_id")?,
        aggregate_type: row.maybe_text("aggregate_type")?,
        aggregate_id: row.maybe_text("aggregate_id")?,
        aggregate_version: row.maybe_int8("aggregate_version")?,
        occurred_at: row.maybe_int8("occurred_us")?.and_then(occurred),
        delay: Duration::ZERO,
    })
}

pub(crate) async fn renew<D: Driver>(
    tx: &mut D::Tx<'_>,
    consumer: &Consumer,
    claims: &[(MessageId, i64)],
    lease: Duration,
) -> Result<(), StoreError> {
    let (ids, claims): (Vec<Uuid>, Vec<i64>) = claims.iter().map(|(id, claim)| (Uuid::from(*id), *claim)).unzip();
    let values =
        [Value::Text(consumer.as_str()), Value::Uuids(&ids), Value::Int8s(&claims), Value::Float8(lease.as_secs_f64())];
    let sql = include_str!("sql/inbox_renew.sql");
    D::changed(tx, Asked { what: "renew the claims of waiting messages", sql, values: &values }).await.map(drop)
}

pub(crate) async fn settle<D: Driver>(
    tx: &mut D::Tx<'_>,
    consumer: &Consumer,
    id: MessageId,
    claim: i64,
    settle: &Settle,
) -> Result<bool, StoreError> {
    let mut values = vec![Value::Text(consumer.as_str()), Value::Uuid(id.into()), Value::Int8(claim)];
    let sql = match settle {
        Settle::Done => include_str!("sql/inbox_settle_done.sql"),
        Settle::GivenBack => include_str!("sql/inbox_settle_back.sql"),
        Settle::Retry { after, attempts, error } => {
            values.extend([Value::Float8(after.as_secs_f64()), Value::Int4(*attempts as i32), Value::Text(error)]);
            include_str!("sql/inbox_settle_retry.sql")
        }
        Settle::Early { window } => {
            values.push(Value::Float8(window.as_secs_f64()));
            include_str!("sql/inbox_settle_early.sql")
        }
        Settle::Dead { attempts, cause, error } => {
            values.extend([Value::Int4(*attempts as i32), Value::Text(cause.as_str()), Value::Text(error)]);
            include_str!("sql/inbox_settle_dead.sql")
        }
    };
    Ok(D::changed(tx, Asked { what: "settle a waiting message", sql, values: &values }).await? == 1)
}

pub(crate) async fn version<D: Driver>(
    tx: &mut D::Tx<'_>,
    consumer: &Consumer,
    aggregate: &Aggregate,
) -> Result<Option<i64>, StoreError> {
    const WHAT: &str = "read the version of an aggregate";
    let values = of_aggregate(consumer, aggregate);
    let read = Asked { what: WHAT, sql: include_str!("sql/inbox_version.sql"), values: &values };
    if let Some(row) = D::rows(tx, read).await?.first() {
        return row.maybe_int8("version");
    }
    D::changed(tx, Asked { what: WHAT, sql: include_str!("sql/inbox_version_first.sql"), values: &values }).await?;
    D::rows(tx, read).await?.first().map_or(Ok(None), |row| row.maybe_int8("version"))
}

pub(crate) async fn set_version<D: Driver>(
    tx: &mut D::Tx<'_>,
    consumer: &Consumer,
    aggregate: &Aggregate,
    version: i64,
) -> Result<(), StoreError> {
    let [consumer, kind, id] = of_aggregate(consumer, aggregate);
    let values = [consumer, kind, id, Value::Int8(version)];
    let sql = include_str!("sql/inbox_set_version.sql");
    D::changed(tx, Asked { what: "note the version of an aggregate", sql, values: &values }).await.map(drop)
}

pub(crate) async fn waiting_versions<D: Driver>(
    tx: &mut D::Tx<'_>,
    consumer: &Consumer,
    aggregate: &Aggregate,
    above: i64,
    below: i64,
) -> Result<Vec<(i64, bool)>, StoreError> {
    let [consumer, kind, id] = of_aggregate(consumer, aggregate);
    let values = [consumer, kind, id, Value::Int8(above), Value::Int8(below)];
    let sql = include_str!("sql/inbox_waiting_versions.sql");
    let rows = D::rows(tx, Asked { what: "read the versions that wait", sql, values: &values }).await?;
    rows.iter().map(|row| Ok((row.int8("version")?, row.flag("early")?))).collect()
}

fn of_aggregate<'a>(consumer: &'a Consumer, aggregate: &'a Aggregate) -> [Value<'a>; 3] {
    [Value::Text(consumer.as_str()), Value::Text(&aggregate.kind), Value::Text(&aggregate.id)]
}

pub(crate) async fn filler<D: Driver>(
    tx: &mut D::Tx<'_>,
    consumer: &Consumer,
) -> Result<Option<FillerSeen>, StoreError> {
    let values = [Value::Text(consumer.as_str())];
    let asked =
        Asked { what: "find out who fills an inbox", sql: include_str!("sql/filler_seen.sql"), values: &values };
    let rows = D::rows(tx, asked).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    Ok(Some(FillerSeen {
        owner: row.maybe_text("owner")?,
        epoch: row.int8("epoch")?,
        lease: Duration::from_millis(row.int8("lease_ms")?.max(0) as u64),
        renewal: row.int8("renewal")?,
        free: row.flag("free")?,
    }))
}

pub(crate) async fn take_inbox<D: Driver>(
    tx: &mut D::Tx<'_>,
    consumer: &Consumer,
    owner: &str,
    lease: Duration,
    seen: Option<&FillerSeen>,
) -> Result<Option<Tenure>, StoreError> {
    let mut values = vec![Value::Text(consumer.as_str()), Value::Text(owner), Value::Int8(milliseconds(lease))];
    let sql = match seen {
        None => include_str!("sql/filler_first.sql"),
        Some(seen) => {
            values.extend([Value::Int8(seen.epoch), Value::Int8(seen.renewal)]);
            include_str!("sql/filler_take.sql")
        }
    };
    let rows = D::rows(tx, Asked { what: "take an inbox to fill", sql, values: &values }).await?;
    rows.first().map(|row| Ok(Tenure { owner: owner.to_owned(), epoch: row.int8("epoch")? })).transpose()
}

pub(crate) async fn renew_inbox<D: Driver>(
    tx: &mut D::Tx<'_>,
    consumer: &Consumer,
    tenure: &Tenure,
    lease: Duration,
    said: &FillerReport,
) -> Result<bool, StoreError> {
    let [consumer, owner, epoch] = of_tenure(consumer, tenure);
    let (source, down) = (said.source.as_deref(), said.source_down.as_deref());
    let lease = Value::Int8(milliseconds(lease));
    let values = [consumer, owner, epoch, lease, Value::MaybeText(source), Value::MaybeText(down)];
    let sql = include_str!("sql/filler_renew.sql");
    Ok(D::changed(tx, Asked { what: "renew the lease of an inbox", sql, values: &values }).await? == 1)
}

pub(crate) async fn fence_inbox<D: Driver>(
    tx: &mut D::Tx<'_>,
    consumer: &Consumer,
    tenure: &Tenure,
) -> Result<bool, StoreError> {
    let sql = include_str!("sql/filler_fence.sql");
    let values = of_tenure(consumer, tenure);
    Ok(D::rows(tx, Asked { what: "check who fills an inbox", sql, values: &values }).await?.len() == 1)
}

pub(crate) async fn leave_inbox<D: Driver>(
    tx: &mut D::Tx<'_>,
    consumer: &Consumer,
    tenure: &Tenure,
) -> Result<(), StoreError> {
    let sql = include_str!("sql/filler_leave.sql");
    let values = of_tenure(consumer, tenure);
    D::changed(tx, Asked { what: "give an inbox back", sql, values: &values }).await.map(drop)
}

fn of_tenure<'a>(consumer: &'a Consumer, tenure: &'a Tenure) -> [Value<'a>; 3] {
    [Value::Text(consumer.as_str()), Value::Text(&tenure.owner), Value::Int8(tenure.epoch)]
}
