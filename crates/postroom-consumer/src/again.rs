//! Waits between two tries at the store, which a stop ends.

use std::time::Duration;

use tokio::sync::watch;

const FIRST: Duration = Duration::from_millis(20);
pub(crate) const CAP: Duration = Duration::from_secs(5);
/// What the store is asked outside of handlers takes no longer than this unless it hangs.
pub(crate) const STORE_PATIENCE: Duration = Duration::from_secs(30);

/// Waits before the next try. True: it is to stop.
pub(crate) async fn stopped_before_try(stopping: &watch::Receiver<bool>, tries: u32) -> bool {
    stopped_within(stopping, pause(tries)).await
}

/// Whether it is to stop within this time.
pub(crate) async fn stopped_within(stopping: &watch::Receiver<bool>, wait: Duration) -> bool {
    let mut stopping = stopping.clone();
    tokio::time::timeout(wait, stopping.wait_for(|stopping| *stopping)).await.is_ok()
}

fn pause(tries: u32) -> Duration {
    FIRST.saturating_mul(1 << tries.min(10)).min(CAP)
}
