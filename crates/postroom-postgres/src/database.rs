//! One PostgreSQL database: what a program that is configured with one holds on to.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use postroom::{
    Archivable, ArchiveState, ArchivedMessage, Consumer, DISCOVER, DeadCursor, DeadDeed, DeadFilter, DeadLetter,
    DeadNote, Deed, Diagnosis, Discovered, Expired, Fate, Finding, Forgotten, FoundTable, Headline, IdPrints, Intake,
    IntakeStatus, Intakes, Keeper, KeyDeed, Listed, MarkedRows, Message, MessageFilter, MessageId, MigrateError,
    Migrated, MigrationPlan, Needs, NewOperation, OperationEffects, OperationId, Operator, Previewed, Reception,
    Reconcilable, Reconciled, Removed, Restored, Retention, Route, RouteChange, RouteSettings, Segment, SegmentId,
    SessionKeeper, ShownOperation, ShownRoute, Side, Source, Span, Steer, Stepped, Store, StoreError, StoreStatus,
    StoredMessage, Stuck, Survey, Sweep, TableIndex, TableName, Tally, TookIn, TopicFilter, Turn, Unhandled,
    UnroutedTopic, Vitals, WaitingKey, Wake, Whereabouts,
};

use crate::Postgres;
use crate::connect::{Connector, InvalidUrl};
use crate::inbox::PostgresSession;
use crate::intake;
use crate::link::{Link, Server, store_error};
use crate::log::{Listener, LogSource};
use crate::operate::{OperatorSession, while_it_answers, with_blockers, within};
use crate::operate::{archive, operations, reconcile};
use crate::{migrate, operate};

/// A PostgreSQL database with postroom's schema in it, or one that is to get it. Clones share it.
///
/// All sources of a database share its connections: at most fifteen, however many routes there are, and four where there is one.
/// Operators' calls open one each.
#[derive(Clone)]
pub struct Database {
    connector: Arc<Connector>,
    links: Arc<Links>,
}

impl std::fmt::Debug for Database {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Database").field(&self.connector).finish()
    }
}

/// A small sample of each table; one that takes longer is given up.
const REFRESHED_WITHIN: Duration = Duration::from_secs(60);

/// What the sources of one database share.
pub(crate) struct Links {
    pub server: Arc<Server>,
    /// Reads; writes nothing that may not be lost.
    pub claims: Link,
    /// Positions, parked messages and dead letters: durable, so that a crash of the server repeats no more than a crash of the relay.
    pub writes: Link,
    /// Renewals never wait behind anything else.
    pub leases: Link,
    /// Putting positions right, for all routes at once; without our usual deadlines. And when it was tried last.
    pub repairs: Link,
    pub repair: tokio::sync::Mutex<Repair>,
    /// Steps of operations, while there are any.
    pub steps: tokio::sync::Mutex<Option<OperatorSession>>,
    /// Steps of intakes, and how their connections are opened.
    pub intakes: intake::AllKept,
    pub intake_connector: Arc<Connector>,
    /// A connection is kept for the steps of operations.
    pub keeps_steps: bool,
    /// For what is rarely done.
    pub connector: Arc<Connector>,
    /// Statistics are being refreshed.
    pub refreshing: AtomicBool,
}

impl Links {
    /// Has tables analyzed that became much larger than the planner knows. On a connection of its own, and nobody waits for it: nothing
    /// depends on it but the time that statements take.
    pub fn refresh_statistics(self: &Arc<Self>) {
        if self.refreshing.swap(true, Ordering::Relaxed) {
            return;
        }
        let links = self.clone();
        tokio::spawn(async move {
            let refreshed = async {
                let mut session = OperatorSession::open(&links.connector).await?;
                let failed = |error| store_error("refresh the statistics of the tables", error);
                let tx = session.deed().await?;
                tx.batch_execute("select postroom.refresh_statistics()").await.map_err(failed)?;
                tx.commit().await.map_err(failed)
            };
            if let Ok(Err(error)) = tokio::time::timeout(REFRESHED_WITHIN, refreshed).await {
                tracing::debug!(%error, "the statistics of the tables stay as they are until the next renewal");
            }
            links.refreshing.store(false, Ordering::Relaxed);
        });
    }
}

/// When positions may be put right again.
#[derive(Debug, Default)]
pub(crate) struct Repair {
    /// None: at once.
    pub pause: Option<RepairPause>,
}

/// Something was in the way.
#[derive(Debug, Clone)]
pub(crate) struct RepairPause {
    pub until: Instant,
    pub length: Duration,
    /// What was in the way, for people.
    pub why: String,
}

/// A read sorts its rows with what is stored in them, up to 2 KB each; larger payloads are beside the table. With the usual 4 MB a
/// window of 8,000 messages of 1 KB would be sorted on the disk.
const CLAIM_SETTINGS: &str = "-c synchronous_commit=off -c work_mem=32MB";
const CLAIM_CONNECTIONS_MAX: usize = 4;
/// Somebody who holds a row of one route must not keep the connections from the others: a wait for a lock ends soon, and is begun again
/// after a pause.
const WRITE_SETTINGS: &str = "-c lock_timeout=500ms";
const WRITE_CONNECTIONS_MAX: usize = 6;
const LEASE_SETTINGS: &str = "-c lock_timeout=250ms";
const LEASE_CONNECTIONS_MAX: usize = 4;
/// Claims, writes, leases, repairs, and operators' calls.
const FRUGAL_CONNECTIONS: usize = 5;

impl Database {
    /// Reads a `postgres://` URL as [`Connector::new`] does; connects to nothing.
    pub fn new(url: &str) -> Result<Self, InvalidUrl> {
        Connector::new(url).map(Self::of)
    }

    /// The database that this connector leads to.
    pub fn of(connector: Connector) -> Self {
        Self::with(connector, [CLAIM_CONNECTIONS_MAX, WRITE_CONNECTIONS_MAX, LEASE_CONNECTIONS_MAX], None)
    }

    /// The same with few connections, for programs that work with many databases: one each for claims, writes, renewals and repairs of
    /// positions, one for operators' calls, which take turns, and one for each of so many intakes. How many that are.
    pub fn frugal(connector: Connector, intakes: usize) -> (Self, usize) {
        let calls = connector.at_most(1);
        (Self::with(calls, [1, 1, 1], Some(intakes)), FRUGAL_CONNECTIONS + intakes)
    }

    fn with(connector: Connector, [claims, writes, leases]: [usize; 3], frugal: Option<usize>) -> Self {
        let (connector, server) = (Arc::new(connector), Arc::new(Server::default()));
        let link = |settings, connections_max| Link::new(connector.clone(), server.clone(), settings, connections_max);
        let links = Links {
            claims: link(CLAIM_SETTINGS, claims),
            writes: link(WRITE_SETTINGS, writes),
            leases: link(LEASE_SETTINGS, leases),
            repairs: link("", 1),
            repair: tokio::sync::Mutex::default(),
            steps: tokio::sync::Mutex::default(),
            intakes: intake::AllKept::default(),
            intake_connector: frugal.map_or_else(|| connector.clone(), |intakes| Arc::new(connector.at_most(intakes))),
            keeps_steps: frugal.is_none(),
            connector: connector.clone(),
            refreshing: AtomicBool::new(false),
            server: server.clone(),
        };
        Self { links: Arc::new(links), connector }
    }

    pub(crate) fn links(&self) -> &Arc<Links> {
        &self.links
    }

    /// Opens connections to it.
    pub fn connector(&self) -> &Connector {
        &self.connector
    }
}

const COMPARE: &str = "compare messages with effects";

#[async_trait]
impl Operator for Database {
    async fn status(&self) -> Result<StoreStatus, StoreError> {
        within(&self.connector, "read the status", operate::status(&self.connector)).await
    }

    async fn work_waits(&self, routes: &[String]) -> Result<bool, StoreError> {
        within(&self.connector, "look whether something is to be sent", operate::work_waits(&self.connector, routes))
            .await
    }

    async fn unrouted_topics(&self) -> Result<Vec<UnroutedTopic>, StoreError> {
        let what = "look for topics that no route takes";
        within(&self.connector, what, operate::unrouted_topics(&self.connector)).await
    }

    async fn vitals(&self) -> Result<Vitals, StoreError> {
        within(&self.connector, "read the sizes of the tables", operate::vitals(&self.connector)).await
    }

    async fn note_sizes(&self) -> Result<(), StoreError> {
        within(&self.connector, "remember the sizes of the tables", operate::note_sizes(&self.connector)).await
    }

    async fn routes(&self) -> Result<Vec<ShownRoute>, StoreError> {
        within(&self.connector, "read the routes", operate::routes(&self.connector)).await
    }

    async fn set_route(
        &self,
        route: &str,
        change: &RouteChange,
        deed: &Deed,
    ) -> Result<Option<RouteSettings>, StoreError> {
        within(&self.connector, "change a route", operate::set_route(&self.connector, route, change, deed)).await
    }

    async fn whereabouts(&self, id: MessageId) -> Result<Vec<Whereabouts>, StoreError> {
        within(&self.connector, "look for a message", operate::whereabouts(&self.connector, id)).await
    }

    async fn receptions(&self, id: MessageId) -> Result<Vec<Reception>, StoreError> {
        let what = "look for a received message";
        within(&self.connector, what, operate::receptions(&self.connector, id)).await
    }

    async fn messages(&self, filter: &MessageFilter, limit: i64) -> Result<Listed, StoreError> {
        within(&self.connector, "look for messages", operate::messages(&self.connector, filter, limit)).await
    }

    async fn message(&self, id: MessageId) -> Result<Option<StoredMessage>, StoreError> {
        within(&self.connector, "look for a message", operate::message(&self.connector, id)).await
    }

    async fn note_payload_read(&self, id: MessageId, deed: &Deed) -> Result<(), StoreError> {
        let work = operate::note_payload_read(&self.connector, id, deed);
        within(&self.connector, "note that a payload is read", work).await
    }

    async fn forget_route(&self, route: &str, discard: bool, deed: &Deed) -> Result<Option<Forgotten>, StoreError> {
        within(&self.connector, "forget a route", operate::forget_route(&self.connector, route, discard, deed)).await
    }

    async fn waiting_keys(&self, side: Side, of: Option<&str>, limit: i64) -> Result<Vec<WaitingKey>, StoreError> {
        within(&self.connector, "read the waiting keys", operate::waiting_keys(&self.connector, side, of, limit)).await
    }

    async fn act_on_key(&self, route: &str, key: &str, what: KeyDeed, deed: &Deed) -> Result<bool, StoreError> {
        within(&self.connector, "act on a key", operate::act_on_key(&self.connector, route, key, what, deed)).await
    }

    async fn dead_letters_behind(
        &self,
        after: Option<&DeadCursor>,
        side: Side,
        filter: &DeadFilter,
        limit: i64,
    ) -> Result<Vec<DeadLetter>, StoreError> {
        let work = operate::dead_letters(&self.connector, after, side, filter, limit);
        within(&self.connector, "read the dead letters", work).await
    }

    async fn dead_payload(&self, side: Side, route: &str, seq: i64) -> Result<Option<Vec<u8>>, StoreError> {
        within(&self.connector, "read a dead letter", operate::dead_payload(&self.connector, side, route, seq)).await
    }

    async fn act_on_dead(
        &self,
        what: DeadDeed,
        side: Side,
        filter: &DeadFilter,
        limit: i64,
        deed: &Deed,
        progress: &mut (dyn FnMut(usize) + Send),
    ) -> Result<Vec<DeadLetter>, StoreError> {
        operate::act_on_dead(&self.connector, what, side, filter, limit, deed, progress).await
    }

    async fn dead_headlines(
        &self,
        side: Side,
        after: Option<&DeadCursor>,
        limit: i64,
    ) -> Result<Vec<Headline>, StoreError> {
        let work = operations::headlines(&self.connector, side, after, limit);
        within(&self.connector, "read the dead letters", work).await
    }

    async fn dead_notes(&self, groups: &[String]) -> Result<Vec<(String, DeadNote)>, StoreError> {
        let work = operations::dead_notes(&self.connector, groups);
        within(&self.connector, "read the notes about dead letters", work).await
    }

    async fn note_dead(&self, group: &str, note: &str, deed: &Deed) -> Result<(), StoreError> {
        let work = operations::note_dead(&self.connector, group, note, deed);
        within(&self.connector, "write a note about dead letters", work).await
    }

    async fn survey_operation(&self, operation: &NewOperation, survey: &mut Survey) -> Result<(), StoreError> {
        let work = operations::survey(&self.connector, operation, survey);
        within(&self.connector, "look what would be done", work).await
    }

    async fn begin_operation(&self, id: OperationId, operation: &NewOperation, deed: &Deed) -> Result<(), StoreError> {
        let work = operations::begin(&self.connector, id, operation, deed);
        within(&self.connector, "begin the operation", work).await
    }

    async fn operations(&self, id: Option<OperationId>, limit: i64) -> Result<Vec<ShownOperation>, StoreError> {
        within(&self.connector, "read the operations", operations::operations(&self.connector, id, limit)).await
    }

    async fn operation_effects(&self, id: OperationId) -> Result<Vec<OperationEffects>, StoreError> {
        let what = "look what became of the messages of an operation";
        within(&self.connector, what, operations::effects(&self.connector, id)).await
    }

    async fn steer_operation(&self, id: OperationId, what: Steer, deed: &Deed) -> Result<bool, StoreError> {
        within(&self.connector, "change the operation", operations::steer(&self.connector, id, what, deed)).await
    }

    async fn step_operations(&self) -> Result<Stepped, StoreError> {
        let mut kept = self.links.steps.lock().await;
        let stepped =
            within(&self.connector, "carry out operations", operations::step(&self.connector, &mut kept)).await;
        if !self.links.keeps_steps {
            *kept = None;
        }
        stepped
    }

    async fn prune_inbox(
        &self,
        older_than: Duration,
        deed: &Deed,
        progress: &mut (dyn FnMut(u64) + Send),
    ) -> Result<u64, StoreError> {
        operate::prune_inbox(&self.connector, older_than, deed, progress).await
    }

    async fn retain(&self, retention: &Retention, sweep: &mut Sweep) -> Result<Removed, StoreError> {
        within(&self.connector, "remove what is finished and old", operate::retain(&self.connector, retention, sweep))
            .await
    }
}

#[async_trait]
impl Intakes for Database {
    async fn check_intake(&self, of: &Intake) -> Result<Vec<Finding>, StoreError> {
        within(&self.connector, "look at a table", intake::check(&self.connector, of)).await
    }

    async fn preview_intake(&self, of: &Intake, max: usize) -> Result<Vec<Previewed>, StoreError> {
        within(&self.connector, "look at rows of a table", intake::preview(&self.connector, of, max)).await
    }

    async fn take_in(&self, of: &Intake, max: usize) -> Result<TookIn, StoreError> {
        let work = intake::take_in(&self.links.intake_connector, &self.links.intakes, of, max);
        within(&self.connector, "take rows of a table", work).await
    }

    async fn mark_rows(&self, of: &Intake, after: i64, max: usize) -> Result<MarkedRows, StoreError> {
        let work = intake::mark_rows(&self.links.intake_connector, &self.links.intakes, of, after, max);
        within(&self.connector, "mark rows that were sent", work).await
    }

    async fn intake_status(&self, of: &Intake) -> Result<IntakeStatus, StoreError> {
        within(&self.connector, "look at an intake", intake::status(&self.connector, of)).await
    }

    async fn take_again(&self, of: &Intake, row: Option<&str>, deed: &Deed) -> Result<u64, StoreError> {
        within(&self.connector, "let rows be taken again", intake::again(&self.connector, of, row, deed)).await
    }

    async fn indexes_of(&self, table: &TableName) -> Result<Vec<TableIndex>, StoreError> {
        within(&self.connector, "look at a table's indexes", intake::indexes(&self.connector, table)).await
    }

    async fn senders_to(&self, table: &TableName) -> Result<Vec<String>, StoreError> {
        within(&self.connector, "look at sessions", intake::senders(&self.connector, table)).await
    }

    async fn free_rows(
        &self,
        of: &Intake,
        stuck: &Stuck,
        age: Duration,
        max: usize,
        deed: &Deed,
    ) -> Result<u64, StoreError> {
        let work = intake::free(&self.connector, of, stuck, age, max, deed);
        within(&self.connector, "give back rows that are stuck", work).await
    }

    async fn tables_with(&self, columns: &[String]) -> Result<Vec<FoundTable>, StoreError> {
        within(&self.connector, "look for tables", intake::tables_with(&self.connector, columns)).await
    }
}

#[async_trait]
impl Archivable for Database {
    async fn archive_state(&self) -> Result<ArchiveState, StoreError> {
        within(&self.connector, "look at the archive's segments", archive::state(&self.connector)).await
    }

    async fn find_expired(&self, retention: &Retention, sweep: &mut Sweep) -> Result<Vec<Expired>, StoreError> {
        let work = archive::find_expired(&self.connector, retention, sweep);
        within(&self.connector, "look for messages to archive", work).await
    }

    async fn begin_segment(&self, messages: &[Expired]) -> Result<Option<Segment>, StoreError> {
        within(&self.connector, "begin to archive", archive::begin(&self.connector, messages)).await
    }

    async fn take_segment(&self) -> Result<Turn, StoreError> {
        within(&self.connector, "go on with archiving", archive::take(&self.connector)).await
    }

    async fn segment_messages(&self, segment: SegmentId) -> Result<Vec<ArchivedMessage>, StoreError> {
        let work = archive::messages(&self.connector, segment);
        within(&self.connector, "read what is to be archived", work).await
    }

    async fn end_segment(&self, segment: SegmentId) -> Result<u64, StoreError> {
        within(&self.connector, "remove what is archived", archive::end(&self.connector, segment)).await
    }

    async fn restore(
        &self,
        messages: &[ArchivedMessage],
        stays: Duration,
        deed: &Deed,
    ) -> Result<Restored, StoreError> {
        let work = archive::restore(&self.connector, messages, stays, deed);
        within(&self.connector, "put archived messages back", work).await
    }

    async fn forget_restored(&self) -> Result<u64, StoreError> {
        let work = archive::forget_restored(&self.connector);
        within(&self.connector, "remove what came back from the archive", work).await
    }
}

#[async_trait]
impl Reconcilable for Database {
    async fn outbox_times(&self, plausible: Span) -> Result<Option<Span>, StoreError> {
        within(&self.connector, COMPARE, reconcile::outbox_times(&self.connector, plausible)).await
    }

    async fn outbox_outside(&self, span: Span) -> Result<u64, StoreError> {
        within(&self.connector, COMPARE, reconcile::outbox_outside(&self.connector, span)).await
    }

    async fn outbox_prints(&self, topics: &TopicFilter, span: Span, piece_ms: i64) -> Result<IdPrints, StoreError> {
        within(&self.connector, COMPARE, reconcile::outbox_prints(&self.connector, topics, span, piece_ms)).await
    }

    async fn outbox_ids(&self, topics: &TopicFilter, span: Span) -> Result<Vec<MessageId>, StoreError> {
        within(&self.connector, COMPARE, reconcile::outbox_ids(&self.connector, topics, span)).await
    }

    async fn inbox_begins(&self, consumer: &Consumer) -> Result<Option<i64>, StoreError> {
        within(&self.connector, COMPARE, reconcile::inbox_begins(&self.connector, consumer)).await
    }

    async fn inbox_prints(&self, consumer: &Consumer, span: Span, piece_ms: i64) -> Result<IdPrints, StoreError> {
        within(&self.connector, COMPARE, reconcile::inbox_prints(&self.connector, consumer, span, piece_ms)).await
    }

    async fn inbox_ids(&self, consumer: &Consumer, span: Span) -> Result<Vec<MessageId>, StoreError> {
        within(&self.connector, COMPARE, reconcile::inbox_ids(&self.connector, consumer, span)).await
    }

    async fn inbox_unhandled(&self, consumer: &Consumer, span: Span) -> Result<Unhandled, StoreError> {
        within(&self.connector, COMPARE, reconcile::inbox_unhandled(&self.connector, consumer, span)).await
    }

    async fn dead_at(&self, consumer: &Consumer, ids: &[MessageId]) -> Result<Vec<MessageId>, StoreError> {
        within(&self.connector, COMPARE, reconcile::dead_at(&self.connector, consumer, ids)).await
    }

    async fn fates(&self, route: &str, ids: &[MessageId]) -> Result<Vec<(MessageId, Fate)>, StoreError> {
        within(&self.connector, COMPARE, reconcile::fates(&self.connector, route, ids)).await
    }

    async fn tallies(&self, route: &str, topics: &TopicFilter, span: Span) -> Result<Vec<Tally>, StoreError> {
        within(&self.connector, COMPARE, reconcile::tallies(&self.connector, route, topics, span)).await
    }

    async fn business(&self, query: &str, span: Span) -> Result<Vec<(Option<String>, String, u64)>, StoreError> {
        within(&self.connector, COMPARE, reconcile::business(&self.connector, query, span)).await
    }

    async fn unwritten(
        &self,
        query: &str,
        topics: &TopicFilter,
        changed: Span,
        written: Span,
        limit: usize,
    ) -> Result<postroom::Unwritten, StoreError> {
        let unwritten = reconcile::unwritten(&self.connector, query, topics, changed, written, limit);
        within(&self.connector, COMPARE, unwritten).await
    }

    async fn note_reconciled(&self, result: &Reconciled) -> Result<(), StoreError> {
        within(&self.connector, COMPARE, reconcile::note(&self.connector, result)).await
    }

    async fn reconciled(&self, name: Option<&str>) -> Result<Vec<Reconciled>, StoreError> {
        within(&self.connector, COMPARE, reconcile::reconciled(&self.connector, name)).await
    }
}

#[async_trait]
impl Store for Database {
    fn intakes(&self) -> Option<&dyn Intakes> {
        Some(self)
    }

    fn shown(&self) -> String {
        self.connector.shown().to_owned()
    }

    async fn source(&self, route: &Route, owner: &str) -> Result<Arc<dyn Source>, StoreError> {
        Ok(Arc::new(LogSource::open(self, route, owner).await?))
    }

    fn keeper(&self, consumer: &Consumer) -> Arc<dyn Keeper> {
        let connector = self.connector.as_ref().clone();
        SessionKeeper::<Postgres>::new(consumer.clone(), move || PostgresSession::new(connector.clone()))
    }

    async fn discover(&self, query: &str) -> Result<Vec<Discovered>, StoreError> {
        within(&self.connector, DISCOVER, reconcile::discover(&self.connector, query)).await
    }

    async fn send(&self, message: &Message) -> Result<(), StoreError> {
        within(&self.connector, "write a message", operate::send(&self.connector, message)).await
    }

    async fn check(&self, needs: Needs) -> Result<Vec<Finding>, StoreError> {
        within(&self.connector, "check the store", operate::rights::check(&self.connector, needs)).await
    }

    async fn diagnose(&self) -> Result<Vec<Diagnosis>, StoreError> {
        within(&self.connector, "examine the store", operate::diagnose(&self.connector)).await
    }

    fn listen(&self, wakes: Vec<Wake>) -> Option<Box<dyn Send>> {
        Some(Box::new(Listener::new(self.connector.as_ref().clone(), wakes)))
    }

    async fn migrate(&self, lanes: Option<u16>) -> Result<Migrated, MigrateError> {
        match while_it_answers(&self.connector, migrate::migrate(&self.connector, lanes)).await {
            Some(Err(MigrateError::Store(error))) => Err(with_blockers(&self.connector, error).await.into()),
            Some(migrated) => migrated,
            None => {
                let what = "migrate the schema; it was changed in whole or not at all";
                let source = "the server has stopped answering; run it again when the server is back".into();
                Err(StoreError::Unavailable { what, source }.into())
            }
        }
    }

    async fn plan(&self) -> Result<MigrationPlan, MigrateError> {
        let planned = async { Ok(migrate::plan(&self.connector).await) };
        within(&self.connector, "read the applied migrations", planned).await?
    }

    fn print_sql(&self, lanes: Option<u16>) -> Result<String, MigrateError> {
        migrate::print_sql(lanes)
    }
}
