//! Which handler takes which type.

use std::any::Any;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::Arc;

use async_trait::async_trait;
use postroom::{Aggregate, BoxError, Message, Transactions};
use serde::de::DeserializeOwned;

use crate::handler::{Call, Compensate, Handle, HandlerError, Incoming, OutOfOrder, Stale};
use crate::versions::Versions;

/// What becomes of a message of a type that nobody handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unknown {
    /// It is dead at once, and can be retried when somebody handles it.
    #[default]
    DeadLetter,
    /// It is done; it is counted.
    Ignore,
    /// It is given back and the receiver stops.
    Fail,
}

/// Registrations that contradict each other.
#[derive(Debug, thiserror::Error)]
pub enum InvalidHandlers {
    /// Versions go to a compensation that is not there.
    #[error("versions of aggregate {0:?} go to the compensation; name one with `compensation`")]
    NoCompensation(String),
    /// Two handlers for one type.
    #[error("two handlers take type {0:?}")]
    Twice(String),
}

type Decoder<M> = Box<dyn Fn(&Message) -> Result<M, BoxError> + Send + Sync>;

/// The answer of a [`Call`], on its way to `done`.
pub(crate) type Answer = Box<dyn Any + Send + Sync>;

#[async_trait]
pub(crate) trait Erased<F: Transactions>: Send + Sync {
    /// Whether it has an effect outside the database.
    fn calls(&self) -> bool;
    /// The call of a handler that calls.
    async fn call(&self, key: &str, message: &Arc<Message>, attempts: u32) -> Result<Answer, HandlerError>;
    async fn handle(
        &self,
        tx: &mut F::Tx<'_>,
        message: &Arc<Message>,
        attempts: u32,
        merge_into: Option<i64>,
        answer: Option<&Answer>,
    ) -> Result<(), HandlerError>;
}

fn decoded<M>(
    decoder: &Decoder<M>,
    message: &Arc<Message>,
    attempts: u32,
    merge_into: Option<i64>,
) -> Result<Incoming<M>, HandlerError> {
    // A payload that cannot be read today cannot be read tomorrow.
    let body = decoder(message).map_err(HandlerError::Reject)?;
    Ok(Incoming { body, message: message.clone(), attempts, merge_into })
}

struct Handling<F, M, H> {
    decoder: Decoder<M>,
    handler: H,
    family: PhantomData<fn() -> F>,
}

#[async_trait]
impl<F: Transactions, M: Send + Sync + 'static, H: Handle<F, M>> Erased<F> for Handling<F, M, H> {
    fn calls(&self) -> bool {
        false
    }

    async fn call(&self, _: &str, _: &Arc<Message>, _: u32) -> Result<Answer, HandlerError> {
        Ok(Box::new(()))
    }

    async fn handle(
        &self,
        tx: &mut F::Tx<'_>,
        message: &Arc<Message>,
        attempts: u32,
        merge_into: Option<i64>,
        _: Option<&Answer>,
    ) -> Result<(), HandlerError> {
        let incoming = decoded(&self.decoder, message, attempts, merge_into)?;
        self.handler.handle(tx, &incoming).await
    }
}

struct Calling<F, M, H> {
    decoder: Decoder<M>,
    handler: H,
    family: PhantomData<fn() -> F>,
}

#[async_trait]
impl<F: Transactions, M: Send + Sync + 'static, H: Call<F, M>> Erased<F> for Calling<F, M, H> {
    fn calls(&self) -> bool {
        true
    }

    async fn call(&self, key: &str, message: &Arc<Message>, attempts: u32) -> Result<Answer, HandlerError> {
        let incoming = decoded(&self.decoder, message, attempts, None)?;
        Ok(Box::new(self.handler.call(key, &incoming).await?))
    }

    async fn handle(
        &self,
        tx: &mut F::Tx<'_>,
        message: &Arc<Message>,
        attempts: u32,
        merge_into: Option<i64>,
        answer: Option<&Answer>,
    ) -> Result<(), HandlerError> {
        let incoming = decoded(&self.decoder, message, attempts, merge_into)?;
        let answer = answer.and_then(|answer| answer.downcast_ref::<H::Answer>());
        let answer = answer.ok_or_else(|| HandlerError::Again("the call was not made".into()))?;
        self.handler.done(tx, &incoming, answer).await
    }
}

/// The handlers of a consumer, by the type of their messages.
pub struct Handlers<F: Transactions> {
    by_type: HashMap<String, Box<dyn Erased<F>>>,
    unknown: Unknown,
    versions: HashMap<String, Versions>,
    compensation: Option<Box<dyn Compensate<F>>>,
    twice: Option<String>,
}

impl<F: Transactions> Default for Handlers<F> {
    fn default() -> Self {
        Self {
            by_type: HashMap::new(),
            unknown: Unknown::default(),
            versions: HashMap::new(),
            compensation: None,
            twice: None,
        }
    }
}

impl<F: Transactions> Handlers<F> {
    /// No handler yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Handles messages of type `kind`, whose payload is JSON.
    pub fn on<M: DeserializeOwned + Send + Sync + 'static>(self, kind: &str, handler: impl Handle<F, M>) -> Self {
        self.on_decoded(kind, json, handler)
    }

    /// Handles messages of type `kind`, whose payload `decoder` reads. A message that it refuses is dead.
    pub fn on_decoded<M: Send + Sync + 'static>(
        self,
        kind: &str,
        decoder: impl Fn(&Message) -> Result<M, BoxError> + Send + Sync + 'static,
        handler: impl Handle<F, M>,
    ) -> Self {
        self.register(kind, Box::new(Handling { decoder: Box::new(decoder), handler, family: PhantomData }))
    }

    /// Calls the outside for messages of type `kind`, whose payload is JSON.
    pub fn on_call<M: DeserializeOwned + Send + Sync + 'static>(self, kind: &str, handler: impl Call<F, M>) -> Self {
        self.register(kind, Box::new(Calling { decoder: Box::new(json), handler, family: PhantomData }))
    }

    fn register(mut self, kind: &str, handler: Box<dyn Erased<F>>) -> Self {
        if self.by_type.insert(kind.to_owned(), handler).is_some() {
            self.twice = Some(kind.to_owned());
        }
        self
    }

    /// What becomes of messages of other types; dead letters unless something else is said.
    pub fn unknown(mut self, unknown: Unknown) -> Self {
        self.unknown = unknown;
        self
    }

    /// How the versions of aggregates of type `aggregate_type` are looked at, whatever the types of their messages.
    pub fn versions(mut self, aggregate_type: &str, versions: Versions) -> Self {
        self.versions.insert(aggregate_type.to_owned(), versions);
        self
    }

    /// Who repairs what did not come in order.
    pub fn compensation(mut self, compensation: impl Compensate<F>) -> Self {
        self.compensation = Some(Box::new(compensation));
        self
    }

    pub(crate) fn check(&self) -> Result<(), InvalidHandlers> {
        if let Some(kind) = &self.twice {
            return Err(InvalidHandlers::Twice(kind.clone()));
        }
        let compensates = |versions: &Versions| match versions {
            Versions::Any => false,
            Versions::Newer(stale) => *stale == Stale::Compensate,
            Versions::InOrder { .. } => true,
        };
        match self.versions.iter().find(|(_, versions)| compensates(versions)) {
            Some((kind, _)) if self.compensation.is_none() => Err(InvalidHandlers::NoCompensation(kind.clone())),
            _ => Ok(()),
        }
    }

    pub(crate) fn of(&self, kind: &str) -> Option<&dyn Erased<F>> {
        self.by_type.get(kind).map(AsRef::as_ref)
    }

    pub(crate) fn on_unknown(&self) -> Unknown {
        self.unknown
    }

    /// How this message's version is looked at, and of which aggregate it is.
    pub(crate) fn version_of(&self, message: &Message) -> Option<(Versions, Aggregate, i64)> {
        let kind = message.aggregate_type.as_ref()?;
        let versions = *self.versions.get(kind).filter(|versions| **versions != Versions::Any)?;
        let aggregate = Aggregate { kind: kind.clone(), id: message.aggregate_id.clone()? };
        Some((versions, aggregate, message.aggregate_version?))
    }

    pub(crate) async fn compensate(&self, tx: &mut F::Tx<'_>, what: &OutOfOrder<'_>) -> Result<(), HandlerError> {
        match &self.compensation {
            Some(compensation) => compensation.compensate(tx, what).await,
            // `check` has seen to it that there is one.
            None => Ok(()),
        }
    }
}

fn json<M: DeserializeOwned>(message: &Message) -> Result<M, BoxError> {
    serde_json::from_slice(&message.payload).map_err(|error| {
        let place = format!("line {} column {}", error.line(), error.column());
        let what = told(&error.to_string()).unwrap_or_else(|| format!("{:?}", error.classify()));
        format!("read {} as JSON: {what} at {place}", message.kind).into()
    })
}

/// What an error of JSON says of the type that was asked for: which field is missing, what was expected. Never what was found, which is
/// the payload.
fn told(error: &str) -> Option<String> {
    if let Some(rest) = error.strip_prefix("missing field `") {
        return Some(format!("missing field `{}`", rest.split('`').next()?));
    }
    let expected = error.strip_prefix("invalid ").and(error.rsplit_once(", expected "))?.1;
    let expected = expected.rsplit_once(" at line ").map_or(expected, |(expected, _)| expected);
    Some(format!("another value than the expected {expected}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    struct Order {
        #[allow(dead_code)]
        id: String,
        #[allow(dead_code)]
        cents: i64,
    }

    #[test]
    fn an_error_names_the_missing_field_and_never_the_payload() {
        let said = |payload: &'static str| {
            json::<Order>(&Message::new("orders", "order.placed", payload)).unwrap_err().to_string()
        };
        assert_eq!(said("{\"id\":\"o-1\"}"), "read order.placed as JSON: missing field `cents` at line 1 column 12");
        let wrong = said("{\"id\":\"o-1\",\"cents\":\"s3cret, expected at line 7\"}");
        assert!(wrong.contains("expected i64 at line 1") && !wrong.contains("s3cret"), "{wrong}");
        assert_eq!(said("{s3cret}"), "read order.placed as JSON: Syntax at line 1 column 2");
    }
}
