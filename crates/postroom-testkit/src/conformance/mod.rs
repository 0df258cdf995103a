//! One contract, one suite, every implementation. A suite is a list of cases; each is a function of a fixture, and an
//! implementation's tests name the fixture once: `postroom_testkit::source_conforms!(MyStore);` makes a test of every case.

#![allow(missing_docs, reason = "the name of a case is its sentence")]

pub mod consumer_store;
pub mod intake;
pub mod operator;
pub mod sink;
pub mod source;
pub mod subscription;

use async_trait::async_trait;

/// What a case begins with: a store, a broker, a queue that nobody else uses.
#[async_trait]
pub trait Fixture: Send + Sync + Sized {
    /// A new and empty one.
    async fn create() -> Self;
}

/// Makes a test of each case of a suite.
#[macro_export]
macro_rules! conformance_cases {
    ($fixture:ty, $suite:ident: $($case:ident)+) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                let fixture = <$fixture as $crate::conformance::Fixture>::create().await;
                $crate::conformance::$suite::$case(fixture).await;
            }
        )+
    };
}
