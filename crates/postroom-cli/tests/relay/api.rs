//! The admin API of a running postroom, on both stores.

use std::collections::HashMap;
use std::process::Stdio;

use postroom_testkit::surroundings;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::commands::{json as told, postroom};
use crate::operators::{stores, until};
use crate::reconcile::execute;

/// A `postroom run` with three tokens.
struct Api {
    address: String,
    tokens: HashMap<&'static str, String>,
    process: std::process::Child,
}

impl Drop for Api {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&self.body)))
    }

    /// An error, as each one is.
    fn code(&self) -> String {
        assert!(self.head.contains("content-type: application/problem+json"), "{}", self.head);
        self.json()["code"].as_str().unwrap().to_owned()
    }
}

impl Api {
    async fn start(store: &str) -> Self {
        let mut tokens = HashMap::new();
        let mut entries = String::new();
        for (name, role, more) in
            [("viewer", "viewer", ""), ("operator", "operator", "payloads = true\n"), ("admin", "admin", "")]
        {
            let made = told(&postroom(&["--json", "token", name, "--role", role]));
            tokens.insert(name, made["token"].as_str().unwrap().to_owned());
            let sha256 = made["sha256"].as_str().unwrap();
            entries += &format!("[[admin.tokens]]\nname = {name:?}\nrole = {role:?}\nsha256 = {sha256:?}\n{more}");
        }
        let dir = surroundings::scratch("api");
        let (config, log) = (dir.join("postroom.toml"), dir.join("run.log"));
        let out = dir.join("out.jsonl");
        let text = format!(
            "[store]\nurl = {store:?}\n[[routes]]\nname = \"orders\"\ntopics = [\"orders\", \"odd*\"]\n[routes.sink]\nkind = \"file\"\npath = {out:?}\n\
             [admin]\nlisten = \"127.0.0.1:0\"\n{entries}"
        );
        std::fs::write(&config, text).unwrap();
        let process = surroundings::postroom()
            .args(["run", "--config"])
            .arg(&config)
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let mut api = Self { address: String::new(), tokens, process };
        while api.address.is_empty() {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            let log = std::fs::read_to_string(&log).unwrap();
            assert!(api.process.try_wait().unwrap().is_none(), "{log}");
            if let Some((_, after)) = log.split_once("/metrics are at http://") {
                api.address = after.split_once('\n').map(|(address, _)| address.trim().to_owned()).unwrap_or_default();
            }
        }
        api
    }

    async fn send(&self, who: &str, method: &str, path: &str, body: &[u8]) -> Answer {
        let mut stream = TcpStream::connect(&self.address).await.unwrap();
        let token = self.tokens.get(who).map(|token| format!("authorization: Bearer {token}\r\n")).unwrap_or_default();
        let head = format!(
            "{method} /api/v1{path} HTTP/1.0\r\nhost: {}\r\n{token}x-request-id: test-1\r\ncontent-length: {}\r\n\r\n",
            self.address,
            body.len()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        // Whoever sends too much is told so before it is read.
        let _ = stream.write_all(body).await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap();
        let head = String::from_utf8_lossy(&answer[..end]).to_ascii_lowercase();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer { status, head, body: answer[end + 4..].to_vec() }
    }

    async fn get(&self, who: &str, path: &str) -> Answer {
        // A token asks at a limited rate.
        loop {
            let answer = self.send(who, "GET", path, b"").await;
            if answer.status != 429 {
                return answer;
            }
            tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        }
    }

    async fn post(&self, who: &str, path: &str, body: Value) -> Answer {
        self.send(who, "POST", path, body.to_string().as_bytes()).await
    }
}

/// The answer is what the description says.
fn holds_to(document: &Value, method: &str, path: &str, answer: &Value) {
    let described = &document["paths"][path][method]["responses"]["2XX"]["content"]["application/json"]["schema"];
    assert!(described.is_object(), "{method} {path} is not described");
    let schema = json!({ "$ref": described["$ref"], "components": document["components"] });
    let validator = jsonschema::validator_for(&schema).unwrap();
    let wrong: Vec<String> =
        validator.iter_errors(answer).map(|error| format!("{}: {error}", error.instance_path())).collect();
    assert!(wrong.is_empty(), "{method} {path}: {wrong:?}: {answer}");
}

#[tokio::test]
async fn the_api_shows_and_does_what_its_description_and_a_token_allow() {
    let (_database, stores) = stores().await;
    for store in &stores {
        let api = Api::start(store).await;
        let send = |topic: &str, key: &str| {
            let arguments = [
                "--json",
                "send",
                "--topic",
                topic,
                "--type",
                "order.placed",
                "--key",
                key,
                "--payload",
                "secret payload",
                "--store",
                store,
            ];
            told(&postroom(&arguments))["id"].as_str().unwrap().to_owned()
        };
        let ids: Vec<String> = (0..5).map(|n| send("orders", &format!("k{n}"))).collect();
        send("odd\u{1b}[2J<b>\u{202e}", "k/1 ä");
        until(store, "it is sent", |status| {
            status["routes"][0]["backlog"] == 0 && status["routes"][0]["lanes_held"].as_i64() > Some(0)
        });

        // Who may ask.
        let document = api.get("viewer", "/openapi.json").await.json();
        assert_eq!(document["openapi"], "3.1.0");
        for (who, method, path, status, code) in [
            ("nobody", "GET", "/status", 401, "token-required"),
            ("nobody", "GET", "/openapi.json", 401, "token-required"),
            ("viewer", "POST", "/operations", 403, "role-required"),
            ("viewer", "GET", "/messages/x/payload", 403, "role-required"),
            ("admin", "GET", "/messages/x/payload", 403, "payloads-required"),
            ("operator", "PATCH", "/routes/orders", 403, "role-required"),
            ("viewer", "GET", "/nothing", 404, "no-such-path"),
            ("viewer", "DELETE", "/status", 405, "wrong-method"),
            ("viewer", "GET", "/messages?tpoic=orders", 400, "bad-query"),
            ("viewer", "GET", "/messages?limit=0", 400, "bad-query"),
            ("viewer", "GET", "/messages/x", 400, "bad-id"),
            ("viewer", "GET", "/messages/0199c9a2-7d2e-7bd0-a8d2-0b6d9c1c9a01", 404, "no-such-message"),
            ("viewer", "GET", "/operations/0199c9a2-7d2e-7bd0-a8d2-0b6d9c1c9a01", 404, "no-such-operation"),
            ("operator", "POST", "/operations", 400, "bad-body"),
            ("operator", "POST", "/routes/orders/keys//park", 400, "bad-path"),
            ("operator", "POST", "/routes/orders/keys/a%00b/park", 400, "bad-path"),
            ("viewer", "GET", "/messages/%ff", 400, "bad-path"),
            ("viewer", "GET", "/messages?topic", 400, "bad-query"),
            ("viewer", "GET", "/messages?key=%ff", 400, "bad-query"),
            ("viewer", "GET", "/messages?after=0", 400, "bad-query"),
            ("viewer", "GET", "/dead?after_route=orders", 400, "bad-query"),
            ("viewer", "GET", "/messages?newer_than_seconds=60&older_than_seconds=60", 400, "bad-query"),
            ("viewer", "GET", "/messages?route=orders&state=unrouted", 400, "bad-query"),
            ("viewer", "GET", "/messages?route=ordres", 404, "no-such-route"),
        ] {
            let answer = api.send(who, method, path, b"").await;
            assert_eq!((answer.status, answer.code().as_str()), (status, code), "{who} {method} {path}");
            assert!(answer.head.contains("x-request-id: test-1"), "{}", answer.head);
        }
        let large = api.send("operator", "POST", "/operations", &vec![b' '; 2 << 20]).await;
        assert_eq!((large.status, large.code().as_str()), (413, "body-too-large"));
        let unknown = api.send("nobody", "POST", "/operations", &vec![b' '; 2 << 20]).await;
        assert_eq!(unknown.status, 401, "before its body is read");
        for reason in ["a\u{1b}[31m", "a\nb", "a\u{202e}b"] {
            let answer = api.post("operator", "/routes/orders/keys/k/park", json!({ "reason": reason })).await;
            assert_eq!(answer.code(), "bad-reason", "{reason:?}");
        }
        assert_eq!(api.post("operator", "/routes/orders/keys/k/park", json!(["x"])).await.code(), "bad-body");

        // Everything that may be looked at is as it is described, and steers no terminal and no page.
        for path in document["paths"].as_object().unwrap().keys() {
            if document["paths"][path]["get"].is_null()
                || path.contains("/operations/{id}")
                || path.ends_with("/payload")
            {
                continue;
            }
            let answer = api.get("viewer", &path.replace("{id}", &ids[0])).await;
            assert_eq!(answer.status, 200, "{path}: {}", String::from_utf8_lossy(&answer.body));
            holds_to(&document, "get", path, &answer.json());
            let raw = String::from_utf8(answer.body).unwrap();
            assert!(raw.chars().all(|c| !c.is_control() && !"<>\u{202e}".contains(c)), "{path}: {raw}");
            assert!(!raw.contains("secret payload"), "{path}");
        }
        let odd = api.get("viewer", "/messages?topic=odd%1b%5b2J%3cb%3e%e2%80%ae").await.json();
        assert_eq!(odd["messages"].as_array().map(Vec::len), Some(1), "{odd}");

        // A payload leaves an audit row.
        let of = format!("/messages/{}/payload", ids[0]);
        assert_eq!(api.get("operator", &of).await.code(), "reason-required");
        let payload = api.get("operator", &format!("{of}?reason=ticket%207")).await;
        assert_eq!((payload.status, payload.body.as_slice()), (200, &b"secret payload"[..]));

        // Dead letters, page by page.
        let time = if store.starts_with("sqlite:") { ("occurred_ms", "0") } else { ("occurred_at", "now()") };
        for (n, id) in ids.iter().enumerate() {
            let sql = format!(
                "insert into {} (route, seq, lane, attempts, cause, error, id, topic, type, payload, content_type, {})
                 values ('old', {}, 0, 1, 'permanent', 'x', '{id}', 'orders', 'x', '', 'x', {})",
                if store.starts_with("sqlite:") { "postroom_dead_letters" } else { "postroom.dead_letters" },
                time.0,
                // By seq, and neither by id nor by the time of death.
                9 - n,
                time.1,
            );
            execute(store, &sql).await;
        }
        for path in ["/dead", "/dead/headlines"] {
            let (mut found, mut after) = (Vec::new(), String::new());
            loop {
                let page = api.get("viewer", &format!("{path}?limit=2{after}")).await.json();
                holds_to(&document, "get", path, &page);
                let letters = page.get("dead_letters").unwrap_or(&page["headlines"]).as_array().unwrap();
                found.extend(letters.iter().map(|letter| letter["id"].as_str().unwrap().to_owned()));
                let Some(next) = page["next"].as_object() else { break };
                let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                after = next.iter().map(|(name, value)| format!("&{name}={}", text(value))).collect();
            }
            found.reverse();
            assert_eq!(found, ids, "{path}");
        }

        // An operation from its preview to its end.
        let all = json!({ "kind": "replay", "route": "orders", "all": true, "rate": 100, "reason": "ticket 7" });
        let refused = json!({ "kind": "replay", "route": "orders", "reason": "x" });
        assert_eq!(api.post("operator", "/operations", refused).await.code(), "filter-required");
        let no_reason = json!({ "kind": "replay", "route": "orders", "all": true });
        assert_eq!(api.post("operator", "/operations", no_reason).await.code(), "reason-required");
        let mistyped = json!({ "kind": "replay", "route": "ordres", "all": true, "reason": "x" });
        assert_eq!(api.post("operator", "/operations", mistyped).await.code(), "no-such-route");
        let unknown = json!({ "kind": "replay", "route": "orders", "all": true, "reason": "x", "canray": 5 });
        assert_eq!(api.post("operator", "/operations", unknown).await.code(), "bad-body");
        let mut dry = all.clone();
        dry["dry_run"] = true.into();
        let preview = api.post("operator", "/operations", dry).await;
        assert_eq!((preview.status, &preview.json()["preview"]["matching"]), (200, &6.into()));
        let begun = api.post("operator", "/operations", all).await;
        assert_eq!(begun.status, 201);
        holds_to(&document, "post", "/operations", &begun.json());
        let id = begun.json()["operation"].as_str().unwrap().to_owned();
        let events = api.get("viewer", &format!("/operations/{id}/events")).await;
        let stream = String::from_utf8(events.body).unwrap();
        assert!(events.head.contains("text/event-stream") && stream.contains("event: end\ndata: {"), "{stream}");
        let operation = api.get("viewer", &format!("/operations/{id}")).await.json();
        holds_to(&document, "get", "/operations/{id}", &operation);
        assert_eq!((&operation["state"], &operation["done"]), (&"done".into(), &6.into()), "{operation}");
        assert_eq!(operation["actor"], "operator (token)");
        let over = api.post("operator", &format!("/operations/{id}/pause"), json!({ "reason": "x" })).await;
        assert_eq!((over.status, over.code().as_str()), (409, "nothing-to-do"));

        // Keys and routes.
        let key = "/routes/orders/keys/k%2F1%20%C3%A4";
        let parked = api.post("operator", &format!("{key}/park"), json!({ "reason": "x" })).await.json();
        assert_eq!((&parked["key"], &parked["changed"]), (&"k/1 ä".into(), &true.into()), "{parked}");
        holds_to(&document, "post", "/routes/{route}/keys/{key}/park", &parked);
        let again = api.post("operator", &format!("{key}/unpark"), json!({ "reason": "x" })).await.json();
        assert_eq!(again["changed"], true);
        let change = json!({ "on_dead": "block", "reason": "x" });
        let changed = api.send("admin", "PATCH", "/routes/orders", change.to_string().as_bytes()).await;
        holds_to(&document, "patch", "/routes/{route}", &changed.json());
        assert_eq!(changed.json()["on_dead"], "block");
        let forget = api.send("admin", "DELETE", "/routes/orders", b"{\"reason\":\"x\"}").await;
        assert_eq!((forget.status, forget.code().as_str()), (409, "route-in-use"), "its relay runs");
        let note = api.post("operator", "/dead/notes", json!({ "group": "g", "note": "fixed", "reason": "x" })).await;
        holds_to(&document, "post", "/dead/notes", &note.json());

        // Each deed has its row, with the token's name.
        let expected = "'payload.read', 'operation.begin', 'key.park', 'key.unpark', 'route.set', 'dead.note'";
        let sql = format!(
            "create table seen as select count(distinct action) as n from postroom.audit
              where action in ({expected}) and actor in ('operator (token)', 'admin (token)')"
        );
        execute(store, &sql).await;
        let seen = match store.strip_prefix("sqlite:") {
            Some(file) => postroom_sqlite::connect(std::path::Path::new(file))
                .unwrap()
                .query_row("select n from seen", [], |row| row.get(0))
                .unwrap(),
            None => postroom_testkit::postgres::connect(store)
                .await
                .query_one("select n from seen", &[])
                .await
                .unwrap()
                .get::<_, i64>(0),
        };
        assert_eq!(seen, 6);

        // Whoever asks too often is told so, and others are not.
        let mut refused = 0;
        for _ in 0..300 {
            refused += u32::from(api.send("viewer", "GET", "/status?x=1", b"").await.status == 429);
        }
        assert!(refused > 0);
        assert_eq!(api.send("admin", "GET", "/operations", b"").await.status, 200);
    }
}
