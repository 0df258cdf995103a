//! Every broker that a configuration can name: those of the crate `postroom-brokers`, and inboxes of stores.

use postroom_brokers::{BROKERS, Broker, Section, SinkOptions, SubscriptionOptions};

use crate::inbox_sink;

/// All of them.
pub fn all() -> impl Iterator<Item = &'static Broker> {
    const INBOX: &Broker = &inbox_sink::BROKER;
    BROKERS.iter().copied().chain([INBOX])
}

/// What messages can be sent to.
pub fn sink_kinds() -> Vec<&'static str> {
    all().filter(|broker| broker.sink.is_some()).map(|broker| broker.kind).collect()
}

/// What messages can be received from.
pub fn subscription_kinds() -> Vec<&'static str> {
    all().filter(|broker| broker.subscription.is_some()).map(|broker| broker.kind).collect()
}

/// The broker of this kind that messages can be sent to.
pub fn sink_section(kind: &str) -> Option<&'static Section<dyn SinkOptions>> {
    all().find(|broker| broker.kind == kind)?.sink.as_ref()
}

/// The broker of this kind that messages can be received from.
pub fn subscription_section(kind: &str) -> Option<&'static Section<dyn SubscriptionOptions>> {
    all().find(|broker| broker.kind == kind)?.subscription.as_ref()
}
