//! What a driver has to do for the receiving end: run statements in the application's own transaction. Everything else is shared.

use async_trait::async_trait;
use postroom::{BoxError, StoreError, Transactions};
use uuid::Uuid;

/// A parameter of a statement, with the type that the server is told.
#[derive(Clone, Copy)]
pub(crate) enum Value<'a> {
    Text(&'a str),
    MaybeText(Option<&'a str>),
    Bytes(&'a [u8]),
    Int4(i32),
    Int8(i64),
    MaybeInt8(Option<i64>),
    Float8(f64),
    Uuid(Uuid),
    Texts(&'a [&'a str]),
    MaybeTexts(&'a [Option<&'a str>]),
    MaybeStrings(&'a [Option<String>]),
    Blobs(&'a [&'a [u8]]),
    Int8s(&'a [i64]),
    MaybeInt8s(&'a [Option<i64>]),
    Uuids(&'a [Uuid]),
}

/// A row that a statement brought.
pub(crate) trait Found: Send + Sync {
    fn uuid(&self, column: &str) -> Result<Uuid, StoreError>;
    /// With `U+FFFD` for what is not UTF-8, where the driver can read such a column.
    fn text(&self, column: &str) -> Result<String, StoreError>;
    fn maybe_text(&self, column: &str) -> Result<Option<String>, StoreError>;
    fn bytes(&self, column: &str) -> Result<Vec<u8>, StoreError>;
    fn int4(&self, column: &str) -> Result<i32, StoreError>;
    fn int8(&self, column: &str) -> Result<i64, StoreError>;
    fn maybe_int8(&self, column: &str) -> Result<Option<i64>, StoreError>;
    fn flag(&self, column: &str) -> Result<bool, StoreError>;
}

/// A statement with its parameters, and what it is for.
#[derive(Clone, Copy)]
pub(crate) struct Asked<'a> {
    pub what: &'static str,
    pub sql: &'static str,
    pub values: &'a [Value<'a>],
}

/// A driver. One round trip a statement.
#[async_trait]
pub(crate) trait Driver: Transactions {
    type Row: Found;

    async fn rows(tx: &mut Self::Tx<'_>, asked: Asked<'_>) -> Result<Vec<Self::Row>, StoreError>;

    /// How many rows a statement changed.
    async fn changed(tx: &mut Self::Tx<'_>, asked: Asked<'_>) -> Result<u64, StoreError>;

    /// Two statements, the second after the first; in one round trip where the driver can.
    async fn both(
        tx: &mut Self::Tx<'_>,
        first: Asked<'_>,
        second: Asked<'_>,
    ) -> Result<(Vec<Self::Row>, Vec<Self::Row>), StoreError> {
        let first = Self::rows(tx, first).await?;
        Ok((first, Self::rows(tx, second).await?))
    }
}

/// Why a row could not be read.
pub(crate) fn unreadable(error: impl Into<BoxError>) -> StoreError {
    StoreError::Refused { what: "read a row of the inbox", source: error.into() }
}

/// Implements the receiving end for a driver: every method is the shared one, but for the commit and for what an error means.
macro_rules! receiving_end {
    ($store:ty, |$tx:ident| $commit:expr, refuses: $refuses:expr, sort: $sort:expr) => {
        #[async_trait::async_trait]
        impl postroom::ConsumerStore for $store {
            async fn commit($tx: Self::Tx<'_>) -> Result<(), postroom::StoreError> {
                $commit
            }

            async fn admit(
                tx: &mut Self::Tx<'_>,
                consumer: &postroom::Consumer,
                arrivals: &[(postroom::MessageId, Option<String>)],
            ) -> Result<Vec<postroom::Admitted>, postroom::StoreError> {
                $crate::inbox::statements::admit::<Self>(tx, consumer, arrivals).await
            }

            async fn keep(
                tx: &mut Self::Tx<'_>,
                consumer: &postroom::Consumer,
                messages: &[postroom::Message],
                keep: postroom::Keep<'_>,
            ) -> Result<i64, postroom::StoreError> {
                $crate::inbox::statements::keep::<Self>(tx, consumer, messages, keep).await
            }

            async fn keep_dead(
                tx: &mut Self::Tx<'_>,
                consumer: &postroom::Consumer,
                message: &postroom::Message,
                error: &str,
            ) -> Result<(), postroom::StoreError> {
                $crate::inbox::statements::keep_dead::<Self>(tx, consumer, message, error).await
            }

            async fn take(
                tx: &mut Self::Tx<'_>,
                consumer: &postroom::Consumer,
                owner: &str,
                max: usize,
                lease: std::time::Duration,
                claims_max: u32,
            ) -> Result<Vec<postroom::Waiting>, postroom::StoreError> {
                $crate::inbox::statements::take::<Self>(tx, consumer, owner, max, lease, claims_max).await
            }

            async fn renew(
                tx: &mut Self::Tx<'_>,
                consumer: &postroom::Consumer,
                claims: &[(postroom::MessageId, i64)],
                lease: std::time::Duration,
            ) -> Result<(), postroom::StoreError> {
                $crate::inbox::statements::renew::<Self>(tx, consumer, claims, lease).await
            }

            async fn settle(
                tx: &mut Self::Tx<'_>,
                consumer: &postroom::Consumer,
                id: postroom::MessageId,
                claim: i64,
                settle: &postroom::Settle,
            ) -> Result<bool, postroom::StoreError> {
                $crate::inbox::statements::settle::<Self>(tx, consumer, id, claim, settle).await
            }

            async fn version(
                tx: &mut Self::Tx<'_>,
                consumer: &postroom::Consumer,
                aggregate: &postroom::Aggregate,
            ) -> Result<Option<i64>, postroom::StoreError> {
                $crate::inbox::statements::version::<Self>(tx, consumer, aggregate).await
            }

            async fn set_version(
                tx: &mut Self::Tx<'_>,
                consumer: &postroom::Consumer,
                aggregate: &postroom::Aggregate,
                version: i64,
            ) -> Result<(), postroom::StoreError> {
                $crate::inbox::statements::set_version::<Self>(tx, consumer, aggregate, version).await
            }

            async fn waiting_versions(
                tx: &mut Self::Tx<'_>,
                consumer: &postroom::Consumer,
                aggregate: &postroom::Aggregate,
                above: i64,
                below: i64,
            ) -> Result<Vec<(i64, bool)>, postroom::StoreError> {
                $crate::inbox::statements::waiting_versions::<Self>(tx, consumer, aggregate, above, below).await
            }

            fn refuses_the_message(error: &postroom::StoreError) -> bool {
                $refuses(error)
            }

            fn sort(error: postroom::BoxError) -> Result<postroom::StoreError, postroom::BoxError> {
                $sort(error)
            }
        }

        #[async_trait::async_trait]
        impl postroom::FillerStore for $store {
            async fn filler(
                tx: &mut Self::Tx<'_>,
                consumer: &postroom::Consumer,
            ) -> Result<Option<postroom::FillerSeen>, postroom::StoreError> {
                $crate::inbox::statements::filler::<Self>(tx, consumer).await
            }

            async fn take_inbox(
                tx: &mut Self::Tx<'_>,
                consumer: &postroom::Consumer,
                owner: &str,
                lease: std::time::Duration,
                seen: Option<&postroom::FillerSeen>,
            ) -> Result<Option<postroom::Tenure>, postroom::StoreError> {
                $crate::inbox::statements::take_inbox::<Self>(tx, consumer, owner, lease, seen).await
            }

            async fn renew_inbox(
                tx: &mut Self::Tx<'_>,
                consumer: &postroom::Consumer,
                tenure: &postroom::Tenure,
                lease: std::time::Duration,
                said: &postroom::FillerReport,
            ) -> Result<bool, postroom::StoreError> {
                $crate::inbox::statements::renew_inbox::<Self>(tx, consumer, tenure, lease, said).await
            }

            async fn fence_inbox(
                tx: &mut Self::Tx<'_>,
                consumer: &postroom::Consumer,
                tenure: &postroom::Tenure,
            ) -> Result<bool, postroom::StoreError> {
                $crate::inbox::statements::fence_inbox::<Self>(tx, consumer, tenure).await
            }

            async fn leave_inbox(
                tx: &mut Self::Tx<'_>,
                consumer: &postroom::Consumer,
                tenure: &postroom::Tenure,
            ) -> Result<(), postroom::StoreError> {
                $crate::inbox::statements::leave_inbox::<Self>(tx, consumer, tenure).await
            }
        }
    };
}

pub(crate) use receiving_end;
