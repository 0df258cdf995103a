//! What the doctor says of real stores.

use std::collections::HashMap;

use postroom_testkit::postgres::Database;
use postroom_testkit::surroundings;

use crate::commands::{json, postroom};

/// Severity and advice by code.
fn examined(store: &str) -> (Option<i32>, HashMap<String, (String, String)>) {
    let output = postroom(&["--json", "doctor", "--store", store]);
    let found = json(&output)["examined"].as_array().unwrap().clone();
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let by_code =
        found.iter().map(|one| (text(&one["code"]), (text(&one["severity"]), text(&one["advice"])))).collect();
    (output.status.code(), by_code)
}

#[tokio::test]
async fn the_doctor_names_what_can_lose_messages_and_its_advice_works() {
    let database = Database::create().await;
    assert_eq!(postroom(&["migrate", "--store", database.url()]).status.code(), Some(0));
    let client = database.connect().await;
    let (_, healthy) = examined(database.url());
    for code in ["sequence-cache", "autovacuum", "encoding", "standby", "unrouted-topics", "schema-version", "clock"] {
        assert_eq!(healthy[code].0, "fine", "{code}: {healthy:?}");
    }
    client
        .batch_execute(
            "alter sequence postroom.outbox_seq_seq cache 10;
             alter table postroom.outbox set (autovacuum_enabled = false);
             select postroom.enqueue('nobody', 'x', '{}'::jsonb)",
        )
        .await
        .unwrap();
    let (code, ill) = examined(database.url());
    assert_eq!(code, Some(1));
    for (code, severity) in [("sequence-cache", "danger"), ("autovacuum", "warning"), ("unrouted-topics", "danger")] {
        assert_eq!(ill[code].0, severity, "{code}: {ill:?}");
        assert_eq!(postroom(&["explain", code]).status.code(), Some(0));
    }
    client.batch_execute(ill["sequence-cache"].1.split("; then").next().unwrap()).await.unwrap();
    let advice = ill["autovacuum"].1.replace("NAME", "outbox");
    client.batch_execute(&advice).await.unwrap();
    let (_, healed) = examined(database.url());
    assert_eq!((healed["sequence-cache"].0.as_str(), healed["autovacuum"].0.as_str()), ("fine", "fine"));

    let file = surroundings::scratch("doctor").join("store.db");
    let store = format!("sqlite:{}", file.display());
    assert_eq!(postroom(&["migrate", "--store", &store]).status.code(), Some(0));
    let (code, found) = examined(&store);
    assert_eq!((code, found["file-permissions"].0.as_str()), (Some(0), "fine"), "{found:?}");
    assert_eq!(postroom(&["explain", "no-such-code"]).status.code(), Some(2));
}
