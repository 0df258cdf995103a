//! What people are told of messages is what is known of them.

use std::collections::HashSet;

use postroom::{Deed, MessageFilter, Operator, Place, Route, RouteChange, Source, StartAt, TopicFilter};

use crate::setup::{drain, enqueue, prepared, route, source_of, store};

#[tokio::test]
async fn why_does_not_call_acked_what_was_never_sent() {
    let database = prepared().await;
    let client = database.connect().await;
    let before = enqueue(&client, Some("a"), 1).await[0];
    let from_now = Route { start_at: StartAt::Now, topics: TopicFilter::new(["orders"]).unwrap(), ..route() };
    let relay = source_of(&database, &from_now, "relay").await;
    let sent = enqueue(&client, Some("a"), 1).await[0];
    assert_eq!(drain(&relay).await, [sent]);
    let place = async |id| store(&database).whereabouts(id).await.unwrap().remove(0);
    let told = place(before).await;
    assert_eq!(told.state, Place::NotTaken);
    assert!(told.because[0].contains("never sent it"), "{:?}", told.because);
    assert_eq!(place(sent).await.state, Place::Acked);
    // A topic that the route takes no more: what it sent of it before is not denied.
    let deed = Deed { actor: "ann".to_owned(), reason: "x".to_owned() };
    let change = RouteChange { topics: Some(TopicFilter::new(["billing"]).unwrap()), ..RouteChange::default() };
    store(&database).set_route(&from_now.name, &change, &deed).await.unwrap();
    assert_eq!(place(sent).await.state, Place::Passed);
}

#[tokio::test]
async fn strict_topics_refuse_a_mistyped_one_however_it_is_written() {
    let database = prepared().await;
    let client = database.connect().await;
    let named = Route { topics: TopicFilter::new(["orders", "billing.*"]).unwrap(), ..route() };
    let _relay = source_of(&database, &named, "relay").await;
    client.batch_execute("select postroom.strict_topics(true)").await.unwrap();
    for accepted in ["orders", "billing.paid"] {
        client.query_one("select postroom.enqueue($1, 'k', 'x'::text)", &[&accepted]).await.unwrap();
    }
    for refused in [
        "select postroom.enqueue('ordres', 'k', 'x'::text)",
        "insert into postroom.outbox (topic, type, payload) values ('ordres', 'k', 'x')",
    ] {
        let error = client.batch_execute(refused).await.unwrap_err();
        let error = error.as_db_error().unwrap();
        assert!(error.message().contains("no route takes topic 'ordres'"), "{error:?}");
        assert!(error.hint().unwrap().contains("routes list"), "{error:?}");
    }
    client.batch_execute("select postroom.strict_topics(false); insert into postroom.outbox (topic, type, payload) values ('x', 'k', 'x')").await.unwrap();
}

#[tokio::test]
async fn why_does_not_deny_what_a_forgotten_route_of_that_name_sent() {
    let database = prepared().await;
    let client = database.connect().await;
    let first = source_of(&database, &route(), "relay").await;
    let sent = enqueue(&client, Some("a"), 1).await[0];
    assert_eq!(drain(&first).await, [sent]);
    first.release().await.unwrap();
    let deed = Deed { actor: "ann".to_owned(), reason: "moved".to_owned() };
    assert!(store(&database).forget_route(&route().name, false, &deed).await.unwrap().unwrap().done);
    let from_now = Route { start_at: StartAt::Now, ..route() };
    let _second = source_of(&database, &from_now, "relay").await;
    let told = store(&database).whereabouts(sent).await.unwrap().remove(0);
    assert_eq!(told.state, Place::Passed, "{:?}", told.because);
    assert!(told.because[0].contains("ann") && told.because[0].contains("may have sent it"), "{:?}", told.because);
}

#[tokio::test]
async fn the_list_has_the_newest_messages_also_when_one_key_has_most_of_them_and_finds_rare_ones_far_back() {
    let database = prepared().await;
    let client = database.connect().await;
    let write = "select postroom.enqueue($1, 'k', 'x'::text, key => $2 || case when $3 then n::text else '' end)
                   from generate_series(1, $4) n";
    for (topic, key, own, count) in [
        ("rare", "r", false, 1),
        ("orders", "cold", true, 500),
        ("orders", "hot", false, 25_000),
        ("orders", "cold", true, 30),
        ("orders", "hot", false, 60),
        ("orders", "warm", true, 20),
    ] {
        client.execute(write, &[&topic, &key, &own, &count]).await.unwrap();
    }
    let newest = "select id from postroom.outbox order by seq desc limit 300";
    let newest: Vec<String> =
        client.query(newest, &[]).await.unwrap().iter().map(|row| row.get::<_, uuid::Uuid>(0).to_string()).collect();
    for limit in [1, 50, 100, 300] {
        let listed = store(&database).messages(&MessageFilter::default(), limit).await.unwrap();
        let ids: Vec<&str> = listed.messages.iter().map(|message| message.id.as_str()).collect();
        assert!(listed.next.is_some());
        assert_eq!(ids, newest[..limit as usize], "{limit}");
    }
    // A page looks at a bounded number of rows; page by page, the list is whole all the same.
    for (filter, count) in [
        (MessageFilter { topic: Some("rare".to_owned()), ..MessageFilter::default() }, 1),
        (MessageFilter { key: Some("hot".to_owned()), ..MessageFilter::default() }, 25_060),
        (MessageFilter::default(), 25_611),
    ] {
        // A lane with most of the rows makes pages no shorter.
        let most = 25_611 / 5_000 + 4;
        let (mut found, mut pages, mut after) = (HashSet::new(), 0, None);
        loop {
            let page = store(&database).messages(&MessageFilter { after, ..filter.clone() }, 5_000).await.unwrap();
            pages += 1;
            for message in page.messages {
                assert!(found.insert(message.id.clone()), "twice: {message:?}");
            }
            let Some(next) = page.next else { break };
            after = Some(next.parse().unwrap());
        }
        assert_eq!(found.len(), count, "{filter:?}");
        assert!((3..=most).contains(&pages), "{pages}");
    }
}
