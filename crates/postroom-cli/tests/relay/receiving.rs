//! The receiving side as the program offers it: inboxes that it fills, dead letters of consumption, retention.

use std::process::{Command, Stdio};

use postroom_testkit::postgres::Database;
use postroom_testkit::surroundings;

use crate::commands::{json, postroom, text};

#[tokio::test]
async fn run_fills_an_inbox_that_an_application_takes_messages_from() {
    const MESSAGES: i64 = 300;
    let database = Database::create().await;
    let client = database.connect().await;
    assert_eq!(postroom(&["migrate", "--store", database.url()]).status.code(), Some(0));
    let (rabbitmq, exchange) = (surroundings::rabbitmq_url(), format!("e-{}", surroundings::unique()));
    let config = surroundings::scratch("inbox").join("postroom.toml");
    let written = format!(
        "[store]\nurl = {:?}\n[[routes]]\nname = \"orders\"\n[routes.sink]\nkind = \"rabbitmq\"\nurl = {rabbitmq:?}\nexchange = {exchange:?}\n\
         [[inboxes]]\nconsumer = \"billing\"\n[inboxes.from]\nkind = \"rabbitmq\"\nurl = {rabbitmq:?}\nqueue = \"billing-{exchange}\"\n\
         bind = [{{ exchange = {exchange:?}, routing_key = \"orders.#\" }}]\n",
        database.url()
    );
    std::fs::write(&config, written).unwrap();
    let program = surroundings::postroom()
        .args(["run", "--json", "--config"])
        .arg(&config)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let write = "select postroom.enqueue('orders', 'orders.placed', n::text, key => 'k' || n % 7)
                   from generate_series(1, $1::bigint) n";
    client.execute(write, &[&MESSAGES]).await.unwrap();
    let mut done: Vec<i64> = Vec::new();
    while done.len() < MESSAGES as usize {
        let sql = "select message_id, claim, convert_from(payload, 'UTF8')::bigint
                     from postroom.inbox_take('billing', 50, 'worker-1') order by seq";
        for row in client.query(sql, &[]).await.unwrap() {
            let (id, claim): (uuid::Uuid, i64) = (row.get(0), row.get(1));
            client.execute("select postroom.inbox_done('billing', $1, $2)", &[&id, &claim]).await.unwrap();
            done.push(row.get(2));
        }
    }
    for key in 0..7 {
        let of_key: Vec<i64> = done.iter().copied().filter(|n| n % 7 == key).collect();
        assert!(of_key.is_sorted(), "{of_key:?}");
    }
    let pid = program.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let output = program.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let ended = json(&output);
    assert_eq!(ended["routes"][0]["acked"], MESSAGES);
    let kept = &ended["inboxes"][0];
    assert_eq!((&kept["consumer"], &kept["kept"]), (&"billing".into(), &MESSAGES.into()), "{kept}");
}

#[tokio::test]
async fn dead_letters_of_consumption_are_retried_and_discarded_and_the_inbox_is_pruned() {
    let database = Database::create().await;
    let client = database.connect().await;
    let postgres = database.url().to_owned();
    let path = surroundings::scratch("dead-in").join("billing.db");
    let sqlite = format!("sqlite:{}", path.display());
    for store in [&postgres, &sqlite] {
        assert_eq!(postroom(&["migrate", "--store", store]).status.code(), Some(0));
    }
    let file = postroom_sqlite::connect(&path).unwrap();
    for n in 1..=3 {
        let (id, error) =
            (format!("00000000-0000-7000-8000-00000000000{n}"), if n > 1 { "no funds" } else { "no such type" });
        let columns = "message_id, seq, attempts, cause, error, ordering_key, topic, type, payload, key, content_type";
        let values = format!(
            "'{id}', {n}, 8, 'exhausted', '{error}', 'k', 'orders', 'order.placed', 'secret', 'k', 'text/plain'"
        );
        client
            .batch_execute(&format!(
                "insert into postroom.dead_consume (consumer, {columns}) values ('billing', {values})"
            ))
            .await
            .unwrap();
        file.execute_batch(&format!(
            "insert into postroom_dead_consume (consumer, {}) values ('billing', {values});
             insert into postroom_inbox values ('billing', '{id}', 0);",
            columns.replace("message_id", "id")
        ))
        .unwrap();
    }
    let old = "insert into postroom.inbox select gen_random_uuid(), 'billing', clock_timestamp() - interval '40 days'
                 from generate_series(1, 25000)";
    client.batch_execute(old).await.unwrap();
    for store in [&postgres, &sqlite] {
        let run = |arguments: &[&str]| {
            postroom(&[&["dead"], arguments, &["--side", "in", "--json", "--store", store]].concat())
        };
        let listed = |arguments: &[&str]| json(&run(arguments))["dead_letters"].as_array().unwrap().len();
        assert_eq!((listed(&["list"]), listed(&["list", "--route", "billing", "--error", "no funds"])), (3, 2));
        assert_eq!(listed(&["list", "--route", "shipping"]), 0);
        assert_eq!(
            json(&postroom(&["dead", "list", "--json", "--store", store]))["dead_letters"],
            serde_json::json!([])
        );
        let shown = text(&run(&["show", "--payload", "00000000-0000-7000-8000-000000000001"]).stdout);
        assert!(shown.contains("secret") && shown.contains("no such type"), "{shown}");
        assert_eq!(listed(&["retry", "--error", "no funds", "--reason", "they have funds now"]), 2);
        assert_eq!((listed(&["discard", "--all", "--reason", "nobody's"]), listed(&["list"])), (1, 0));

        let prune = |age: &str| postroom(&["inbox", "prune", "--older-than", age, "--json", "--store", store]);
        let refused = prune("13d");
        assert_eq!(refused.status.code(), Some(1));
        assert!(text(&refused.stderr).contains("redelivery horizon"), "{}", text(&refused.stderr));
        // On SQLite three are old, of which two wait again.
        assert_eq!(json(&prune("30d"))["pruned"], if *store == postgres { 25_000 } else { 1 });
        assert_eq!(json(&prune("30d"))["pruned"], 0);
    }
    let taken = client
        .query(
            "select attempts, ordering_key, convert_from(payload, 'UTF8') from postroom.inbox_take('billing', 9)",
            &[],
        )
        .await
        .unwrap();
    assert_eq!(taken.len(), 1, "the first of the key; the other is behind it");
    assert_eq!((taken[0].get::<_, i32>(0), taken[0].get::<_, &str>(2)), (0, "secret"));
    let actions: Vec<String> = client
        .query("select action from postroom.audit order by id", &[])
        .await
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(actions, ["inbox.retry", "inbox.discard", "inbox.prune"]);
    let audits: i64 = file.query_row("select count(*) from postroom_audit", [], |row| row.get(0)).unwrap();
    assert_eq!(audits, 3);
}
