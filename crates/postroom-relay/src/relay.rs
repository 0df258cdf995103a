//! Carries out what the engine asks for.

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use postroom::{
    Batch, Cause, Happened, Live, LostLane, Message, MessageSpan, Noted, Observed, Observer, Route, Sink, Source, Step,
    Verdict, Verdicts, Wake, crash_point, crash_point_over,
};

use crate::engine::Engine;
use crate::protocol::{Action, Counters, EngineOptions, Input, RouteNow};
use crate::told::{PROBE, Told};

/// Giving the lanes back takes no longer than this, and closing the sink neither.
const CLOSE_DEADLINE: Duration = Duration::from_secs(5);
/// The first wait between two tries to give the lanes back.
const RELEASE_AGAIN: Duration = Duration::from_millis(100);
/// Longer than this is never meant.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// Relays one route from a source to a sink, as a process of its own or inside an application.
///
/// A crash at any moment loses nothing and repeats at most `in_flight_max` messages, with the same ids.
pub struct Relay {
    route: Route,
    source: Arc<dyn Source>,
    sink: Arc<dyn Sink>,
    wake: Wake,
    in_flight_max: usize,
    in_flight_bytes_max: usize,
    poll_idle: Duration,
    stop_deadline: Duration,
    seed: u64,
    sink_name: Option<String>,
    brief: bool,
    observer: Arc<dyn Observer>,
    live: Live<RouteNow>,
}

/// How a relay ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summary {
    /// What it counted.
    pub counters: Counters,
    /// Deliveries that were claimed and not settled at the deadline; the next relay publishes them again.
    pub unfinished: usize,
    /// At most this many finished deliveries are not known to be covered by a saved position, because the store could not be
    /// reached or an unfinished one is before them: those that the sink has are sent again.
    pub unwritten: usize,
    /// The lanes were given back. Otherwise other relays wait until the lease expires.
    pub released: bool,
}

impl Relay {
    /// A relay of this route with 2,000 messages and 64 MiB in flight, an idle poll of 200 ms, and a stop deadline of 20 s. The
    /// source must be of the same route.
    pub fn new(route: Route, source: Arc<dyn Source>, sink: Arc<dyn Sink>) -> Self {
        Self {
            route,
            source,
            sink,
            wake: Wake::new(),
            in_flight_max: 2000,
            in_flight_bytes_max: 64 << 20,
            poll_idle: Duration::from_millis(200),
            stop_deadline: Duration::from_secs(20),
            seed: 0,
            sink_name: None,
            brief: false,
            observer: Arc::new(()),
            live: Live::new(),
        }
    }

    /// Wakes the relay at once after a commit in this process.
    pub fn wake_by(mut self, wake: Wake) -> Self {
        self.wake = wake;
        self
    }

    /// Most deliveries that are claimed but not yet covered by a saved position, which is what a crash can repeat; at least 1.
    pub fn in_flight_max(mut self, messages: usize) -> Self {
        self.in_flight_max = messages.max(1);
        self
    }

    /// Limit on the bytes of payloads and headers in memory, which one message may exceed; at least 1.
    pub fn in_flight_bytes_max(mut self, bytes: usize) -> Self {
        self.in_flight_bytes_max = bytes.max(1);
        self
    }

    /// Longest wait between two polls when there is nothing to do.
    pub fn poll_idle(mut self, wait: Duration) -> Self {
        self.poll_idle = wait.max(Duration::from_millis(1));
        self
    }

    /// How long a stop may take before it leaves messages in flight unfinished; at most a year.
    pub fn stop_deadline(mut self, deadline: Duration) -> Self {
        self.stop_deadline = deadline.min(LONGEST);
        self
    }

    /// A name for the sink, for people, without secrets; shown by `postroom status`.
    pub fn sink_named(mut self, name: impl Into<String>) -> Self {
        self.sink_name = Some(name.into());
        self
    }

    /// It is one of many that run for a short time each: that it stops is logged for debugging only.
    pub fn brief(mut self) -> Self {
        self.brief = true;
        self
    }

    /// Seed of the jitter.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Tells an observer what happens, once for each batch.
    pub fn observed_by(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = observer;
        self
    }

    /// Publishes the route's state here, after every step.
    pub fn shown_in(mut self, live: Live<RouteNow>) -> Self {
        self.live = live;
        self
    }

    /// Runs until `stop` resolves, then claims nothing more, finishes the messages in flight within the deadline, gives the
    /// lanes back and closes the sink. Errors of the store and the broker are logged and tried again; they never end it.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Summary {
        let began = Instant::now();
        let mut engine = Engine::new(EngineOptions {
            in_flight_max: self.in_flight_max,
            in_flight_bytes_max: self.in_flight_bytes_max,
            order: self.route.order,
            on_dead: self.route.on_dead,
            rate: self.route.rate.filter(|rate| *rate > 0),
            breaker_after: self.route.breaker_after,
            poll_idle: self.poll_idle,
            retry: self.route.retry.clone(),
            // Often enough that a lane left by another relay is taken within two seconds of its lease.
            renew_every: (self.source.lease() / 3).min(Duration::from_secs(1)),
            sink: self.sink.limits(),
            seed: self.seed,
        });
        let told = Told::new(&self.route.name);
        let mut work: FuturesUnordered<BoxFuture<'_, Option<Input>>> = FuturesUnordered::new();
        let mut stop = std::pin::pin!(stop);
        let mut deadline: Option<Instant> = None;
        loop {
            let mut finished = false;
            for action in engine.next(began.elapsed()) {
                match self.start(&told, action) {
                    Some(future) => work.push(future),
                    None => finished = true,
                }
            }
            if finished {
                break;
            }
            let mut standing = engine.standing();
            standing.sink_blocked = self.sink.blocked();
            told.sink(standing.sink_down.as_deref());
            told.rest(false);
            // What waits for a sink that is down will not get there in time.
            let in_vain = standing.sink_down.is_some() && standing.with_sink == 0 && engine.unrecorded() == 0;
            self.live.set(standing);
            if in_vain && deadline.is_some() {
                break;
            }
            let mut wait = engine.wake_at().map_or(Duration::from_secs(1), |at| at.saturating_sub(began.elapsed()));
            if let Some(deadline) = deadline {
                wait = wait.min(deadline.saturating_duration_since(Instant::now()));
            }
            let input = tokio::select! {
                biased;
                () = &mut stop, if deadline.is_none() => {
                    deadline = Some(Instant::now() + self.stop_deadline);
                    let (route, in_flight) = (&self.route.name, engine.in_flight());
                    if self.brief {
                        tracing::debug!(%route, in_flight, "stopping: finishing the messages in flight");
                    } else {
                        tracing::info!(%route, in_flight, "stopping: finishing the messages in flight");
                    }
                    Some(Input::Stop)
                }
                Some(input) = work.next(), if !work.is_empty() => input,
                () = self.wake.notified() => Some(Input::Woken),
                () = tokio::time::sleep(wait) => None,
            };
            if engine.is_connected_and_idle()
                && let Some(why) = self.sink.disconnected()
            {
                engine.on(began.elapsed(), Input::SinkLost(why));
            }
            if let Some(input) = input {
                if let Input::Renewed(standing) = &input {
                    told.store(standing.is_some());
                }
                engine.on(began.elapsed(), input);
                let deaths = engine.take_deaths();
                deaths.iter().for_each(|death| told.death(death));
                for cause in Cause::ALL.iter().copied() {
                    let messages = deaths.iter().filter(|death| death.cause == cause).count();
                    if messages > 0 {
                        self.happened(Happened::Died { cause, messages });
                    }
                }
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                break;
            }
        }
        drop(work);
        told.rest(true);
        let unfinished = engine.unfinished();
        if unfinished > 0 {
            tracing::warn!(route = %self.route.name, unfinished, "stopped before these were finished; they will be published again");
        }
        let released = self.close(&told).await;
        self.live.set(engine.standing());
        let unwritten = engine.unrecorded() + if released && unfinished == 0 { 0 } else { engine.settled_ahead() };
        if unwritten > 0 {
            tracing::warn!(
                route = %self.route.name, unwritten,
                "stopped with this many finished messages that no saved position covers: those that the sink has may be sent again"
            );
        }
        Summary { counters: engine.counters(), unfinished, unwritten, released }
    }

    /// Whether the lanes were given back, and with them every position written.
    async fn close(&self, told: &Told) -> bool {
        // A connection that broke a moment ago is opened again: the store itself may well be there.
        let release = async {
            let mut wait = RELEASE_AGAIN;
            loop {
                match self.source.release().await {
                    Err(error) if error.is_transient() => {
                        told.complaint("give the lanes back", &error);
                        tokio::time::sleep(wait).await;
                        wait *= 2;
                    }
                    released => return released,
                }
            }
        };
        let release = tokio::time::timeout(CLOSE_DEADLINE, release).await;
        let released = match release {
            Ok(Ok(())) => true,
            Ok(Err(error)) => {
                told.complaint("give the lanes back; they become free when the lease expires", &error);
                false
            }
            Err(_) => {
                tracing::warn!(route = %self.route.name, "the lanes were not given back in time; the lease will expire");
                false
            }
        };
        if tokio::time::timeout(CLOSE_DEADLINE, self.sink.close()).await.is_err() {
            tracing::warn!(route = %self.route.name, "the sink was not closed in time; its connections end with the process");
        }
        released
    }

    /// The future that carries an action out; none for the end.
    fn start<'a>(&'a self, told: &'a Told, action: Action) -> Option<BoxFuture<'a, Option<Input>>> {
        Some(match action {
            Action::Renew(mut report) => Box::pin(async move {
                report.sink.clone_from(&self.sink_name);
                // One that is about to be connected to for the first time is not down.
                report.sink_down = report.sink_down.filter(|_| told.sink_is_down());
                report.sink_blocked = self.sink.blocked();
                told.blocked(report.sink_blocked.as_deref());
                let began = Instant::now();
                let standing = self.source.renew(&report).await;
                self.happened(match &standing {
                    Ok(standing) => Happened::Renewed { lanes: standing.held, took: began.elapsed() },
                    Err(_) => Happened::StoreFailed { what: "renew the lease" },
                });
                self.tell_lost(standing.as_ref().map_or(&[][..], |standing| &standing.lost_lanes));
                Some(Input::Renewed(standing.inspect_err(|error| drop(told.complaint("renew the lease", error))).ok()))
            }),
            Action::Claim(want) => Box::pin(async move {
                let began = Instant::now();
                let claimed = self.source.claim(want).await;
                self.happened(match &claimed {
                    Ok(claimed) => Happened::Claimed { messages: claimed.deliveries.len(), took: began.elapsed() },
                    Err(_) => Happened::StoreFailed { what: "claim messages" },
                });
                self.tell_lost(claimed.as_ref().map_or(&[][..], |claimed| &claimed.lost_lanes));
                for delivery in claimed.iter().flat_map(|claimed| &claimed.deliveries) {
                    drop(MessageSpan::begin(Step::Claim, &delivery.message, "postroom", &self.route.name));
                }
                Some(Input::Claimed(claimed.inspect_err(|error| drop(told.complaint("claim messages", error))).ok()))
            }),
            Action::Note { token, proven } => Box::pin(async move {
                let proven = proven && self.sink.blocked().is_none();
                let noted = self.source.note(token, proven).await;
                let noted =
                    noted.inspect_err(|error| drop(told.complaint("note the message that is published alone", error)));
                Some(Input::Noted(noted.unwrap_or(Noted { proven, ..Noted::default() })))
            }),
            Action::ClearNote => Box::pin(async move {
                let cleared = self.source.clear_note().await;
                let cleared = cleared
                    .inspect_err(|error| drop(told.complaint("clear the note about a message that came back", error)));
                Some(Input::NoteCleared(cleared.is_ok()))
            }),
            Action::Settle(settlements) => Box::pin(async move {
                let began = Instant::now();
                let settled = self.source.settle(&settlements).await;
                self.happened(match &settled {
                    Ok(settled) => {
                        Happened::Settled { messages: settlements.len(), fenced: settled.fenced, took: began.elapsed() }
                    }
                    Err(_) => Happened::StoreFailed { what: "settle messages" },
                });
                self.tell_lost(settled.as_ref().map_or(&[][..], |settled| &settled.lost_lanes));
                Some(Input::Settled(settled.inspect_err(|error| drop(told.complaint("settle messages", error))).ok()))
            }),
            Action::Publish(id, batch) => Box::pin(async move {
                crash_point("publish.before");
                batch.messages().iter().for_each(|message| crash_point_over("publish", &message.kind));
                // A sink that panics over a message ends its batch, not the relay.
                let system = self.sink.system();
                let begin = |message: &Arc<Message>| MessageSpan::begin(Step::Send, message, system, message.address());
                let spans: Vec<MessageSpan> = batch.messages().iter().map(begin).collect();
                let began = Instant::now();
                let verdicts = AssertUnwindSafe(self.sink.publish(&batch)).catch_unwind().await;
                let verdicts = match verdicts {
                    Ok(verdicts) => verdicts.map_err(|error| told.complaint("publish", &error)),
                    Err(panic) => Err(self.panicked("publish", panic.as_ref())),
                };
                self.happened(published(&batch, verdicts.as_ref().ok(), began.elapsed()));
                if let Ok(verdicts) = &verdicts {
                    self.tell_unknown(&batch, verdicts);
                    let mut written = batch.messages().iter().enumerate().filter_map(|(place, message)| {
                        message.occurred_at.filter(|_| matches!(verdicts.of(place), Some(Verdict::Stored)))
                    });
                    self.observer.through(Observed::Route(&self.route.name), &mut written);
                }
                for (place, (message, span)) in batch.messages().iter().zip(spans).enumerate() {
                    match &verdicts {
                        Err(error) => span.failed(error),
                        Ok(verdicts) => {
                            if let Some(Verdict::Failed(failure)) = verdicts.of(place) {
                                told.failure(message, failure);
                                span.failed(&failure.reason);
                            }
                        }
                    }
                }
                crash_point("publish.after");
                Some(Input::Published(id, verdicts))
            }),
            Action::Probe => Box::pin(async {
                let reachable = self.sink.probe().await;
                Some(Input::Probed(reachable.map_err(|error| told.complaint(PROBE, &error))))
            }),
            Action::Finish => return None,
        })
    }

    fn happened(&self, event: Happened) {
        self.observer.event(Observed::Route(&self.route.name), &event);
    }

    fn tell_lost(&self, lost: &[LostLane]) {
        if !lost.is_empty() {
            self.happened(Happened::LanesLost { lanes: lost.len() });
            let lanes: Vec<String> = lost.iter().map(|lost| lost.lane.to_string()).collect();
            tracing::warn!(
                route = %self.route.name, lanes = %lanes.join(","),
                "lost lanes; their messages in flight will be published again by the relay that holds them now"
            );
        }
    }

    /// Where a channel closed over one message, the others of its batch may or may not be stored.
    fn tell_unknown(&self, batch: &Batch, verdicts: &Verdicts) {
        let mut unknown = (0..batch.messages().len()).filter_map(|place| match verdicts.of(place)? {
            Verdict::Unknown(why) => Some(why),
            _ => None,
        });
        if let Some(why) = unknown.next() {
            let messages = 1 + unknown.count();
            tracing::warn!(route = %self.route.name, messages, "it is unknown whether the sink has these; they are published again: {why}");
        }
    }

    fn panicked(&self, what: &str, panic: &(dyn Any + Send)) -> String {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no text".to_owned());
        tracing::error!(route = %self.route.name, "panicked while trying to {what}: {text}");
        format!("the sink panicked: {text}")
    }
}

/// What became of a batch; without verdicts the sink was unavailable.
fn published(batch: &Batch, verdicts: Option<&Verdicts>, took: Duration) -> Happened {
    let messages = batch.messages().len();
    let Some(verdicts) = verdicts else { return Happened::Unavailable { messages, took } };
    let (mut stored, mut failed, mut skipped, mut unknown) = (0, 0, 0, 0);
    for place in 0..messages {
        *match verdicts.of(place) {
            Some(Verdict::Stored) => &mut stored,
            Some(Verdict::Failed(_)) => &mut failed,
            Some(Verdict::Skipped) => &mut skipped,
            Some(Verdict::Unknown(_)) | None => &mut unknown,
            Some(Verdict::NotSent) => continue,
        } += 1;
    }
    Happened::Published { stored, failed, skipped, unknown, took }
}

#[cfg(test)]
mod tests {
    use postroom::FailureKind;

    use super::*;

    #[test]
    fn a_batch_is_one_event_that_counts_each_verdict() {
        let batch = Batch::new((0..5).map(|_| Message::new("orders", "order.placed", "x")));
        let took = Duration::from_millis(3);
        assert_eq!(published(&batch, None, took), Happened::Unavailable { messages: 5, took });
        let mut verdicts = batch.silent();
        verdicts.judge(0, Verdict::Stored);
        verdicts.judge(1, Verdict::failed(FailureKind::Busy, "full"));
        verdicts.judge(2, Verdict::Skipped);
        let expected = Happened::Published { stored: 1, failed: 1, skipped: 1, unknown: 2, took };
        assert_eq!(published(&batch, Some(&verdicts), took), expected, "silence is unknown");
    }
}
