//! The five systems, and how each of them is run.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use postroom::{BoxError, MessageId};
use postroom_postgres::Connector;
use tokio_postgres::Client;
use uuid::Uuid;

use crate::Args;
use crate::consumer::{self, Running};
use crate::databases::{self, On, Tables};
use crate::ledger::{Committed, Ledger};
use crate::process::{Postroom, stop};

/// Without any progress for so long, what is missing counts as lost.
const PATIENCE: Duration = Duration::from_secs(60);

/// One system.
pub struct System {
    pub name: &'static str,
    pub about: &'static str,
    pub on: On,
    /// Processes of `postroom run`.
    relays: usize,
    /// The article's table.
    pub schema: &'static str,
    /// What writes a row of it: $1 the id, $2 the key, $3 the number.
    pub insert: &'static str,
    /// Type of its messages.
    kind: &'static str,
    /// How many rows do not say that they were sent.
    unmarked: &'static str,
    /// `[[intake]]` and what else belongs to its configuration.
    configuration: &'static str,
    /// What else the article does with it.
    also: Also,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Also {
    Nothing,
    Archive,
    DeadAndReplay,
}

const PROCESSED_ON: &str = "
[[intake]]
name = \"outbox\"
preset = \"processed-on\"
every = \"50ms\"
[intake.message]
key = \"${content:/key}\"
";

const PROCESSED_ON_AND_ARCHIVE: &str = "
[[intake]]
name = \"outbox\"
preset = \"processed-on\"
every = \"50ms\"
[intake.message]
key = \"${content:/key}\"
[retention]
outbox = \"7d\"
[archive]
url = \"ARCHIVE\"
";

pub const SYSTEMS: &[System] = &[
    System {
        name: "processed-on",
        about: "the first article's table, whose rows get the time when they were sent; breaker, archive",
        on: On::Postgres,
        relays: 1,
        schema: include_str!("sql/processed_on.sql"),
        // As if they were older, so that they can be archived at once.
        insert: "insert into outbox_messages (id, type, content, occurred_on_utc)
                 values ($1, 'order-created', jsonb_build_object('key', $2::text, 'n', $3::bigint), clock_timestamp() - interval '1 hour')",
        kind: "order-created",
        unmarked: "select count(*) from outbox_messages where processed_on_utc is null or error is not null",
        configuration: PROCESSED_ON_AND_ARCHIVE,
        also: Also::Archive,
    },
    System {
        name: "processed-on, five relays",
        about: "the same table, scaled out as the article does it",
        on: On::Postgres,
        relays: 5,
        schema: include_str!("sql/processed_on.sql"),
        insert: "insert into outbox_messages (id, type, content, occurred_on_utc)
                 values ($1, 'order-created', jsonb_build_object('key', $2::text, 'n', $3::bigint), clock_timestamp())",
        kind: "order-created",
        unmarked: "select count(*) from outbox_messages where processed_on_utc is null or error is not null",
        configuration: PROCESSED_ON,
        also: Also::Nothing,
    },
    System {
        name: "delete-when-sent",
        about: "the second article's table: sent at once, deleted when sent, and swept",
        on: On::Postgres,
        relays: 2,
        schema: include_str!("sql/delete_when_sent.sql"),
        insert: "insert into outbox (id, message, \"timestamp\")
                 values ($1, json_build_object('key', $2::text, 'n', $3::bigint)::text, clock_timestamp())",
        kind: "message",
        unmarked: "select count(*) from outbox",
        configuration: "
[[intake]]
name = \"outbox\"
preset = \"delete-when-sent\"
every = \"50ms\"
[intake.message]
key = \"${message:/key}\"
",
        also: Also::Nothing,
    },
    System {
        name: "task-states, two databases",
        about: "the third article's task table in two databases, shared out by user, a topic for each row",
        on: On::Mariadb,
        relays: 1,
        schema: include_str!("sql/tasks.sql"),
        insert: "",
        kind: "send_award",
        unmarked: "select count(*) from task where state <> 'completed'",
        configuration: "
[[intake]]
name = \"tasks\"
preset = \"task-states\"
every = \"50ms\"
",
        also: Also::Nothing,
    },
    System {
        name: "status-codes",
        about: "the fourth article's table with status, tenant, headers and partition key; dead letters, replay",
        on: On::Postgres,
        relays: 3,
        schema: include_str!("sql/status_codes.sql"),
        insert: "insert into outbox_messages (id, aggregate_id, aggregate_type, aggregate_version, type, payload, headers, tenant_id,
                                              occurred_at, visible_at, routing_key, partition_key)
                 values ($1, gen_random_uuid(), 'order', $3, 'order.placed', jsonb_build_object('key', $2::text, 'n', $3::bigint),
                         '{\"source\": \"shop\"}', 'tenant-1', clock_timestamp(), clock_timestamp(), 'order.placed', $2)",
        kind: "order.placed",
        unmarked: "select count(*) from outbox_messages where status <> 1",
        configuration: "
[[intake]]
name = \"outbox\"
preset = \"status-codes\"
every = \"50ms\"
",
        also: Also::DeadAndReplay,
    },
    System {
        name: "status-codes, SQL Server",
        about: "the same table on SQL Server",
        on: On::Mssql,
        relays: 3,
        schema: include_str!("sql/status_codes_mssql.sql"),
        insert: "insert into outbox_messages (id, aggregate_id, aggregate_type, aggregate_version, type, payload, headers, tenant_id,
                                              occurred_at, visible_at, routing_key, partition_key)
                 values (@P1, newid(), N'order', @P3, N'order.placed', @P4, N'{\"source\": \"shop\"}', N'tenant-1',
                         sysutcdatetime(), sysutcdatetime(), N'order.placed', @P2)",
        kind: "order.placed",
        unmarked: "select count_big(*) from outbox_messages where status <> 1",
        configuration: "
[[intake]]
name = \"outbox\"
preset = \"status-codes\"
every = \"50ms\"
",
        also: Also::Nothing,
    },
];

pub async fn run(args: &Args, system: &'static System) -> Result<Ledger, BoxError> {
    let unique = MessageId::new().to_string().replace('-', "");
    let run = format!("articles-{unique}");
    let (service_url, service) = databases::postgres(&args.store, &format!("articles_s_{unique}")).await?;
    let connector = Connector::new(&service_url)?;
    postroom_postgres::migrate(&connector, postroom::LANES_DEFAULT).await?;
    service.batch_execute(consumer::TABLES).await?;

    // The application's databases, and the configuration that names them.
    let all = Arc::new(AtomicUsize::new(0));
    let (mut tables, stores, writing) = databases::begin(args, system, &unique, &all).await?;
    let configuration = format!(
        "{stores}[relay]\nlease = \"1s\"\npoll_idle = \"50ms\"\nin_flight_max = 500\n\
         [[routes]]\nname = \"messages\"\nbreaker_after = 50\n[routes.retry]\nbase = 1.0\ncap = \"1s\"\njitter = \"0ms\"\nattempts_max = 2\n\
         [routes.sink]\nkind = \"rabbitmq\"\nurl = {:?}\nexchange = {run:?}\n{}",
        args.rabbitmq, system.configuration
    );
    let postroom = Postroom::new(args, &run, &configuration)?;
    let running = Running::begin(
        &connector,
        &args.rabbitmq,
        &run,
        &["order.*", "order-created", "message", "send_award"],
        &[system.kind],
    )
    .await?;
    postroom.command(&["migrate"]).await?;
    let mut relays = Vec::new();
    for _ in 0..system.relays {
        relays.push(postroom.relay()?);
    }

    // One relay dies while messages are on their way.
    while all.load(Ordering::Relaxed) < args.messages / 2 && !writing.iter().all(|writer| writer.is_finished()) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    relays[0].kill().await?;
    relays[0] = postroom.relay()?;
    let (mut committed, mut rolled_back) = (Committed::new(), 0);
    for writer in writing {
        let (some, none) = writer.await??;
        committed.extend(some);
        rolled_back += none;
    }
    until(&service, committed.len(), &postroom).await?;
    marked(&mut tables, system.unmarked, 0, &postroom).await?;

    let mut suppressed = 0;
    let mut also = Vec::new();
    let mut running = running;
    match (system.also, &mut tables) {
        (Also::Archive, _) => {
            let pruned = postroom.command(&["prune", "--outbox", "1m"]).await?;
            postroom.command(&["archive", "verify"]).await?;
            also.push(format!("archived, verified, and {}", pruned.trim()));
        }
        (Also::DeadAndReplay, Tables::Postgres(client)) => {
            // A message that no queue accepts, as long as nobody binds one for it.
            let id = *MessageId::new().as_uuid();
            let insert = system.insert.replace("'order.placed', $2)", "'late.placed', $2)");
            client.execute(&insert, &[&id, &"late", &1_i64]).await?;
            committed.insert(id, ("late".to_owned(), 1));
            let dead = "select count(*) from outbox_messages where status = 3";
            marked(&mut tables, dead, 1, &postroom).await?;
            suppressed += running.end().await?.duplicates;
            running = Running::begin(&connector, &args.rabbitmq, &run, &["order.*", "late.*"], &[system.kind]).await?;
            postroom.command(&["dead", "retry", "--topic", "order", "--reason", "a queue is bound now"]).await?;
            until(&service, committed.len(), &postroom).await?;
            marked(&mut tables, system.unmarked, 0, &postroom).await?;
            postroom.command(&["replay", "--all", "--wait", "--reason", "a new service"]).await?;
            also.push("one message was dead with status 3, and was sent when it was retried".to_owned());
            also.push(format!("all {} were replayed, and the inbox recognised them", committed.len()));
        }
        _ => {}
    }
    for relay in relays {
        stop(relay).await?;
    }
    postroom.remove()?;
    suppressed += running.end().await?.duplicates;
    let rows = service.query("select message_id, key, n from effects order by at", &[]).await?;
    let effects: Vec<(Uuid, String, i64)> = rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
    let unmarked = tables.count(system.unmarked).await?;
    Ok(Ledger::of(system.name, &committed, rolled_back, &effects, (suppressed, unmarked), also))
}

/// Waits until the service has applied so many, or makes no progress.
async fn until(service: &Client, messages: usize, postroom: &Postroom) -> Result<(), BoxError> {
    let mut progress: HashMap<i64, Instant> = HashMap::new();
    loop {
        let effects: i64 = service.query_one("select count(*) from effects", &[]).await?.get(0);
        if effects as usize >= messages {
            return Ok(());
        }
        if progress.entry(effects).or_insert_with(Instant::now).elapsed() > PATIENCE {
            eprintln!("only {effects} of {messages} arrive; the relays said:\n{}", postroom.last_words());
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Waits until this query counts so many.
async fn marked(tables: &mut Tables, sql: &str, rows: i64, postroom: &Postroom) -> Result<(), BoxError> {
    let began = Instant::now();
    loop {
        let counted = tables.count(sql).await?;
        if counted == rows {
            return Ok(());
        }
        if began.elapsed() > PATIENCE {
            return Err(
                format!("{sql}: {counted} in place of {rows}; the relays said:\n{}", postroom.last_words()).into()
            );
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
