//! Looks at the store from time to time, so that nobody who reads the metrics causes a query.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use postroom::{Store, StoreError};

use crate::metrics::{Meter, Sample, Sampled};

/// Between two looks at the state; longer where a look takes long, so that looking takes a small part of the time. No longer than this, or
/// what was seen would be too old to be shown before it is seen again.
const EVERY: Duration = Duration::from_secs(15);
const EVERY_AT_MOST: Duration = Duration::from_secs(60);
const SIZES_EVERY: Duration = Duration::from_secs(60);
const SHARE: u32 = 20;
/// An error that a person has to fix is logged again after this.
const TELL_EVERY: Duration = Duration::from_secs(3600);

/// Samples one store.
#[derive(Debug)]
pub struct Sampler {
    sampled: Sampled,
    meter: Meter,
}

impl Sampler {
    /// Nothing is known yet. `capacity_bytes` is how large the store may become, for the metrics that tell when it is full.
    pub fn new(meter: Meter, capacity_bytes: Option<i64>) -> Self {
        Self { sampled: Sampled::new(capacity_bytes), meter }
    }

    pub(crate) fn sampled(&self) -> Sampled {
        self.sampled.clone()
    }

    /// Looks for ever.
    pub async fn run(self, store: Arc<dyn Store>) {
        let mut sizes_at: Option<Instant> = None;
        let mut told: Option<Instant> = None;
        loop {
            let began = Instant::now();
            if sizes_at.is_none_or(|at| at.elapsed() >= SIZES_EVERY) {
                sizes_at = Some(began);
                if let Err(error) = self.look_at_sizes(store.as_ref()).await {
                    self.failed(&error, &mut told);
                }
            }
            let status_began = Instant::now();
            let wait = match store.status().await {
                Ok(value) => {
                    let took = status_began.elapsed();
                    self.sampled.status(Sample { value, at: Instant::now(), took });
                    (began.elapsed() * SHARE).clamp(EVERY, EVERY_AT_MOST)
                }
                Err(error) => {
                    self.failed(&error, &mut told);
                    EVERY
                }
            };
            tokio::time::sleep(wait).await;
        }
    }

    async fn look_at_sizes(&self, store: &dyn Store) -> Result<(), StoreError> {
        let (began, ours) = (Instant::now(), SystemTime::now());
        let value = store.vitals().await?;
        let took = began.elapsed();
        // The database looked at its clock some time in between.
        self.meter.database_clock(value.now, ours + took / 2);
        self.sampled.vitals(Sample { value, at: Instant::now(), took });
        store.note_sizes().await
    }

    fn failed(&self, error: &StoreError, told: &mut Option<Instant>) {
        self.sampled.failed();
        // A store that is away is told elsewhere.
        if error.is_transient() || told.is_some_and(|at| at.elapsed() < TELL_EVERY) {
            return;
        }
        *told = Some(Instant::now());
        let mut text = error.to_string();
        let mut cause = std::error::Error::source(error);
        while let Some(error) = cause {
            text.push_str(&format!(": {error}"));
            cause = error.source();
        }
        tracing::error!(
            "the metrics lack the state of the store: failed to {text}; `postroom check` names missing rights"
        );
    }
}
