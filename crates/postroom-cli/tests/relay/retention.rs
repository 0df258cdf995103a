//! What is finished and old is removed, and nothing else.

use std::process::Stdio;

use postroom_testkit::postgres::Database;
use postroom_testkit::surroundings;

use crate::commands::{json, postroom, text};
use crate::operators::{Running, until};

/// Both ways to remove what is finished: once, and by a process that runs.
#[tokio::test]
async fn what_is_finished_and_old_goes_by_command_and_by_itself() {
    let database = Database::create().await;
    let store = database.url();
    assert_eq!(postroom(&["migrate", "--store", store]).status.code(), Some(0));
    let client = database.connect().await;
    let sent = async || {
        let write = "select postroom.enqueue(t, 'k', 'x'::text) from unnest(array['orders', 'orders', 'ordres']) t";
        client.batch_execute(write).await.unwrap();
        let out = surroundings::scratch("retained").join("out.jsonl");
        let _relay = Running::relay(store, &format!("kind = \"file\"\npath = {out:?}\n"));
        until(store, "it is sent", |status| {
            status["routes"][0]["backlog"] == 0 && status["routes"][0]["lanes_held"].as_i64() > Some(0)
        });
    };
    let aged = "update postroom.outbox set occurred_at = now() - interval '8 days'";
    let rows = async || client.query_one("select count(*) from postroom.outbox", &[]).await.unwrap().get::<_, i64>(0);
    sent().await;
    let prune = |arguments: &[&str]| postroom(&[&["prune", "--json", "--store", store], arguments].concat());
    assert_eq!(json(&prune(&["--outbox", "7d"]))["outbox"], 0, "too young");
    client.batch_execute(aged).await.unwrap();
    assert_eq!(
        json(&prune(&["--outbox", "7d"])),
        serde_json::json!({ "outbox": 2, "dead": 0, "inbox": 0, "audit": 0 })
    );
    assert_eq!(rows().await, 1, "what no route takes stays");
    let config = surroundings::scratch("retention").join("postroom.toml");
    let routes = "[[routes]]\nname = \"orders\"\ntopics = [\"orders\"]\n[routes.sink]\nkind = \"stdout\"\n";
    std::fs::write(&config, format!("[store]\nurl = {store:?}\n{routes}")).unwrap();
    let nothing = postroom(&["prune", "--config", config.to_str().unwrap()]);
    assert_eq!(nothing.status.code(), Some(2));
    assert!(text(&nothing.stderr).contains("nothing expires"), "{}", text(&nothing.stderr));
    for wrong in [
        "outbox = \"5s\"",
        "dead = \"1h\"",
        "audit = \"1d\"",
        "outbxo = \"7d\"",
        "[[retention.topics]]\ntopics = [\"a\"]",
    ] {
        std::fs::write(&config, format!("[store]\nurl = {store:?}\n[retention]\n{wrong}\n{routes}")).unwrap();
        assert_eq!(postroom(&["prune", "--config", config.to_str().unwrap()]).status.code(), Some(78), "{wrong}");
    }
    sent().await;
    client.batch_execute(aged).await.unwrap();
    let retention = "[retention]\noutbox = \"never\"\n[[retention.topics]]\ntopics = [\"ord*\"]\noutbox = \"7d\"\n";
    std::fs::write(&config, format!("[store]\nurl = {store:?}\n{retention}{routes}")).unwrap();
    let log = std::fs::File::create(config.with_file_name("run.log")).unwrap();
    let mut run = surroundings::postroom();
    run.args(["run", "--config"]).arg(&config).stdout(Stdio::null()).stderr(log);
    let _running = Running(run.spawn().unwrap());
    let began = std::time::Instant::now();
    while rows().await > 2 {
        assert!(
            began.elapsed().as_secs() < 120,
            "{}",
            std::fs::read_to_string(config.with_file_name("run.log")).unwrap()
        );
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    assert_eq!(rows().await, 2, "what no route takes stays");
}

/// Nothing is kept for a route that is not registered, so retention waits for it.
#[tokio::test]
async fn nothing_is_removed_before_every_route_of_the_configuration_is_registered() {
    let database = Database::create().await;
    let store = database.url();
    assert_eq!(postroom(&["migrate", "--store", store]).status.code(), Some(0));
    let client = database.connect().await;
    let refuse = "create function public.not_yet() returns trigger language plpgsql as $$
                  begin if new.name = 'audit' then raise lock_not_available; end if; return new; end $$;
                  create trigger not_yet before insert on postroom.routes for each row execute function public.not_yet();
                  select postroom.enqueue('orders', 'k', 'x'::text) from generate_series(1, 3);
                  update postroom.outbox set occurred_at = now() - interval '8 days'";
    client.batch_execute(refuse).await.unwrap();
    let rows = async || client.query_one("select count(*) from postroom.outbox", &[]).await.unwrap().get::<_, i64>(0);
    let dir = surroundings::scratch("unregistered");
    let (config, log, audit) = (dir.join("postroom.toml"), dir.join("run.log"), dir.join("audit.jsonl"));
    let routes: String = ["orders", "audit"]
        .map(|name| {
            let out = dir.join(format!("{name}.jsonl"));
            format!("[[routes]]\nname = {name:?}\ntopics = [\"*\"]\n[routes.sink]\nkind = \"file\"\npath = {out:?}\n")
        })
        .concat();
    std::fs::write(&config, format!("[store]\nurl = {store:?}\n[retention]\noutbox = \"7d\"\n{routes}")).unwrap();
    let mut run = surroundings::postroom();
    run.args(["run", "--config"]).arg(&config).stdout(Stdio::null()).stderr(std::fs::File::create(&log).unwrap());
    let _running = Running(run.spawn().unwrap());
    until(store, "one route has sent everything", |status| {
        status["routes"][0]["backlog"] == 0 && status["routes"][0]["lanes_held"].as_i64() > Some(0)
    });
    let began = std::time::Instant::now();
    let in_time =
        |what: &str| assert!(began.elapsed().as_secs() < 120, "{what}: {}", std::fs::read_to_string(&log).unwrap());
    while !std::fs::read_to_string(&log).unwrap().contains("no message is removed before route \"audit\"") {
        in_time("it says why it removes nothing");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    let prune = postroom(&["prune", "--config", config.to_str().unwrap()]);
    assert_eq!(prune.status.code(), Some(1));
    assert!(
        text(&prune.stderr).contains("route \"audit\" of the configuration is not registered"),
        "{}",
        text(&prune.stderr)
    );
    assert_eq!(rows().await, 3);
    client.batch_execute("drop trigger not_yet on postroom.routes").await.unwrap();
    while rows().await > 0 {
        in_time("they go when the route has sent them");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    assert_eq!(std::fs::read_to_string(&audit).unwrap().lines().count(), 3);
}
