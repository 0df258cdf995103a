//! Relays that send mails and are killed again and again in the middle of one read.

use std::collections::HashSet;
use std::path::PathBuf;

use postroom_testkit::services::SmtpServer;
use postroom_testkit::surroundings;
use serde_json::Value;

use crate::rig::Rig;

const MAILS: usize = 60;
/// With so many more at the server, a relay is killed.
const EACH: usize = 8;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_that_is_killed_in_the_middle_of_a_read_has_got_on() {
    let rig = Rig::shared().await;
    let server = SmtpServer::start(&surroundings::scratch("smtp"), "{}").unwrap();
    let client = rig.database.connect().await;
    let write = "select postroom.enqueue('orders', 'mail', '\"x\"'::jsonb, key => (n % 10)::text, headers => '{\"mail-to\":\"slow@example.com\"}')::text
                   from generate_series(1, $1::bigint) n";
    let written: HashSet<String> =
        client.query(write, &[&(MAILS as i64)]).await.unwrap().iter().map(|row| row.get(0)).collect();
    let text = format!(
        "[store]\nurl = {:?}\n[relay]\nlease = \"1s\"\npoll_idle = \"50ms\"\n[[routes]]\nname = \"orders\"\n\
         [routes.sink]\nkind = \"smtp\"\nurl = \"smtp://{}\"\nfrom = \"shop@example.com\"\n",
        rig.database.url(),
        server.address()
    );
    let sent = || -> Vec<String> {
        let mails = server.mails().unwrap();
        let id = |mail: &String| serde_json::from_str::<Value>(mail).unwrap()["id"].as_str().unwrap().to_owned();
        mails.iter().map(id).collect()
    };
    // The one of the tests, which has the feature.
    let program = PathBuf::from(env!("CARGO_BIN_EXE_postroom"));
    let mut kills = 0;
    loop {
        let before = sent().len();
        let mut relay = rig.relay_with(&program, "one", &text, &[]);
        let there = || sent().into_iter().collect::<HashSet<_>>().len();
        rig.until("more mails are sent", async || sent().len() >= before + EACH || there() == MAILS).await;
        if there() == MAILS {
            rig.drained().await;
            assert_eq!(relay.terminate().0, Some(0));
            break;
        }
        relay.kill();
        kills += 1;
        assert!(kills < MAILS, "each relay sends what the one before had sent: {} of {MAILS} are there", there());
    }
    let sent = sent();
    println!("{} mails for {MAILS} messages, {kills} kills", sent.len());
    assert_eq!(sent.iter().cloned().collect::<HashSet<_>>(), written, "I1, I2");
}
