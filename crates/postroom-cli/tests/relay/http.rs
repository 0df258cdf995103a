//! Relays that send requests to an endpoint which fails one in ten, while they are killed.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode};
use postroom_testkit::chance::Chance;
use postroom_testkit::judge::History;
use postroom_testkit::surroundings;

use crate::rig::{Rig, assert_clean};

const MESSAGES: usize = 5_000;
/// Two batches.
const IN_FLIGHT_MAX: usize = 128;

struct Endpoint {
    got: Mutex<Vec<String>>,
    chance: Mutex<Chance>,
}

async fn take(State(endpoint): State<Arc<Endpoint>>, method: Method, headers: HeaderMap) -> StatusCode {
    if method != Method::POST {
        return StatusCode::METHOD_NOT_ALLOWED;
    }
    match endpoint.chance.lock().unwrap().below(20) {
        0 => return StatusCode::INTERNAL_SERVER_ERROR,
        1 => return StatusCode::SERVICE_UNAVAILABLE,
        _ => {}
    }
    endpoint.got.lock().unwrap().push(headers["webhook-id"].to_str().unwrap().to_owned());
    StatusCode::NO_CONTENT
}

/// I1, I4, I12: nothing is lost, and what is repeated is what was on its way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_or_out_of_order_at_an_endpoint_that_fails_while_relays_are_killed() {
    let rig = Rig::shared().await;
    let endpoint = Arc::new(Endpoint { got: Mutex::default(), chance: Mutex::new(Chance::new(81)) });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = Router::new().fallback(take).with_state(endpoint.clone());
    tokio::spawn(async move { axum::serve(listener, app).await });
    let text = format!(
        "[store]\nurl = {:?}\n[relay]\nlease = \"1s\"\npoll_idle = \"50ms\"\n[[routes]]\nname = \"orders\"\n\
         [routes.retry]\nbase = 1.0\ncap = \"100ms\"\nattempts_max = 100\n\
         [routes.sink]\nkind = \"http\"\nurl = \"http://{address}/{{topic}}\"\nprivate_addresses = true\n",
        rig.database.url()
    );
    let start = |name: &str| rig.relay_with(&surroundings::postroom_binary(), name, &text, &[]);
    let mut processes = vec![start("one"), start("two")];
    let (committed, writers) = rig.write(MESSAGES, 81);
    let mut chance = Chance::new(82);
    let faults = 4;
    for _ in 0..faults {
        let before = committed.load(std::sync::atomic::Ordering::Relaxed);
        rig.until("more was written", async || {
            let now = committed.load(std::sync::atomic::Ordering::Relaxed);
            now > before + MESSAGES / 10 || now >= MESSAGES
        })
        .await;
        let victim = chance.below(2) as usize;
        processes[victim].kill();
        processes[victim] = start("again");
    }
    for writer in writers {
        writer.await.unwrap();
    }
    rig.drained().await;
    for process in processes {
        assert_eq!(process.terminate().0, Some(0));
    }
    let stored = std::mem::take(&mut *endpoint.got.lock().unwrap());
    let history = History { stored, ..rig.history(faults * IN_FLIGHT_MAX, false).await };
    assert!(history.pending.is_empty() && history.dead.is_empty() && history.committed.len() >= MESSAGES);
    assert_clean(&history);
}
