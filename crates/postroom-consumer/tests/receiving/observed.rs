//! What a receiver tells while it runs.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use postroom::{Happened, Live, Observed, Observer};

use crate::setup::{Running, as_told, broker, postgres, publish, receiver, told, until};

/// Adds up what it hears: done, duplicates, kept, dead, given up; and of how many effects it hears when their message was written.
#[derive(Default)]
struct Sums(Mutex<[usize; 5]>, AtomicUsize);

impl Observer for Sums {
    fn event(&self, of: Observed<'_>, event: &Happened) {
        assert_eq!(of, Observed::Inbox("totals"));
        if let Happened::Handled { done, duplicates, kept, dead, given_up, .. } = event {
            let mut sums = self.0.lock().unwrap();
            let more = [done, duplicates, kept, dead, given_up];
            sums.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
        }
    }

    fn through(&self, _: Observed<'_>, written: &mut dyn Iterator<Item = SystemTime>) {
        self.1.fetch_add(written.count(), Ordering::Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_add_up_to_the_counters_and_the_snapshot_is_of_now() {
    let database = postgres().await;
    let client = database.connect().await;
    let broker = broker();
    let mut messages: Vec<_> = (0..200).map(|n| told(&format!("k{n}"), "fine")).collect();
    messages.extend([told("a", "fail twice"), told("a", "behind"), told("b", "reject"), told("c", "hang")]);
    messages.iter_mut().for_each(|message| message.occurred_at = Some(SystemTime::now()));
    publish(&broker, messages.clone()).await;
    publish(&broker, messages[..50].to_vec()).await;
    let (sums, live) = (Arc::new(Sums::default()), Live::new());
    let receiver = receiver(&database, broker.subscribe("q", 500), as_told());
    let stop_deadline = std::time::Duration::from_millis(100);
    let receiver = receiver.stop_deadline(stop_deadline).observed_by(sums.clone()).shown_in(live.clone());
    let running = Running::start(receiver);
    until(&client, "select (select count(*) from done) = 202 and (select count(*) from postroom.dead_consume) = 1")
        .await;
    // The one that hangs is in work, and nothing else comes any more.
    while live.now().working != 1 || live.now().received != 1 || live.now().claimed != 0 {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    let counters = running.stop().await;
    let [done, duplicates, kept, dead, given_up] = sums.0.lock().unwrap().map(|sum| sum as u64);
    assert_eq!((done, done), (counters.applied, 202));
    assert_eq!(sums.1.load(Ordering::Relaxed), 202, "each effect is told with the time of its message");
    assert_eq!((duplicates, dead), (counters.duplicates, counters.dead));
    assert_eq!(kept, counters.kept + counters.retried, "{counters:?}");
    assert!(duplicates >= 50 && dead == 1 && kept >= 3, "{counters:?}");
    assert!(given_up <= counters.requeued);
    assert_eq!(live.now().counters, counters);
}
