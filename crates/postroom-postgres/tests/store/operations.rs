//! How fast operations go.

use postroom::{Deed, NewOperation, OperationFilter, OperationId, OperationKind, Operator, ReplayPlace, Side};

use crate::setup::{ROUTE, drain, enqueue, prepared, source, store};

#[tokio::test]
async fn an_operation_reaches_its_rate_whatever_its_steps_cost() {
    let database = prepared().await;
    let client = database.connect().await;
    let relay = source(&database, "relay").await;
    enqueue(&client, None, 400).await;
    assert_eq!(drain(&relay).await.len(), 400);
    let store = store(&database);
    let operation = NewOperation {
        kind: OperationKind::Replay,
        side: Side::Out,
        route: ROUTE.to_owned(),
        filter: OperationFilter::default(),
        planned: None,
        canary: None,
        goes_on: false,
        rate: Some(20),
        place: ReplayPlace::Before,
        new_ids: false,
    };
    let deed = Deed { actor: "test".to_owned(), reason: "test".to_owned() };
    store.begin_operation(OperationId::new(), &operation, &deed).await.unwrap();
    // The last step as so many seconds before now; what is given out then, and by how much the time of the last step moves for each of it.
    let step = async |seconds: f64| {
        let sql = "update postroom.operations set stepped_at = clock_timestamp() - $1 * interval '1 second'
                   returning extract(epoch from stepped_at)::float8";
        let before: f64 = client.query_one(sql, &[&seconds]).await.unwrap().get(0);
        let given = store.step_operations().await.unwrap().given_out;
        let sql = "select extract(epoch from stepped_at)::float8 from postroom.operations";
        (given, client.query_one(sql, &[]).await.unwrap().get::<_, f64>(0) - before)
    };
    assert_eq!(step(60.0).await.0, 20, "a second is saved up, and no more");
    // On a slow machine a step may take longer than the second that is saved up.
    let mut moved = Vec::new();
    while moved.last().is_none_or(|(given, by): &(u64, f64)| (by - *given as f64 / 20.0).abs() > 0.001) {
        moved.push(step(0.5).await);
        assert!(moved.len() < 10, "a step costs more than its messages: {moved:?}");
    }
    assert!(moved.iter().all(|(given, _)| (10..=20).contains(given)), "{moved:?}");
}
