//! What `postroom run` shows of itself while it runs: the meter that everything reports to, and the listener, if one is configured.

use std::sync::Arc;

use postroom::{Live, Store};
use postroom_consumer::InboxNow;
use postroom_relay::RouteNow;
use postroom_server::admin::{Admin, Expected, Health, Options};
use postroom_server::{FleetShown, Meter, Metrics, Sampler};

use crate::config::Config;
use crate::exit::{self, Failure};

/// Whether the metrics go to a collector.
pub fn exports() -> bool {
    #[cfg(feature = "otlp")]
    return crate::otlp::is_named();
    #[cfg(not(feature = "otlp"))]
    false
}

/// The same for many stores: without the admin API and the state of one store, and with how all of them stand.
pub async fn serve_many(config: &Config, meter: &Meter, shown: &FleetShown) -> Result<(), Failure> {
    if config.admin.is_none() && !exports() {
        return Ok(());
    }
    let metrics = Metrics::new(meter, Vec::new(), Vec::new()).with_fleet(shown).shared();
    #[cfg(feature = "otlp")]
    tokio::spawn(crate::otlp::export(metrics.clone()));
    let expected = Expected { routes: Vec::new(), inboxes: Vec::new(), lease: config.relay.lease };
    listen(config, metrics, Health::new(expected, meter.clone()), None).await
}

/// Listens as the configuration says, exports the metrics as the environment says, and samples the store for them. Nothing, if neither
/// is wanted.
pub async fn serve(
    config: &Config,
    store: Arc<dyn Store>,
    meter: &Meter,
    routes: &[Live<RouteNow>],
    inboxes: &[Live<InboxNow>],
) -> Result<(), Failure> {
    if config.admin.is_none() && !exports() {
        return Ok(());
    }
    let names: Vec<String> = config.routes.iter().map(|routed| routed.route.name.clone()).collect();
    let consumers: Vec<String> = config.inboxes.iter().map(|inbox| inbox.consumer.to_string()).collect();
    let expected = Expected { routes: names.clone(), inboxes: consumers.clone(), lease: config.relay.lease };
    meter.expect(&names, &consumers);
    let sampler = Sampler::new(meter.clone(), config.capacity_bytes);
    let routes = names.into_iter().zip(routes.iter().cloned()).collect();
    let inboxes = consumers.into_iter().zip(inboxes.iter().cloned()).collect();
    let metrics = Metrics::new(meter, routes, inboxes).with_store(&sampler).shared();
    #[cfg(feature = "otlp")]
    tokio::spawn(crate::otlp::export(metrics.clone()));
    tokio::spawn(sampler.run(store.clone()));
    listen(config, metrics, Health::new(expected, meter.clone()), Some(store)).await
}

async fn listen(
    config: &Config,
    metrics: Arc<Metrics>,
    health: Health,
    store: Option<Arc<dyn Store>>,
) -> Result<(), Failure> {
    let Some(admin) = &config.admin else { return Ok(()) };
    let options = Options { listen: admin.listen, tokens: admin.tokens.clone(), metrics_public: admin.metrics_public };
    let api = if store.is_some() { "/api/v1, " } else { "" };
    let bound = Admin::bind(options, metrics, health, store).await;
    let listener = bound.map_err(|error| Failure::of(exit::CONFIG, &error))?;
    if let Ok(address) = listener.address() {
        tracing::info!("{api}/livez, /readyz and /metrics are at http://{address}");
    }
    tokio::spawn(listener.serve());
    Ok(())
}
