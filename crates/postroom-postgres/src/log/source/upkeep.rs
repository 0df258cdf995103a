//! Before anything is claimed and with every renewal: whether the tables are whole and still those that we know, and what the
//! route is.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use postroom::{Needs, Route, StartAt, StoreError};
use tokio_postgres::types::ToSql;

use super::LogSource;
use crate::connect::behind_a_pooler;
use crate::database::RepairPause;
use crate::log::watch::Seen;
use crate::migrate::schema_version;
use crate::operate::rights::missing_grants;

/// After a try to put positions right that met an open transaction.
const MEND_AGAIN: Duration = Duration::from_secs(10);
const MEND_AGAIN_MAX: Duration = Duration::from_secs(60);
const REPAIR: &str = "correct the positions after the database was changed";
/// Longer than any rewrite of an outbox.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);

impl LogSource {
    /// Looks at the schema and registers the route.
    pub(super) async fn register(&self) -> Result<(), StoreError> {
        let generation = self.links.server.generation();
        let lacking = self
            .links
            .writes
            .call(generation, "check the rights of this role", async |session| {
                missing_grants(&session.client, Needs { relay: true, ..Needs::default() }).await
            })
            .await?;
        if !lacking.is_empty() {
            let grants = lacking.join("; ");
            return Err(StoreError::Refused {
                what: "work as a relay",
                source: format!("its role lacks rights; run as the owner of the schema: {grants};").into(),
            });
        }
        let (version, missing, cache, oldest) = self
            .links
            .writes
            .call(generation, "look at the schema", async |session| {
                // As JSON: an older schema has no such column, and is told as what it is.
                let sql =
                    "select (select max(number) from postroom.migrations), postroom.missing_indexes(), s.seqcache,
                                  (select (to_jsonb(t) ->> 'oldest_program')::int from postroom.settings t)
                             from pg_sequence s where s.seqrelid = 'postroom.outbox_seq_seq'::regclass";
                let row = session.client.query_one(sql, &[]).await?;
                let (version, missing) = (row.get::<_, Option<i32>>(0), row.get::<_, Vec<String>>(1));
                Ok((version, missing, row.get::<_, i64>(2), row.get::<_, Option<i32>>(3)))
            })
            .await?;
        let version = version.unwrap_or_default();
        if version < schema_version() {
            return Err(StoreError::Schema {
                problem: format!("it is at version {version}, and this program needs version {}", schema_version()),
                hint: "run `postroom migrate` on this database",
            });
        }
        if let Some(oldest) = oldest.filter(|oldest| *oldest > schema_version()) {
            let known = schema_version();
            return Err(StoreError::Schema {
                problem: format!(
                    "it is at version {version} and works with programs that know version {oldest} or newer; this one knows {known}"
                ),
                hint: "use a newer postroom",
            });
        }
        if !missing.is_empty() {
            return Err(StoreError::Schema {
                problem: format!("it is incomplete: missing {}", missing.join(", ")),
                hint: "finish the restore that created it, or run `postroom migrate` on an empty database",
            });
        }
        if cache != 1 {
            return Err(StoreError::Schema {
                problem: format!(
                    "postroom.outbox_seq_seq caches {cache} values for each session, which would lose messages"
                ),
                hint: "run `alter sequence postroom.outbox_seq_seq cache 1` and reconnect the writers",
            });
        }
        self.mend_if(generation, "postroom.positions_are_foreign()").await?;
        self.register_route(self.links.server.generation()).await
    }

    async fn register_route(&self, generation: u64) -> Result<(), StoreError> {
        let Route { name: route, topics, order, on_dead, start_at, .. } = &self.route;
        let (owner, given) = (&self.owner, topics.patterns());
        let now_if_new = *start_at == StartAt::Now;
        let now = self
            .links
            .writes
            .call(generation, "register the route", async |session| {
                // The checkpoint commits first, so that its id is older than the snapshot that the lanes start from.
                let floor: i64 =
                    session.client.query_one("select floor_seq from postroom.checkpoint()", &[]).await?.get(0);
                // A route that ran before, and lost its lanes, begins with the oldest message: nobody knows what it had passed.
                let tx = session.client.transaction().await?;
                let sql = "select not exists (select from postroom.routes where name = $1)";
                let from_now = now_if_new && tx.query_one(sql, &[route]).await?.get::<_, bool>(0);
                let sql =
                    "select topics_now, ordering_now, on_dead_now from postroom.register_route($1, $2, $3, $4, $5)";
                let parameters: [&(dyn ToSql + Sync); 5] = [route, &given, &order.as_str(), &on_dead.as_str(), owner];
                let row = tx.query_one(sql, &parameters).await?;
                let now: (Vec<String>, String, String) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
                if from_now {
                    let sql = include_str!("../sql/register_lanes_now.sql");
                    tx.execute(sql, &[route, &floor]).await?;
                } else {
                    tx.execute(include_str!("../sql/register_lanes_oldest.sql"), &[route]).await?;
                }
                tx.commit().await?;
                Ok(now)
            })
            .await?;
        let (topics_now, order_now, on_dead_now) = now;
        let more: Vec<&String> =
            topics_now.iter().filter(|topic| !given.contains(topic) && !given.iter().any(|own| own == "*")).collect();
        if !more.is_empty() || order_now != order.as_str() || on_dead_now != on_dead.as_str() {
            let topics = topics_now.join(", ");
            tracing::warn!(
                %route, %topics, order = %order_now, on_dead = %on_dead_now,
                "the route's stored settings differ from this relay's configuration and take precedence: a relay that starts \
                 only adds topics and makes order and on_dead stricter. `postroom routes set` changes them"
            );
        }
        Ok(())
    }

    /// Runs postroom.mend() if `condition` holds, for all routes of the database at once. What it changes makes everything worthless
    /// that was learnt before.
    async fn mend_if(&self, generation: u64, condition: &'static str) -> Result<(), StoreError> {
        let mut repair = self.links.repair.lock().await;
        if self.links.server.generation() != generation {
            // Another route of this process has done it, or the server is another one: whoever asked looks again.
            return Ok(());
        }
        if let Some(RepairPause { until, why, .. }) = &repair.pause
            && Instant::now() < *until
        {
            let source = format!("{why}; trying again after a pause").into();
            return Err(StoreError::Busy { what: REPAIR, source });
        }
        if !self.is_needed(generation, condition).await? {
            return Ok(());
        }
        let mended = self.mend_now(generation, condition).await;
        repair.pause = match &mended {
            // Each try makes new writers wait behind it.
            Err(StoreError::Busy { source, .. }) => {
                let length = repair.pause.as_ref().map_or(MEND_AGAIN, |before| (before.length * 2).min(MEND_AGAIN_MAX));
                let cause = source.source().map_or_else(String::new, |cause| format!(": {cause}"));
                Some(RepairPause { until: Instant::now() + length, length, why: format!("{source}{cause}") })
            }
            _ => None,
        };
        mended
    }

    /// Asks on a connection that is there: with nothing to put right, nothing more is opened.
    async fn is_needed(&self, generation: u64, condition: &'static str) -> Result<bool, StoreError> {
        let needed = self
            .links
            .writes
            .call(generation, "check whether the positions belong to this database", async |session| {
                session.client.query_one(&format!("select {condition}"), &[]).await?.try_get::<_, Option<bool>>(0)
            })
            .await?;
        Ok(needed != Some(false))
    }

    async fn mend_now(&self, generation: u64, condition: &'static str) -> Result<(), StoreError> {
        // It may rewrite a large outbox, which takes as long as it takes.
        let mended = self
            .links
            .repairs
            .call_within(FOREVER, generation, REPAIR, async |session| {
                let tx = session.client.transaction().await?;
                let needed = tx.query_one(&format!("select {condition}"), &[]).await?.try_get::<_, Option<bool>>(0)?;
                if needed == Some(false) {
                    return Ok("nothing".to_owned());
                }
                tx.batch_execute("set local statement_timeout = 0; set local lock_timeout = 0").await?;
                let mended = tx.query_one("select postroom.mend()", &[]).await?.try_get::<_, String>(0)?;
                tx.commit().await?;
                Ok(mended)
            })
            .await?;
        let what = match mended.as_str() {
            "rebased" => "the database or its outbox was restored or replaced: positions were re-based",
            "sequence" => {
                "the sequence of the outbox had gone back: it was advanced, and messages that would have been missed got new seqs"
            }
            _ => return Ok(()),
        };
        tracing::warn!(route = %self.route.name, "{what}; no message was skipped, some may be sent again");
        self.links.server.forget();
        Ok(())
    }

    /// Looks whether the tables are still those that we know, and puts right what is not; learns what the route is now and
    /// which other relays are silent. Before anything is renewed or taken.
    pub(super) async fn look_around(&self) -> Result<Seen, StoreError> {
        let generation = self.links.server.generation();
        let astray = self.astray.load(Ordering::Relaxed);
        let (route, owner) = (&self.route.name, &self.owner);
        let (row, backend) = self
            .links
            .leases
            .call_within(self.route.lease / 2, generation, "look at the route", async |session| {
                let statement = session.prepared(include_str!("../sql/watch.sql")).await?;
                Ok((session.client.query_opt(&statement, &[route, owner]).await?, session.backend))
            })
            .await?;
        let seen = row.as_ref().map(Seen::of).transpose()?;
        if seen.as_ref().is_some_and(|seen| seen.backend != backend) {
            return Err(behind_a_pooler());
        }
        match seen {
            Some(mut seen) if seen.at_home && !seen.sequence_behind && !astray => {
                if !seen.registered {
                    tracing::warn!(%route, "the route or its lanes were deleted from the database; it is registered again");
                    self.register_route(generation).await?;
                }
                self.links.server.positions_are_of(generation, seen.incarnation);
                let news = self.watch.lock().unwrap_or_else(PoisonError::into_inner).look(&seen);
                if news.reset_waits {
                    self.reset_waits(self.links.server.generation()).await?;
                }
                seen.silent = news.silent;
                Ok(seen)
            }
            _ => {
                // The settings may be missing while a restore is under way; mend() says so.
                self.mend_if(generation, "true").await?;
                self.astray.store(false, Ordering::Relaxed);
                Err(StoreError::Busy { what: "renew the lease", source: "positions had to be corrected first".into() })
            }
        }
    }

    async fn reset_waits(&self, generation: u64) -> Result<(), StoreError> {
        let waits = self
            .links
            .leases
            .call(generation, "shorten waits after the clock went back", async |session| {
                session.client.execute(include_str!("../sql/reset_waits.sql"), &[&self.route.name]).await
            })
            .await?;
        if waits > 0 {
            tracing::warn!(
                route = %self.route.name, waits,
                "the database's clock went back, or a backup was restored that was made while the clock was ahead; waits were shortened by \
                 the same amount"
            );
        }
        Ok(())
    }
}
