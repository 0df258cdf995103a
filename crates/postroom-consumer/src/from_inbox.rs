//! A receiver without a broker.

use async_trait::async_trait;
use postroom::{Answer, Arrival, Bound, Receipt, Subscription, Unavailable};

/// Brings nothing: a [`Receiver`](crate::Receiver) with it handles what is in the inbox table of its consumer, where an
/// [`InboxSink`](crate::InboxSink) or a [`Filler`](crate::Filler) puts messages.
#[derive(Debug, Clone, Copy, Default)]
pub struct FromInbox;

#[async_trait]
impl Subscription for FromInbox {
    fn system(&self) -> &'static str {
        "postroom"
    }

    fn origin(&self) -> String {
        "the inbox table".to_owned()
    }

    async fn receive(&self, _: Bound) -> Result<Arrival, Unavailable> {
        std::future::pending().await
    }

    async fn settle(&self, _: &[(Receipt, Answer)]) -> Result<(), Unavailable> {
        Ok(())
    }

    async fn close(&self) {}
}
