//! One application with two databases, shared out by user as in the third article: the database is chosen first, then the business row and its
//! message are written there in one transaction.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use postroom::{Message, Outbox, Shards};
use postroom_postgres::Postgres;
use postroom_testkit::chance::Chance;
use postroom_testkit::postgres::Database;
use postroom_testkit::surroundings;
use serde_json::Value;

use crate::commands::postroom;
use crate::operators::{Running, until};

/// As the third article's router does: the upper half of the hash on the lower one, and as many of its bits as there are databases.
fn router(user: &str) -> String {
    let hash = user.bytes().fold(0_u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(u32::from(byte)));
    format!("db-{}", (hash ^ (hash >> 16)) & 1)
}

fn sent(file: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    // The last line may be half of one: its relay was killed.
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

#[tokio::test]
async fn users_over_two_databases_keep_their_order_and_lose_nothing_when_a_relay_dies() {
    let databases = [Database::create().await, Database::create().await];
    let dir = surroundings::scratch("shards");
    let out = |name: &str| dir.join(format!("{name}.jsonl"));
    let mut clients = Vec::new();
    let mut configs = HashMap::new();
    for (n, database) in databases.iter().enumerate() {
        let name = format!("db-{n}");
        assert_eq!(postroom(&["migrate", "--store", database.url()]).status.code(), Some(0));
        let client = database.connect().await;
        client
            .batch_execute("create table user_award_record (id bigint generated always as identity primary key, user_id text not null, award int not null)")
            .await
            .unwrap();
        let config = dir.join(format!("{name}.toml"));
        let text = format!(
            "[store]\nurl = {:?}\n[relay]\nlease = \"1s\"\npoll_idle = \"50ms\"\n[[routes]]\nname = \"awards\"\n[routes.sink]\nkind = \"file\"\npath = {:?}\n",
            database.url(),
            out(&name)
        );
        std::fs::write(&config, text).unwrap();
        configs.insert(name.clone(), config.to_str().unwrap().to_owned());
        clients.push((name, tokio::sync::Mutex::new(client)));
    }
    let shards = Shards::by_function(clients, router).unwrap();
    let mut relays: HashMap<&str, Running> =
        configs.iter().map(|(name, config)| (name.as_str(), Running::of(config))).collect();

    let mut chance = Chance::new(7);
    let (mut committed, mut of_user): (HashMap<String, &str>, HashMap<String, Vec<String>>) = Default::default();
    for award in 0..600 {
        if award == 300 {
            let mut killed = relays.remove("db-0").unwrap();
            killed.0.kill().unwrap();
            killed.0.wait().unwrap();
            relays.insert("db-0", Running::of(&configs["db-0"]));
        }
        let user = format!("user-{}", chance.below(40));
        let (name, client) = shards.of(&user).unwrap();
        let mut client = client.lock().await;
        let mut tx = client.transaction().await.unwrap();
        let insert = "insert into user_award_record (user_id, award) values ($1, $2)";
        tx.execute(insert, &[&user, &award]).await.unwrap();
        let message = Message::new("send_award", "award.granted", format!("{{\"award\":{award}}}")).key(user.as_str());
        let id = message.id.to_string();
        Postgres.enqueue(&mut tx, &[message]).await.unwrap();
        if chance.below(5) == 0 {
            tx.rollback().await.unwrap();
        } else {
            tx.commit().await.unwrap();
            committed.insert(id.clone(), name);
            of_user.entry(user).or_default().push(id);
        }
    }
    let mut where_seen: HashMap<String, String> = HashMap::new();
    let mut first_seen: Vec<String> = Vec::new();
    for (n, database) in databases.iter().enumerate() {
        let name = format!("db-{n}");
        until(database.url(), "everything is sent", |status| status["routes"][0]["backlog"] == 0);
        for message in sent(&out(&name)) {
            let id = message["id"].as_str().unwrap().to_owned();
            if where_seen.insert(id.clone(), name.clone()).is_none() {
                first_seen.push(id);
            }
        }
        let client = database.connect().await;
        let users = client.query("select distinct user_id from user_award_record", &[]).await.unwrap();
        assert!(users.len() > 5, "both are used");
        assert!(users.iter().all(|row| router(row.get(0)) == name), "a user is in one database");
    }
    let ids: HashSet<&String> = committed.keys().collect();
    assert_eq!(where_seen.keys().collect::<HashSet<_>>(), ids, "what was committed, and nothing else");
    assert!(committed.iter().all(|(id, name)| where_seen[id] == **name), "from the database of the user");
    for (user, expected) in of_user {
        let got: Vec<&String> = first_seen.iter().filter(|id| expected.contains(id)).collect();
        assert_eq!(got, expected.iter().collect::<Vec<_>>(), "{user}: in order");
    }
}
