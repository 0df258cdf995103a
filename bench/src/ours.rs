//! postroom itself, in this process: the source, the engine, and a sink that counts.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use postroom::{
    Batch, BoxError, MessageId, Order, Route, Sink, SinkLimits, Source, Store, Unavailable, Verdict, Verdicts, Wake,
};
use postroom_brokers::rabbitmq::{RabbitmqOptions, RabbitmqSink};
use postroom_postgres::Database;
use postroom_relay::{Relay, Summary};
use postroom_testkit::surroundings;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

/// Counts what its inner sink stored, and says so.
pub struct Counting<S> {
    inner: S,
    stored: AtomicUsize,
    progress: watch::Sender<usize>,
    /// Ids with the time at which they were known to be stored.
    acked: Option<mpsc::UnboundedSender<(MessageId, Instant)>>,
}

#[async_trait]
impl<S: Sink> Sink for Counting<S> {
    fn limits(&self) -> SinkLimits {
        self.inner.limits()
    }

    async fn publish(&self, batch: &Batch) -> Result<Verdicts, Unavailable> {
        let mut judged = self.inner.publish(batch).await?;
        let mut verdicts = batch.silent();
        let mut stored = 0;
        for (place, message) in batch.messages().iter().enumerate() {
            let verdict = judged.take(place);
            if verdict == Verdict::Stored {
                stored += 1;
                if let Some(acked) = &self.acked {
                    let _ = acked.send((message.id, Instant::now()));
                }
            }
            verdicts.judge(place, verdict);
        }
        let total = self.stored.fetch_add(stored, Ordering::Relaxed) + stored;
        self.progress.send_replace(total);
        Ok(verdicts)
    }

    async fn probe(&self) -> Result<(), Unavailable> {
        self.inner.probe().await
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}

/// Takes everything and keeps nothing.
pub struct Nowhere;

#[async_trait]
impl Sink for Nowhere {
    fn limits(&self) -> SinkLimits {
        SinkLimits { batch_messages_max: 500, batch_bytes_max: usize::MAX, batches_in_flight_max: 4 }
    }

    async fn publish(&self, batch: &Batch) -> Result<Verdicts, Unavailable> {
        let mut verdicts = batch.silent();
        for place in 0..batch.messages().len() {
            verdicts.judge(place, Verdict::Stored);
        }
        Ok(verdicts)
    }

    async fn probe(&self) -> Result<(), Unavailable> {
        Ok(())
    }

    async fn close(&self) {}
}

/// A relay that runs.
pub struct Running {
    progress: watch::Receiver<usize>,
    stop: watch::Sender<bool>,
    task: JoinHandle<Summary>,
    pub wake: Wake,
}

impl Running {
    /// Waits until so many messages were stored.
    pub async fn stored(&mut self, messages: usize) -> Result<(), BoxError> {
        let reached = self.progress.wait_for(|stored| *stored >= messages);
        tokio::time::timeout(Duration::from_secs(600), reached).await.map_err(|_| "the relay is stuck")??;
        Ok(())
    }

    /// How many were stored so far.
    pub fn stored_now(&self) -> usize {
        *self.progress.borrow()
    }

    /// Stops it gracefully.
    pub async fn stop(self) -> Result<Summary, BoxError> {
        self.stop.send_replace(true);
        Ok(self.task.await?)
    }
}

/// Everything about a run but its sink.
pub struct Run<'a> {
    pub store: &'a str,
    pub route: &'static str,
    pub order: Order,
    pub in_flight_max: usize,
    pub acked: Option<mpsc::UnboundedSender<(MessageId, Instant)>>,
}

impl<'a> Run<'a> {
    pub fn of(store: &'a str) -> Self {
        Self { store, route: "bench", order: Order::Key, in_flight_max: 2000, acked: None }
    }

    pub async fn into_rabbitmq(self, exchange: &str) -> Result<Running, BoxError> {
        let mut options = RabbitmqOptions::new(surroundings::rabbitmq_url());
        options.exchange = exchange.to_owned();
        self.start(RabbitmqSink::new(options)?).await
    }

    pub async fn start(self, sink: impl Sink + 'static) -> Result<Running, BoxError> {
        let route = Route { order: self.order, ..Route::new(self.route) };
        let source = Database::new(self.store)?.source(&route, &surroundings::unique()).await?;
        Ok(relay(route, source, sink, self.in_flight_max, self.acked))
    }
}

/// A relay that runs from now on, in this process.
pub fn relay(
    route: Route,
    source: Arc<dyn Source>,
    sink: impl Sink + 'static,
    in_flight_max: usize,
    acked: Option<mpsc::UnboundedSender<(MessageId, Instant)>>,
) -> Running {
    let (progress, seen) = watch::channel(0);
    let sink = Counting { inner: sink, stored: AtomicUsize::new(0), progress, acked };
    let (stop, mut stopped) = watch::channel(false);
    let wake = Wake::new();
    let relay = Relay::new(route, source, Arc::new(sink)).in_flight_max(in_flight_max).wake_by(wake.clone());
    let task = tokio::spawn(relay.run(async move {
        let _ = stopped.wait_for(|stopped| *stopped).await;
    }));
    Running { progress: seen, stop, task, wake }
}
