//! Sends the metrics to a collector of OpenTelemetry from time to time, as the environment says.
//!
//! The variables and their defaults are those of <https://opentelemetry.io/docs/specs/otel/protocol/exporter/> and of the periodic
//! exporting reader. The body is JSON, which every receiver of OTLP over HTTP takes.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use postroom_server::{Exported, Metrics};

const INTERVAL: Duration = Duration::from_secs(60);
const TIMEOUT: Duration = Duration::from_secs(10);

/// Where metrics go.
struct Collector {
    url: String,
    headers: Vec<(String, String)>,
    interval: Duration,
    timeout: Duration,
    resource: Vec<(String, String)>,
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Whether a collector of metrics is named.
pub fn is_named() -> bool {
    url(&variable).is_some()
}

fn url(variable: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    if variable("OTEL_METRICS_EXPORTER").is_some_and(|exporter| exporter != "otlp")
        || variable("OTEL_SDK_DISABLED").is_some_and(|disabled| disabled.eq_ignore_ascii_case("true"))
    {
        return None;
    }
    variable("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT").or_else(|| {
        let base = variable("OTEL_EXPORTER_OTLP_ENDPOINT")?;
        Some(format!("{}/v1/metrics", base.trim_end_matches('/')))
    })
}

impl Collector {
    fn of(variable: &dyn Fn(&str) -> Option<String>) -> Option<Self> {
        let of_metrics = |name: &str| {
            variable(&format!("OTEL_EXPORTER_OTLP_METRICS_{name}"))
                .or_else(|| variable(&format!("OTEL_EXPORTER_OTLP_{name}")))
        };
        let milliseconds = |text: Option<String>, usual| {
            text.and_then(|text| text.parse().ok()).filter(|ms| *ms > 0).map_or(usual, Duration::from_millis)
        };
        let mut resource = pairs(&variable("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default());
        resource.retain(|(name, _)| name != "service.name" || variable("OTEL_SERVICE_NAME").is_none());
        if !resource.iter().any(|(name, _)| name == "service.name") {
            resource.push((
                "service.name".to_owned(),
                variable("OTEL_SERVICE_NAME").unwrap_or_else(|| "postroom".to_owned()),
            ));
        }
        // Two processes with one name would be one series to the collector.
        if !resource.iter().any(|(name, _)| name == "service.instance.id") {
            resource.push(("service.instance.id".to_owned(), postroom::MessageId::new().to_string()));
        }
        Some(Self {
            url: url(variable)?,
            headers: pairs(&of_metrics("HEADERS").unwrap_or_default()),
            interval: milliseconds(variable("OTEL_METRIC_EXPORT_INTERVAL"), INTERVAL),
            timeout: milliseconds(of_metrics("TIMEOUT"), TIMEOUT),
            resource,
        })
    }
}

/// `a=b,c=d`, values percent-encoded.
fn pairs(text: &str) -> Vec<(String, String)> {
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=')?;
        Some((name.trim().to_owned(), decoded(value.trim())))
    };
    text.split(',').filter_map(pair).collect()
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let hex = after
            .get(..2)
            .and_then(|two| std::str::from_utf8(two).ok())
            .and_then(|two| u8::from_str_radix(two, 16).ok());
        match (first, hex) {
            (b'%', Some(byte)) => {
                bytes.push(byte);
                rest = after.get(2..).unwrap_or_default();
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Sends for ever, if a collector is named. One that is away or refuses is told of once, and gets the figures of then when it is back:
/// they are sums since the beginning.
pub async fn export(metrics: Arc<Metrics>) {
    let Some(collector) = Collector::of(&variable) else { return };
    let shown = postroom::redact_url(&collector.url);
    // The headers may be secrets: they go nowhere else.
    let nowhere_else = reqwest::redirect::Policy::none();
    let client = match reqwest::Client::builder().timeout(collector.timeout).redirect(nowhere_else).build() {
        Ok(client) => client,
        Err(error) => return tracing::error!("metrics are not exported: {error}"),
    };
    let (since, mut away) = (SystemTime::now(), false);
    loop {
        let exported = Exported { resource: &collector.resource, since, at: SystemTime::now() };
        let body = exported.request(&metrics.text()).to_string();
        let mut request = client.post(&collector.url).header("content-type", "application/json").body(body);
        for (name, value) in &collector.headers {
            request = request.header(name, value);
        }
        let failed = match request.send().await {
            Ok(answer) if answer.status().is_success() => None,
            Ok(answer) => Some(format!("it answered {}", answer.status())),
            Err(error) => Some(told(&error.without_url())),
        };
        match failed {
            None if std::mem::take(&mut away) => tracing::info!("metrics are exported to {shown} again"),
            None => {}
            Some(why) if !std::mem::replace(&mut away, true) => {
                let every = collector.interval;
                tracing::warn!("metrics are not exported to {shown}, trying again every {every:?}: {why}");
            }
            Some(_) => {}
        }
        tokio::time::sleep(collector.interval).await;
    }
}

fn told(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), |source| format!("{error}: {}", told(source)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Option<Collector> {
        let variable =
            |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        Collector::of(&variable)
    }

    #[test]
    fn the_environment_says_where_to_and_what_with() {
        assert!(of(&[]).is_none());
        let base = [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318/"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x,b=c"),
        ];
        let collector = of(&base).unwrap();
        assert_eq!(collector.url, "http://c:4318/v1/metrics");
        assert_eq!(
            collector.headers,
            [("authorization".to_owned(), "Bearer x".to_owned()), ("b".to_owned(), "c".to_owned())]
        );
        assert_eq!((collector.interval, collector.timeout), (INTERVAL, TIMEOUT));
        assert_eq!(collector.resource[0], ("service.name".to_owned(), "postroom".to_owned()));
        assert_eq!(collector.resource[1].0, "service.instance.id");
        assert!(of(&[&base[..], &[("OTEL_METRICS_EXPORTER", "none")]].concat()).is_none());
        let own = [
            ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://m:1/x"),
            ("OTEL_METRIC_EXPORT_INTERVAL", "5000"),
            ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "100"),
            ("OTEL_RESOURCE_ATTRIBUTES", "service.name=a,zone=b%2Cc,service.instance.id=1"),
            ("OTEL_SERVICE_NAME", "orders"),
        ];
        let collector = of(&[&base[..], &own].concat()).unwrap();
        assert_eq!(
            (collector.url.as_str(), collector.interval.as_secs(), collector.timeout.as_millis()),
            ("http://m:1/x", 5, 100)
        );
        let expected = [("zone", "b,c"), ("service.instance.id", "1"), ("service.name", "orders")];
        assert_eq!(collector.resource, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }
}
