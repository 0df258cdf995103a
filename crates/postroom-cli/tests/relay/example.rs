//! The examples as a person runs them.

use std::process::Command;

use postroom_testkit::postgres::Database;
use postroom_testkit::services::MysqlServer;
use postroom_testkit::surroundings;

#[tokio::test]
async fn the_checkout_example_ends_each_order_once_though_a_service_is_killed() {
    let output = Command::new(surroundings::checkout_binary())
        .args([
            "--orders",
            "1000",
            "--store",
            &surroundings::postgres_url(),
            "--rabbitmq",
            &surroundings::rabbitmq_url(),
        ])
        .output()
        .unwrap();
    let (printed, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{printed}{said}");
    assert_eq!(printed.matches("as it should be").count(), 8, "{printed}");
    assert!(printed.contains("the payment service was killed"));
}

#[tokio::test]
async fn the_orders_example_ends_with_a_balanced_ledger() {
    let database = Database::create().await;
    let mut orders = Command::new(surroundings::orders_binary());
    surroundings::without_tests(&mut orders);
    let output = orders
        .args(["--json", "--orders", "20000", "--store", database.url(), "--rabbitmq", &surroundings::rabbitmq_url()])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    let ledger: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    for (name, expected) in [("committed", 20_000), ("acked", 20_000), ("effects", 20_000), ("lost", 0), ("ghosts", 0)]
    {
        assert_eq!(ledger[name], expected, "{name} in {ledger}");
    }
    assert!(ledger["rolled_back"].as_i64().unwrap() > 1000);
}

#[tokio::test]
async fn the_systems_of_the_articles_end_with_balanced_ledgers() {
    let mariadb = MysqlServer::start(&surroundings::scratch("articles").join("mariadb")).unwrap();
    let mut articles = Command::new(surroundings::articles_binary());
    surroundings::without_tests(&mut articles);
    let output = articles
        .args(["--json", "--messages", "1000", "--store", &surroundings::postgres_url()])
        .args(["--mariadb", &mariadb.url("mysql"), "--rabbitmq", &surroundings::rabbitmq_url()])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let systems = shown["systems"].as_array().unwrap();
    assert_eq!(systems.len(), 5, "{shown}");
    for ledger in systems {
        assert!(
            ledger["committed"].as_i64().unwrap() >= 1000 && ledger["rolled_back"].as_i64().unwrap() > 50,
            "{ledger}"
        );
        for name in ["lost", "ghosts", "repeated_effects", "out_of_order", "unmarked"] {
            assert_eq!(ledger[name], 0, "{name} in {ledger}");
        }
    }
    let replayed = systems.iter().find(|ledger| ledger["system"] == "status-codes").unwrap();
    assert!(replayed["duplicates_suppressed"].as_i64() >= replayed["committed"].as_i64(), "{replayed}");
}
