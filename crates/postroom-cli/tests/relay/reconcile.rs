//! Messages are compared with changes and effects, whichever stores the two sides are in.

use std::path::Path;

use postroom_testkit::surroundings;
use uuid::{NoContext, Timestamp, Uuid};

use crate::commands::{json, postroom, text};
use crate::operators::{Running, stores, until};

const DAY: u64 = 24 * 3600;

/// Runs statements on either kind of store.
pub async fn execute(store: &str, sql: &str) {
    match store.strip_prefix("sqlite:") {
        Some(file) => postroom_sqlite::connect(Path::new(file))
            .unwrap()
            .execute_batch(&sql.replace("postroom.", "postroom_"))
            .unwrap(),
        None => postroom_testkit::postgres::connect(store).await.batch_execute(sql).await.unwrap(),
    }
}

fn received(consumer: &str, ids: &[Uuid]) -> String {
    let rows: Vec<String> = ids.iter().map(|id| format!("('{consumer}', '{id}')")).collect();
    format!("insert into postroom.inbox (consumer, message_id) values {}", rows.join(", "))
}

fn forgotten(table: &str, column: &str, ids: &[Uuid]) -> String {
    let ids: Vec<String> = ids.iter().map(|id| format!("'{id}'")).collect();
    format!("delete from postroom.{table} where {column} in ({})", ids.join(", "))
}

/// M71: exactly what is missing is found, on both sides, in other databases too; and from there it is replayed.
#[tokio::test]
async fn exactly_what_is_missing_is_found_and_replayed() {
    let (_database, stores) = stores().await;
    for (store, other) in [(&stores[0], &stores[1]), (&stores[1], &stores[0])] {
        // Of thirty days.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        let ids: Vec<Uuid> = (0..900)
            .map(|n: u64| Uuid::new_v7(Timestamp::from_unix(NoContext, now - 30 * DAY + n * 30 * DAY / 900, 0)))
            .collect();
        execute(store, "create table orders (tenant text, kind text, day bigint, message text)").await;
        for (n, chunk) in ids.chunks(100).enumerate() {
            let rows: Vec<String> =
                chunk.iter().map(|id| format!("('{id}', 'orders', 'order.placed', 'x', 'k{n}', 'acme')")).collect();
            execute(
                store,
                &format!(
                    "insert into postroom.outbox (id, topic, type, payload, key, tenant_id) values {}",
                    rows.join(", ")
                ),
            )
            .await;
            let ms = |id: &Uuid| postroom::id_ms(id);
            let changes: Vec<String> =
                chunk.iter().map(|id| format!("('acme', 'order.placed', {}, '{id}')", ms(id))).collect();
            execute(store, &format!("insert into orders values {}", changes.join(", "))).await;
        }
        let out = surroundings::scratch("reconciled").join("out.jsonl");
        let sink = format!("kind = \"file\"\npath = {out:?}\n");
        {
            let _relay = Running::relay(store, &sink);
            until(store, "it is sent", |status| {
                status["routes"][0]["backlog"] == 0 && status["routes"][0]["lanes_held"].as_i64() > Some(0)
            });
        }
        let mut here = ids.clone();
        let missing_here: Vec<Uuid> = [5, 6, 450, 899].iter().map(|n| ids[*n]).collect();
        here.retain(|id| !missing_here.contains(id));
        execute(store, &received("billing", &here)).await;
        let missing_there = vec![ids[10]];
        let there: Vec<Uuid> = ids.iter().filter(|id| !missing_there.contains(id)).copied().collect();
        execute(other, &received("mail", &there)).await;
        let removed = vec![ids[100], ids[700]];
        execute(store, &forgotten("outbox", "id", &removed)).await;
        execute(store, &format!("delete from orders where message = '{}'", ids[300])).await;

        let config = surroundings::scratch("reconcile").join("postroom.toml");
        let business = match store.starts_with("sqlite") {
            true => "select tenant, kind, count(*) from orders where day >= ?1 and day < ?2 group by 1, 2",
            false => {
                "select tenant, kind, count(*) from orders where day >= extract(epoch from $1::timestamptz) * 1000 and day < extract(epoch from $2::timestamptz) * 1000 group by 1, 2"
            }
        };
        let text_of = format!(
            "[store]\nurl = {store:?}\n[[routes]]\nname = \"orders\"\n[routes.sink]\n{sink}[[reconcile]]\nname = \"orders\"\ntopics = [\"orders\"]\n\
             window = \"31d\"\nsettles = \"0s\"\nbusiness = {business:?}\n[[reconcile.consumers]]\nconsumer = \"billing\"\n\
             [[reconcile.consumers]]\nconsumer = \"mail\"\nstore = {other:?}\n"
        );
        std::fs::write(&config, text_of).unwrap();
        let config = config.to_str().unwrap();
        let run = || postroom(&["--json", "reconcile", "run", "--config", config]);
        let compared = run();
        assert_eq!(compared.status.code(), Some(1), "{compared:?}");
        let result = &json(&compared)["reconciled"][0];
        let consumer = |name: &str| {
            let all = result["consumers"].as_array().unwrap();
            all.iter().find(|one| one["consumer"] == name).unwrap().clone()
        };
        let ids_in = |value: &serde_json::Value| -> Vec<Uuid> {
            let mut ids: Vec<Uuid> =
                value.as_array().unwrap().iter().map(|id| id.as_str().unwrap().parse().unwrap()).collect();
            ids.sort_unstable();
            ids
        };
        for (name, missing) in [("billing", &missing_here), ("mail", &missing_there)] {
            let found = consumer(name);
            assert_eq!((&found["expected"], &found["missing"]), (&898.into(), &missing.len().into()), "{found}");
            assert_eq!(
                (ids_in(&found["missing_ids"]), ids_in(&found["stranger_ids"])),
                (missing.clone(), removed.clone())
            );
            let read = found["ids_read"].as_u64().unwrap();
            assert!(read < 100, "{read} ids were read for {} differences", missing.len() + removed.len());
        }
        let differing: Vec<(i64, i64)> = result["days"]
            .as_array()
            .unwrap()
            .iter()
            .map(|day| (day["changes"].as_i64().unwrap(), day["committed"].as_i64().unwrap()))
            .filter(|(changes, committed)| changes != committed)
            .collect();
        assert_eq!(differing.len(), 3, "one change and two messages are gone: {result}");

        let show =
            json(&postroom(&["--json", "reconcile", "show", "orders", "--consumer", "billing", "--store", store]));
        assert_eq!((&show["total"], &show["messages"][0]["type"]), (&4.into(), &"order.placed".into()), "{show}");
        let ambiguous = postroom(&["replay", "--missing", "orders", "--dry-run", "--store", store]);
        assert!(text(&ambiguous.stderr).contains("name one of the consumers: billing, mail"), "{ambiguous:?}");
        let status = json(&postroom(&["--json", "status", "--store", store]));
        assert_eq!(
            (&status["reconciled"][0]["missing"], &status["reconciled"][0]["strangers"]),
            (&5.into(), &4.into())
        );
        assert!(status["attention"].as_array().unwrap().iter().any(|found| found["kind"] == "reconcile"), "{status}");
        let failing = postroom(&["status", "--store", store, "--fail-on", "reconcile"]);
        assert_eq!(failing.status.code(), Some(1));

        // What was found open is looked at again, also by one that would not look so far back.
        let short = surroundings::scratch("reconcile").join("short.toml");
        let of_a_day = std::fs::read_to_string(config).unwrap().replace("window = \"31d\"", "window = \"1d\"");
        std::fs::write(&short, of_a_day).unwrap();
        let again = json(&postroom(&["--json", "reconcile", "run", "--config", short.to_str().unwrap()]));
        let of_each = again["reconciled"][0]["consumers"].as_array().unwrap();
        let missing: i64 = of_each.iter().map(|one| one["missing"].as_i64().unwrap()).sum();
        assert_eq!(missing, 5, "{again}");

        // From the difference to its end.
        let before = std::fs::read_to_string(&out).unwrap().lines().count();
        {
            let _relay = Running::relay(store, &sink);
            let replay = [
                "--json",
                "replay",
                "--missing",
                "orders/billing",
                "--wait",
                "--reason",
                "billing lost four",
                "--store",
                store,
            ];
            let replayed = json(&postroom(&replay));
            assert_eq!(replayed["done"], 4, "{replayed}");
        }
        assert_eq!(std::fs::read_to_string(&out).unwrap().lines().count(), before + 4);
        execute(store, &received("billing", &missing_here)).await;
        execute(other, &received("mail", &missing_there)).await;
        execute(store, &forgotten("inbox", "message_id", &removed)).await;
        execute(other, &forgotten("inbox", "message_id", &removed)).await;
        execute(store, &forgotten("orders", "message", &removed).replace("postroom.", "")).await;
        let lost_change =
            format!("insert into orders values ('acme', 'order.placed', {}, 'again')", postroom::id_ms(&ids[300]));
        execute(store, &lost_change).await;
        let compared = run();
        assert_eq!(compared.status.code(), Some(0), "{compared:?}");
        execute(other, "delete from postroom.inbox where consumer = 'mail'").await;
    }
}

/// What is on its way, dead, or before a consumer began is no missing message.
#[tokio::test]
async fn what_is_on_its_way_is_not_missing() {
    let (_database, stores) = stores().await;
    for store in &stores {
        let send = |kind: &str| {
            let sent =
                postroom(&["--json", "send", "--topic", "orders", "--type", kind, "--payload", "x", "--store", store]);
            json(&sent)["id"].as_str().unwrap().parse::<Uuid>().unwrap()
        };
        send("early");
        let handled = send("handled");
        let dead_there = send("dead");
        let out = surroundings::scratch("on-its-way").join("out.jsonl");
        let sink = format!("kind = \"file\"\npath = {out:?}\n");
        {
            let _relay = Running::relay(store, &sink);
            until(store, "it is sent", |status| {
                status["routes"][0]["backlog"] == 0 && status["routes"][0]["lanes_held"].as_i64() > Some(0)
            });
        }
        send("unsent");
        execute(store, &received("billing", &[handled])).await;
        let id = if store.starts_with("sqlite") { "id" } else { "message_id" };
        execute(
            store,
            &format!(
                "insert into postroom.dead_consume (consumer, {id}, seq, attempts, cause, error, topic, type, payload, content_type)
                 values ('billing', '{dead_there}', 1, 1, 'permanent', 'no', 'orders', 'dead', 'x', 'text/plain')"
            ),
        )
        .await;
        let config = surroundings::scratch("on-its-way").join("postroom.toml");
        let text_of = format!(
            "[store]\nurl = {store:?}\n[[routes]]\nname = \"orders\"\n[routes.sink]\n{sink}[[reconcile]]\nname = \"orders\"\n\
             settles = \"0s\"\n[[reconcile.consumers]]\nconsumer = \"billing\"\n"
        );
        std::fs::write(&config, &text_of).unwrap();
        let compared = postroom(&["--json", "reconcile", "run", "--config", config.to_str().unwrap()]);
        assert_eq!(compared.status.code(), Some(1), "{compared:?}");
        let result = json(&compared)["reconciled"][0].clone();
        let one = result["consumers"][0].clone();
        assert_eq!((&one["expected"], &one["received"], &one["missing"]), (&4.into(), &1.into(), &1.into()), "{one}");
        assert_eq!((&one["unsent"], &one["dead"]), (&1.into(), &1.into()), "{one}");
        assert!(result["notes"].to_string().contains("set `since`"), "{result}");
        // A consumer that began later need not have it; one whose name is wrong lacks everything.
        let began = postroom::id_ms(&handled);
        let since = format!("since = \"{}\"\n", jiff::Timestamp::from_millisecond(began).unwrap());
        std::fs::write(&config, format!("{text_of}{since}")).unwrap();
        let compared = postroom(&["--json", "reconcile", "run", "--config", config.to_str().unwrap()]);
        assert_eq!(compared.status.code(), Some(0), "{compared:?}");
        std::fs::write(&config, text_of.replace("billing", "biling")).unwrap();
        let compared = postroom(&["--json", "reconcile", "run", "--config", config.to_str().unwrap()]);
        let mistyped = json(&compared)["reconciled"][0].clone();
        assert_eq!((compared.status.code(), &mistyped["consumers"][0]["missing"]), (Some(1), &3.into()), "{mistyped}");
        assert!(mistyped["notes"].to_string().contains("is empty"), "{mistyped}");
        // What was unsent is followed when it has left the window, also past a comparison of another time. No window is needed for that:
        // here it begins behind the message.
        let old = Uuid::new_v7(Timestamp::from_unix(NoContext, postroom::id_ms(&handled) as u64 / 1000 - 20 * 3600, 0));
        let row =
            format!("insert into postroom.outbox (id, topic, type, payload) values ('{old}', 'orders', 'old', 'x')");
        execute(store, &row).await;
        let with_window = |window: &str| {
            std::fs::write(&config, text_of.replace("settles = ", &format!("window = \"{window}\"\nsettles = ")))
                .unwrap()
        };
        let run = |more: &[&str]| {
            let arguments = ["--json", "reconcile", "run", "--config", config.to_str().unwrap()];
            json(&postroom(&[&arguments, more].concat()))["reconciled"][0]["consumers"][0].clone()
        };
        with_window("1d");
        assert_eq!(run(&[])["unsent"], 2);
        run(&["--from", "1h"]);
        with_window("1h");
        assert_eq!(run(&[])["unsent"], 2);
        execute(store, &forgotten("outbox", "id", &[old])).await;

        // What has not settled is not looked at.
        std::fs::write(&config, text_of.replace("\"0s\"", "\"15m\"")).unwrap();
        let compared = json(&postroom(&["--json", "reconcile", "run", "--config", config.to_str().unwrap()]));
        assert_eq!(compared["reconciled"][0]["consumers"][0]["expected"], 0, "{compared}");
        // An id without a time: among the newest, and behind many that have one.
        let insert = |ids: &[Uuid]| {
            let rows: Vec<String> =
                ids.iter().map(|id| format!("('{id}', 'orders', 'order.placed', 'x', 'k')")).collect();
            format!("insert into postroom.outbox (id, topic, type, payload, key) values {}", rows.join(", "))
        };
        execute(store, &insert(&["f47ac10b-58cc-4372-a567-0e02b2c3d479".parse().unwrap()])).await;
        let run = || postroom(&["--json", "reconcile", "run", "--config", config.to_str().unwrap()]);
        assert!(text(&run().stderr).contains("not UUIDv7"));
        let newer: Vec<Uuid> = (0..1100).map(|_| *postroom::MessageId::new().as_uuid()).collect();
        execute(store, &insert(&newer)).await;
        let compared = run();
        assert_eq!(
            (compared.status.code(), &json(&compared)["reconciled"][0]["not_compared"]),
            (Some(1), &1.into()),
            "{compared:?}"
        );
    }
}

/// A database that is away, a query that fails, a comparison of less time, and none at all: nothing of that reads as "no difference".
#[tokio::test]
async fn what_could_not_be_compared_never_passes_for_no_difference() {
    let (_database, stores) = stores().await;
    for (store, other) in [(&stores[0], &stores[1]), (&stores[1], &stores[0])] {
        let none = postroom(&["--json", "status", "--store", store, "--fail-on", "reconcile"]);
        assert_eq!(none.status.code(), Some(1));
        assert!(json(&none)["attention"].to_string().contains("never compared"), "{none:?}");
        let ids: Vec<Uuid> = (0..3).map(|_| *postroom::MessageId::new().as_uuid()).collect();
        let rows: Vec<String> = ids.iter().map(|id| format!("('{id}', 'orders', 'order.placed', 'x')")).collect();
        execute(store, &format!("insert into postroom.outbox (id, topic, type, payload) values {}", rows.join(", ")))
            .await;
        let out = surroundings::scratch("trouble").join("out.jsonl");
        let sink = format!("kind = \"file\"\npath = {out:?}\n");
        {
            let _relay = Running::relay(store, &sink);
            until(store, "it is sent", |status| {
                status["routes"][0]["backlog"] == 0 && status["routes"][0]["lanes_held"].as_i64() > Some(0)
            });
        }
        execute(store, &received("billing", &ids)).await;
        execute(other, &received("mail", &ids)).await;
        let away = match store.starts_with("sqlite") {
            true => "postgres://postgres@127.0.0.1:1/nowhere".to_owned(),
            false => format!("sqlite:{}", surroundings::scratch("trouble").join("nowhere.db").display()),
        };
        let config = surroundings::scratch("trouble").join("postroom.toml");
        let write = |mail: &str, business: &str| {
            let text = format!(
                "[store]\nurl = {store:?}\n[[routes]]\nname = \"orders\"\n[routes.sink]\n{sink}[[reconcile]]\nname = \"orders\"\n\
                 settles = \"0s\"\n{business}[[reconcile.consumers]]\nconsumer = \"mail\"\nstore = {mail:?}\n\
                 [[reconcile.consumers]]\nconsumer = \"billing\"\n"
            );
            std::fs::write(&config, text).unwrap();
        };
        let run = |more: &[&str]| {
            let arguments = ["--json", "reconcile", "run", "--config", config.to_str().unwrap()];
            let compared = postroom(&[&arguments, more].concat());
            (compared.status.code(), json(&compared)["reconciled"][0].clone())
        };
        let fails = |because: &str| {
            let status = postroom(&["--json", "status", "--store", store, "--fail-on", "reconcile"]);
            let found = json(&status)["attention"].to_string();
            assert_eq!(status.status.code(), Some(1), "{found}");
            assert!(found.contains(because), "{found}");
        };
        let passes = || postroom(&["status", "--store", store, "--fail-on", "reconcile"]).status.code() == Some(0);

        write(&away, "");
        let (code, result) = run(&[]);
        assert_eq!(code, Some(1), "{result}");
        let (mail, billing) = (&result["consumers"][0], &result["consumers"][1]);
        assert!(mail["trouble"].is_string() && mail["oldest_open_ms"].is_i64(), "{result}");
        assert_eq!(
            (&billing["received"], &billing["missing"], &billing["trouble"]),
            (&3.into(), &0.into(), &().into())
        );
        fails("1 sides that could not be compared");
        let show = postroom(&["reconcile", "show", "orders", "--consumer", "mail", "--store", store]);
        assert!(text(&show.stderr).contains("could not compare consumer mail"), "{show:?}");
        let replay = postroom(&["replay", "--missing", "orders/mail", "--dry-run", "--store", store]);
        assert!(text(&replay.stderr).contains("could not compare consumer mail"), "{replay:?}");
        let check = postroom(&["--json", "check", "--config", config.to_str().unwrap()]);
        let of_mail = |check: &std::process::Output| {
            let checked = json(check)["checked"].as_array().unwrap().clone();
            checked.iter().find(|one| one["part"] == "reconcile orders, consumer mail").unwrap()["ok"].clone()
        };
        assert_eq!(of_mail(&check), false, "{check:?}");

        // What is known to be missing stays known while nobody can look: in the status, on the list and for a replay.
        write(other, "");
        execute(other, &forgotten("inbox", "message_id", &ids[..1])).await;
        assert_eq!(run(&[]).1["consumers"][0]["missing"], 1);
        write(&away, "");
        let (_, result) = run(&[]);
        assert_eq!((&result["consumers"][0]["missing"], &result["consumers"][0]["received"]), (&1.into(), &0.into()));
        fails("1 messages that a consumer lacks");
        let show = postroom(&["--json", "reconcile", "show", "orders", "--consumer", "mail", "--store", store]);
        assert_eq!(json(&show)["messages"][0]["id"], ids[0].to_string(), "{show:?}");
        assert!(text(&show.stderr).contains("an earlier one found"), "{show:?}");
        // One that was asked for leaves it out, and does not count in its place.
        write(other, "");
        let (code, result) = run(&["--from", "2d", "--to", "26h"]);
        assert_eq!((code, &result["partial"]), (Some(0), &true.into()), "{result}");
        fails("1 messages that a consumer lacks");
        let show = postroom(&["--json", "reconcile", "show", "orders", "--consumer", "mail", "--store", store]);
        assert_eq!(json(&show)["messages"][0]["id"], ids[0].to_string(), "{show:?}");
        // SQLite takes ids as they were written.
        if store.starts_with("sqlite") {
            let rewrite =
                format!("update postroom.outbox set id = upper(replace(id, '-', '')) where id = '{}'", ids[0]);
            execute(store, &rewrite).await;
        }
        let preview = ["--json", "replay", "--missing", "orders/mail", "--dry-run", "--store", store];
        assert_eq!(json(&postroom(&preview))["preview"]["matching"], 1);
        execute(other, &received("mail", &ids[..1])).await;
        assert_eq!(run(&[]).0, Some(0));
        assert!(passes());

        write(other, "business = \"select tenant, kind, count(*) from no_such_table\"\n");
        let (code, result) = run(&[]);
        assert_eq!((code, &result["consumers"][0]["received"]), (Some(1), &3.into()), "{result}");
        assert!(result["business_trouble"].to_string().contains("no_such_table"), "{result}");
        let open = result["business_open_ms"].as_i64().unwrap();
        assert!(open <= result["span"]["from_ms"].as_i64().unwrap(), "asked about again: {result}");
        fails("1 sides that could not be compared");

        write(other, "");
        let (code, result) = run(&["--from", "1h"]);
        assert_eq!((code, &result["partial"]), (Some(0), &true.into()), "{result}");
        fails("1 sides that could not be compared");
        let (code, result) = run(&[]);
        assert_eq!((code, &result["partial"]), (Some(0), &false.into()), "{result}");
        assert!(passes());
        assert_eq!(of_mail(&postroom(&["--json", "check", "--config", config.to_str().unwrap()])), true);

        // An outbox that is empty has no message of any change; one whose messages are deleted too soon cannot tell.
        let of_orders = "changes = \"select 'order', 'o-1', 1 where {from} < {to}\"\n";
        let of_orders = match store.starts_with("sqlite") {
            true => of_orders.replace("{from}", "?1").replace("{to}", "?2"),
            false => of_orders.replace("{from}", "$1::timestamptz").replace("{to}", "$2::timestamptz"),
        };
        execute(store, "delete from postroom.outbox").await;
        write(other, &of_orders);
        let (code, result) = run(&[]);
        assert_eq!((code, result["unwritten"].as_u64() > Some(0)), (Some(1), true), "{result}");
        let text_of = std::fs::read_to_string(&config).unwrap();
        std::fs::write(&config, format!("{text_of}[retention]\noutbox = \"30m\"\n")).unwrap();
        let (code, result) = run(&[]);
        assert_eq!(code, Some(1), "{result}");
        assert!(result["changes_trouble"].to_string().contains("an hour longer"), "{result}");
        write(other, "");
        assert_eq!(run(&[]).0, Some(0));
        // A consumer that begins in the future is a mistake, and not one that lacks nothing.
        let text_of = std::fs::read_to_string(&config).unwrap();
        let since = text_of.replace("consumer = \"mail\"\n", "consumer = \"mail\"\nsince = \"2999-01-01T00:00:00Z\"\n");
        std::fs::write(&config, since).unwrap();
        let (code, result) = run(&[]);
        assert_eq!(code, Some(1), "{result}");
        assert!(result["consumers"][0]["trouble"].to_string().contains("has not come yet"), "{result}");
        write(other, "");
        assert_eq!(run(&[]).0, Some(0));
        // Three that were due were left out.
        let earlier = match store.starts_with("sqlite") {
            true => "update postroom.reconciliations set at_ms = at_ms - 11000000",
            false => "update postroom.reconciliations set at = at - interval '11000 s'",
        };
        execute(store, earlier).await;
        fails("is to be made every");
        // Where a relay compares by itself, a comparison that fails as a whole is a result too: this id has no time in it.
        let no_time = "insert into postroom.outbox (id, topic, type, payload)
                       values ('4b3f2a52-5d1f-4c7e-9d0a-1f2e3d4c5b6a', 'orders', 'order.placed', 'x')";
        execute(store, no_time).await;
        let mut command = surroundings::postroom();
        command.args(["run", "--config"]).arg(&config).stdout(std::process::Stdio::null());
        let relay = Running(command.stderr(std::process::Stdio::null()).spawn().unwrap());
        until(store, "the relay has noted that it cannot compare", |status| {
            status["reconciled"][0]["troubles"].as_i64() > Some(0)
        });
        drop(relay);
        execute(store, "delete from postroom.outbox").await;
        execute(other, "delete from postroom.inbox where consumer = 'mail'").await;
    }
}

/// Somebody wrote to the table and not to the outbox: the change is named, whatever else has a message.
#[tokio::test]
async fn changes_without_a_message_are_named() {
    let (_database, stores) = stores().await;
    for store in &stores {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as u64;
        let sqlite = store.starts_with("sqlite");
        execute(store, "create table invoices (kind text, name text, version bigint, changed bigint)").await;
        // Over two days, so that more than one query is needed; each aggregate has three versions.
        for n in 0..120_u64 {
            let (ms, name, version) = (now - 48 * 3_600_000 + n * 1_440_000, n / 3, n % 3 + 1);
            let id = Uuid::new_v7(Timestamp::from_unix(NoContext, ms / 1000, 0));
            let topic = if n == 50 { "others" } else { "invoices" };
            let message = format!(
                "insert into postroom.outbox (id, topic, type, payload, aggregate_type, aggregate_id, aggregate_version)
                 values ('{id}', '{topic}', 'x', 'x', 'invoice', 'i-{name}', {version})"
            );
            execute(store, &message).await;
            execute(store, &format!("insert into invoices values ('invoice', 'i-{name}', {version}, {ms})")).await;
        }
        // Written without a message: a version, another type, and one of nothing that is known. A version that nobody counts fits any.
        let later = now - 20 * 3_600_000;
        for (kind, name, version) in
            [("'invoice'", "i-7", "4"), ("'credit'", "i-7", "1"), ("null", "i-900", "null"), ("null", "i-23", "null")]
        {
            execute(store, &format!("insert into invoices values ({kind}, '{name}', {version}, {later})")).await;
        }
        let out = surroundings::scratch("changes").join("out.jsonl");
        let config = surroundings::scratch("changes").join("postroom.toml");
        let (from, to) = match sqlite {
            true => ("?1", "?2"),
            false => ("extract(epoch from $1::timestamptz) * 1000", "extract(epoch from $2::timestamptz) * 1000"),
        };
        let write = |changes: &str| {
            let text = format!(
                "[store]\nurl = {store:?}\n[[routes]]\nname = \"invoices\"\n[routes.sink]\nkind = \"file\"\npath = {out:?}\n\
                 [[reconcile]]\nname = \"invoices\"\ntopics = [\"invoices\"]\nwindow = \"3d\"\nsettles = \"0s\"\nchanges = {changes:?}\n"
            );
            std::fs::write(&config, text).unwrap();
        };
        write(&format!("select kind, name, version from invoices where changed >= {from} and changed < {to};"));
        {
            let _relay = Running::relay(store, &format!("kind = \"file\"\npath = {out:?}\n"));
            until(store, "a relay ran", |status| status["routes"][0]["lanes_held"].as_i64() > Some(0));
        }
        // The route of that relay is the one that counts.
        let as_run = std::fs::read_to_string(&config)
            .unwrap()
            .replace("name = \"invoices\"\n[routes", "name = \"orders\"\n[routes");
        std::fs::write(&config, &as_run).unwrap();
        let run = || postroom(&["--json", "reconcile", "run", "--config", config.to_str().unwrap()]);
        let compared = run();
        let result = json(&compared)["reconciled"][0].clone();
        assert_eq!((compared.status.code(), &result["unwritten"]), (Some(1), &4.into()), "{compared:?}");
        assert!(result["notes"].to_string().contains("are not compared"), "the messages begin later: {result}");
        let changes = json(&postroom(&["--json", "reconcile", "changes", "invoices", "--store", store]));
        let mut named: Vec<(String, Option<i64>)> = changes["changes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| (one["aggregate_id"].as_str().unwrap().to_owned(), one["aggregate_version"].as_i64()))
            .collect();
        named.sort();
        let expected = [("i-16", Some(3)), ("i-7", Some(1)), ("i-7", Some(4)), ("i-900", None)];
        assert_eq!(named, expected.map(|(name, version)| (name.to_owned(), version)), "{changes}");
        let status = json(&postroom(&["--json", "status", "--store", store]));
        assert_eq!(status["reconciled"][0]["unwritten"], 4, "{status}");
        assert!(text(&postroom(&["reconcile", "report", "--store", store]).stdout).contains("4 changes of aggregates"));
        assert!(text(&postroom(&["reconcile", "changes", "invoices", "--store", store]).stdout).contains("i-900"));

        execute(store, "delete from invoices where version is null or version = 4 or kind = 'credit' or name = 'i-16'")
            .await;
        let compared = run();
        assert_eq!(compared.status.code(), Some(0), "{compared:?}");
        std::fs::write(&config, as_run.replace("from invoices", "from nowhere")).unwrap();
        let compared = run();
        assert_eq!(compared.status.code(), Some(1));
        let result = json(&compared)["reconciled"][0].clone();
        assert!(result["changes_trouble"].to_string().contains("nowhere"), "{result}");
        assert!(result["business_open_ms"].is_i64(), "the time is asked about again: {result}");
        let refused = postroom(&["reconcile", "changes", "invoices", "--store", store]);
        assert!(text(&refused.stderr).contains("could not ask"), "{refused:?}");
    }
}
