//! Carries out operations, one step at a time, for as long as the process runs. Several processes may do so: a step is one transaction.

use std::sync::Arc;
use std::time::{Duration, Instant};

use postroom::Store;

use crate::exit::{self, Failure};

/// Between two looks while nothing is to be done, and between two steps while something is.
const IDLE: Duration = Duration::from_secs(5);
const STEP: Duration = Duration::from_millis(100);
/// An operation that pauses, or waits for outcomes, is looked at this often for so long after its last step.
const ACTIVE_FOR: Duration = Duration::from_secs(30);
const ACTIVE: Duration = Duration::from_millis(250);
/// After an error that a person has to fix.
const REFUSED: Duration = Duration::from_secs(60);
const TELL_EVERY: Duration = Duration::from_secs(3600);

/// Steps for ever.
pub async fn carry_out(store: Arc<dyn Store>) {
    let mut active_until: Option<Instant> = None;
    let mut told: Option<Instant> = None;
    loop {
        let wait = match store.step_operations().await {
            Ok(stepped) if stepped.given_out > 0 || stepped.going_on > 0 => {
                active_until = Some(Instant::now() + ACTIVE_FOR);
                STEP
            }
            Ok(_) if active_until.is_some_and(|until| Instant::now() < until) => ACTIVE,
            Ok(_) => IDLE,
            // A store that is away is told elsewhere.
            Err(error) if error.is_transient() => IDLE,
            Err(error) => {
                if told.is_none_or(|at| at.elapsed() >= TELL_EVERY) {
                    told = Some(Instant::now());
                    let text = Failure::of(exit::FAILURE, &error).text;
                    tracing::error!(
                        "this process carries out no operations: {text}; `postroom check` names missing rights"
                    );
                }
                REFUSED
            }
        };
        tokio::time::sleep(wait).await;
    }
}
