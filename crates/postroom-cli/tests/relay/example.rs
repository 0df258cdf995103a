//! The orders example as a person runs it.

use std::process::Command;

use postroom_testkit::postgres::Database;
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
