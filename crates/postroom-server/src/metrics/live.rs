//! The state of routes and inboxes in this process, read when somebody asks.

use std::fmt;

use postroom::Live;
use postroom_consumer::InboxNow;
use postroom_relay::RouteNow;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Unit;

use super::labels::{Values, counter, gauge, named};
use super::meter::LeaseAges;

/// Names and states of the routes that this process relays.
pub type Routes = Vec<(String, Live<RouteNow>)>;
/// Consumers and states of the inboxes that this process fills, or stands by for.
pub type Inboxes = Vec<(String, Live<InboxNow>)>;

#[derive(Debug)]
pub(super) struct Running {
    pub routes: Routes,
    pub inboxes: Inboxes,
    pub lease_ages: LeaseAges,
}

impl Collector for Running {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let e = &mut encoder;
        let routes: Vec<(&str, RouteNow)> =
            self.routes.iter().map(|(route, live)| (route.as_str(), live.now())).collect();
        let of_routes = |value: &dyn Fn(&RouteNow) -> f64| -> Values {
            routes.iter().map(|(route, now)| (vec![("route", named(route))], value(now))).collect()
        };
        let help = "Messages that failed and wait for another attempt, since the route's relay began in this process";
        counter(e, "retried_messages", help, &of_routes(&|now| now.counters.retried as f64))?;
        let help = "Messages that were queued up behind another one of their key, since the route's relay began in this process";
        counter(e, "queued_messages", help, &of_routes(&|now| now.counters.queued as f64))?;
        let help =
            "Delayed messages that were set aside until their time, since the route's relay began in this process";
        counter(e, "scheduled_messages", help, &of_routes(&|now| now.counters.scheduled as f64))?;
        let help = "Times that the sink became unavailable, since the route's relay began in this process";
        counter(e, "sink_outages", help, &of_routes(&|now| now.counters.sink_outages as f64))?;
        let help = "1: messages can be published, as far as this process knows; 0: they wait, because the sink is away or blocked, or the breaker is open";
        let up = |now: &RouteNow| now.sink_down.is_none() && now.sink_blocked.is_none();
        gauge(e, "sink_up", None, help, &of_routes(&|now| f64::from(u8::from(up(now)))))?;
        gauge(
            e,
            "lanes_held",
            None,
            "Lanes that this process holds; lanes_covered is about all processes",
            &of_routes(&|now| now.lanes as f64),
        )?;
        let help = "Messages claimed by this process and not settled";
        gauge(e, "in_flight_messages", None, help, &of_routes(&|now| now.in_flight as f64))?;
        let help = "Payloads and headers of messages in flight";
        gauge(e, "in_flight", Some(Unit::Bytes), help, &of_routes(&|now| now.in_flight_bytes as f64))?;
        let aged = routes.iter().filter_map(|(route, _)| {
            Some((vec![("route", named(route))], self.lease_ages.of_route(route)?.as_secs_f64()))
        });
        gauge(e, "lease_age", Some(Unit::Seconds), "Time since the last renewal by this process", &aged.collect())?;

        let inboxes: Vec<(&str, InboxNow)> = self.inboxes.iter().map(|(of, live)| (of.as_str(), live.now())).collect();
        let of_inboxes = |value: &dyn Fn(&InboxNow) -> f64| -> Values {
            inboxes.iter().map(|(of, now)| (vec![("consumer", named(of))], value(now))).collect()
        };
        let help = "1: this process fills the inbox; 0: it stands by";
        gauge(e, "inbox_filling", None, help, &of_inboxes(&|now| f64::from(u8::from(now.filling))))?;
        let help = "Messages received by this process and not kept yet";
        gauge(e, "inbox_in_hand_messages", None, help, &of_inboxes(&|now| now.waiting as f64))?;
        let aged = inboxes
            .iter()
            .filter_map(|(of, _)| Some((vec![("consumer", named(of))], self.lease_ages.of_inbox(of)?.as_secs_f64())));
        let help = "Time since the store last told this process who fills the inbox";
        gauge(e, "inbox_lease_age", Some(Unit::Seconds), help, &aged.collect())?;
        let built = vec![(vec![("version", env!("CARGO_PKG_VERSION").to_owned())], 1.0)];
        gauge(e, "build_info", None, "The version that runs; always 1", &built)
    }
}
