//! Waking a relay in another process, outside the business transaction.
//!
//! A `notify` inside the business transaction would take a lock on the whole cluster at its commit and serialize all commits
//! that notify; so writers notify after the commit, on a connection of their own, at most once in a while. A notification
//! that is lost, or that nobody sends, costs one poll: polling is the truth.

use std::time::Duration;

use postroom::Wake;
use tokio::task::JoinHandle;

use crate::connect::Connector;

/// The channel that writers notify and relays listen to.
const CHANNEL: &str = "postroom";
/// After a failure, how long until the next try.
const PAUSE: Duration = Duration::from_secs(1);

/// Tells relays in other processes that there is something to do. One for each process of writers; it has one connection.
///
/// Leave it out behind a pooler in transaction mode: relays cannot listen through one.
#[derive(Debug)]
pub struct Notifier {
    wake: Wake,
    task: JoinHandle<()>,
}

impl Notifier {
    /// Notifies at most once every `at_most_every`, however often it is asked.
    pub fn new(connector: Connector, at_most_every: Duration) -> Self {
        let wake = Wake::new();
        let asked = wake.clone();
        let task = tokio::spawn(async move {
            loop {
                let Ok(client) = connector.connect().await else {
                    tokio::time::sleep(PAUSE).await;
                    continue;
                };
                loop {
                    asked.notified().await;
                    if let Err(error) = client.batch_execute(&format!("notify {CHANNEL}")).await {
                        tracing::debug!(%error, "a notification was not sent; relays find the messages by polling");
                        break;
                    }
                    tokio::time::sleep(at_most_every).await;
                }
            }
        });
        Self { wake, task }
    }

    /// Call this after the commit, never before it. It returns at once.
    pub fn notify(&self) {
        self.wake.notify();
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Wakes relays of this process whenever a [`Notifier`] of any process notifies; ends when dropped.
#[derive(Debug)]
pub struct Listener(JoinHandle<()>);

impl Listener {
    /// Listens on a connection of its own, and again after it broke. Each of `wakes` is woken.
    pub fn new(connector: Connector, wakes: Vec<Wake>) -> Self {
        let heard = Wake::new();
        let task = tokio::spawn(async move {
            loop {
                match listen(&connector, &heard, &wakes).await {
                    Ok(()) => tracing::debug!("the listening connection ended"),
                    Err(error) => tracing::debug!(%error, "listening failed; the relay keeps polling"),
                }
                tokio::time::sleep(PAUSE).await;
            }
        });
        Self(task)
    }
}

async fn listen(connector: &Connector, heard: &Wake, wakes: &[Wake]) -> Result<(), postroom::StoreError> {
    let (client, mut broken) = connector.connect_listening(heard.clone()).await?;
    let listening = client.batch_execute(&format!("listen {CHANNEL}")).await;
    listening.map_err(|error| crate::link::store_error("listen", error))?;
    loop {
        // What was committed before we listened was not announced to us.
        wakes.iter().for_each(Wake::notify);
        tokio::select! {
            () = heard.notified() => {}
            _ = &mut broken => return Ok(()),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.0.abort();
    }
}
