//! One order's trace, seen whole by a collector: request, create, claim, send, receive, process. And the metrics of its relay.

#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::HashMap;
use std::process::{Command, Stdio};
use std::sync::Arc;

use async_trait::async_trait;
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use postroom::{Consumer, Message, Outbox};
use postroom_brokers::rabbitmq::{Binding, RabbitmqSubscription, RabbitmqSubscriptionOptions};
use postroom_consumer::{Handle, HandlerError, Handlers, Incoming, Receiver};
use postroom_postgres::{Connector, Postgres, PostgresSession, migrate};
use postroom_testkit::postgres::Database;
use postroom_testkit::surroundings;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio_postgres::Transaction;
use tracing::Instrument;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Reads one request after the other and hands the spans and metrics in them on.
async fn collect(
    mut stream: TcpStream,
    spans: mpsc::UnboundedSender<Value>,
    metrics: mpsc::UnboundedSender<Value>,
) -> std::io::Result<()> {
    let mut buffer = Vec::new();
    loop {
        let end = loop {
            if let Some(end) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
                break end + 4;
            }
            if stream.read_buf(&mut buffer).await? == 0 {
                return Ok(());
            }
        };
        let head = String::from_utf8_lossy(&buffer[..end]).to_lowercase();
        let of_metrics = head.starts_with("post /v1/metrics");
        assert!(of_metrics || head.starts_with("post /v1/traces"), "{head}");
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap().trim();
        let length: usize = length.parse().unwrap();
        while buffer.len() < end + length {
            stream.read_buf(&mut buffer).await?;
        }
        let body: Value = serde_json::from_slice(&buffer[end..end + length]).unwrap();
        buffer.drain(..end + length);
        if of_metrics {
            for metric in body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"].as_array().unwrap() {
                // The test may be over by then.
                let _ = metrics.send(metric.clone());
            }
        }
        for resource in body["resourceSpans"].as_array().into_iter().flatten() {
            for scope in resource["scopeSpans"].as_array().unwrap() {
                for span in scope["spans"].as_array().unwrap() {
                    spans.send(span.clone()).unwrap();
                }
            }
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}").await?;
    }
}

struct Bills(mpsc::UnboundedSender<bool>);

#[async_trait]
impl Handle<Postgres, Value> for Bills {
    async fn handle(&self, _: &mut Transaction<'_>, order: &Incoming<Value>) -> Result<(), HandlerError> {
        // What a handler writes itself belongs to the same trace.
        self.0.send(order.message.headers.contains_key("traceparent")).unwrap();
        Ok(())
    }
}

#[test]
fn the_trace_of_one_order_is_seen_whole_by_a_collector() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (sender, mut received) = mpsc::unbounded_channel();
    let (measured, metrics) = mpsc::unbounded_channel();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let collector = format!("http://{}", listener.local_addr().unwrap());
    runtime.spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(collect(stream, sender.clone(), measured.clone()));
        }
    });
    let _ = rustls::crypto::ring::default_provider().install_default();
    let exporter = SpanExporter::builder()
        .with_http()
        .with_protocol(Protocol::HttpJson)
        .with_endpoint(format!("{collector}/v1/traces"))
        .build()
        .unwrap();
    let resource = Resource::builder().with_service_name("shop").build();
    let provider = SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build();
    tracing_subscriber::registry()
        .with(tracing_opentelemetry::layer().with_tracer(provider.tracer("shop")))
        .with(
            tracing_subscriber::filter::Targets::new()
                .with_target("trace", tracing::Level::INFO)
                .with_target("postroom", tracing::Level::INFO),
        )
        .init();

    let id = runtime.block_on(one_order(&collector, metrics));
    provider.shutdown().unwrap();
    let mut spans: HashMap<String, Value> = HashMap::new();
    while let Ok(span) = received.try_recv() {
        spans.insert(span["name"].as_str().unwrap().to_owned(), span);
    }
    let named = |name: &str| spans.get(name).unwrap_or_else(|| panic!("{name} is not in {:?}", spans.keys()));
    let (request, create) = (named("place order"), named("create orders"));
    assert_eq!(create["parentSpanId"], request["spanId"]);
    for name in ["claim orders", "send orders.placed", "receive billing", "process billing"] {
        let span = named(name);
        assert_eq!((&span["traceId"], &span["parentSpanId"]), (&request["traceId"], &create["spanId"]), "{name}");
        let attributes = span["attributes"].as_array().unwrap();
        let attribute = |key: &str| {
            let found = attributes.iter().find(|attribute| attribute["key"] == key);
            found.map(|attribute| attribute["value"]["stringValue"].as_str().unwrap_or_default().to_owned())
        };
        assert_eq!(attribute("messaging.message.id"), Some(id.clone()), "{name}");
        assert_eq!(attribute("messaging.operation.name").as_deref(), name.split(' ').next());
    }
}

async fn one_order(collector: &str, mut metrics: mpsc::UnboundedReceiver<Value>) -> String {
    let database = Database::create().await;
    let connector = Connector::new(database.url()).unwrap();
    migrate(&connector, 4).await.unwrap();
    let (rabbitmq, exchange) = (surroundings::rabbitmq_url(), format!("e-{}", surroundings::unique()));
    let subscription = RabbitmqSubscription::new(RabbitmqSubscriptionOptions {
        url: rabbitmq.clone(),
        queue: format!("q-{exchange}"),
        bind: vec![Binding::new(&exchange, "#")],
        prefetch: 10,
        unsettled_bytes_max: 64 << 20,
    })
    .unwrap();
    subscription.connect().await.unwrap();
    let config = surroundings::scratch("trace").join("postroom.toml");
    let written = format!(
        "[store]\nurl = {:?}\n[[routes]]\nname = \"orders\"\n[routes.sink]\nkind = \"rabbitmq\"\nurl = {rabbitmq:?}\nexchange = {exchange:?}\n",
        database.url()
    );
    std::fs::write(&config, written).unwrap();
    let relay = surroundings::postroom()
        .args(["run", "--config"])
        .arg(&config)
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", collector)
        .env("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
        .env("OTEL_METRIC_EXPORT_INTERVAL", "200")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();

    let message = Message::json("orders", "orders.placed", &1).unwrap();
    let id = message.id.to_string();
    let mut client = database.connect().await;
    let placing = async {
        let mut tx = client.transaction().await.unwrap();
        Postgres.enqueue(&mut tx, &[message]).await.unwrap();
        tx.commit().await.unwrap();
    };
    placing.instrument(tracing::info_span!("place order")).await;

    let (handled, mut seen) = mpsc::unbounded_channel();
    let handlers = Handlers::new().on("orders.placed", Bills(handled));
    let open = move || PostgresSession::new(connector.clone());
    let consumer = Consumer::new("billing").unwrap();
    let receiver = Receiver::new(Arc::new(subscription), consumer, handlers, open).unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let receiving = tokio::spawn(receiver.run(async move {
        let _ = stopped.await;
    }));
    assert!(seen.recv().await.unwrap(), "the context reached the handler");
    stop.send(()).unwrap();
    receiving.await.unwrap().unwrap();
    // The relay's metrics came to the same collector: one message of this route was acked, and its time is in a histogram.
    let of_orders = |metric: &Value, kind: &str| {
        let points = metric[kind]["dataPoints"].as_array().cloned().unwrap_or_default();
        let ours = |point: &&Value| point["attributes"][0]["value"]["stringValue"] == "orders";
        points.iter().find(ours).cloned().unwrap_or_default()
    };
    let (mut acked, mut timed) = (false, false);
    while !(acked && timed) {
        let received = tokio::time::timeout(std::time::Duration::from_secs(60), metrics.recv()).await;
        let metric = received.expect("the metrics of an acked message come").unwrap();
        match metric["name"].as_str().unwrap() {
            "postroom_acked_messages" => acked = of_orders(&metric, "sum")["asDouble"].as_f64() >= Some(1.0),
            "postroom_publish_duration_seconds" => {
                timed = of_orders(&metric, "histogram")["count"].as_str().is_some_and(|count| count != "0");
            }
            _ => {}
        }
    }
    let pid = relay.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let ended = tokio::task::spawn_blocking(|| relay.wait_with_output()).await.unwrap().unwrap();
    assert!(ended.status.success());
    id
}
