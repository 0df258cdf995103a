//! One trace from the request that wrote a message to the handler that took it. Everything about spans is in this module;
//! without the feature `trace` there is nothing here.
//!
//! Names and attributes are those of OpenTelemetry's semantic conventions for messaging. The context at the time of the
//! enqueue travels in the W3C headers `traceparent` and `tracestate` and is never changed on the way, so a message that is
//! published again has the same bytes; claim, send, receive and process are children of that one context.

#[cfg(not(feature = "trace"))]
use crate::message::Message;

/// What is done with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// An application writes it.
    Create,
    /// A relay takes it from the outbox.
    Claim,
    /// A relay publishes it.
    Send,
    /// A consumer gets it from its broker.
    Receive,
    /// A handler works on it.
    Process,
}

/// A span about one message; it ends when it is dropped.
#[derive(Debug, Clone, Default)]
#[must_use = "the span ends when this is dropped"]
pub struct MessageSpan {
    #[cfg(feature = "trace")]
    span: Option<tracing::Span>,
}

#[cfg(not(feature = "trace"))]
impl MessageSpan {
    /// Nothing.
    #[inline]
    pub fn begin(_: Step, _: &Message, _: &'static str, _: &str) -> Self {
        Self::default()
    }

    /// Nothing.
    #[inline]
    pub fn headers(&self, _: &Message) -> Option<crate::message::Headers> {
        None
    }

    /// Nothing.
    #[inline]
    pub fn failed(&self, _: &str) {}

    /// The future itself.
    #[inline]
    pub async fn around<T>(&self, future: impl Future<Output = T>) -> T {
        future.await
    }
}

#[cfg(feature = "trace")]
mod spans {
    use opentelemetry::Context;
    use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState};
    use tracing::field::Empty;
    use tracing::{Instrument, Span};
    use tracing_opentelemetry::OpenTelemetrySpanExt;

    use super::{MessageSpan, Step};
    use crate::message::{Headers, Message};

    const PARENT: &str = "traceparent";
    const STATE: &str = "tracestate";

    macro_rules! span {
        ($name:literal, $type:literal, $kind:literal, $message:ident, $system:ident, $destination:ident) => {
            tracing::info_span!(
                target: "postroom::trace",
                $name,
                otel.name = %format_args!("{} {}", $name, $destination),
                otel.kind = $kind,
                otel.status_code = Empty,
                error.type = Empty,
                messaging.system = $system,
                messaging.operation.name = $name,
                messaging.operation.type = $type,
                messaging.destination.name = $destination,
                messaging.message.id = %$message.id,
                messaging.message.body.size = $message.payload.len(),
                postroom.type = $message.kind,
                postroom.tenant_id = $message.tenant_id,
                postroom.aggregate_type = $message.aggregate_type,
                postroom.aggregate_id = $message.aggregate_id,
                postroom.aggregate_version = $message.aggregate_version,
            )
        };
    }

    impl MessageSpan {
        /// A span about `message` at `destination` of `system`. For [`Step::Create`] it is a child of the current span, if
        /// that is part of a trace; for the others, of the context that the message carries, if it carries one.
        pub fn begin(step: Step, message: &Message, system: &'static str, destination: &str) -> Self {
            let parent = if step == Step::Create {
                if message.headers.contains_key(PARENT) {
                    return Self::default();
                }
                let context = Span::current().context();
                if !context.span().span_context().is_valid() {
                    return Self::default();
                }
                None
            } else {
                let Some(context) = carried(&message.headers) else { return Self::default() };
                Some(context)
            };
            let span = match step {
                Step::Create => span!("create", "create", "producer", message, system, destination),
                Step::Claim => span!("claim", "claim", "internal", message, system, destination),
                Step::Send => span!("send", "send", "producer", message, system, destination),
                Step::Receive => span!("receive", "receive", "consumer", message, system, destination),
                Step::Process => span!("process", "process", "consumer", message, system, destination),
            };
            if let Some(context) = parent {
                // Without a layer for OpenTelemetry there is nothing to set.
                let _ = span.set_parent(Context::new().with_remote_span_context(context));
            }
            Self { span: Some(span) }
        }

        /// The headers of `message` with the context of this span; none where there is no span.
        pub fn headers(&self, message: &Message) -> Option<Headers> {
            let context = self.span.as_ref()?.context();
            let span = context.span();
            let context = span.span_context();
            if !context.is_valid() {
                return None;
            }
            let mut headers = message.headers.clone();
            let flags = context.trace_flags().to_u8();
            headers.insert(PARENT.to_owned(), format!("00-{}-{}-{flags:02x}", context.trace_id(), context.span_id()));
            let state = context.trace_state().header();
            if !state.is_empty() {
                headers.insert(STATE.to_owned(), state);
            }
            Some(headers)
        }

        /// Says that the step failed.
        pub fn failed(&self, error: &str) {
            if let Some(span) = &self.span {
                span.record("otel.status_code", "ERROR");
                span.record("error.type", error);
            }
        }

        /// Runs a future within the span.
        pub async fn around<T>(&self, future: impl Future<Output = T>) -> T {
            match &self.span {
                Some(span) => future.instrument(span.clone()).await,
                None => future.await,
            }
        }
    }

    /// The context in W3C headers, version 00 of <https://www.w3.org/TR/trace-context/>.
    fn carried(headers: &Headers) -> Option<SpanContext> {
        let mut parts = headers.get(PARENT)?.trim().split('-');
        let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        // Later versions may have more parts; 00 has none, and ff is not one.
        if version.len() != 2 || version == "ff" || (version == "00" && parts.next().is_some()) {
            return None;
        }
        if trace.len() != 32 || span.len() != 16 || flags.len() != 2 {
            return None;
        }
        let context = SpanContext::new(
            TraceId::from_hex(trace).ok()?,
            SpanId::from_hex(span).ok()?,
            TraceFlags::new(u8::from_str_radix(flags, 16).ok()?),
            true,
            headers.get(STATE).and_then(|state| state.parse::<TraceState>().ok()).unwrap_or_default(),
        );
        context.is_valid().then_some(context)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn only_a_well_formed_context_is_followed() {
            let of = |text: &str| carried(&Headers::from([(PARENT.to_owned(), text.to_owned())]));
            let good = of("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").unwrap();
            assert_eq!(good.trace_id().to_string(), "0af7651916cd43dd8448eb211c80319c");
            assert!(good.is_sampled() && good.is_remote());
            for bad in [
                "",
                "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
                "00-00000000000000000000000000000000-b7ad6b7169203331-01",
                "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x",
                "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
                "00-zzf7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            ] {
                assert!(of(bad).is_none(), "{bad}");
            }
        }
    }
}
