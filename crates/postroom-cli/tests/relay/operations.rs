//! Replays and retries of many messages on real servers, carried out by relays that are killed.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use postroom::Message;
use postroom_consumer::{Handle, HandlerError, Handlers, Incoming};
use postroom_postgres::Postgres;
use tokio_postgres::Transaction;

use crate::alerts::Watch;
use crate::commands::{json, postroom};
use crate::metrics::{listening, listening_at};
use crate::rig::{CountsEffects, Rig, assert_clean};

/// A consumer with a bug, until its fix is deployed.
struct Buggy(Arc<AtomicBool>);

#[async_trait]
impl Handle<Postgres, Message> for Buggy {
    async fn handle(&self, tx: &mut Transaction<'_>, incoming: &Incoming<Message>) -> Result<(), HandlerError> {
        if self.0.load(Ordering::Relaxed) {
            let id = incoming.message.id;
            return Err(match id.as_uuid().as_bytes()[15] % 3 {
                0 => HandlerError::reject(format!("order {id} is unknown")),
                1 => HandlerError::reject(format!("no stock of item {}", id.as_uuid().as_bytes()[14])),
                _ => HandlerError::reject("column \"cents\" does not exist"),
            });
        }
        CountsEffects.handle(tx, incoming).await
    }
}

fn asked(rig: &Rig, arguments: &[&str]) -> serde_json::Value {
    let url = rig.database.url().to_owned();
    let arguments: Vec<&str> = ["--json"].iter().chain(arguments).copied().chain(["--store", &url]).collect();
    let output = postroom(&arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {output:?}");
    json(&output)
}

/// A consumer's bug kills messages in three kinds, and an alert fires. After the fix each group is retried: a canary first, then the rest
/// at a rate, while the relay that carries it out is killed. Nothing is missing at the end, nothing counted twice, and the alert is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_incident_ends_with_every_message_handled_once() {
    const MESSAGES: usize = 2000;
    let rig = Rig::shared().await;
    let broken = Arc::new(AtomicBool::new(true));
    let handlers = Handlers::new().on_decoded("order.placed", |message| Ok(message.clone()), Buggy(broken.clone()));
    let consumer = rig.consume_with(handlers).await;
    let (_, writers) = rig.write(MESSAGES, 41);
    let (mut relay, admin) = listening(&rig, rig.database.url(), &rig.rabbitmq, "").await;
    let watch = Watch::start(&admin);
    for writer in writers {
        writer.await.unwrap();
    }
    let client = rig.database.connect().await;
    let count = async |sql: &str| client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0);
    rig.until("everything is dead", async || {
        count("select count(*) from postroom.dead_consume").await == count("select count(*) from ledger").await
    })
    .await;
    let committed = count("select count(*) from ledger").await;
    rig.until("the alert fires", async || watch.fires("PostroomInboxDeadLetters").await).await;
    let found = asked(&rig, &["dead", "groups", "--side", "in"]);
    let groups = found["groups"].as_array().unwrap().clone();
    let errors: Vec<&str> = groups.iter().map(|group| group["error"].as_str().unwrap()).collect();
    assert_eq!(groups.len(), 3, "{errors:?}");
    let dead: i64 = groups.iter().map(|group| group["messages"].as_i64().unwrap()).sum();
    assert_eq!((dead, found["complete"].as_bool()), (committed, Some(true)));

    // Before the fix, the canary of the first group dies again, and nothing follows it.
    let group = groups[0]["group"].as_str().unwrap();
    let retry =
        ["dead", "retry", "--side", "in", "--group", group, "--canary", "10", "--go-on", "--reason", "ticket 12"];
    let begun = asked(&rig, &retry);
    let first = begun["operation"].as_str().unwrap();
    let waited = postroom(&["--json", "operations", "show", first, "--wait", "--store", rig.database.url()]);
    assert_eq!(waited.status.code(), Some(1), "not everything is done");
    let waiting: serde_json::Value = serde_json::from_slice(&waited.stdout).unwrap();
    assert_eq!((&waiting["state"], &waiting["done"]), (&"waiting".into(), &0.into()), "{waiting}");
    assert_eq!((&waiting["given_out"], &waiting["failed"]["permanent"]), (&10.into(), &10.into()), "{waiting}");
    asked(&rig, &["operations", "cancel", first, "--reason", "not fixed yet"]);

    broken.store(false, Ordering::Relaxed);
    asked(&rig, &["dead", "note", group, "fixed in 1.2", "--reason", "ticket 12"]);
    let mut done = 0;
    for (place, group) in groups.iter().enumerate() {
        let group = group["group"].as_str().unwrap();
        let retry = [
            "dead", "retry", "--side", "in", "--group", group, "--canary", "10", "--go-on", "--rate", "200",
            "--reason", "fixed",
        ];
        let begun = asked(&rig, &retry);
        let id = begun["operation"].as_str().unwrap().to_owned();
        if place == 0 {
            let given = async || asked(&rig, &["operations", "show", &id])["given_out"].as_i64().unwrap();
            rig.until("a part is given out", async || given().await > 100).await;
            relay.kill();
            relay = listening_at(&rig, rig.database.url(), &rig.rabbitmq, &admin, "");
        }
        let report = asked(&rig, &["operations", "show", &id, "--wait"]);
        assert_eq!((&report["state"], &report["coverage"]), (&"done".into(), &1.0.into()), "{report}");
        assert_eq!((&report["pending"], &report["left_alone"]), (&0.into(), &0.into()), "{report}");
        let effects = &report["effects"][0];
        assert_eq!(
            (&effects["consumer"], &effects["effects"], &effects["missing"]),
            (&"effects".into(), &report["done"], &0.into())
        );
        done += report["done"].as_i64().unwrap();
    }
    assert_eq!(done, committed);
    assert_eq!(count("select count(*) from postroom.dead_consume").await, 0);
    rig.effective().await;
    let config = rig.dir.join("reconcile.toml");
    let compared = format!(
        "[store]\nurl = {:?}\n[[routes]]\nname = \"orders\"\n[routes.sink]\nkind = \"stdout\"\n[[reconcile]]\nname = \"incident\"\n\
         settles = \"0s\"\n[[reconcile.consumers]]\nconsumer = \"effects\"\n",
        rig.database.url()
    );
    std::fs::write(&config, compared).unwrap();
    let reconciled = postroom(&["--json", "reconcile", "run", "--config", config.to_str().unwrap()]);
    assert_eq!(reconciled.status.code(), Some(0), "no difference: {reconciled:?}");
    let effects = &json(&reconciled)["reconciled"][0]["consumers"][0];
    assert_eq!((&effects["expected"], &effects["received"]), (&committed.into(), &committed.into()), "{effects}");
    rig.until("the alert is over", async || !watch.fires("PostroomInboxDeadLetters").await).await;
    consumer.stop().await;
    assert_eq!(relay.terminate().0, Some(0));
    assert_clean(&rig.history(rig.in_flight_max, true).await);
}

/// A replay of everything while new messages flow and the relay is killed three times: each message comes again with its id, in the
/// order of its key, the inbox takes it for a duplicate, and the report counts each once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_survives_its_relays_and_has_no_effect_twice() {
    const BEFORE: usize = 4000;
    let mut rig = Rig::shared().await;
    rig.in_flight_max = 200;
    let consumer = rig.consume().await;
    let (_, writers) = rig.write(BEFORE, 43);
    let mut relay = rig.relay();
    for writer in writers {
        writer.await.unwrap();
    }
    rig.drained().await;
    rig.effective().await;
    let client = rig.database.connect().await;
    let rows = client.query("select id::text from ledger", &[]).await.unwrap();
    let replayed: HashSet<String> = rows.iter().map(|row| row.get(0)).collect();
    let sent = replayed.len() as i64;

    let preview = asked(&rig, &["replay", "--all", "--dry-run"]);
    assert_eq!(
        (&preview["operation"], &preview["preview"]["matching"]),
        (&serde_json::Value::Null, &sent.into()),
        "{preview}"
    );
    let remembered = &preview["preview"]["remembered_by"]["effects"];
    assert_eq!(remembered.as_i64(), Some(sent.min(10_000)), "{preview}");
    let begun = asked(&rig, &["replay", "--all", "--rate", "1000", "--reason", "a projection is rebuilt"]);
    let id = begun["operation"].as_str().unwrap().to_owned();
    let (_, writers) = rig.write(2000, 44);
    let given = async || asked(&rig, &["operations", "show", &id])["given_out"].as_i64().unwrap();
    for part in 1..=3 {
        rig.until("a part is given out", async || given().await > part * sent / 5).await;
        relay.kill();
        relay = rig.relay();
    }
    for writer in writers {
        writer.await.unwrap();
    }
    let report = asked(&rig, &["operations", "show", &id, "--wait"]);
    assert_eq!((&report["state"], &report["done"]), (&"done".into(), &sent.into()), "{report}");
    assert_eq!((&report["matched"], &report["coverage"]), (&sent.into(), &1.0.into()), "{report}");
    let effects = &report["effects"][0];
    assert_eq!((&effects["suppressed"], &effects["effects"]), (&sent.into(), &0.into()), "{report}");
    rig.drained().await;
    rig.effective().await;
    consumer.stop().await;
    assert_eq!(relay.terminate().0, Some(0));

    let history = rig.history(3 * sent as usize, true).await;
    // What was replayed is in the queue again; of each key, the last ones of the replayed messages are in their order. New messages may
    // have come twice too, because of the kills.
    let numbers: HashMap<&str, (&str, i64)> =
        history.committed.iter().map(|message| (message.id.as_str(), (message.key.as_str(), message.number))).collect();
    let mut times: HashMap<&str, usize> = HashMap::new();
    history.stored.iter().for_each(|id| *times.entry(id.as_str()).or_default() += 1);
    let once: Vec<&String> =
        replayed.iter().filter(|id| times.get(id.as_str()).is_none_or(|times| *times < 2)).collect();
    assert!(once.is_empty(), "these did not come again: {once:?}");
    let mut last: HashMap<&str, i64> = HashMap::new();
    let mut seen: HashMap<&str, usize> = HashMap::new();
    for id in history.stored.iter().filter(|id| replayed.contains(*id)) {
        let (key, number) = numbers[id.as_str()];
        let seen = seen.entry(id.as_str()).or_default();
        *seen += 1;
        if *seen == times[id.as_str()] {
            let before = last.insert(key, number).unwrap_or(0);
            assert!(number > before, "{key}: {number} after {before}");
        }
    }
    assert_clean(&history);
}
