//! Logs on standard error and, with the feature `otlp`, traces to a collector.

use std::io::Write;

use tracing_subscriber::filter::{FilterExt, filter_fn};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

/// Where spans about messages come from; they are for the collector, not for the log.
const SPANS: &str = "postroom::trace";
/// The variables of OpenTelemetry that name a collector.
const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];

/// A record of the log, one line whatever is in it: brokers, servers and messages say parts of it.
struct LogLine;

impl Write for LogLine {
    fn write(&mut self, record: &[u8]) -> std::io::Result<usize> {
        let text = String::from_utf8_lossy(record);
        let line = crate::say::printable(&crate::exit::in_a_line(text.trim_end_matches('\n')));
        writeln!(std::io::stderr().lock(), "{line}").map(|()| record.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Sends what is left of the traces when it is dropped; to be kept until the end, outside of the runtime.
pub struct Telemetry {
    #[cfg(feature = "otlp")]
    provider: Option<opentelemetry_sdk::trace::SdkTracerProvider>,
}

/// Starts logging at the `usual` level unless `POSTROOM_LOG` says otherwise, and tracing where a collector is named.
pub fn start(usual: &str) -> Telemetry {
    if let Ok(key) = std::env::var("POSTROOM_LOG_KEY") {
        postroom::set_log_key(key);
    }
    let filter = EnvFilter::try_from_env("POSTROOM_LOG").unwrap_or_else(|_| EnvFilter::new(usual));
    // Whatever POSTROOM_LOG says: libraries log payloads, headers and URLs, which never go into logs. What matters of their errors is
    // reported by us.
    let ours = filter_fn(|about| {
        let target = about.target();
        (target.starts_with("postroom") || target.starts_with("opentelemetry")) && target != SPANS
    });
    let filter = filter.and(ours);
    // Its own complaints about a log that cannot be written would panic.
    let logs = tracing_subscriber::fmt::layer()
        .with_writer(|| LogLine)
        .with_target(false)
        .with_ansi(false)
        .log_internal_errors(false);
    let named = ENDPOINTS.iter().any(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty()));
    let registry = tracing_subscriber::registry().with(logs.with_filter(filter));
    #[cfg(not(feature = "otlp"))]
    {
        registry.init();
        let of_metrics = std::env::var_os("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT").is_some_and(|value| !value.is_empty());
        if named || of_metrics {
            tracing::warn!(
                "a collector is configured, but this program was built without the feature otlp: nothing is exported"
            );
        }
        Telemetry {}
    }
    #[cfg(feature = "otlp")]
    {
        let provider = if named { provider() } else { Ok(None) };
        let (provider, failed) = match provider {
            Ok(provider) => (provider, None),
            Err(error) => (None, Some(error)),
        };
        let spans = provider.as_ref().map(|provider| {
            use opentelemetry::trace::TracerProvider;
            let only = tracing_subscriber::filter::Targets::new().with_target(SPANS, tracing::Level::INFO);
            tracing_opentelemetry::layer().with_tracer(provider.tracer("postroom")).with_filter(only)
        });
        registry.with(spans).init();
        if let Some(error) = failed {
            tracing::warn!("traces are not exported: {error}");
        }
        Telemetry { provider }
    }
}

#[cfg(feature = "otlp")]
fn provider() -> Result<Option<opentelemetry_sdk::trace::SdkTracerProvider>, opentelemetry_otlp::ExporterBuildError> {
    use opentelemetry_otlp::SpanExporter;
    use opentelemetry_sdk::Resource;
    use opentelemetry_sdk::trace::SdkTracerProvider;

    // Endpoint, headers, protocol and timeout are read from the environment, by OpenTelemetry's own names.
    let exporter = SpanExporter::builder().with_http().build()?;
    let mut resource = Resource::builder();
    if std::env::var_os("OTEL_SERVICE_NAME").is_none() {
        resource = resource.with_service_name("postroom");
    }
    Ok(Some(SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource.build()).build()))
}

#[cfg(feature = "otlp")]
impl Drop for Telemetry {
    fn drop(&mut self) {
        if let Some(provider) = self.provider.take()
            && let Err(error) = provider.shutdown()
        {
            crate::say::say!("postroom: the last traces were not exported: {error}");
        }
    }
}
