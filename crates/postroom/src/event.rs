//! Typed events with names that outlive the types.

use serde::Serialize;

use crate::message::Message;

/// Why an event could not be turned into a message.
#[derive(Debug, thiserror::Error)]
#[error("encode event {kind:?} as JSON")]
pub struct EventError {
    kind: &'static str,
    #[source]
    source: serde_json::Error,
}

/// A typed event. Its name is written out, never taken from the Rust type: renaming a struct must not rename an event.
///
/// ```
/// use postroom::Event;
///
/// #[derive(serde::Serialize)]
/// struct OrderPlaced { order_id: String, cents: i64, version: i64 }
///
/// impl Event for OrderPlaced {
///     const TOPIC: &'static str = "orders";
///     const TYPE: &'static str = "order.placed";
///     const AGGREGATE_TYPE: &'static str = "order";
///     fn aggregate_id(&self) -> String { self.order_id.clone() }
///     fn aggregate_version(&self) -> i64 { self.version }
/// }
///
/// let message = OrderPlaced { order_id: "o-1".into(), cents: 1250, version: 1 }.to_message()?;
/// assert_eq!(message.ordering_key(), Some("o-1"));
/// # Ok::<(), postroom::EventError>(())
/// ```
pub trait Event: Serialize + Sized {
    /// Topic of the event.
    const TOPIC: &'static str;
    /// Stable name of the event.
    const TYPE: &'static str;
    /// Type of the aggregate that raises it.
    const AGGREGATE_TYPE: &'static str;

    /// Id of the aggregate: the key within which order holds.
    fn aggregate_id(&self) -> String;

    /// Version of the aggregate after the event.
    fn aggregate_version(&self) -> i64;

    /// Tenant, where there are tenants.
    fn tenant_id(&self) -> Option<String> {
        None
    }

    /// The event as a message, its fields as JSON in the payload.
    fn to_message(&self) -> Result<Message, EventError> {
        let mut message = Message::json(Self::TOPIC, Self::TYPE, self)
            .map_err(|source| EventError { kind: Self::TYPE, source })?
            .aggregate(Self::AGGREGATE_TYPE, self.aggregate_id(), self.aggregate_version());
        message.tenant_id = self.tenant_id();
        Ok(message)
    }
}
