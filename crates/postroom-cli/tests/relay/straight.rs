//! Relays that put messages straight into the inbox of another database, while they are killed.

use std::sync::atomic::Ordering;

use postroom_postgres::Connector;
use postroom_testkit::judge::History;
use postroom_testkit::postgres::Database;
use postroom_testkit::surroundings;

use crate::commands::{json as told, postroom};
use crate::rig::{Rig, assert_clean};

const MESSAGES: usize = 10_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_message_is_in_the_inbox_of_another_database_exactly_once_while_relays_are_killed() {
    let rig = Rig::shared().await;
    let inbox = Database::create().await;
    let text = format!(
        "[store]\nurl = {:?}\n[relay]\nlease = \"1s\"\npoll_idle = \"50ms\"\n[[routes]]\nname = \"orders\"\n[routes.sink]\nkind = \"inbox\"\n\
         url = {:?}\nconsumer = \"billing\"\n",
        rig.database.url(),
        inbox.url()
    );
    let config = rig.dir.join("straight.toml");
    std::fs::write(&config, &text).unwrap();
    let config = config.display().to_string();
    let checked = postroom(&["check", "--config", &config]);
    let checked = String::from_utf8(checked.stdout).unwrap();
    assert!(checked.contains("the inbox in") && checked.contains("postroom migrate"), "{checked}");
    postroom_postgres::migrate(&Connector::new(inbox.url()).unwrap(), 4).await.unwrap();
    assert_eq!(told(&postroom(&["--json", "check", "--config", &config]))["ok"], true);
    let client = inbox.connect().await;
    let kept =
        async || -> i64 { client.query_one("select count(*) from postroom.inbox_messages", &[]).await.unwrap().get(0) };
    let start = |name: &str| rig.relay_with(&surroundings::postroom_binary(), name, &text, &[]);
    let mut processes = vec![start("one"), start("two")];
    let (committed, writers) = rig.write(MESSAGES, 91);
    for fault in 0..8 {
        let before = kept().await;
        rig.until("the inbox has got more", async || {
            kept().await > before || committed.load(Ordering::Relaxed) >= MESSAGES
        })
        .await;
        if fault % 4 == 3 {
            processes[0].signal("STOP");
            let since = std::time::Instant::now();
            rig.until("its lease is over", async || since.elapsed().as_secs() >= 3).await;
            processes[0].signal("CONT");
        } else {
            processes[fault % 2].kill();
            processes[fault % 2] = start("again");
        }
    }
    for writer in writers {
        writer.await.unwrap();
    }
    rig.drained().await;
    for process in processes {
        assert_eq!(process.terminate().0, Some(0));
    }
    let rows = client.query("select message_id::text from postroom.inbox_messages order by seq", &[]).await.unwrap();
    let stored: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    // Nothing twice, whatever was killed.
    let history = History { stored, ..rig.history(0, false).await };
    assert!(history.pending.is_empty() && history.dead.is_empty() && history.committed.len() >= MESSAGES);
    assert_clean(&history);
}
