//! The examples of this crate, as a person runs them.

#![allow(clippy::unwrap_used, missing_docs)]

use postroom_testkit::surroundings;

#[path = "../examples/projection.rs"]
mod projection;
#[path = "../examples/worker.rs"]
mod worker;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_worker_does_each_job_once() {
    let path = surroundings::scratch("worker").join("app.db");
    assert_eq!(worker::run(&path, 50).await.unwrap(), 50);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_projection_is_in_order_and_knows_what_is_missing() {
    let path = surroundings::scratch("projection").join("view.db");
    let (counters, wrong) = projection::run(&path).await.unwrap();
    assert_eq!((counters.applied, counters.missing, wrong), (80, 20, 0), "{counters:?}");
}
