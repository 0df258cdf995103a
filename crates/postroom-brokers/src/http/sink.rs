//! Publishing: each message is a request, and its answer a verdict.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use futures_util::StreamExt;
use postroom::{Batch, FailureKind, Message, Sink, SinkLimits, Unavailable, Verdict, Verdicts};
use reqwest::header::{HeaderName, HeaderValue, LOCATION, RETRY_AFTER};
use reqwest::{Response, StatusCode, Url};

use super::{HttpOptions, Opened, request};
use crate::{CheckFailed, OpenSinkError};

/// A batch has at most so many bytes; a single message may be larger.
const BATCH_BYTES_MAX: usize = 16 << 20;
const BATCHES_IN_FLIGHT_MAX: usize = 2;
/// An endpoint that asks for a longer pause is asked again after this.
const PAUSE_MAX: Duration = Duration::from_secs(3_600);
/// Endpoints whose pauses are remembered.
const PAUSES_MAX: usize = 10_000;
/// A host that has stored something within this time is up: who is silent beside that is silent alone.
const EVIDENCE_FOR: Duration = Duration::from_secs(600);
/// After a connection that could not be used again, none is used again for so long.
const DISTRUSTED_FOR: Duration = Duration::from_secs(600);
/// A host that does not answer a question within this time may still take messages.
const ANSWERS_HEAD_WITHIN: Duration = Duration::from_secs(5);
const NOT_IN_TIME: &str = "not sent within the deadline of its batch";
/// What is read of an answer's body, so that its connection can be used again; and for how long.
const ANSWER_BYTES_MAX: usize = 64 << 10;
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// Sends requests to one host.
pub struct HttpSink {
    options: HttpOptions,
    opened: Opened,
    /// Until when an endpoint has asked to be left alone.
    pauses: Mutex<HashMap<String, Instant>>,
    /// The two urls that stored something last, the newest first.
    stored: Mutex<[Option<(String, Instant)>; 2]>,
    /// Until when each request has a connection of its own.
    distrusts: Mutex<Option<Instant>>,
    is_closed: AtomicBool,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What became of one message.
enum Outcome {
    Judged(Verdict),
    /// It was not sent: the endpoint cannot be reached, or not in time.
    Unsent(String),
}

impl HttpSink {
    /// Checks the options; connects with the first request.
    pub fn new(options: HttpOptions) -> Result<Self, OpenSinkError> {
        let opened = options.opened().map_err(|problem| OpenSinkError { kind: "http", problem })?;
        Ok(Self {
            options,
            opened,
            pauses: Mutex::default(),
            stored: Mutex::default(),
            distrusts: Mutex::default(),
            is_closed: AtomicBool::new(false),
        })
    }

    pub(super) fn is_here(&self) -> bool {
        let host = self.opened.host.trim_matches(['[', ']']);
        host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
    }

    fn unavailable(&self, reason: impl Into<postroom::BoxError>) -> Unavailable {
        Unavailable::new(format!("endpoint {}", self.options.shown_url()), reason)
    }

    /// For people: which way requests take.
    fn by_proxy(&self) -> String {
        self.options
            .proxy
            .as_deref()
            .map(|proxy| format!(" by proxy {}", postroom::redact_url(proxy)))
            .unwrap_or_default()
    }

    fn deadline(&self) -> Duration {
        Duration::from_secs(self.options.deadline_seconds)
    }

    /// Messages of one key, one after the other.
    async fn chain(&self, batch: &Batch, places: Vec<usize>, by: Instant) -> Vec<(usize, Outcome)> {
        let mut outcomes = Vec::with_capacity(places.len());
        let mut stopped = None;
        for place in places {
            let outcome = match (&stopped, batch.messages().get(place)) {
                (Some(Some(reason)), _) => Outcome::Unsent(String::clone(reason)),
                (Some(None), _) => Outcome::Judged(Verdict::NotSent),
                (None, Some(message)) => self.send(message, by).await,
                (None, None) => Outcome::Unsent("it is not in the batch".to_owned()),
            };
            if !matches!(outcome, Outcome::Judged(Verdict::Stored)) && stopped.is_none() {
                stopped = Some(match &outcome {
                    Outcome::Unsent(reason) => Some(reason.clone()),
                    Outcome::Judged(_) => None,
                });
            }
            outcomes.push((place, outcome));
        }
        outcomes
    }

    async fn send(&self, message: &Message, by: Instant) -> Outcome {
        if self.is_closed.load(Ordering::Relaxed) {
            return Outcome::Unsent("the sink is closed".to_owned());
        }
        let url = match self.url_of(message) {
            Ok(url) => url,
            Err(reason) => return Outcome::Judged(Verdict::failed(FailureKind::Permanent, reason)),
        };
        if let Some(pause) = self.pause_of(&url) {
            let reason = format!("the endpoint asked for a pause, of which {} s are left", pause.as_secs() + 1);
            return Outcome::Judged(Verdict::failed(FailureKind::Busy, reason));
        }
        let left = by.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Outcome::Unsent(NOT_IN_TIME.to_owned());
        }
        let request = match self.request(url.clone(), message, left) {
            Ok(request) => request,
            Err(reason) => return Outcome::Judged(Verdict::failed(FailureKind::Permanent, reason)),
        };
        match self.execute(request, by).await {
            Ok(response) => {
                let verdict = self.verdict(&url, &response);
                if verdict == Verdict::Stored {
                    self.has_stored(url.as_str());
                }
                let _ = tokio::time::timeout(ANSWER_WITHIN, drain(response)).await;
                Outcome::Judged(verdict)
            }
            Err(error) if error.is_connect() => Outcome::Unsent(why(&error)),
            Err(error) if error.is_builder() => Outcome::Judged(Verdict::failed(
                FailureKind::Permanent,
                format!("no request can be made of it: {}", why(&error)),
            )),
            Err(error) if error.is_timeout() => {
                Outcome::Judged(Verdict::Unknown(format!("no answer within {} s", self.options.deadline_seconds)))
            }
            Err(error) => Outcome::Judged(Verdict::Unknown(why(&error))),
        }
    }

    /// A server may close a connection just when it is used again, or have said more on it than one answer. Such a request is made once
    /// more at once, on a connection of its own, as are those after it for a while.
    async fn execute(&self, request: reqwest::Request, by: Instant) -> Result<Response, reqwest::Error> {
        let is_distrusted = lock(&self.distrusts).is_some_and(|until| until > Instant::now());
        if is_distrusted || !self.options.reuse_connections {
            return self.opened.fresh.execute(request).await;
        }
        let again = request.try_clone();
        let error = match self.opened.client.execute(request).await {
            Err(error) if !error.is_connect() && !error.is_timeout() && !error.is_builder() => error,
            other => return other,
        };
        *lock(&self.distrusts) = Some(Instant::now() + DISTRUSTED_FOR);
        let left = by.saturating_duration_since(Instant::now());
        match again {
            Some(mut again) if !left.is_zero() => {
                *again.timeout_mut() = Some(left);
                self.opened.fresh.execute(again).await
            }
            _ => Err(error),
        }
    }

    fn has_stored(&self, url: &str) {
        let mut stored = lock(&self.stored);
        if stored[0].as_ref().is_none_or(|(last, _)| last != url) {
            stored.swap(0, 1);
        }
        stored[0] = Some((url.to_owned(), Instant::now()));
    }

    /// Whether the host has stored something at another url of late.
    fn others_are_stored(&self, url: &str) -> bool {
        let is_other = |(other, at): &(String, Instant)| other != url && at.elapsed() < EVIDENCE_FOR;
        lock(&self.stored).iter().flatten().any(is_other)
    }

    fn url_of(&self, message: &Message) -> Result<Url, String> {
        let text = self.opened.template.encoded(message, request::part_of_url);
        let text = text.map_err(|problem| format!("the url {problem}"))?;
        let url = Url::parse(&text).map_err(|error| format!("the url of this message cannot be read: {error}"))?;
        // No field can lead to another host; this says so once more.
        if url.origin() != self.opened.origin.origin() {
            return Err("the url of this message leads to another host".to_owned());
        }
        Ok(url)
    }

    fn url_at(&self, batch: &Batch, place: usize) -> Option<String> {
        batch.messages().get(place).and_then(|message| self.url_of(message).ok()).map(String::from)
    }

    fn request(&self, url: Url, message: &Message, within: Duration) -> Result<reqwest::Request, String> {
        let made = request::of(message, self.opened.events.as_ref());
        let id = message.id.to_string();
        let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let timestamp = i64::try_from(seconds).unwrap_or(i64::MAX);
        let signature = self.opened.secrets.signature(&id, timestamp, &made.body);
        let mut request = reqwest::Request::new(reqwest::Method::POST, url);
        *request.timeout_mut() = Some(within);
        let headers = request.headers_mut();
        let own = [
            (request::ID, Some(id)),
            (request::TIMESTAMP, Some(timestamp.to_string())),
            (request::SIGNATURE, signature),
        ];
        let own = own.into_iter().filter_map(|(name, value)| Some((name.into(), value?)));
        for (name, value) in made.headers.into_iter().chain(own) {
            let name = HeaderName::try_from(name.as_ref()).map_err(|_| format!("{name:?} is no name of a header"))?;
            let value = HeaderValue::try_from(value)
                .map_err(|_| format!("header {name} has a value that no header can have"))?;
            headers.insert(name, value);
        }
        for (name, value) in &self.opened.headers {
            headers.insert(name, value.clone());
        }
        *request.body_mut() = Some(made.body.into());
        Ok(request)
    }

    fn pause_of(&self, url: &Url) -> Option<Duration> {
        let mut pauses = lock(&self.pauses);
        let left = pauses.get(url.as_str())?.saturating_duration_since(Instant::now());
        if left.is_zero() {
            pauses.remove(url.as_str());
        }
        (!left.is_zero()).then_some(left)
    }

    fn verdict(&self, url: &Url, response: &Response) -> Verdict {
        let status = response.status();
        if status.is_success() {
            return Verdict::Stored;
        }
        let header = |name| response.headers().get(name).and_then(|value: &HeaderValue| value.to_str().ok());
        if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
            && let Some(pause) = header(RETRY_AFTER).and_then(|text| pause_in(text, SystemTime::now()))
        {
            let mut pauses = lock(&self.pauses);
            if pauses.len() >= PAUSES_MAX {
                let now = Instant::now();
                pauses.retain(|_, until| *until > now);
            }
            if pauses.len() < PAUSES_MAX {
                pauses.insert(url.as_str().to_owned(), Instant::now() + pause.min(PAUSE_MAX));
            }
        }
        judged(status, header(LOCATION))
    }

    async fn head(&self, within: Duration) -> Result<StatusCode, reqwest::Error> {
        let url = match self.opened.template.has_fields() {
            true => self.opened.origin.clone(),
            false => self
                .opened
                .template
                .of(&Message::new("", "", ""))
                .ok()
                .and_then(|text| Url::parse(&text).ok())
                .unwrap_or_else(|| self.opened.origin.clone()),
        };
        let request = self.opened.fresh.head(url).headers(self.opened.headers.clone()).timeout(within);
        request.send().await.map(|response| response.status())
    }

    /// Whether it can be reached, with a request that by its meaning changes nothing.
    pub(super) async fn check(&self) -> Result<String, CheckFailed> {
        let status = self.head(self.deadline()).await.map_err(|error| {
            let problem = format!("{} cannot be reached{}: {}", self.options.shown_url(), self.by_proxy(), why(&error));
            CheckFailed { advice: advice(&problem).to_owned(), problem }
        })?;
        let signed = match self.opened.secrets.count() {
            0 => "requests are not signed".to_owned(),
            1 => "requests are signed".to_owned(),
            more => format!("requests are signed with {more} secrets"),
        };
        let encrypted = if self.opened.origin.scheme() == "https" { "encrypted with TLS" } else { "not encrypted" };
        Ok(format!(
            "{} answers (status {status} to HEAD, which says nothing about POST); {signed}; the connection is {encrypted}",
            self.opened.host
        ))
    }
}

#[async_trait]
impl Sink for HttpSink {
    fn system(&self) -> &'static str {
        "http"
    }

    fn limits(&self) -> SinkLimits {
        SinkLimits {
            batch_messages_max: self.options.batch_messages_max,
            batch_bytes_max: BATCH_BYTES_MAX,
            batches_in_flight_max: BATCHES_IN_FLIGHT_MAX,
        }
    }

    async fn publish(&self, batch: &Batch) -> Result<Verdicts, Unavailable> {
        let by = Instant::now() + self.deadline();
        let mut chains: Vec<Vec<usize>> = Vec::new();
        let mut of_key: HashMap<&str, usize> = HashMap::new();
        for (place, message) in batch.messages().iter().enumerate() {
            let next = chains.len();
            let chain = message.ordering_key().map_or(next, |key| *of_key.entry(key).or_insert(next));
            match chains.get_mut(chain) {
                Some(chain) => chain.push(place),
                None => chains.push(vec![place]),
            }
        }
        let outcomes: Vec<Vec<(usize, Outcome)>> = futures_util::stream::iter(chains)
            .map(|places| self.chain(batch, places, by))
            .buffer_unordered(self.options.requests_in_flight_max)
            .collect()
            .await;
        let outcomes: Vec<(usize, Outcome)> = outcomes.into_iter().flatten().collect();
        // Where another url of the host answers, the silence of this one is its own: only its keys wait.
        let is_silent_alone = |place: usize| self.url_at(batch, place).is_some_and(|url| self.others_are_stored(&url));
        let (mut verdicts, mut any, mut last) = (batch.silent(), false, None);
        for (place, outcome) in outcomes {
            match outcome {
                Outcome::Judged(Verdict::Unknown(reason)) if is_silent_alone(place) => {
                    let reason =
                        format!("{reason}; whether the endpoint has it is not known, and others of the host answer");
                    any = true;
                    verdicts.judge(place, Verdict::failed(FailureKind::Busy, reason));
                }
                // Others have taken the time of the batch.
                Outcome::Unsent(reason) if reason == NOT_IN_TIME && is_silent_alone(place) => {
                    any = true;
                    verdicts.judge(place, Verdict::failed(FailureKind::Busy, reason));
                }
                Outcome::Judged(verdict) => {
                    any = true;
                    verdicts.judge(place, verdict);
                }
                Outcome::Unsent(reason) => {
                    verdicts.judge(place, Verdict::Unknown(reason.clone()));
                    last = Some(reason);
                }
            }
        }
        match last {
            Some(reason) if !any => Err(self.unavailable(reason)),
            _ => Ok(verdicts),
        }
    }

    async fn probe(&self) -> Result<(), Unavailable> {
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(self.unavailable("the sink is closed"));
        }
        match self.head(self.deadline().min(ANSWERS_HEAD_WITHIN)).await {
            Err(error) if error.is_connect() || error.is_builder() => {
                Err(self.unavailable(format!("{}{}", why(&error), self.by_proxy())))
            }
            // Some serve nothing but `POST`: whether they take messages shows with the first one.
            _ => Ok(()),
        }
    }

    async fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }
}

/// What an answer other than 2xx means for the message. Pure.
fn judged(status: StatusCode, location: Option<&str>) -> Verdict {
    let told = |kind, what: &str| Verdict::failed(kind, format!("the endpoint answered {status}: {what}"));
    match status.as_u16() {
        // By their meaning these have nothing to do with this request: 429 and 503 ask for a pause.
        429 | 503 => told(FailureKind::Busy, "it takes no requests now"),
        304 => told(FailureKind::Transient, "that is no answer to POST; look into the endpoint"),
        300..=399 => {
            // Its path may have a token in it.
            let to = location.and_then(|to| Url::parse(to).ok());
            let to = to.map_or_else(|| "elsewhere".to_owned(), |to| to.origin().ascii_serialization());
            told(
                FailureKind::Transient,
                &format!("redirects are not followed; set url to where it leads ({to}), if that is meant"),
            )
        }
        401 | 403 | 407 => told(
            FailureKind::Transient,
            "it does not let this request in; correct the secret, the headers or the rights",
        ),
        404 | 405 => told(FailureKind::Transient, "nothing there takes POST; correct url"),
        410 => told(FailureKind::Permanent, "it is gone for good"),
        413 => told(FailureKind::Permanent, "the message is too large for it"),
        414 | 431 => told(FailureKind::Permanent, "the headers or the url of the message are too large for it"),
        408 | 425 => told(FailureKind::Transient, "it asks for the request once more"),
        // About the account, another request with this id that is not finished, the connection, a lock: not about this message.
        402 | 409 | 421 | 423 | 424 | 451 => told(FailureKind::Transient, "it does not take this request now"),
        400..=499 => told(FailureKind::Permanent, "it refuses this message"),
        _ => told(FailureKind::Transient, "it failed"),
    }
}

/// The pause that `Retry-After` asks for: seconds, or a time. Pure.
fn pause_in(text: &str, now: SystemTime) -> Option<Duration> {
    match text.trim().parse::<u64>() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => httpdate::parse_http_date(text.trim()).ok()?.duration_since(now).ok(),
    }
}

/// Reads the rest of an answer, which is not looked at; a long one ends its connection.
async fn drain(mut response: Response) {
    let mut read = 0;
    while read <= ANSWER_BYTES_MAX
        && let Ok(Some(chunk)) = response.chunk().await
    {
        read += chunk.len();
    }
}

/// Why a request failed, without its URL.
fn why(error: &reqwest::Error) -> String {
    let mut text = String::new();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            let colon = if text.is_empty() { "" } else { ": " };
            text.push_str(colon);
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    match (text.is_empty(), error.is_timeout()) {
        (_, true) => "no answer in time".to_owned(),
        (true, false) => "the request failed".to_owned(),
        (false, false) => {
            let hint = crate::tls::hint(&text);
            format!("{text}{hint}")
        }
    }
}

fn advice(problem: &str) -> &'static str {
    let lower = problem.to_lowercase();
    if lower.contains("private_addresses") {
        "set private_addresses = true if requests are meant to go to a private network or this machine"
    } else if lower.contains("certificate") || lower.contains("tls") {
        "use https:// where the endpoint has TLS; for a CA of your own add cacertfile=/path/to/ca.pem to the url"
    } else {
        "correct url, or start what listens there"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(status: u16) -> Option<FailureKind> {
        match judged(StatusCode::from_u16(status).unwrap(), None) {
            Verdict::Failed(failure) => Some(failure.kind),
            _ => None,
        }
    }

    #[test]
    fn an_answer_decides_what_follows() {
        use FailureKind::{Busy, Permanent, Transient};
        for (status, expected) in [
            (302, Transient),
            (400, Permanent),
            (401, Transient),
            (404, Transient),
            (408, Transient),
            (410, Permanent),
            (413, Permanent),
            (422, Permanent),
            (429, Busy),
            (500, Transient),
            (502, Transient),
            (503, Busy),
            (504, Transient),
            (599, Transient),
        ] {
            assert_eq!(kind(status), Some(expected), "{status}");
        }
        let Verdict::Failed(failure) = judged(StatusCode::FOUND, Some("https://other.example/secret?token=secret"))
        else {
            panic!()
        };
        assert!(failure.reason.contains("https://other.example") && !failure.reason.contains("secret"), "{failure:?}");
    }

    #[test]
    fn a_pause_is_given_in_seconds_or_as_a_time() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        assert_eq!(pause_in("120", now), Some(Duration::from_secs(120)));
        assert_eq!(pause_in("Sun, 06 Nov 1994 08:50:37 GMT", now), Some(Duration::from_secs(60)));
        assert_eq!(pause_in("Sun, 06 Nov 1994 08:40:37 GMT", now), None, "it is over");
        assert_eq!(pause_in("soon", now), None);
    }
}
