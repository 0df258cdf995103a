//! Keeps the tasks of `postroom run` going: a task that ends or panics without a request to stop is logged and started again, and
//! the others keep running.

use std::any::Any;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::Instant;

use crate::exit::{self, Failure};

const BACKOFF: Backoff =
    Backoff { first: Duration::from_secs(1), cap: Duration::from_secs(30), recovered_after: Duration::from_secs(60) };

/// Waits between the runs of a task.
#[derive(Clone, Copy)]
struct Backoff {
    first: Duration,
    cap: Duration,
    /// A task that has run this long has recovered: the next wait is the first one again.
    recovered_after: Duration,
}

/// One run of a task.
pub type Attempt<T> = Pin<Box<dyn Future<Output = Result<T, Failure>> + Send>>;

/// How a task ended.
#[derive(Debug)]
pub struct Ended<T> {
    /// The result of its last run; none: it was not running when the stop came.
    pub last: Option<T>,
    /// Why there is no result.
    pub failed: Option<Failure>,
    /// How often it was started again.
    pub restarts: u64,
}

/// A task under supervision.
pub struct Supervised<T> {
    name: String,
    task: JoinHandle<Ended<T>>,
}

impl<T> Supervised<T> {
    /// Waits for its end, which comes only after the stop.
    pub async fn ended(self) -> Ended<T> {
        match self.task.await {
            Ok(ended) => ended,
            Err(error) => Ended { last: None, failed: Some(told(&self.name, &why(error))), restarts: 0 },
        }
    }
}

/// Runs `first`, and then `again` with the number of the restart each time the task ends without a request to stop.
pub fn supervise<T: Send + 'static>(
    name: String,
    stopped: watch::Receiver<bool>,
    first: Attempt<T>,
    again: impl Fn(u64) -> Attempt<T> + Send + 'static,
) -> Supervised<T> {
    supervise_with(BACKOFF, name, stopped, first, again)
}

fn supervise_with<T: Send + 'static>(
    waits: Backoff,
    name: String,
    mut stopped: watch::Receiver<bool>,
    first: Attempt<T>,
    again: impl Fn(u64) -> Attempt<T> + Send + 'static,
) -> Supervised<T> {
    let of = name.clone();
    let task = tokio::spawn(async move {
        let mut restarts = 0;
        let mut backoff = waits.first;
        let mut attempt = first;
        loop {
            let began = Instant::now();
            // A task of its own, so that a panic ends nothing else.
            let ended = tokio::spawn(attempt).await;
            let stop = *stopped.borrow();
            let cause = match ended {
                Ok(Ok(last)) if stop => return Ended { last: Some(last), failed: None, restarts },
                Ok(Ok(_)) => "it ended by itself".to_owned(),
                Ok(Err(failure)) => failure.text,
                Err(error) => why(error),
            };
            if stop {
                tracing::error!("{name} ended while postroom stopped: {cause}");
                return Ended { last: None, failed: Some(told(&name, &cause)), restarts };
            }
            if began.elapsed() >= waits.recovered_after {
                backoff = waits.first;
            }
            tracing::error!(restarts, "{name} ended: {cause}; starting it again in {backoff:?}");
            // An error means that the sender is gone, which is a stop too.
            if tokio::time::timeout(backoff, stopped.wait_for(|stopped| *stopped)).await.is_ok() {
                return Ended { last: None, failed: Some(told(&name, &cause)), restarts };
            }
            restarts += 1;
            backoff = (backoff * 2).min(waits.cap);
            attempt = again(restarts);
        }
    });
    Supervised { name: of, task }
}

fn told(name: &str, cause: &str) -> Failure {
    Failure::new(exit::FAILURE, format!("{name} was not running when postroom stopped: {cause}"))
}

fn why(error: JoinError) -> String {
    match error.try_into_panic() {
        Ok(panic) => format!("it panicked: {}", text_of(panic.as_ref())),
        Err(error) => error.to_string(),
    }
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without a message".to_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[tokio::test]
    async fn what_ends_or_panics_is_started_again_with_growing_waits_and_stopped_once() {
        let (stop, stopped) = watch::channel(false);
        let runs = Arc::new(AtomicU64::new(0));
        let run = {
            let (runs, stopped) = (runs.clone(), stopped.clone());
            move |restart: u64| -> Attempt<u64> {
                let (runs, mut stopped) = (runs.clone(), stopped.clone());
                Box::pin(async move {
                    runs.fetch_add(1, Ordering::SeqCst);
                    match restart {
                        0 => panic!("told to panic"),
                        1 => Err(Failure::new(exit::FAILURE, "told to fail")),
                        2 => Ok(restart),
                        _ => {
                            let _ = stopped.wait_for(|stopped| *stopped).await;
                            Ok(restart)
                        }
                    }
                })
            }
        };
        let waits = Backoff { first: Duration::from_millis(10), cap: Duration::from_millis(30), ..BACKOFF };
        let began = Instant::now();
        let task = supervise_with(waits, "route orders".to_owned(), stopped, run(0), run);
        while runs.load(Ordering::SeqCst) < 4 {
            tokio::task::yield_now().await;
        }
        assert!(began.elapsed() >= Duration::from_millis(10 + 20 + 30), "growing up to the cap");
        stop.send(true).unwrap();
        let ended = task.ended().await;
        assert_eq!((ended.last, ended.restarts, ended.failed.is_none()), (Some(3), 3, true));
    }
}
