//! One SQLite file: what a program that is configured with one holds on to.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{
    Archivable, ArchiveState, ArchivedMessage, Consumer, DISCOVER, DeadCursor, DeadDeed, DeadFilter, DeadLetter,
    DeadNote, Deed, Diagnosis, Discovered, Expired, Fate, Finding, Forgotten, FoundTable, Headline, IdPrints, Intake,
    IntakeStatus, Intakes, Keeper, KeyDeed, Listed, MarkedRows, Message, MessageFilter, MessageId, MigrateError,
    Migrated, MigrationPlan, Needs, NewOperation, OperationEffects, OperationId, Operator, Previewed, Reception,
    Reconcilable, Reconciled, Removed, Restored, Retention, Route, RouteChange, RouteSettings, Segment, SegmentId,
    SessionKeeper, ShownOperation, ShownRoute, Side, Source, Span, StartAt, Steer, Stepped, Store, StoreError,
    StoreStatus, StoredMessage, Stuck, Survey, Sweep, TableIndex, TableName, Tally, TookIn, TopicFilter, Turn,
    Unhandled, UnroutedTopic, Vitals, WaitingKey, Whereabouts, redact_url,
};
use rusqlite::Connection;

use crate::Sqlite;
use crate::connect::{connect, create_private};
use crate::inbox::SqliteSession;
use crate::intake;
use crate::log::SqliteSource;
use crate::operate::{archive, operations, reconcile};
use crate::{migrate, operate};

/// A SQLite file with postroom's tables in it, or one that is to get them. All work happens on blocking threads, each call on a
/// connection of its own.
#[derive(Debug, Clone)]
pub struct Database {
    path: PathBuf,
}

impl Database {
    /// The file at this path; opens nothing.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs on a blocking thread; it runs to its end even when the caller stops waiting.
    async fn on_thread<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl FnOnce(&mut Connection) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let path = self.path.clone();
        let work = move || {
            // Opening would create it, and a mistyped path would look like an empty store.
            if !path.exists() {
                let source = format!("there is no file {}; `postroom migrate` creates it", path.display()).into();
                return Err(StoreError::Unavailable { what, source });
            }
            work(&mut connect(&path)?)
        };
        blocking(what, work).await?
    }
}

async fn blocking<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, StoreError> {
    tokio::task::spawn_blocking(work).await.map_err(|error| StoreError::Unavailable { what, source: error.into() })
}

const COMPARE: &str = "compare messages with effects";

#[async_trait]
impl Operator for Database {
    async fn status(&self) -> Result<StoreStatus, StoreError> {
        self.on_thread("read the status", |connection| operate::status(connection)).await
    }

    async fn work_waits(&self, routes: &[String]) -> Result<bool, StoreError> {
        let routes = routes.to_vec();
        let what = "look whether something is to be sent";
        self.on_thread(what, move |connection| operate::work_waits(connection, &routes)).await
    }

    async fn unrouted_topics(&self) -> Result<Vec<UnroutedTopic>, StoreError> {
        let what = "look for topics that no route takes";
        self.on_thread(what, |connection| operate::unrouted_topics(connection)).await
    }

    async fn vitals(&self) -> Result<Vitals, StoreError> {
        self.on_thread("read the size of the file", |connection| operate::vitals(connection)).await
    }

    async fn note_sizes(&self) -> Result<(), StoreError> {
        self.on_thread("remember the size of the file", operate::note_sizes).await
    }

    async fn routes(&self) -> Result<Vec<ShownRoute>, StoreError> {
        self.on_thread("read the routes", |connection| operate::routes(connection)).await
    }

    async fn set_route(
        &self,
        route: &str,
        change: &RouteChange,
        deed: &Deed,
    ) -> Result<Option<RouteSettings>, StoreError> {
        let (route, change, deed) = (route.to_owned(), change.clone(), deed.clone());
        let work = move |connection: &mut Connection| operate::set_route(connection, &route, &change, &deed);
        self.on_thread("change a route", work).await
    }

    async fn whereabouts(&self, id: MessageId) -> Result<Vec<Whereabouts>, StoreError> {
        self.on_thread("look for a message", move |connection| operate::whereabouts(connection, id)).await
    }

    async fn receptions(&self, id: MessageId) -> Result<Vec<Reception>, StoreError> {
        self.on_thread("look for a received message", move |connection| operate::receptions(connection, id)).await
    }

    async fn messages(&self, filter: &MessageFilter, limit: i64) -> Result<Listed, StoreError> {
        let filter = filter.clone();
        self.on_thread("look for messages", move |connection| operate::messages(connection, &filter, limit)).await
    }

    async fn message(&self, id: MessageId) -> Result<Option<StoredMessage>, StoreError> {
        self.on_thread("look for a message", move |connection| operate::message(connection, id)).await
    }

    async fn note_payload_read(&self, id: MessageId, deed: &Deed) -> Result<(), StoreError> {
        let deed = deed.clone();
        let work = move |connection: &mut Connection| operate::note_payload_read(connection, id, &deed);
        self.on_thread("note that a payload is read", work).await
    }

    async fn forget_route(&self, route: &str, discard: bool, deed: &Deed) -> Result<Option<Forgotten>, StoreError> {
        let (route, deed) = (route.to_owned(), deed.clone());
        let work = move |connection: &mut Connection| operate::forget_route(connection, &route, discard, &deed);
        self.on_thread("forget a route", work).await
    }

    async fn waiting_keys(&self, side: Side, of: Option<&str>, limit: i64) -> Result<Vec<WaitingKey>, StoreError> {
        let of = of.map(str::to_owned);
        let work = move |connection: &mut Connection| operate::waiting_keys(connection, side, of.as_deref(), limit);
        self.on_thread("read the waiting keys", work).await
    }

    async fn act_on_key(&self, route: &str, key: &str, what: KeyDeed, deed: &Deed) -> Result<bool, StoreError> {
        let (route, key, deed) = (route.to_owned(), key.to_owned(), deed.clone());
        let work = move |connection: &mut Connection| operate::act_on_key(connection, &route, &key, what, &deed);
        self.on_thread("act on a key", work).await
    }

    async fn dead_letters_behind(
        &self,
        after: Option<&DeadCursor>,
        side: Side,
        filter: &DeadFilter,
        limit: i64,
    ) -> Result<Vec<DeadLetter>, StoreError> {
        let (after, filter) = (after.cloned(), filter.clone());
        let work =
            move |connection: &mut Connection| operate::dead_letters(connection, after.as_ref(), side, &filter, limit);
        self.on_thread("read the dead letters", work).await
    }

    async fn dead_payload(&self, side: Side, route: &str, seq: i64) -> Result<Option<Vec<u8>>, StoreError> {
        let route = route.to_owned();
        let work = move |connection: &mut Connection| operate::dead_payload(connection, side, &route, seq);
        self.on_thread("read a dead letter", work).await
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
        let (filter, deed) = (filter.clone(), deed.clone());
        let work =
            move |connection: &mut Connection| operate::act_on_dead(connection, what, side, &filter, limit, &deed);
        let done = self.on_thread("act on dead letters", work).await?;
        progress(done.len());
        Ok(done)
    }

    async fn dead_headlines(
        &self,
        side: Side,
        after: Option<&DeadCursor>,
        limit: i64,
    ) -> Result<Vec<Headline>, StoreError> {
        let after = after.cloned();
        let work = move |connection: &mut Connection| operations::headlines(connection, side, after.as_ref(), limit);
        self.on_thread("read the dead letters", work).await
    }

    async fn dead_notes(&self, groups: &[String]) -> Result<Vec<(String, DeadNote)>, StoreError> {
        let groups = groups.to_vec();
        let work = move |connection: &mut Connection| operations::dead_notes(connection, &groups);
        self.on_thread("read the notes about dead letters", work).await
    }

    async fn note_dead(&self, group: &str, note: &str, deed: &Deed) -> Result<(), StoreError> {
        let (group, note, deed) = (group.to_owned(), note.to_owned(), deed.clone());
        let work = move |connection: &mut Connection| operations::note_dead(connection, &group, &note, &deed);
        self.on_thread("write a note about dead letters", work).await
    }

    async fn survey_operation(&self, operation: &NewOperation, survey: &mut Survey) -> Result<(), StoreError> {
        let (operation, so_far) = (operation.clone(), survey.clone());
        let work = move |connection: &mut Connection| operations::survey(connection, &operation, so_far);
        *survey = self.on_thread("look what would be done", work).await?;
        Ok(())
    }

    async fn begin_operation(&self, id: OperationId, operation: &NewOperation, deed: &Deed) -> Result<(), StoreError> {
        let (operation, deed) = (operation.clone(), deed.clone());
        let work = move |connection: &mut Connection| operations::begin(connection, id, &operation, &deed);
        self.on_thread("begin the operation", work).await
    }

    async fn operations(&self, id: Option<OperationId>, limit: i64) -> Result<Vec<ShownOperation>, StoreError> {
        self.on_thread("read the operations", move |connection| operations::operations(connection, id, limit)).await
    }

    async fn operation_effects(&self, id: OperationId) -> Result<Vec<OperationEffects>, StoreError> {
        let what = "look what became of the messages of an operation";
        self.on_thread(what, move |connection| operations::effects(connection, id)).await
    }

    async fn steer_operation(&self, id: OperationId, what: Steer, deed: &Deed) -> Result<bool, StoreError> {
        let deed = deed.clone();
        let work = move |connection: &mut Connection| operations::steer(connection, id, what, &deed);
        self.on_thread("change the operation", work).await
    }

    async fn step_operations(&self) -> Result<Stepped, StoreError> {
        self.on_thread("carry out operations", operations::step).await
    }

    async fn prune_inbox(
        &self,
        older_than: Duration,
        deed: &Deed,
        progress: &mut (dyn FnMut(u64) + Send),
    ) -> Result<u64, StoreError> {
        let mut pruned = 0;
        loop {
            let (deed, first) = (deed.clone(), pruned == 0);
            let work = move |connection: &mut Connection| operate::prune_step(connection, older_than, first, &deed);
            let (step, more) = self.on_thread("prune the inbox", work).await?;
            pruned += step;
            progress(pruned);
            if !more {
                return Ok(pruned);
            }
        }
    }

    async fn retain(&self, retention: &Retention, sweep: &mut Sweep) -> Result<Removed, StoreError> {
        let (retention, from) = (retention.clone(), sweep.clone());
        let work = move |connection: &mut Connection| operate::retain_step(connection, &retention, from);
        let (removed, to) = self.on_thread("remove what is finished and old", work).await?;
        *sweep = to;
        Ok(removed)
    }
}

#[async_trait]
impl Intakes for Database {
    async fn check_intake(&self, of: &Intake) -> Result<Vec<Finding>, StoreError> {
        let of = of.clone();
        self.on_thread("look at a table", move |connection| intake::check(connection, &of)).await
    }

    async fn preview_intake(&self, of: &Intake, max: usize) -> Result<Vec<Previewed>, StoreError> {
        let of = of.clone();
        self.on_thread("look at rows of a table", move |connection| intake::preview(connection, &of, max)).await
    }

    async fn take_in(&self, of: &Intake, max: usize) -> Result<TookIn, StoreError> {
        let of = of.clone();
        self.on_thread("take rows of a table", move |connection| intake::take_in(connection, &of, max)).await
    }

    async fn mark_rows(&self, of: &Intake, after: i64, max: usize) -> Result<MarkedRows, StoreError> {
        let of = of.clone();
        self.on_thread("mark rows that were sent", move |connection| intake::mark_rows(connection, &of, after, max))
            .await
    }

    async fn intake_status(&self, of: &Intake) -> Result<IntakeStatus, StoreError> {
        let of = of.clone();
        self.on_thread("look at an intake", move |connection| intake::status(connection, &of)).await
    }

    async fn take_again(&self, of: &Intake, row: Option<&str>, deed: &Deed) -> Result<u64, StoreError> {
        let (of, row, deed) = (of.clone(), row.map(str::to_owned), deed.clone());
        let work = move |connection: &mut Connection| intake::again(connection, &of, row.as_deref(), &deed);
        self.on_thread("let rows be taken again", work).await
    }

    async fn indexes_of(&self, table: &TableName) -> Result<Vec<TableIndex>, StoreError> {
        let table = table.clone();
        self.on_thread("look at a table's indexes", move |connection| intake::indexes(connection, &table)).await
    }

    async fn senders_to(&self, _table: &TableName) -> Result<Vec<String>, StoreError> {
        // A file tells of nobody who has it open.
        Ok(Vec::new())
    }

    async fn free_rows(
        &self,
        of: &Intake,
        stuck: &Stuck,
        age: Duration,
        max: usize,
        deed: &Deed,
    ) -> Result<u64, StoreError> {
        let (of, stuck, deed) = (of.clone(), stuck.clone(), deed.clone());
        let work = move |connection: &mut Connection| intake::free(connection, &of, &stuck, age, max, &deed);
        self.on_thread("give back rows that are stuck", work).await
    }

    async fn tables_with(&self, columns: &[String]) -> Result<Vec<FoundTable>, StoreError> {
        let columns = columns.to_vec();
        self.on_thread("look for tables", move |connection| intake::tables_with(connection, &columns)).await
    }
}

#[async_trait]
impl Archivable for Database {
    async fn archive_state(&self) -> Result<ArchiveState, StoreError> {
        self.on_thread("look at the archive's segments", |connection| archive::state(connection)).await
    }

    async fn find_expired(&self, retention: &Retention, sweep: &mut Sweep) -> Result<Vec<Expired>, StoreError> {
        let (retention, from) = (retention.clone(), sweep.clone());
        let work = move |connection: &mut Connection| archive::find_expired(connection, &retention, from);
        let (found, to) = self.on_thread("look for messages to archive", work).await?;
        *sweep = to;
        Ok(found)
    }

    async fn begin_segment(&self, messages: &[Expired]) -> Result<Option<Segment>, StoreError> {
        let messages = messages.to_vec();
        self.on_thread("begin to archive", move |connection| archive::begin(connection, &messages)).await
    }

    async fn take_segment(&self) -> Result<Turn, StoreError> {
        self.on_thread("go on with archiving", archive::take).await
    }

    async fn segment_messages(&self, segment: SegmentId) -> Result<Vec<ArchivedMessage>, StoreError> {
        self.on_thread("read what is to be archived", move |connection| archive::messages(connection, segment)).await
    }

    async fn end_segment(&self, segment: SegmentId) -> Result<u64, StoreError> {
        self.on_thread("remove what is archived", move |connection| archive::end(connection, segment)).await
    }

    async fn restore(
        &self,
        messages: &[ArchivedMessage],
        stays: Duration,
        deed: &Deed,
    ) -> Result<Restored, StoreError> {
        let (messages, deed) = (messages.to_vec(), deed.clone());
        let work = move |connection: &mut Connection| archive::restore(connection, &messages, stays, &deed);
        self.on_thread("put archived messages back", work).await
    }

    async fn forget_restored(&self) -> Result<u64, StoreError> {
        self.on_thread("remove what came back from the archive", archive::forget_restored).await
    }
}

#[async_trait]
impl Reconcilable for Database {
    async fn outbox_times(&self, plausible: Span) -> Result<Option<Span>, StoreError> {
        self.on_thread(COMPARE, move |connection| reconcile::outbox_times(connection, plausible)).await
    }

    async fn outbox_outside(&self, span: Span) -> Result<u64, StoreError> {
        self.on_thread(COMPARE, move |connection| reconcile::outbox_outside(connection, span)).await
    }

    async fn outbox_prints(&self, topics: &TopicFilter, span: Span, piece_ms: i64) -> Result<IdPrints, StoreError> {
        let topics = topics.clone();
        self.on_thread(COMPARE, move |connection| reconcile::outbox_prints(connection, &topics, span, piece_ms)).await
    }

    async fn outbox_ids(&self, topics: &TopicFilter, span: Span) -> Result<Vec<MessageId>, StoreError> {
        let topics = topics.clone();
        self.on_thread(COMPARE, move |connection| reconcile::outbox_ids(connection, &topics, span)).await
    }

    async fn inbox_begins(&self, consumer: &Consumer) -> Result<Option<i64>, StoreError> {
        let consumer = consumer.clone();
        self.on_thread(COMPARE, move |connection| reconcile::inbox_begins(connection, &consumer)).await
    }

    async fn inbox_prints(&self, consumer: &Consumer, span: Span, piece_ms: i64) -> Result<IdPrints, StoreError> {
        let consumer = consumer.clone();
        self.on_thread(COMPARE, move |connection| reconcile::inbox_prints(connection, &consumer, span, piece_ms)).await
    }

    async fn inbox_ids(&self, consumer: &Consumer, span: Span) -> Result<Vec<MessageId>, StoreError> {
        let consumer = consumer.clone();
        self.on_thread(COMPARE, move |connection| reconcile::inbox_ids(connection, &consumer, span)).await
    }

    async fn inbox_unhandled(&self, consumer: &Consumer, span: Span) -> Result<Unhandled, StoreError> {
        let consumer = consumer.clone();
        self.on_thread(COMPARE, move |connection| reconcile::inbox_unhandled(connection, &consumer, span)).await
    }

    async fn dead_at(&self, consumer: &Consumer, ids: &[MessageId]) -> Result<Vec<MessageId>, StoreError> {
        let consumer = consumer.clone();
        let ids = ids.to_vec();
        self.on_thread(COMPARE, move |connection| reconcile::dead_at(connection, &consumer, &ids)).await
    }

    async fn fates(&self, route: &str, ids: &[MessageId]) -> Result<Vec<(MessageId, Fate)>, StoreError> {
        let route = route.to_owned();
        let ids = ids.to_vec();
        self.on_thread(COMPARE, move |connection| reconcile::fates(connection, &route, &ids)).await
    }

    async fn tallies(&self, route: &str, topics: &TopicFilter, span: Span) -> Result<Vec<Tally>, StoreError> {
        let route = route.to_owned();
        let topics = topics.clone();
        self.on_thread(COMPARE, move |connection| reconcile::tallies(connection, &route, &topics, span)).await
    }

    async fn business(&self, query: &str, span: Span) -> Result<Vec<(Option<String>, String, u64)>, StoreError> {
        let query = query.to_owned();
        self.on_thread(COMPARE, move |connection| reconcile::business(connection, &query, span)).await
    }

    async fn unwritten(
        &self,
        query: &str,
        topics: &TopicFilter,
        changed: Span,
        written: Span,
        limit: usize,
    ) -> Result<postroom::Unwritten, StoreError> {
        let (query, topics) = (query.to_owned(), topics.clone());
        self.on_thread(COMPARE, move |connection| {
            reconcile::unwritten(connection, &query, &topics, changed, written, limit)
        })
        .await
    }

    async fn note_reconciled(&self, result: &Reconciled) -> Result<(), StoreError> {
        let result = result.clone();
        self.on_thread(COMPARE, move |connection| reconcile::note(connection, &result)).await
    }

    async fn reconciled(&self, name: Option<&str>) -> Result<Vec<Reconciled>, StoreError> {
        let name = name.map(str::to_owned);
        self.on_thread(COMPARE, move |connection| reconcile::reconciled(connection, name.as_deref())).await
    }
}

#[async_trait]
impl Store for Database {
    fn intakes(&self) -> Option<&dyn Intakes> {
        Some(self)
    }

    fn shown(&self) -> String {
        redact_url(&format!("sqlite:{}", self.path.display()))
    }

    fn cannot(&self, route: &Route) -> Option<String> {
        (route.start_at == StartAt::Now).then(|| "start_at = \"now\" is not supported on SQLite; remove it".to_owned())
    }

    async fn source(&self, route: &Route, owner: &str) -> Result<Arc<dyn Source>, StoreError> {
        let (database, route, owner) = (self.clone(), route.clone(), owner.to_owned());
        let open = move || SqliteSource::open(&database, &route, owner);
        Ok(Arc::new(blocking("open the database file", open).await??))
    }

    fn keeper(&self, consumer: &Consumer) -> Arc<dyn Keeper> {
        let path = self.path.clone();
        SessionKeeper::<Sqlite>::new(consumer.clone(), move || SqliteSession::new(&path))
    }

    async fn discover(&self, query: &str) -> Result<Vec<Discovered>, StoreError> {
        let query = query.to_owned();
        self.on_thread(DISCOVER, move |connection| reconcile::discover(connection, &query)).await
    }

    async fn send(&self, message: &Message) -> Result<(), StoreError> {
        let message = message.clone();
        self.on_thread("write a message", move |connection| operate::send(connection, &message)).await
    }

    async fn check(&self, _: Needs) -> Result<Vec<Finding>, StoreError> {
        let shown = self.shown();
        let look = move |connection: &mut Connection| {
            let version = migrate::plan(connection).map_err(|error| match error {
                MigrateError::Store(error) => error,
                other => StoreError::Refused { what: "read the schema version", source: other.into() },
            })?;
            let known = migrate::schema_version();
            Ok(vec![
                Finding::good(format!("the file {shown} can be opened")),
                match version.version {
                    0 => Finding::bad("it has no tables of postroom", "run `postroom migrate` on it"),
                    version if version < known => {
                        let found =
                            format!("its schema is at version {version}, and this program needs version {known}");
                        Finding::bad(found, "run `postroom migrate`; `postroom migrate --plan` shows what it would do")
                    }
                    version => {
                        Finding::good(format!("its schema is at version {version}; this program knows version {known}"))
                    }
                },
            ])
        };
        self.on_thread("check the store", look).await
    }

    async fn diagnose(&self) -> Result<Vec<Diagnosis>, StoreError> {
        let path = self.path.clone();
        self.on_thread("examine the store", move |connection| operate::diagnose(connection, &path)).await
    }

    async fn migrate(&self, _: Option<u16>) -> Result<Migrated, MigrateError> {
        let path = self.path.clone();
        let migrated = move || {
            create_private(&path)?;
            migrate::migrate(&mut connect(&path)?)
        };
        blocking("migrate the schema", migrated).await?
    }

    async fn plan(&self) -> Result<MigrationPlan, MigrateError> {
        let path = self.path.clone();
        let plan = move || {
            // Looking must not create the file.
            if path.exists() { migrate::plan(&connect(&path)?) } else { Ok(migrate::plan_of(0)) }
        };
        blocking("read the applied migrations", plan).await?
    }

    fn print_sql(&self, _: Option<u16>) -> Result<String, MigrateError> {
        Ok(migrate::print_sql())
    }
}
