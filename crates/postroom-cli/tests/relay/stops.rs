//! SIGTERM under load: nothing twice, exit 0.

use crate::rig::{Rig, assert_clean};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_graceful_stop_under_load_repeats_nothing() {
    let rig = Rig::shared().await;
    let (_, writers) = rig.write(60_000, 11);
    for stop in 1..=100 {
        let relay = rig.relay();
        let enough = stop * 500;
        rig.until("more has flowed", async || rig.audit.ready().await >= enough).await;
        let (code, printed) = relay.terminate();
        assert_eq!(code, Some(0), "{printed}");
        let summary: serde_json::Value = serde_json::from_str(printed.trim()).unwrap();
        for trouble in ["unfinished", "unknown", "fenced", "lanes_lost", "sink_outages"] {
            assert_eq!(summary["routes"][0][trouble], 0, "{trouble} without a fault: {printed}");
        }
    }
    for writer in writers {
        writer.await.unwrap();
    }
    let relay = rig.relay();
    rig.drained().await;
    assert_eq!(relay.terminate().0, Some(0));
    assert_clean(&rig.history(0, false).await);
}
