//! The examples of this crate, as a person runs them.

#![allow(clippy::unwrap_used, missing_docs)]

use std::time::Duration;

use postroom_testkit::surroundings;

/// Nothing here takes as long as this unless it is stuck.
const STUCK: Duration = Duration::from_secs(120);

#[path = "../examples/projection.rs"]
mod projection;
#[path = "../examples/worker.rs"]
mod worker;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_worker_does_each_job_once() {
    let path = surroundings::scratch("worker").join("app.db");
    assert_eq!(tokio::time::timeout(STUCK, worker::run(&path, 50)).await.unwrap().unwrap(), 50);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_projection_is_in_order_and_knows_what_is_missing() {
    let path = surroundings::scratch("projection").join("view.db");
    let (counters, wrong) = tokio::time::timeout(STUCK, projection::run(&path)).await.unwrap().unwrap();
    assert_eq!((counters.applied, counters.missing, wrong), (80, 20, 0), "{counters:?}");
}
