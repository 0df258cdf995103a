//! A server that dies loses nothing of what was committed, and a relay goes on where it was.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, TxOpts};
use postroom::{Message, MessageId, Outbox, Outcome, Report, Route, Settlement, Source, Want};
use postroom_mysql::{Mysql, MysqlSource, migrate, options_of};
use postroom_testkit::services::MysqlServer;
use postroom_testkit::surroundings;

#[derive(Default)]
struct Written {
    committed: HashSet<MessageId>,
    /// The server died over the commit.
    unknown: HashSet<MessageId>,
}

async fn write(opts: Opts, stop: Arc<AtomicBool>, written: Arc<Mutex<Written>>) {
    while !stop.load(Ordering::Relaxed) {
        let Ok(mut conn) = Conn::new(opts.clone()).await else {
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        while !stop.load(Ordering::Relaxed) {
            let message = Message::new("orders", "order.placed", "x").key("k");
            let Ok(mut tx) = conn.start_transaction(TxOpts::default()).await else { break };
            if Mysql.enqueue(&mut tx, std::slice::from_ref(&message)).await.is_err() {
                break;
            }
            let committed = tx.commit().await.is_ok();
            let mut written = written.lock().unwrap();
            let to = if committed { &mut written.committed } else { &mut written.unknown };
            to.insert(message.id);
            if !committed {
                break;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_killed_three_times_loses_no_message_and_invents_none() {
    let dir = surroundings::scratch("mariadb-crash").join("server");
    let mut server = tokio::task::spawn_blocking(move || MysqlServer::start(&dir)).await.unwrap().unwrap();
    let mut admin = Conn::new(options_of(&server.url("mysql")).unwrap()).await.unwrap();
    admin.query_drop("create database shop").await.unwrap();
    let opts = options_of(&server.url("shop")).unwrap();
    migrate(&opts, Some(4)).await.unwrap();
    let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Written::default())));
    let writers: Vec<_> = (0..3).map(|_| tokio::spawn(write(opts.clone(), stop.clone(), written.clone()))).collect();
    let route = Route { lease: Duration::from_secs(2), ..Route::new("orders") };
    let relay = MysqlSource::open(&opts, &route, "relay").await.unwrap();
    let (mut seen, mut kills, mut idle) = (HashSet::new(), 0, 0);
    while idle < 3 {
        let enough = written.lock().unwrap().committed.len() > 300 * (kills + 1);
        if kills < 3 && enough {
            server.kill().unwrap();
            server.start_again().unwrap();
            kills += 1;
        } else if enough {
            stop.store(true, Ordering::Relaxed);
        }
        // After an error it is as after any other: renewed and claimed again.
        if !relay.renew(&Report::default()).await.is_ok_and(|standing| standing.held == 4) {
            continue;
        }
        let Ok(claimed) = relay.claim(Want::up_to(100)).await else { continue };
        let over = writers.iter().all(tokio::task::JoinHandle::is_finished);
        idle = if over && claimed.deliveries.is_empty() && !claimed.more { idle + 1 } else { 0 };
        seen.extend(claimed.deliveries.iter().map(|delivery| delivery.message.id));
        let done =
            claimed.deliveries.iter().map(|delivery| Settlement { token: delivery.token, outcome: Outcome::Done });
        let _ = relay.settle(&done.collect::<Vec<_>>()).await;
    }
    for writer in writers {
        writer.await.unwrap();
    }
    let written = written.lock().unwrap();
    println!("{} committed, {} unknown, {} seen", written.committed.len(), written.unknown.len(), seen.len());
    assert_eq!(written.committed.difference(&seen).count(), 0, "I1");
    let possible: HashSet<MessageId> = written.committed.union(&written.unknown).copied().collect();
    assert_eq!(seen.difference(&possible).count(), 0, "I2");
}
