//! Pure: labels and values on their way to the text format.

use std::fmt;

use postroom::is_unseen;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;

/// The route that something is about.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct OfRoute {
    pub route: String,
}

/// The consumer of an inbox.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct OfInbox {
    pub consumer: String,
}

/// A name that may come from others, without what a terminal would obey.
pub fn named(name: &str) -> String {
    name.chars().map(|c| if is_unseen(c) { '\u{fffd}' } else { c }).collect()
}

/// Labels and values of one gauge or counter.
pub type Values = Vec<(Vec<(&'static str, String)>, f64)>;

/// One gauge with all its values; none, and it is left out.
pub fn gauge(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    unit: Option<Unit>,
    help: &str,
    values: &Values,
) -> fmt::Result {
    if values.is_empty() {
        return Ok(());
    }
    let mut family = encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?;
    for (labels, value) in values {
        match labels.is_empty() {
            true => family.encode_gauge(value)?,
            false => family.encode_family(labels)?.encode_gauge(value)?,
        }
    }
    Ok(())
}

/// One counter with all its values.
pub fn counter(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, values: &Values) -> fmt::Result {
    if values.is_empty() {
        return Ok(());
    }
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (labels, value) in values {
        family.encode_family(labels)?.encode_counter::<NoLabelSet, _, f64>(value, None)?;
    }
    Ok(())
}
