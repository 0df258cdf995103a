//! `postroom status`.

use postroom::{RouteStatus, SinkDown, StoreStatus, UnroutedTopic};

use crate::StoreArgs;
use crate::exit::{self, Failure};
use crate::say::{printable, show};

pub async fn status(args: &StoreArgs, json: bool) -> Result<(), Failure> {
    let store = args.open()?;
    let status = store.status().await?;
    if json {
        let text = serde_json::to_string(&status).map_err(|error| Failure::of(exit::FAILURE, &error))?;
        show!("{text}");
    } else {
        print!("{}", table(&store.shown(), &status));
    }
    Ok(())
}

fn table(shown: &str, status: &StoreStatus) -> String {
    let mut text = format!(
        "store    {} ({}), schema version {}, {}{} rows in the outbox\n",
        shown,
        status.store,
        status.schema_version,
        status.outbox_rows,
        if status.outbox_rows_is_bound { "+" } else { "" }
    );
    if status.routes.is_empty() {
        text.push_str("no route has run yet; start one with `postroom run`\n");
        return text;
    }
    let heads = ["route", "backlog", "oldest unsent", "parked", "scheduled", "dead", "lanes held", "relays"];
    let rows: Vec<[String; 8]> = status.routes.iter().map(row).collect();
    let width =
        |column: usize| rows.iter().map(|row| row[column].len()).chain([heads[column].len()]).max().unwrap_or_default();
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    let mut line = |cells: Vec<&str>| {
        let cells: Vec<String> =
            cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}", width = *width)).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    };
    line(heads.to_vec());
    for row in &rows {
        line(row.iter().map(String::as_str).collect());
    }
    problems(status, &mut text);
    text
}

/// What somebody has to look at, in words; or that there is nothing.
fn problems(status: &StoreStatus, text: &mut String) {
    let mut found = Vec::new();
    for route in &status.routes {
        let name = &route.route;
        if route.lanes_held == 0 {
            found.push(format!("route {name}: no relay runs it; start one with `postroom run`"));
        } else if route.lanes_held < route.lanes {
            let free = route.lanes - route.lanes_held;
            found.push(format!(
                "route {name}: {free} of {} lanes are held by nobody; that lasts a lease at most while relays run",
                route.lanes
            ));
        }
        for down in &route.sinks_down {
            let SinkDown { relay, since_seconds, error } = down;
            found.push(format!("route {name}: the sink of relay {relay} is down since {since_seconds:.0} s: {error}"));
        }
        if route.dead > 0 {
            let dead = format!("{}{}", route.dead, if route.dead_is_bound { "+" } else { "" });
            found.push(format!("route {name}: {dead} dead; see `postroom dead list --route {name}`"));
        }
    }
    for UnroutedTopic { topic, messages, oldest_seconds } in &status.unrouted {
        found.push(format!(
            "topic {topic}: no route takes it; {messages} of the newest messages go nowhere, the oldest since {oldest_seconds:.0} s"
        ));
    }
    if found.is_empty() {
        text.push_str("nothing needs attention\n");
    }
    for problem in found {
        // Keys, topics and errors come from others.
        text.push_str(&format!("! {}\n", printable(&problem)));
    }
}

fn row(route: &RouteStatus) -> [String; 8] {
    let counted = |count: i64, is_bound: bool| format!("{count}{}", if is_bound { "+" } else { "" });
    [
        route.route.clone(),
        // Nothing was found before counting was cut: that is not nothing.
        if route.backlog == 0 && route.backlog_is_bound {
            "?".to_owned()
        } else {
            counted(route.backlog, route.backlog_is_bound)
        },
        oldest(route),
        counted(route.parked, route.parked_is_bound),
        counted(route.scheduled, route.scheduled_is_bound),
        counted(route.dead, route.dead_is_bound),
        format!("{}/{}", route.lanes_held, route.lanes),
        if route.relays.is_empty() { "nobody".to_owned() } else { route.relays.join(", ") },
    ]
}

/// Where no message of the route was found before counting was cut, how old one can be at most.
fn oldest(route: &RouteStatus) -> String {
    match (route.oldest_unsent_seconds, route.oldest_unread_seconds) {
        (Some(seconds), _) => format!("{seconds:.1} s"),
        (None, Some(at_most)) if route.backlog_is_bound => format!("<= {at_most:.1} s"),
        _ => "-".to_owned(),
    }
}
