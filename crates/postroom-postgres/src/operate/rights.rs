//! What the role of a relay or a filler may do, and what it has to be granted. `docs/grants-relay.sql` and `docs/grants-consumer.sql`
//! grant the same.

use std::collections::HashSet;

use postroom::{Finding, Needs, StoreError};
use tokio_postgres::GenericClient;

use crate::connect::Connector;
use crate::link::store_error;
use crate::migrate::schema_version;
use crate::operate::session::OperatorSession;

const WHAT_RELAYS_NEED: &str = "
    usage schema postroom
    execute function postroom.checkpoint()
    execute function postroom.register_route(text, text[], text, text, text)
    execute function postroom.change_route(text, text[], text, text, text)
    execute function postroom.at_home()
    execute function postroom.missing_indexes()
    execute function postroom.positions_are_foreign()
    execute function postroom.failure_noted(jsonb, integer, text)
    execute function postroom.refresh_statistics()
    execute function postroom.mend()
    select table postroom.outbox
    select table postroom.settings
    select table postroom.migrations
    select table postroom.outbox_seq_seq
    select,insert,update table postroom.routes
    select,insert,update table postroom.route_revisions
    select,insert,update table postroom.lanes
    select,insert,update,delete table postroom.parked
    select,insert,update,delete table postroom.relays
    select,insert,update,delete table postroom.suspects
    select table postroom.operation_watch
    select columns(id,kind,route) postroom.operations
    select,insert table postroom.dead_letters
    select,insert table postroom.blocked_keys";

const WHAT_FILLERS_NEED: &str = "
    usage schema postroom
    select,insert table postroom.inbox
    select,insert table postroom.dead_consume
    select,insert,update table postroom.inbox_messages
    select,insert,update table postroom.inbox_fillers
    usage sequence postroom.inbox_claims
    select table postroom.settings
    select table postroom.migrations";

const WHAT_RETENTION_NEEDS: &str = "
    execute function postroom.retain_outbox(smallint, bigint, text[], interval[], interval, integer)
    execute function postroom.outbox_expired(smallint, bigint, text[], interval[], interval, integer)
    execute function postroom.archive_begin(smallint[], bigint[], interval)
    execute function postroom.archive_take(interval)
    execute function postroom.archive_end(uuid)
    execute function postroom.archive_forget(integer)
    select table postroom.archive_segments
    execute function postroom.retain_dead(interval, integer)
    execute function postroom.retain_inbox(interval, integer)
    execute function postroom.retain_audit(interval, integer)
    select table postroom.routes
    select table postroom.route_revisions
    select table postroom.settings";

const WHAT_METRICS_NEED: &str = "
    execute function postroom.note_sizes()
    select table postroom.sizes
    select table postroom.operation_watch
    select columns(id,kind,route) postroom.operations
    select table postroom.reconciliations
    select table postroom.inbox
    select table postroom.inbox_fillers
    select columns(consumer) postroom.dead_consume
    select columns(consumer,state,attempts,received_at,due_at,last_error) postroom.inbox_messages";

const WHAT_OPERATIONS_NEED: &str = "
    execute function postroom.operations_due(integer)
    execute function postroom.operation_step(uuid, bigint[], bigint, bigint, boolean)
    select columns(consumer,seq,message_id,type,topic,ordering_key,died_at,cause,error,tenant_id,aggregate_id) postroom.dead_consume";

const WHAT_COMPARISONS_NEED: &str = "
    execute function postroom.note_reconciled(text, bigint, bigint, bigint, jsonb)
    select table postroom.reconciliations
    select table postroom.inbox
    select columns(consumer,message_id) postroom.dead_consume
    select columns(consumer,message_id,state) postroom.inbox_messages";

const WHAT_INTAKES_NEED: &str = "
    insert table postroom.outbox
    select table postroom.dead_letters
    select columns(id,at,actor,action,reason,message_ids) postroom.audit
    select,insert,update,delete table postroom.intakes
    select,insert,update,delete table postroom.intake_rows";

/// Grants that this session's role lacks, as statements to run. Objects that do not exist are not listed: the schema is another one.
pub(crate) async fn missing_grants(
    client: &impl GenericClient,
    needs: Needs,
) -> Result<Vec<String>, tokio_postgres::Error> {
    let needed = [
        (needs.relay, WHAT_RELAYS_NEED),
        (needs.filler, WHAT_FILLERS_NEED),
        (needs.retention, WHAT_RETENTION_NEEDS),
        (needs.metrics, WHAT_METRICS_NEED),
        (needs.operations, WHAT_OPERATIONS_NEED),
        (needs.comparisons, WHAT_COMPARISONS_NEED),
        (needs.intakes, WHAT_INTAKES_NEED),
    ];
    let lines = needed.iter().filter(|(needed, _)| *needed).flat_map(|(_, lines)| lines.lines());
    let rights = lines.filter_map(|line| {
        let (privileges, object) = line.trim().split_once(' ')?;
        let (kind, name) = object.split_once(' ')?;
        Some(privileges.split(',').map(move |privilege| (privilege, kind, name)))
    });
    let (mut privileges, mut kinds, mut names) = (Vec::new(), Vec::new(), Vec::new());
    let mut asked = HashSet::new();
    for (privilege, kind, name) in rights.flatten().filter(|right| asked.insert(*right)) {
        privileges.push(privilege);
        kinds.push(kind);
        names.push(name);
    }
    let rows = client.query(include_str!("sql/missing_grants.sql"), &[&privileges, &kinds, &names]).await?;
    rows.iter().map(|row| row.try_get(0)).collect()
}

/// Looks at the schema and at the rights of this role.
pub(crate) async fn check(connector: &Connector, needs: Needs) -> Result<Vec<Finding>, StoreError> {
    let failed = |error| store_error("check the store", error);
    let mut session = OperatorSession::open(connector).await?;
    let client = session.look().await?;
    let mut findings = Vec::new();
    let encrypted = client
        .query_one("select coalesce((select s.ssl from pg_stat_ssl s where s.pid = pg_backend_pid()), false)", &[])
        .await
        .map_err(failed)?;
    let encrypted = if encrypted.try_get(0).map_err(failed)? { "encrypted with TLS" } else { "not encrypted" };
    findings.push(Finding::good(format!("the database answers; the connection is {encrypted}")));
    let there = client
        .query_one("select to_regnamespace('postroom') is not null, current_user::text", &[])
        .await
        .map_err(failed)?;
    let role: String = there.try_get(1).map_err(failed)?;
    if !there.try_get::<_, bool>(0).map_err(failed)? {
        let advice = "run `postroom migrate` on it as the role that will own the schema";
        findings.push(Finding::bad("there is no schema postroom in this database", advice));
        return Ok(findings);
    }
    let missing = missing_grants(&client, needs).await.map_err(failed)?;
    if missing.is_empty() {
        findings.push(Finding::good(format!("role {role:?} has the rights that it needs")));
    } else {
        findings.push(Finding::bad(
            format!("role {role:?} lacks {} rights", missing.len()),
            format!("run as the owner of the schema: {};", missing.join("; ")),
        ));
    }
    // Without the right to read it there is nothing more to say; an error ends the transaction, and nothing comes after it.
    let sql = "select max(m.number), (select (to_jsonb(t) ->> 'oldest_program')::int from postroom.settings t) from postroom.migrations m";
    let version = client.query_one(sql, &[]).await;
    match version.and_then(|row| Ok((row.try_get::<_, Option<i32>>(0)?, row.try_get::<_, Option<i32>>(1)?))) {
        Ok((version, oldest)) => {
            let (version, known) = (version.unwrap_or_default(), schema_version());
            findings.push(if let Some(oldest) = oldest.filter(|oldest| *oldest > known) {
                let found = format!(
                    "the schema is at version {version} and works with programs that know version {oldest} or newer; this one knows {known}"
                );
                Finding::bad(found, "use a newer postroom")
            } else if version < known {
                let advice = "run `postroom migrate`; `postroom migrate --plan` shows what it would do";
                Finding::bad(
                    format!("the schema is at version {version}, and this program needs version {known}"),
                    advice,
                )
            } else {
                Finding::good(format!("the schema is at version {version}; this program knows version {known}"))
            });
        }
        Err(_) => findings.push(Finding::bad("the schema's version cannot be read", "grant the rights named above")),
    }
    Ok(findings)
}
