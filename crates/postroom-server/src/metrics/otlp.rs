//! Pure: the metrics in OpenTelemetry's protocol, made of their text format.
//!
//! The request is an `ExportMetricsServiceRequest` in the JSON mapping of Protobuf, as
//! <https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding> has it: 64-bit integers are strings. Counters and histograms are
//! cumulative since the process began.

use std::time::SystemTime;

use serde_json::{Map, Value, json};

/// Attributes of the process, and the times that the figures are about.
#[derive(Debug, Clone)]
pub struct Exported<'a> {
    /// Names and values that describe the process, such as `service.name`.
    pub resource: &'a [(String, String)],
    /// When the process began to count.
    pub since: SystemTime,
    /// When the text was made.
    pub at: SystemTime,
}

impl Exported<'_> {
    /// The request with everything that the text shows. Lines that are not understood are left out.
    pub fn request(&self, text: &str) -> Value {
        let mut families: Vec<Family> = Vec::new();
        for line in text.lines() {
            match line.strip_prefix("# ") {
                Some(about) => Family::describe(&mut families, about),
                None => {
                    if let Some(sample) = Sample::parse(line)
                        && let Some(family) = families.last_mut()
                    {
                        family.take(sample);
                    }
                }
            }
        }
        let metrics: Vec<Value> = families.iter().filter_map(|family| family.metric(self)).collect();
        let resource: Vec<Value> = self.resource.iter().map(|(name, value)| attribute(name, value)).collect();
        json!({ "resourceMetrics": [{
            "resource": { "attributes": resource },
            "scopeMetrics": [{ "scope": { "name": "postroom", "version": env!("CARGO_PKG_VERSION") }, "metrics": metrics }],
        }] })
    }
}

fn attribute(name: &str, value: &str) -> Value {
    json!({ "key": name, "value": { "stringValue": value } })
}

fn nanoseconds(time: SystemTime) -> String {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos().to_string()
}

type Labels = Vec<(String, String)>;

/// All series of one name.
#[derive(Debug, Default)]
struct Family {
    name: String,
    kind: String,
    unit: String,
    help: String,
    points: Vec<(Labels, Point)>,
}

#[derive(Debug, Default)]
struct Point {
    value: f64,
    /// Upper bounds with how many were at or below them; of a histogram.
    buckets: Vec<(f64, u64)>,
    count: u64,
    sum: f64,
}

impl Family {
    /// `HELP name text`, `TYPE name kind` or `UNIT name unit`.
    fn describe(families: &mut Vec<Self>, about: &str) {
        let mut words = about.splitn(3, ' ');
        let (Some(what), Some(name), Some(rest)) = (words.next(), words.next(), words.next()) else { return };
        if families.last().is_none_or(|family| family.name != name) {
            families.push(Self { name: name.to_owned(), ..Self::default() });
        }
        let Some(family) = families.last_mut() else { return };
        match what {
            "HELP" => family.help = unescaped(rest),
            "TYPE" => rest.clone_into(&mut family.kind),
            // https://ucum.org, as OpenTelemetry wants it.
            "UNIT" => {
                family.unit = match rest {
                    "seconds" => "s",
                    "bytes" => "By",
                    other => other,
                }
                .to_owned()
            }
            _ => {}
        }
    }

    fn take(&mut self, sample: Sample) {
        let Some(part) = sample.name.strip_prefix(self.name.as_str()) else { return };
        let bound = sample.labels.iter().find(|(name, _)| name == "le").and_then(|(_, bound)| number(bound));
        let labels: Labels = sample.labels.into_iter().filter(|(name, _)| name != "le").collect();
        let place = match self.points.iter().position(|(known, _)| *known == labels) {
            Some(place) => place,
            None => {
                self.points.push((labels, Point::default()));
                self.points.len() - 1
            }
        };
        let Some((_, point)) = self.points.get_mut(place) else { return };
        match (part, bound) {
            ("_bucket", Some(bound)) => point.buckets.push((bound, sample.value as u64)),
            ("_count", _) => point.count = sample.value as u64,
            ("_sum", _) => point.sum = sample.value,
            _ => point.value = sample.value,
        }
    }

    fn metric(&self, exported: &Exported<'_>) -> Option<Value> {
        if self.points.is_empty() {
            return None;
        }
        let points: Vec<Value> =
            self.points.iter().map(|(labels, point)| self.point(labels, point, exported)).collect();
        let mut metric = Map::new();
        metric.insert("name".to_owned(), json!(self.name));
        metric.insert("description".to_owned(), json!(self.help));
        metric.insert("unit".to_owned(), json!(self.unit));
        // 2: cumulative.
        let (kind, data) = match self.kind.as_str() {
            "counter" => ("sum", json!({ "dataPoints": points, "aggregationTemporality": 2, "isMonotonic": true })),
            "histogram" => ("histogram", json!({ "dataPoints": points, "aggregationTemporality": 2 })),
            _ => ("gauge", json!({ "dataPoints": points })),
        };
        metric.insert(kind.to_owned(), data);
        Some(Value::Object(metric))
    }

    fn point(&self, labels: &Labels, point: &Point, exported: &Exported<'_>) -> Value {
        let attributes: Vec<Value> = labels.iter().map(|(name, value)| attribute(name, value)).collect();
        let (since, at) = (nanoseconds(exported.since), nanoseconds(exported.at));
        if self.kind != "histogram" {
            let mut shown = json!({ "attributes": attributes, "timeUnixNano": at, "asDouble": point.value });
            if self.kind == "counter" {
                shown["startTimeUnixNano"] = json!(since);
            }
            return shown;
        }
        // Cumulative counts become those of each bucket; the last one has no bound.
        let mut below = 0;
        let counts: Vec<String> = point
            .buckets
            .iter()
            .map(|(_, upto)| {
                let own = upto.saturating_sub(below);
                below = *upto;
                own.to_string()
            })
            .collect();
        let bounds: Vec<f64> =
            point.buckets.iter().map(|(bound, _)| *bound).filter(|bound| bound.is_finite()).collect();
        json!({
            "attributes": attributes, "startTimeUnixNano": since, "timeUnixNano": at,
            "count": point.count.to_string(), "sum": point.sum, "bucketCounts": counts, "explicitBounds": bounds,
        })
    }
}

/// One line: `name{label="value",…} number`.
struct Sample {
    name: String,
    labels: Labels,
    value: f64,
}

impl Sample {
    fn parse(line: &str) -> Option<Self> {
        let name_ends = line.find(['{', ' '])?;
        let (name, mut rest) = line.split_at(name_ends);
        let mut labels = Labels::new();
        if let Some(mut inside) = rest.strip_prefix('{') {
            loop {
                if let Some(after) = inside.strip_prefix('}') {
                    rest = after;
                    break;
                }
                let (label, after) = inside.split_once("=\"")?;
                let ends = closing_quote(after)?;
                let (value, after) = after.split_at(ends);
                labels.push((label.trim_start_matches(',').to_owned(), unescaped(value)));
                inside = after.get(1..)?;
            }
        }
        // JSON has no other numbers.
        let value = number(rest.split_whitespace().next()?).filter(|value| value.is_finite())?;
        Some(Self { name: name.to_owned(), labels, value })
    }
}

/// Where a quoted value ends.
fn closing_quote(text: &str) -> Option<usize> {
    let mut escaped = false;
    text.char_indices().find_map(|(place, c)| {
        let closes = c == '"' && !escaped;
        escaped = c == '\\' && !escaped;
        closes.then_some(place)
    })
}

fn unescaped(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (c, c == '\\') {
            (_, true) => match chars.next() {
                Some('n') => plain.push('\n'),
                Some(other) => plain.push(other),
                None => plain.push('\\'),
            },
            _ => plain.push(c),
        }
    }
    plain
}

fn number(text: &str) -> Option<f64> {
    match text {
        "+Inf" => Some(f64::INFINITY),
        other => other.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const TEXT: &str = "# HELP postroom_acked_messages Messages \\\"confirmed\\\".\n\
        # TYPE postroom_acked_messages counter\n\
        postroom_acked_messages_total{route=\"a \\\"b\\\\ \\n{,}\"} 3\n\
        postroom_acked_messages_total{route=\"c\"} 5\n\
        # HELP postroom_claim_duration_seconds Time.\n\
        # TYPE postroom_claim_duration_seconds histogram\n\
        # UNIT postroom_claim_duration_seconds seconds\n\
        postroom_claim_duration_seconds_sum{route=\"c\"} 1.5\n\
        postroom_claim_duration_seconds_count{route=\"c\"} 4\n\
        postroom_claim_duration_seconds_bucket{le=\"0.1\",route=\"c\"} 1\n\
        postroom_claim_duration_seconds_bucket{le=\"1.0\",route=\"c\"} 3\n\
        postroom_claim_duration_seconds_bucket{le=\"+Inf\",route=\"c\"} 4\n\
        # HELP postroom_store_up Up.\n\
        # TYPE postroom_store_up gauge\n\
        postroom_store_up 1.0\n\
        # HELP postroom_empty Nothing.\n\
        # TYPE postroom_empty gauge\n\
        # EOF\n";

    #[test]
    fn counters_gauges_and_histograms_keep_their_names_labels_and_values() {
        let resource = [("service.name".to_owned(), "postroom".to_owned())];
        let since = SystemTime::UNIX_EPOCH + Duration::from_secs(1);
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(2);
        let request = Exported { resource: &resource, since, at }.request(TEXT);
        let resource = &request["resourceMetrics"][0];
        assert_eq!(resource["resource"]["attributes"][0]["value"]["stringValue"], "postroom");
        let metrics = resource["scopeMetrics"][0]["metrics"].as_array().unwrap();
        let names: Vec<&str> = metrics.iter().map(|metric| metric["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["postroom_acked_messages", "postroom_claim_duration_seconds", "postroom_store_up"]);
        let acked = &metrics[0]["sum"];
        assert_eq!((&acked["isMonotonic"], &acked["aggregationTemporality"]), (&json!(true), &json!(2)));
        assert_eq!(acked["dataPoints"][0]["attributes"][0]["value"]["stringValue"], "a \"b\\ \n{,}");
        assert_eq!(
            (&acked["dataPoints"][0]["asDouble"], &acked["dataPoints"][1]["asDouble"]),
            (&json!(3.0), &json!(5.0))
        );
        assert_eq!(acked["dataPoints"][0]["startTimeUnixNano"], "1000000000");
        assert_eq!(metrics[1]["unit"], "s");
        let claim = &metrics[1]["histogram"]["dataPoints"][0];
        assert_eq!((&claim["count"], &claim["sum"]), (&json!("4"), &json!(1.5)));
        assert_eq!((&claim["bucketCounts"], &claim["explicitBounds"]), (&json!(["1", "2", "1"]), &json!([0.1, 1.0])));
        assert_eq!(metrics[2]["gauge"]["dataPoints"][0]["asDouble"], json!(1.0));
    }

    #[test]
    fn what_is_not_understood_is_left_out() {
        let exported = Exported { resource: &[], since: SystemTime::UNIX_EPOCH, at: SystemTime::UNIX_EPOCH };
        for text in ["a{b=\"c", "a{", "a{b}", "{}", "# TYPE", "# TYPE a counter\na_total{b=\"\\\"} 1", "x y", "\\"] {
            let request = exported.request(text);
            assert_eq!(request["resourceMetrics"][0]["scopeMetrics"][0]["metrics"], json!([]), "{text}");
        }
    }
}
