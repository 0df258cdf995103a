//! Plans at a million rows: index scans only, and a read costs what it brings, not what waits behind it.

use postroom::Operator;
use serde_json::Value;
use tokio_postgres::Client;
use tokio_postgres::types::ToSql;

use crate::setup::{ROUTE, prepared, source};

const ROWS: i64 = 1_000_000;

/// Where all lanes stand in a read.
struct At<'a> {
    seq: i64,
    floor: i64,
    snapshot: &'a str,
}

/// Runs the claim under `explain (analyze, buffers)`, with the settings of the relay's own session.
async fn explain(client: &Client, at: &At<'_>, limit: i64) -> Value {
    let lanes: Vec<i16> = (0..16).collect();
    let (seqs, floors, limits) = (vec![at.seq; 16], vec![at.floor; 16], vec![limit; 16]);
    let snapshots = vec![at.snapshot; 16];
    let (catch_ups, catch_up_seqs): (Vec<Option<&str>>, Vec<Option<i64>>) = (vec![None; 16], vec![None; 16]);
    let xmax = at.snapshot.split(':').nth(1).filter(|_| at.floor > 0);
    let highest = Some(at.floor).filter(|floor| *floor > 0);
    let sql = format!("explain (analyze, buffers, format json) {}", include_str!("../../src/log/sql/claim.sql"));
    let bytes = 64_i64 << 20;
    let parameters: [&(dyn ToSql + Sync); 13] = [
        &lanes,
        &seqs,
        &floors,
        &snapshots,
        &catch_ups,
        &catch_up_seqs,
        &limits,
        &ROUTE,
        &bytes,
        &xmax,
        &highest,
        &0_i64,
        &false,
    ];
    // The second run: what the first one read into the cache is not counted.
    client.query_one(&sql, &parameters).await.unwrap();
    client.query_one(&sql, &parameters).await.unwrap().get::<_, Value>(0)[0]["Plan"].clone()
}

fn scans(plan: &Value, found: &mut Vec<(String, String)>) {
    if plan["Relation Name"] == "outbox" {
        let text = |key: &str| plan[key].as_str().unwrap_or("").to_owned();
        found.push((text("Node Type"), text("Index Name")));
    }
    for child in plan["Plans"].as_array().into_iter().flatten() {
        scans(child, found);
    }
}

fn buffers(plan: &Value) -> i64 {
    plan["Shared Hit Blocks"].as_i64().unwrap() + plan["Shared Read Blocks"].as_i64().unwrap()
}

fn only_index_scans(plan: &Value) {
    let mut found = Vec::new();
    scans(plan, &mut found);
    assert!(found.len() >= 3, "three branches read the outbox: {found:?}");
    for (node, index) in &found {
        assert!(["Index Scan", "Index Only Scan"].contains(&node.as_str()), "{found:?}");
        assert!(["outbox_fresh", "outbox_late"].contains(&index.as_str()), "{found:?}");
    }
    assert!(found.iter().any(|(_, index)| index == "outbox_late"), "{found:?}");
}

#[tokio::test]
async fn reads_are_index_scans_whose_cost_does_not_grow_with_the_backlog() {
    let database = prepared().await;
    let client = database.connect().await;
    drop(source(&database, "relay").await);
    client
        .execute(
            "insert into postroom.outbox (topic, type, payload, key)
             select 'orders', 'order.placed', convert_to('payload ' || n, 'UTF8'), 'key-' || n % 1000
               from generate_series(1, $1::bigint) n",
            &[&ROWS],
        )
        .await
        .unwrap();
    client.batch_execute("analyze postroom.outbox; set enable_seqscan = off; set jit = off").await.unwrap();
    let snapshot: String = client.query_one("select pg_current_snapshot()::text", &[]).await.unwrap().get(0);

    let behind = |backlog: i64| At { seq: ROWS - backlog, floor: ROWS - backlog, snapshot: &snapshot };
    let short = explain(&client, &behind(1_000), 62).await;
    let long = explain(&client, &behind(ROWS), 62).await;
    only_index_scans(&short);
    only_index_scans(&long);
    assert_eq!(long["Actual Rows"].as_f64().unwrap() as i64, 16 * 62 + 1);
    let (short, long) = (buffers(&short), buffers(&long));
    println!("buffers for the next thousand: {short} at a backlog of 1,000, {long} at a million");
    // Reading the backlog would be tens of thousands. Each transaction of another test that is in progress at one of the two costs up to 16 or so.
    assert!(long < short * 3 / 2 + 1_000, "{long} buffers at a million, {short} at a thousand");

    // A page of the list reads its share, and not a lane or the table, whatever is asked for.
    client.batch_execute("reset enable_seqscan").await.unwrap();
    let none: Option<&str> = None;
    for (topic, key, place) in [
        (none, none, none),
        (Some("nothing"), none, none),
        (none, Some("key-7"), none),
        (none, Some("nobody's"), none),
        (none, none, Some("dead")),
        (none, none, Some("done")),
    ] {
        let (any_age, any_seq) = (None::<f64>, None::<i64>);
        let parameters: [&(dyn ToSql + Sync); 12] =
            [&none, &topic, &key, &place, &any_age, &any_age, &101_i64, &8_000_i64, &8_000_i64, &any_seq, &none, &none];
        let page = buffers_of(&client, include_str!("../../src/operate/sql/messages.sql"), &parameters).await;
        println!("buffers for a page, topic {topic:?}, key {key:?}, place {place:?}: {page}");
        assert!(page < 6_000, "{page} buffers for topic {topic:?}, key {key:?}, place {place:?}");
    }
    client.batch_execute("set enable_seqscan = off").await.unwrap();

    // Late rows: transactions that were open when the snapshot was taken, with rows behind the position.
    let mut writers = Vec::new();
    for _ in 0..8 {
        let writer = database.connect().await;
        writer.batch_execute("begin; select postroom.enqueue('orders', 'late', 'x')").await.unwrap();
        writers.push(writer);
    }
    let floor: i64 = client.query_one("select floor_seq from postroom.checkpoint()", &[]).await.unwrap().get(0);
    client.batch_execute("select postroom.enqueue('orders', 'order.placed', 'x')").await.unwrap();
    let snapshot: String = client.query_one("select pg_current_snapshot()::text", &[]).await.unwrap().get(0);
    let seq: i64 = client.query_one("select max(seq) from postroom.outbox", &[]).await.unwrap().get(0);
    for writer in &writers {
        writer.batch_execute("commit").await.unwrap();
    }
    let late = explain(&client, &At { seq, floor, snapshot: &snapshot }, 62).await;
    only_index_scans(&late);
    assert_eq!(late["Actual Rows"].as_f64().unwrap() as i64, 8 + 1);
    println!("buffers for 8 late rows of 8 transactions in 16 lanes: {}", buffers(&late));
    assert!(buffers(&late) < 2_000);
}

/// Runs a statement twice under `explain (analyze, buffers)`; returns the buffers of the second run.
async fn buffers_of(client: &Client, sql: &str, parameters: &[&(dyn ToSql + Sync)]) -> i64 {
    let sql = format!("explain (analyze, buffers, format json) {sql}");
    client.query_one(&sql, parameters).await.unwrap();
    buffers(&client.query_one(&sql, parameters).await.unwrap().get::<_, Value>(0)[0]["Plan"])
}

#[tokio::test]
async fn an_empty_poll_costs_the_same_with_many_transactions_in_progress() {
    let database = prepared().await;
    let client = database.connect().await;
    drop(source(&database, "relay").await);
    client.batch_execute("set enable_seqscan = off; set jit = off").await.unwrap();
    let floor: i64 = client.query_one("select floor_seq from postroom.checkpoint()", &[]).await.unwrap().get(0);
    let mut writers = Vec::new();
    for _ in 0..40 {
        let writer = database.connect().await;
        writer.batch_execute("begin; select postroom.enqueue('orders', 'order.placed', 'x')").await.unwrap();
        writers.push(writer);
    }
    let snapshot: String = client.query_one("select pg_current_snapshot()::text", &[]).await.unwrap().get(0);
    let at = At { seq: 1_000_000, floor, snapshot: &snapshot };
    let busy = buffers(&explain(&client, &at, 62).await);
    for writer in &writers {
        writer.batch_execute("rollback").await.unwrap();
    }
    let snapshot: String = client.query_one("select pg_current_snapshot()::text", &[]).await.unwrap().get(0);
    let idle = buffers(&explain(&client, &At { snapshot: &snapshot, ..at }, 62).await);
    println!("buffers of an empty poll: {busy} with 40 transactions in progress, {idle} with none");
    // One look-up of each of the 40 in each of the 16 lanes would be 640 and more. The snapshot lists transactions of other tests too.
    assert!(busy <= idle + 300, "{busy} against {idle}");
}

#[tokio::test]
async fn looking_for_parked_messages_passes_over_none_that_are_not_due() {
    let database = prepared().await;
    let client = database.connect().await;
    drop(source(&database, "relay").await);
    let scheduled = "insert into postroom.parked (route, seq, lane, ordering_key, state, attempts, due_at, id, topic, type, payload, content_type, occurred_at)
                     select $1, n, n % 16, null, 'scheduled', 0, now() + interval '1 day', gen_random_uuid(), 't', 'k', '', 'x', now()
                       from generate_series(1, 300000) n";
    client.execute(scheduled, &[&ROUTE]).await.unwrap();
    client.batch_execute("analyze postroom.parked; set enable_seqscan = off; set jit = off").await.unwrap();
    let lanes: Vec<i16> = (0..16).collect();
    let (in_hand, heads, followers, bytes) = (Vec::<i64>::new(), 500_i64, 200_i64, 64_i64 << 20);
    let parameters: [&(dyn ToSql + Sync); 6] = [&ROUTE, &lanes, &in_hand, &heads, &followers, &bytes];
    let cost = buffers_of(&client, include_str!("../../src/log/sql/claim_parked.sql"), &parameters).await;
    println!("buffers for 300,000 scheduled messages, none due: {cost}");
    assert!(cost < 50, "{cost}");

    // What was deleted, while a snapshot of before is held, is no business of a claim.
    let reader = database.connect().await;
    reader.batch_execute("begin isolation level repeatable read; select from postroom.parked limit 1").await.unwrap();
    client.execute("delete from postroom.parked", &[]).await.unwrap();
    let snapshot: String = client.query_one("select pg_current_snapshot()::text", &[]).await.unwrap().get(0);
    let cost = buffers(&explain(&client, &At { seq: 10, floor: 10, snapshot: &snapshot }, 62).await);
    println!("buffers of a claim beside 300,000 deleted rows under a held snapshot: {cost}");
    assert!(cost < 500, "{cost}");
}

/// A thousand keys whose messages wait in long queues, all of them due at once: after a long outage of what they are sent to.
#[tokio::test]
async fn a_claim_of_parked_messages_costs_no_more_for_long_queues() {
    let database = prepared().await;
    let client = database.connect().await;
    drop(source(&database, "relay").await);
    let queued = "insert into postroom.parked (route, seq, lane, ordering_key, state, attempts, due_at, id, topic, type, payload, content_type, occurred_at)
                  select $1, n, n % 16, 'key-' || n % 1000, case when n < 1000 then 'retry' else 'queued' end, 1, now(), gen_random_uuid(), 't', 'k', '', 'x', now()
                    from generate_series(0, $2::bigint - 1) n";
    client.execute(queued, &[&ROUTE, &ROWS]).await.unwrap();
    client
        .batch_execute("analyze postroom.parked; set enable_seqscan = off; set enable_sort = off; set jit = off")
        .await
        .unwrap();
    let lanes: Vec<i16> = (0..16).collect();
    let (in_hand, heads, followers, bytes) = (Vec::<i64>::new(), 1000_i64, 200_i64, 64_i64 << 20);
    let parameters: [&(dyn ToSql + Sync); 6] = [&ROUTE, &lanes, &in_hand, &heads, &followers, &bytes];
    let cost = buffers_of(&client, include_str!("../../src/log/sql/claim_parked.sql"), &parameters).await;
    println!("buffers of a claim of 1,000 heads with 999 behind each: {cost}");
    // Each of the heads' first two hundred twice, and not each of them for each.
    assert!(cost < 1_000_000, "{cost}");
}

#[tokio::test]
async fn pruning_an_inbox_reads_what_it_deletes() {
    let database = prepared().await;
    let client = database.connect().await;
    let rows = "insert into postroom.inbox (consumer, message_id, processed_at)
                select 'billing', gen_random_uuid(), now() - case when n <= 30000 then interval '40 days' else interval '1 day' end
                  from generate_series(1, 300000) n";
    client.execute(rows, &[]).await.unwrap();
    client.batch_execute("analyze postroom.inbox").await.unwrap();
    let prune = "select postroom.inbox_prune(interval '30 days', 10000)";
    let blocks = "select (sum(heap_blks_read + heap_blks_hit) + sum(idx_blks_read + idx_blks_hit))::bigint
                    from pg_statio_user_tables where relid = 'postroom.inbox'::regclass";
    let mut costs = Vec::new();
    for expected in [10_000, 10_000, 10_000, 0] {
        client.batch_execute("select pg_stat_force_next_flush()").await.unwrap();
        let before: i64 = client.query_one(blocks, &[]).await.unwrap().get(0);
        let pruned: i64 = client.query_one(prune, &[]).await.unwrap().get(0);
        client.batch_execute("select pg_stat_force_next_flush()").await.unwrap();
        let after: i64 = client.query_one(blocks, &[]).await.unwrap().get(0);
        assert_eq!(pruned, expected);
        costs.push(after - before);
    }
    println!("blocks for three steps of 10,000 rows and one with nothing to do: {costs:?}");
    assert!(costs[3] < 500, "nothing to do: {costs:?}");
}

#[tokio::test]
async fn the_status_of_many_routes_with_a_large_backlog_costs_what_its_bounds_say() {
    let database = prepared().await;
    let client = database.connect().await;
    for n in 0..10 {
        let route = postroom::Route { name: format!("route-{n}"), ..crate::setup::route() };
        drop(crate::setup::source_of(&database, &route, "relay").await);
    }
    let rows = "insert into postroom.outbox (topic, type, payload, key)
                select 'orders', 'order.placed', convert_to(repeat('x', 200), 'UTF8'), 'key-' || n % 5000
                  from generate_series(1, 400000) n;
                insert into postroom.parked (route, seq, lane, ordering_key, state, attempts, due_at, id, topic, type, payload, content_type, occurred_at)
                select 'route-' || n % 10, n, n % 16, null, 'scheduled', 0, now() + interval '1 day', gen_random_uuid(), 't', 'k', '', 'x', now()
                  from generate_series(1, 300000) n;
                analyze postroom.outbox, postroom.parked; set enable_seqscan = off; set jit = off";
    client.batch_execute(rows).await.unwrap();
    let (backlog_max, others_max) = (50_000_i64, 50_000_i64);
    let sql = include_str!("../../src/operate/sql/status_routes.sql");
    let began = std::time::Instant::now();
    let cost = buffers_of(&client, sql, &[&backlog_max, &others_max]).await;
    println!(
        "buffers of a status with 10 routes, 400,000 in the outbox and 300,000 parked: {cost}, {:?}",
        began.elapsed()
    );
    // A row looked at costs a page of the heap and its share of an index.
    assert!(cost < 3 * (backlog_max + others_max), "{cost}");
    let status = crate::setup::store(&database).status().await.unwrap();
    for route in &status.routes {
        assert_eq!((route.backlog, route.backlog_is_bound), (16 * (50_000 / 160), true), "{route:?}");
        assert_eq!((route.parked, route.parked_is_bound), (5_000, true), "{route:?}");
        assert!(route.scheduled_is_bound && !route.dead_is_bound && route.oldest_unsent_seconds.is_some());
    }
}

/// With the settings of the session that claims.
#[tokio::test]
async fn a_large_window_is_not_sorted_on_the_disk() {
    let database = prepared().await;
    let client = database.connect().await;
    drop(source(&database, "relay").await);
    // Random, so that nothing is compressed.
    let rows = "insert into postroom.outbox (topic, type, payload, key)
                select 'orders', 'order.placed', decode(repeat(md5(n::text), 32), 'hex')
                           || decode(string_agg(md5(n::text || m), ''), 'hex'), 'key-' || n % 5000
                  from generate_series(1, 20000) n cross join generate_series(1, 32) m group by n;
                analyze postroom.outbox; set enable_seqscan = off; set jit = off";
    client.batch_execute(rows).await.unwrap();
    let snapshot: String = client.query_one("select pg_current_snapshot()::text", &[]).await.unwrap().get(0);
    let at = At { seq: 0, floor: 0, snapshot: &snapshot };
    let temporary = async || explain(&client, &at, 500).await["Temp Written Blocks"].as_i64().unwrap();
    assert!(temporary().await > 0, "with the usual setting it spills, or this shows nothing");
    client.batch_execute("set work_mem = '32MB'").await.unwrap();
    assert_eq!(temporary().await, 0);
}

/// With an application's own settings: nobody sets `enable_seqscan` for it.
#[tokio::test]
async fn taking_from_an_inbox_passes_over_none_that_are_not_due() {
    let database = prepared().await;
    let client = database.connect().await;
    let rows = "insert into postroom.inbox_messages (consumer, message_id, state, due_at, ordering_key, topic, type, payload, content_type)
                select 'billing', gen_random_uuid(), case when n % 3 = 0 then 'early' else 'ready' end, now() + interval '1 day',
                       'key-' || n, 'orders', 'order.placed', '', 'x'
                  from generate_series(1, 300000) n;
                analyze postroom.inbox_messages";
    client.batch_execute(rows).await.unwrap();
    let take = "select count(*) from postroom.inbox_take('billing', 100)";
    let cost = buffers_of(&client, take, &[]).await;
    println!("buffers of a take with 300,000 that are not due: {cost}");
    assert!(cost < 200, "{cost}");

    // The same beside 300,000 that are done and deleted, while a snapshot of before is held.
    let reader = database.connect().await;
    reader
        .batch_execute("begin isolation level repeatable read; select from postroom.inbox_messages limit 1")
        .await
        .unwrap();
    client.batch_execute("delete from postroom.inbox_messages").await.unwrap();
    let cost = buffers_of(&client, take, &[]).await;
    println!("buffers of a take beside 300,000 deleted rows under a held snapshot: {cost}");
    assert!(cost < 200, "{cost}");
}

#[tokio::test]
async fn taking_from_an_inbox_costs_no_more_for_long_queues() {
    let database = prepared().await;
    let client = database.connect().await;
    // 40 messages of each of 1,000 keys, and of one 60,000; then the first of each is in work and the others are known to be behind it.
    let rows = "insert into postroom.inbox_messages (consumer, message_id, ordering_key, topic, type, payload, content_type)
                select 'billing', gen_random_uuid(), case when n > 40000 then 'hot' else 'key-' || n % 1000 end, 'orders', 'order.placed', '', 'x'
                  from generate_series(1, 100000) n;
                do $$ begin for i in 1..55 loop perform postroom.inbox_take('billing', 1000); end loop; end $$";
    client.batch_execute(rows).await.unwrap();
    let in_work = "select count(*) from postroom.inbox_messages where state = 'claimed'";
    assert_eq!(client.query_one(in_work, &[]).await.unwrap().get::<_, i64>(0), 1001);
    let done = |of: &str| {
        format!(
            "select count(postroom.inbox_done('billing', message_id, claim)) from postroom.inbox_messages where state = 'claimed' {of}"
        )
    };
    let take = "select count(*) from postroom.inbox_take('billing', 1000)";
    // Without statistics, and with those of a table of this size; without the traces of rows that were changed.
    for upkeep in ["vacuum", "vacuum analyze"] {
        client.batch_execute(&format!("{upkeep} postroom.inbox_messages")).await.unwrap();
        client.execute(&done("and ordering_key = 'hot'"), &[]).await.unwrap();
        let explained = format!("explain (analyze, buffers, format json) {take}");
        // The look that is made every five seconds, at 200 keys whatever is known of them.
        client.batch_execute("update postroom.inbox_clocks set at = at - interval '6 seconds'").await.unwrap();
        let look = "explain (analyze, buffers, format json) select count(*) from postroom.inbox_take('billing', 1)";
        let of_look = buffers(&client.query_one(look, &[]).await.unwrap().get::<_, Value>(0)[0]["Plan"]);
        println!("buffers of a take that looks at 200 keys: {of_look}");
        assert!(of_look < 10_000, "{upkeep}: {of_look}");
        client.execute(&done("and ordering_key = 'hot'"), &[]).await.unwrap();
        client.batch_execute("update postroom.inbox_clocks set at = clock_timestamp()").await.unwrap();
        let of_one = buffers(&client.query_one(&explained, &[]).await.unwrap().get::<_, Value>(0)[0]["Plan"]);
        client.execute(&done("and ordering_key <> 'hot'"), &[]).await.unwrap();
        let of_many = buffers(&client.query_one(&explained, &[]).await.unwrap().get::<_, Value>(0)[0]["Plan"]);
        println!(
            "buffers of a take of one message of a queue of 60,000: {of_one}; of 1,000 of 1,000 queues: {of_many}"
        );
        assert!(of_one < 1_500 && of_many < 200_000, "{upkeep}: {of_one}, {of_many}");
    }
    // A consumer of whom the statistics say nothing.
    let rows = "insert into postroom.inbox_messages (consumer, message_id, ordering_key, topic, type, payload, content_type)
                select 'late', gen_random_uuid(), 'hot', 'orders', 'order.placed', '', 'x' from generate_series(1, 20000) n";
    client.batch_execute(rows).await.unwrap();
    let explained = "explain (analyze, buffers, format json) select count(*) from postroom.inbox_take('late', 10)";
    for _ in 0..3 {
        let cost = buffers(&client.query_one(explained, &[]).await.unwrap().get::<_, Value>(0)[0]["Plan"]);
        println!("buffers of a take of a consumer that is new: {cost}");
        // It examines 2,000 messages.
        assert!(cost < 150_000, "{cost}");
    }
}

#[tokio::test]
async fn statistics_of_an_empty_table_do_not_make_claims_of_parked_messages_quadratic() {
    let database = prepared().await;
    let client = database.connect().await;
    drop(source(&database, "relay").await);
    let park = "insert into postroom.parked (route, seq, lane, ordering_key, state, due_at, id, topic, type, payload, content_type, occurred_at)
                select $1, n, n % 16, 'key-' || n % 1500, case when n <= $3 - 500 then 'retry' else 'queued' end, now(), gen_random_uuid(), 't', 'k', '', 'x', now()
                  from generate_series($2::int, $3::int) n";
    // As in the middle of a long replay: the table was emptied, looked at, and filled again.
    client.batch_execute("alter table postroom.parked set (autovacuum_enabled = false)").await.unwrap();
    client.execute(park, &[&ROUTE, &1, &40_000]).await.unwrap();
    client.execute("delete from postroom.parked", &[]).await.unwrap();
    client.batch_execute("vacuum (truncate off, analyze) postroom.parked").await.unwrap();
    client.execute(park, &[&ROUTE, &50_001, &54_000]).await.unwrap();
    let empty = "select reltuples = 0 and relpages > 0 from pg_class where oid = 'postroom.parked'::regclass";
    assert!(client.query_one(empty, &[]).await.unwrap().get::<_, bool>(0));

    client
        .batch_execute("set enable_seqscan = off; set jit = off; set plan_cache_mode = force_generic_plan")
        .await
        .unwrap();
    client.batch_execute(include_str!("../../src/log/sql/one_index.sql")).await.unwrap();
    let lanes: Vec<i16> = (0..16).collect();
    let (in_hand, heads, followers, bytes) = (Vec::<i64>::new(), 500_i64, 200_i64, 64_i64 << 20);
    let parameters: [&(dyn ToSql + Sync); 6] = [&ROUTE, &lanes, &in_hand, &heads, &followers, &bytes];
    let sql = include_str!("../../src/log/sql/claim_parked.sql");
    let explain = format!("explain (format json) {sql}");
    let plan = client.query_one(&explain, &parameters).await.unwrap().get::<_, Value>(0)[0]["Plan"].clone();
    let mut conditions = Vec::new();
    index_conditions(&plan, &mut conditions);
    println!("{conditions:#?}");
    assert_eq!(conditions.len(), 9);
    for condition in &conditions {
        assert!(
            ["due_at", "ordering_key", "seq =", "(id ="].iter().any(|narrow| condition.contains(narrow)),
            "{condition}"
        );
    }
    assert_eq!(client.query(sql, &parameters).await.unwrap().len(), 500);
}

#[tokio::test]
async fn tables_that_outgrew_their_statistics_are_analyzed_with_a_renewal() {
    let database = prepared().await;
    let client = database.connect().await;
    let fill = async |from: i32, to: i32| {
        let park = "insert into postroom.parked (route, seq, lane, ordering_key, state, due_at, id, topic, type, payload, content_type, occurred_at)
                    select 'other', n, 0, 'key-' || n, 'queued', now(), gen_random_uuid(), 't', 'k', '', 'x', now()
                      from generate_series($1::int, $2::int) n";
        client.execute(park, &[&from, &to]).await
    };
    client.batch_execute("alter table postroom.parked set (autovacuum_enabled = false)").await.unwrap();
    let known = "select reltuples::int from pg_class where oid = 'postroom.parked'::regclass";
    let known = async || client.query_one(known, &[]).await.unwrap().get::<_, i32>(0);
    client.batch_execute("analyze postroom.parked").await.unwrap();
    fill(1, 5000).await.unwrap();
    // The counters of a transaction are told a little after it.
    let live = "select pg_stat_get_live_tuples('postroom.parked'::regclass)";
    for at_least in [5000, 40_000] {
        while client.query_one(live, &[]).await.unwrap().get::<_, i64>(0) < at_least {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        assert!(i64::from(known().await) < at_least / 4);
        // Whoever holds a lock that it needs is not waited for.
        let other = database.connect().await;
        other.batch_execute("begin; lock table postroom.parked in share update exclusive mode").await.unwrap();
        client.batch_execute("select postroom.refresh_statistics()").await.unwrap();
        assert!(i64::from(known().await) < at_least / 4);
        other.batch_execute("commit").await.unwrap();
        drop(source(&database, "relay").await);
        // Nobody waits for it but this test.
        let refreshed = async {
            while i64::from(known().await) < at_least {
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(60), refreshed).await.expect("nobody analyzed it");
        if at_least == 5000 {
            fill(5001, 40_000).await.unwrap();
        }
    }
}

/// What each index is asked for.
fn index_conditions(plan: &Value, found: &mut Vec<String>) {
    if plan.get("Relation Name").is_some() {
        found.push(format!("{} {}", plan["Index Name"], plan["Index Cond"]));
    }
    plan["Plans"].as_array().into_iter().flatten().for_each(|child| index_conditions(child, found));
}
