//! A hint that there is something to do. A hint may be missing or wrong, so polling never stops.

use std::sync::Arc;

use tokio::sync::Notify;

/// Wakes an in-process relay after a commit. Cloning shares the signal; signals given while nobody waits coalesce into one.
#[derive(Debug, Clone, Default)]
pub struct Wake(Arc<Notify>);

impl Wake {
    /// A new signal.
    pub fn new() -> Self {
        Self::default()
    }

    /// Call this after the commit, never before it.
    pub fn notify(&self) {
        self.0.notify_one();
    }

    /// Waits for a signal; returns at once if one was given before the call.
    pub async fn notified(&self) {
        self.0.notified().await;
    }
}
