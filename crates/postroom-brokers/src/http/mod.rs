//! HTTP: each message is a request to an endpoint (a webhook), signed as Standard Webhooks has it, or an event of CloudEvents.
//!
//! - A message counts as stored when the endpoint has answered with 2xx. No answer is *unknown*, and the message is sent again with the same
//!   `webhook-id`.
//! - Requests of one key follow one another; those of other keys go beside them. Behind one that was not answered with 2xx, no other of its key is sent.
//! - Redirects are not followed. Names are resolved to public addresses only, unless private ones are allowed.

mod guard;
mod request;
mod signature;
mod sink;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postroom::Sink;
use reqwest::Url;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use serde::Deserialize;

use crate::template::Template;
use crate::tls::TlsFiles;
use crate::{Broker, CheckFailed, OpenSinkError, Section, SinkOptions};

use guard::Guard;
use signature::Secrets;

use crate::cloud_events::{CloudEvents, Events};

pub use sink::HttpSink;

/// `[routes.sink]` with `kind = "http"`.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpOptions {
    /// Where requests go, `https://` or `http://`, with fields of the message in braces behind the host. Certificates are verified against the
    /// system's roots or what `cacertfile` in the URL names; `certfile` and `keyfile` are a client certificate.
    pub url: String,
    /// Secrets of Standard Webhooks, `whsec_…`; each request is signed with all of them. Empty by default: not signed.
    #[serde(default)]
    pub secrets: Vec<String>,
    /// Headers of every request, such as `authorization`.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    /// `binary` or `structured`: requests are events of CloudEvents 1.0; not by default.
    #[serde(default)]
    pub cloudevents: Option<CloudEvents>,
    /// Where the events come from, a URI reference such as `https://shop.example/orders`; required by `cloudevents`.
    #[serde(default)]
    pub source: Option<String>,
    /// Whether requests may go to private networks and to this machine; not by default.
    #[serde(default)]
    pub private_addresses: bool,
    /// URL of a proxy, which then resolves names and connects; none by default, whatever the environment says.
    #[serde(default)]
    pub proxy: Option<String>,
    /// Whether a connection is used for further requests; true by default. Without, an endpoint that breaks the rules of HTTP cannot make an
    /// answer pass for that of another request; each request then takes a connection of its own.
    #[serde(default = "default_reuse")]
    pub reuse_connections: bool,
    /// Most requests at once; 16 by default.
    #[serde(default = "default_requests")]
    pub requests_in_flight_max: usize,
    /// Most messages of a batch; 64 by default.
    #[serde(default = "default_batch")]
    pub batch_messages_max: usize,
    /// Seconds after which a request without an answer counts as unknown; 15 by default.
    #[serde(default = "default_deadline")]
    pub deadline_seconds: u64,
}

const REQUESTS_MAX: u64 = 1_000;
const BATCH_MAX: u64 = 10_000;
const DEADLINE_MAX_SECONDS: u64 = 600;
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
const PLAIN: &str = "http://";
const ENCRYPTED: &str = "https://";

fn default_reuse() -> bool {
    true
}

fn default_requests() -> usize {
    16
}

fn default_batch() -> usize {
    64
}

fn default_deadline() -> u64 {
    15
}

impl std::fmt::Debug for HttpOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HttpOptions").field("url", &self.shown_url()).finish_non_exhaustive()
    }
}

/// HTTP endpoints.
pub const BROKER: Broker = Broker {
    kind: "http",
    about: "HTTP requests to an endpoint (webhooks), signed, or as CloudEvents",
    sink: Some(Section::sink::<HttpOptions>("kind = \"http\"\nurl = \"https://hooks.example.com/{topic}\"\n")),
    subscription: None,
};

#[async_trait]
impl SinkOptions for HttpOptions {
    fn open(&self) -> Result<Arc<dyn Sink>, OpenSinkError> {
        let sink = HttpSink::new(self.clone())?;
        if self.url.starts_with(PLAIN) && !sink.is_here() {
            tracing::warn!("requests to {} are not encrypted; use https://", self.shown_url());
        }
        Ok(Arc::new(sink))
    }

    fn shown(&self) -> String {
        format!("http {}", self.shown_url())
    }

    async fn check(&self) -> Result<String, CheckFailed> {
        let sink = HttpSink::new(self.clone()).map_err(|error| CheckFailed {
            problem: error.problem,
            advice: "correct the section in the configuration".to_owned(),
        })?;
        sink.check().await
    }
}

impl HttpOptions {
    /// The defaults for an endpoint.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            secrets: Vec::new(),
            headers: BTreeMap::new(),
            cloudevents: None,
            source: None,
            private_addresses: false,
            proxy: None,
            reuse_connections: default_reuse(),
            requests_in_flight_max: default_requests(),
            batch_messages_max: default_batch(),
            deadline_seconds: default_deadline(),
        }
    }

    /// Scheme and host. Endpoints have their tokens in the query, and many in the path.
    fn shown_url(&self) -> String {
        const UNREADABLE: &str = "(an url that cannot be read)";
        let Some((scheme, rest)) = self.url.split_once("://") else { return UNREADABLE.to_owned() };
        let authority = rest.split(['/', '?', '#', '\\']).next().unwrap_or_default();
        let (user, place) = authority.rsplit_once('@').unwrap_or(("", authority));
        // A password with such a sign in it ends the authority too early: what looks like a host is a part of it.
        let is_cut = user.is_empty() && rest[authority.len()..].contains('@');
        let port = place.rsplit_once(':').filter(|_| !place.ends_with(']')).map_or("", |(_, port)| port);
        let host = place.strip_suffix(port).unwrap_or(place);
        let colons = host.strip_suffix(':').unwrap_or(host);
        let is_host =
            port.bytes().all(|byte| byte.is_ascii_digit()) && (colons.starts_with('[') || !colons.contains(':'));
        if is_cut || !is_host {
            return UNREADABLE.to_owned();
        }
        let more = if rest.len() > authority.len() + 1 { "/\u{2026}" } else { "" };
        format!("{scheme}://{place}{more}")
    }

    fn opened(&self) -> Result<Opened, String> {
        let limits = [
            ("requests_in_flight_max", self.requests_in_flight_max as u64, REQUESTS_MAX),
            ("batch_messages_max", self.batch_messages_max as u64, BATCH_MAX),
            ("deadline_seconds", self.deadline_seconds, DEADLINE_MAX_SECONDS),
        ];
        if let Some((name, _, most)) = limits.into_iter().find(|(_, value, most)| !(1..=*most).contains(value)) {
            return Err(format!("{name} must be between 1 and {most}"));
        }
        let (text, files) = TlsFiles::taken_out_of(&self.url, ENCRYPTED)?;
        let rest = text.strip_prefix(PLAIN).or_else(|| text.strip_prefix(ENCRYPTED));
        let rest = rest.ok_or_else(|| format!("url must begin with {ENCRYPTED} or {PLAIN}"))?;
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        if text.contains('\\') {
            return Err("url has a backslash".to_owned());
        }
        if authority.contains(['{', '}']) {
            return Err("url has a field in its host; a field may be in the path and in the query".to_owned());
        }
        if authority.contains('@') {
            return Err("url has a user; give it as headers = { authorization = \"Basic …\" }".to_owned());
        }
        if text.contains('#') {
            return Err("url has a fragment (#), which is not sent".to_owned());
        }
        let template = Template::parse(&text);
        // Its path may have a token in it.
        let template = template.map_err(|problem| format!("url: {}", problem.replace(&format!("{text:?}"), "it")))?;
        let origin = Url::parse(&text[..text.len() - rest.len() + authority.len()]);
        let origin = origin.map_err(|error| format!("url cannot be read: {error}"))?;
        if !template.has_fields() {
            Url::parse(&text).map_err(|error| format!("url cannot be read: {error}"))?;
        }
        let host = origin.host_str().unwrap_or_default().to_owned();
        let literal = host.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>();
        if let Ok(address) = literal
            && !self.private_addresses
            && self.proxy.is_none()
            && !guard::is_public(address)
        {
            return Err(guard::refusal(&host));
        }
        let secrets = Secrets::read(&self.secrets)?;
        let events = Events::read(self.cloudevents, self.source.as_deref())?;
        let headers = self.own_headers()?;
        let client = self.client(&files, self.requests_in_flight_max)?;
        let fresh = self.client(&files, 0)?;
        Ok(Opened { template, origin, host, secrets, events, headers, client, fresh })
    }

    fn own_headers(&self) -> Result<HeaderMap, String> {
        let mut headers = HeaderMap::new();
        for (name, value) in &self.headers {
            let wrong = |what: &str| format!("headers: {name:?} {what}");
            let named = HeaderName::try_from(name.as_str()).map_err(|_| wrong("is no name of a header"))?;
            let managed = ["content-length", "content-type", "host", "transfer-encoding", "connection"];
            if managed.contains(&named.as_str())
                || named.as_str().starts_with("webhook-")
                || named.as_str().starts_with("ce-")
            {
                return Err(wrong("is set by postroom"));
            }
            let mut value =
                HeaderValue::try_from(value.as_str()).map_err(|_| wrong("has a value that no header can have"))?;
            value.set_sensitive(true);
            headers.insert(named, value);
        }
        Ok(headers)
    }

    fn client(&self, files: &TlsFiles, idle_max: usize) -> Result<reqwest::Client, String> {
        let builder = reqwest::Client::builder()
            .tls_backend_preconfigured(files.read()?.client()?)
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT_WITHIN)
            .pool_max_idle_per_host(idle_max)
            .user_agent(concat!("postroom/", env!("CARGO_PKG_VERSION")))
            .no_proxy();
        let builder = match &self.proxy {
            // The proxy resolves names.
            Some(proxy) => {
                let wrong = || "proxy is no URL of a proxy; write http://HOST:PORT or https://HOST:PORT".to_owned();
                let url = Url::parse(proxy).map_err(|_| wrong())?;
                if !matches!(url.scheme(), "http" | "https") || !matches!(url.path(), "" | "/") || url.query().is_some()
                {
                    return Err(wrong());
                }
                builder.proxy(reqwest::Proxy::all(proxy).map_err(|_| wrong())?)
            }
            None => builder.dns_resolver(Guard { private_too: self.private_addresses }),
        };
        builder.build().map_err(|error| error.to_string())
    }
}

/// No URI has one of these. <https://www.rfc-editor.org/rfc/rfc3986#section-2>
/// What is made of the options.
struct Opened {
    template: Template,
    /// Scheme, host and port.
    origin: Url,
    host: String,
    secrets: Secrets,
    events: Option<Events>,
    headers: HeaderMap,
    client: reqwest::Client,
    /// Each of its requests has a connection of its own.
    fresh: reqwest::Client,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_told_without_secrets() {
        let with = |change: &dyn Fn(&mut HttpOptions)| {
            let mut options = HttpOptions::new("https://hooks.example.com/{topic}?token=hunter2");
            change(&mut options);
            options.opened().err()
        };
        assert_eq!(with(&|_| ()), None);
        for (change, told) in [
            (
                &(|options: &mut HttpOptions| options.url = "ftp://x".to_owned()) as &dyn Fn(&mut HttpOptions),
                "must begin with https://",
            ),
            (&|options| options.url = "https://{tenant_id}.example.com/".to_owned(), "field in its host"),
            (&|options| options.url = "https://u:hunter2@example.com/".to_owned(), "has a user"),
            (&|options| options.url = "https://example.com/{nothing}".to_owned(), "the fields are"),
            (&|options| options.url = "https://exa mple.com/".to_owned(), "cannot be read"),
            (&|options| options.url = "https://example.com/#x".to_owned(), "fragment"),
            (&|options| options.url = "http://127.0.0.1/".to_owned(), "private_addresses"),
            (&|options| options.url = "http://[::ffff:169.254.169.254]/".to_owned(), "private_addresses"),
            // The host is read as a browser does.
            (&|options| options.url = "http://0x7f.1/".to_owned(), "private_addresses"),
            (&|options| options.secrets = vec!["hunter2".to_owned()], "whsec_"),
            (&|options| options.cloudevents = Some(CloudEvents::Binary), "needs a source"),
            (&|options| options.source = Some("x".to_owned()), "not set"),
            (
                &|options| options.headers = BTreeMap::from([("webhook-id".to_owned(), "hunter2".to_owned())]),
                "set by postroom",
            ),
            (
                &|options| options.headers = BTreeMap::from([("x".to_owned(), "hunter2\n".to_owned())]),
                "no header can have",
            ),
            (&|options| options.proxy = Some("::hunter2".to_owned()), "proxy is no URL"),
            (&|options| options.proxy = Some("http://proxy.example/hunter2".to_owned()), "proxy is no URL"),
            (&|options| options.proxy = Some("socks5://hunter2".to_owned()), "proxy is no URL"),
            (
                &|options| {
                    (options.cloudevents, options.source) = (Some(CloudEvents::Binary), Some("http://a b".to_owned()));
                },
                "URI reference",
            ),
            (&|options| options.requests_in_flight_max = 0, "between 1 and"),
        ] {
            let error = with(change).unwrap();
            assert!(error.contains(told) && !error.contains("hunter2"), "{told}: {error}");
        }
        for url in [
            "https://u:hunter2/12@h/",
            "https://u:12?hunter2@h/",
            "https://u:hunt#er2@h/",
            "https://127.0.0.1\\hunter2/",
            "https://h:1:hunter2/",
            "https://h/hunter2/{kez}",
            "https://h/hunter2/{key?token=hunter2",
        ] {
            let options = HttpOptions::new(url);
            let told = format!("{} {:?} {:?}", options.shown(), options, options.opened().err());
            assert!(!told.contains("hunter2") && !told.contains("hunt"), "{url}: {told}");
        }
        assert_eq!(HttpOptions::new("https://[::1]:8443/x").shown(), "http https://[::1]:8443/\u{2026}");
        let options = HttpOptions::new("https://u:hunter2@hooks.example.com/hunter2?token=hunter2");
        assert_eq!(options.shown(), "http https://hooks.example.com/\u{2026}");
        assert!(!format!("{options:?}").contains("hunter2"));
    }
}
