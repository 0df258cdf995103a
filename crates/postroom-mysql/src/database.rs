//! One database: what a program that is configured with one holds on to.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use mysql_async::{Conn, Opts};
use postroom::{
    Archivable, ArchiveState, ArchivedMessage, Consumer, DISCOVER, DeadCursor, DeadDeed, DeadFilter, DeadLetter,
    DeadNote, Deed, Diagnosis, Discovered, Expired, Fate, Finding, Forgotten, FoundTable, Headline, IdPrints, Intake,
    IntakeStatus, Intakes, Keeper, KeyDeed, Listed, MarkedRows, Message, MessageFilter, MessageId, MigrateError,
    Migrated, MigrationPlan, Needs, NewOperation, OperationEffects, OperationId, Operator, Previewed, Reception,
    Reconcilable, Reconciled, Removed, Restored, Retention, Route, RouteChange, RouteSettings, Segment, SegmentId,
    SessionKeeper, ShownOperation, ShownRoute, Side, Source, Span, Steer, Stepped, Store, StoreError, StoreStatus,
    StoredMessage, Stuck, Survey, Sweep, TableIndex, TableName, Tally, TookIn, TopicFilter, Turn, Unhandled,
    UnroutedTopic, Unwritten, Vitals, WaitingKey, Whereabouts, redact_url,
};

use crate::connect::options_of;
use crate::desk::Desk;
use crate::inbox::MysqlSession;
use crate::intake;
use crate::log::MysqlSource;
use crate::operate::{archive, operations, reconcile};
use crate::{Mysql, migrate, operate};

/// A MariaDB or MySQL database with postroom's tables in it, or one that is to get them.
#[derive(Clone)]
pub struct Database {
    shown: String,
    desk: Arc<Desk>,
}

impl std::fmt::Debug for Database {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Database").field(&self.shown).finish()
    }
}

impl Database {
    /// The database of a `mysql://` or `mariadb://` URL; connects to nothing.
    pub fn new(url: &str) -> Result<Self, StoreError> {
        Ok(Self { shown: redact_url(url), desk: Arc::new(Desk::new(options_of(url)?)) })
    }

    /// The same with few connections, for programs that work with many databases: two for each of so many routes, and one for operators'
    /// calls, which take turns. How many that are.
    pub fn frugal(url: &str, routes: usize) -> Result<(Self, usize), StoreError> {
        let desk = Desk::new(options_of(url)?).one_at_a_time();
        Ok((Self { shown: redact_url(url), desk: Arc::new(desk) }, 2 * routes + 1))
    }

    /// How it is reached.
    pub fn opts(&self) -> &Opts {
        self.desk.opts()
    }
}

/// Dead letters that one transaction is about: relays wait for it.
const DEAD_STEP: i64 = 100;
const COMPARE: &str = "compare messages with effects";

#[async_trait]
impl Operator for Database {
    async fn status(&self) -> Result<StoreStatus, StoreError> {
        self.desk.call("read the status", async |conn: &mut Conn| operate::status(conn).await).await
    }

    async fn work_waits(&self, routes: &[String]) -> Result<bool, StoreError> {
        let what = "look whether something is to be sent";
        self.desk.call(what, async |conn: &mut Conn| operate::work_waits(conn, routes).await).await
    }

    async fn unrouted_topics(&self) -> Result<Vec<UnroutedTopic>, StoreError> {
        let what = "look for topics that no route takes";
        self.desk.call(what, async |conn: &mut Conn| operate::unrouted_topics(conn).await).await
    }

    async fn vitals(&self) -> Result<Vitals, StoreError> {
        self.desk.call("read the size of the tables", async |conn: &mut Conn| operate::vitals(conn).await).await
    }

    async fn note_sizes(&self) -> Result<(), StoreError> {
        self.desk.call("remember the size of the tables", async |conn: &mut Conn| operate::note_sizes(conn).await).await
    }

    async fn routes(&self) -> Result<Vec<ShownRoute>, StoreError> {
        self.desk.call("read the routes", async |conn: &mut Conn| operate::routes(conn).await).await
    }

    async fn set_route(
        &self,
        route: &str,
        change: &RouteChange,
        deed: &Deed,
    ) -> Result<Option<RouteSettings>, StoreError> {
        let work = async |conn: &mut Conn| operate::set_route(conn, route, change, deed).await;
        self.desk.call("change a route; nothing was changed", work).await
    }

    async fn whereabouts(&self, id: MessageId) -> Result<Vec<Whereabouts>, StoreError> {
        self.desk.call("look for a message", async |conn: &mut Conn| operate::whereabouts(conn, id).await).await
    }

    async fn receptions(&self, id: MessageId) -> Result<Vec<Reception>, StoreError> {
        let work = async |conn: &mut Conn| operate::receptions(conn, id).await;
        self.desk.call("look for a received message", work).await
    }

    async fn messages(&self, filter: &MessageFilter, limit: i64) -> Result<Listed, StoreError> {
        let work = async |conn: &mut Conn| operate::messages(conn, filter, limit).await;
        self.desk.call("look for messages", work).await
    }

    async fn message(&self, id: MessageId) -> Result<Option<StoredMessage>, StoreError> {
        self.desk.call("look for a message", async |conn: &mut Conn| operate::message(conn, id).await).await
    }

    async fn note_payload_read(&self, id: MessageId, deed: &Deed) -> Result<(), StoreError> {
        let work = async |conn: &mut Conn| operate::note_payload_read(conn, id, deed).await;
        self.desk.call("note that a payload is read; it was not shown", work).await
    }

    async fn forget_route(&self, route: &str, discard: bool, deed: &Deed) -> Result<Option<Forgotten>, StoreError> {
        let work = async |conn: &mut Conn| operate::forget_route(conn, route, discard, deed).await;
        self.desk.call("forget a route; nothing was changed", work).await
    }

    async fn waiting_keys(&self, side: Side, of: Option<&str>, limit: i64) -> Result<Vec<WaitingKey>, StoreError> {
        let work = async |conn: &mut Conn| operate::waiting_keys(conn, side, of, limit).await;
        self.desk.call("read the waiting keys", work).await
    }

    async fn act_on_key(&self, route: &str, key: &str, what: KeyDeed, deed: &Deed) -> Result<bool, StoreError> {
        let work = async |conn: &mut Conn| operate::act_on_key(conn, route, key, what, deed).await;
        self.desk.call("act on a key; nothing was changed", work).await
    }

    async fn dead_letters_behind(
        &self,
        after: Option<&DeadCursor>,
        side: Side,
        filter: &DeadFilter,
        limit: i64,
    ) -> Result<Vec<DeadLetter>, StoreError> {
        let work = async |conn: &mut Conn| operate::dead_letters(conn, after, side, filter, limit).await;
        self.desk.call("read the dead letters", work).await
    }

    async fn dead_payload(&self, side: Side, route: &str, seq: i64) -> Result<Option<Vec<u8>>, StoreError> {
        let work = async |conn: &mut Conn| operate::dead_payload(conn, side, route, seq).await;
        self.desk.call("read a dead letter", work).await
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
        let (mut done, mut after) = (Vec::new(), None);
        loop {
            let left = limit.saturating_sub(i64::try_from(done.len()).unwrap_or(i64::MAX)).min(DEAD_STEP);
            let work = async |conn: &mut Conn| {
                operate::act_on_dead(conn, what, side, filter, (after.as_ref(), left), deed).await
            };
            let step = self.desk.call("act on dead letters; this step changed nothing", work).await?;
            done.extend(step.done);
            progress(done.len());
            after = step.next;
            if after.is_none() || done.len() as i64 >= limit {
                return Ok(done);
            }
        }
    }

    async fn dead_headlines(
        &self,
        side: Side,
        after: Option<&DeadCursor>,
        limit: i64,
    ) -> Result<Vec<Headline>, StoreError> {
        let work = async |conn: &mut Conn| operations::headlines(conn, side, after, limit).await;
        self.desk.call("read the dead letters", work).await
    }

    async fn dead_notes(&self, groups: &[String]) -> Result<Vec<(String, DeadNote)>, StoreError> {
        let work = async |conn: &mut Conn| operations::dead_notes(conn, groups).await;
        self.desk.call("read the notes about dead letters", work).await
    }

    async fn note_dead(&self, group: &str, note: &str, deed: &Deed) -> Result<(), StoreError> {
        let work = async |conn: &mut Conn| operations::note_dead(conn, group, note, deed).await;
        self.desk.call("write a note about dead letters; nothing was written", work).await
    }

    async fn survey_operation(&self, operation: &NewOperation, survey: &mut Survey) -> Result<(), StoreError> {
        let so_far = survey.clone();
        let work = async |conn: &mut Conn| operations::survey(conn, operation, so_far.clone()).await;
        *survey = self.desk.call("look what would be done", work).await?;
        Ok(())
    }

    async fn begin_operation(&self, id: OperationId, operation: &NewOperation, deed: &Deed) -> Result<(), StoreError> {
        let work = async |conn: &mut Conn| operations::begin(conn, id, operation, deed).await;
        self.desk.call("begin the operation; nothing was changed", work).await
    }

    async fn operations(&self, id: Option<OperationId>, limit: i64) -> Result<Vec<ShownOperation>, StoreError> {
        let work = async |conn: &mut Conn| operations::operations(conn, id, limit).await;
        self.desk.call("read the operations", work).await
    }

    async fn operation_effects(&self, id: OperationId) -> Result<Vec<OperationEffects>, StoreError> {
        let work = async |conn: &mut Conn| operations::effects(conn, id).await;
        self.desk.call("look what became of the messages of an operation", work).await
    }

    async fn steer_operation(&self, id: OperationId, what: Steer, deed: &Deed) -> Result<bool, StoreError> {
        let work = async |conn: &mut Conn| operations::steer(conn, id, what, deed).await;
        self.desk.call("change the operation; nothing was changed", work).await
    }

    async fn step_operations(&self) -> Result<Stepped, StoreError> {
        operations::step(&self.desk).await
    }

    async fn prune_inbox(
        &self,
        older_than: Duration,
        deed: &Deed,
        progress: &mut (dyn FnMut(u64) + Send),
    ) -> Result<u64, StoreError> {
        let mut pruned = 0;
        loop {
            let first = pruned == 0;
            let work = async |conn: &mut Conn| operate::prune_step(conn, older_than, first, deed).await;
            let (step, more) = self.desk.call("prune the inbox", work).await?;
            pruned += step;
            progress(pruned);
            if !more {
                return Ok(pruned);
            }
        }
    }

    async fn retain(&self, retention: &Retention, sweep: &mut Sweep) -> Result<Removed, StoreError> {
        let from = sweep.clone();
        let work = async |conn: &mut Conn| {
            let mut sweep = from.clone();
            Ok((operate::retain_step(conn, retention, &mut sweep).await?, sweep))
        };
        let (removed, to) = self.desk.call("remove what is finished and old", work).await?;
        *sweep = to;
        Ok(removed)
    }
}

#[async_trait]
impl Intakes for Database {
    fn quoted(&self, name: &str) -> String {
        format!("`{}`", name.replace('`', "``"))
    }

    async fn check_intake(&self, of: &Intake) -> Result<Vec<Finding>, StoreError> {
        self.desk.call("look at a table", async |conn: &mut Conn| intake::check(conn, of).await).await
    }

    async fn preview_intake(&self, of: &Intake, max: usize) -> Result<Vec<Previewed>, StoreError> {
        self.desk.call("look at rows of a table", async |conn: &mut Conn| intake::preview(conn, of, max).await).await
    }

    async fn take_in(&self, of: &Intake, max: usize) -> Result<TookIn, StoreError> {
        let work = async |conn: &mut Conn| intake::take_in(conn, of, max).await;
        self.desk.call("take rows of a table; nothing was taken", work).await
    }

    async fn mark_rows(&self, of: &Intake, after: i64, max: usize) -> Result<MarkedRows, StoreError> {
        let work = async |conn: &mut Conn| intake::mark_rows(conn, of, after, max).await;
        self.desk.call("mark rows that were sent", work).await
    }

    async fn intake_status(&self, of: &Intake) -> Result<IntakeStatus, StoreError> {
        self.desk.call("look at an intake", async |conn: &mut Conn| intake::status(conn, of).await).await
    }

    async fn take_again(&self, of: &Intake, row: Option<&str>, deed: &Deed) -> Result<u64, StoreError> {
        let work = async |conn: &mut Conn| intake::again(conn, of, row, deed).await;
        self.desk.call("let rows be taken again; nothing was changed", work).await
    }

    async fn indexes_of(&self, table: &TableName) -> Result<Vec<TableIndex>, StoreError> {
        self.desk.call("look at a table's indexes", async |conn: &mut Conn| intake::indexes(conn, table).await).await
    }

    async fn senders_to(&self, table: &TableName) -> Result<Vec<String>, StoreError> {
        self.desk.call("look at sessions", async |conn: &mut Conn| intake::senders(conn, table).await).await
    }

    async fn free_rows(
        &self,
        of: &Intake,
        stuck: &Stuck,
        age: Duration,
        max: usize,
        deed: &Deed,
    ) -> Result<u64, StoreError> {
        let work = async |conn: &mut Conn| intake::free(conn, of, stuck, age, max, deed).await;
        self.desk.call("give back rows that are stuck; nothing was changed", work).await
    }

    async fn tables_with(&self, columns: &[String]) -> Result<Vec<FoundTable>, StoreError> {
        self.desk.call("look for tables", async |conn: &mut Conn| intake::tables_with(conn, columns).await).await
    }
}

#[async_trait]
impl Archivable for Database {
    async fn archive_state(&self) -> Result<ArchiveState, StoreError> {
        self.desk.call("look at the archive's segments", async |conn: &mut Conn| archive::state(conn).await).await
    }

    async fn find_expired(&self, retention: &Retention, sweep: &mut Sweep) -> Result<Vec<Expired>, StoreError> {
        let from = sweep.clone();
        let work = async |conn: &mut Conn| {
            let mut sweep = from.clone();
            Ok((archive::find_expired(conn, retention, &mut sweep).await?, sweep))
        };
        let (found, to) = self.desk.call("look for messages to archive", work).await?;
        *sweep = to;
        Ok(found)
    }

    async fn begin_segment(&self, messages: &[Expired]) -> Result<Option<Segment>, StoreError> {
        self.desk.call("begin to archive", async |conn: &mut Conn| archive::begin(conn, messages).await).await
    }

    async fn take_segment(&self) -> Result<Turn, StoreError> {
        self.desk.call("go on with archiving", async |conn: &mut Conn| archive::take(conn).await).await
    }

    async fn segment_messages(&self, segment: SegmentId) -> Result<Vec<ArchivedMessage>, StoreError> {
        let work = async |conn: &mut Conn| archive::messages(conn, segment).await;
        self.desk.call("read what is to be archived", work).await
    }

    async fn end_segment(&self, segment: SegmentId) -> Result<u64, StoreError> {
        self.desk.call("remove what is archived", async |conn: &mut Conn| archive::end(conn, segment).await).await
    }

    async fn restore(
        &self,
        messages: &[ArchivedMessage],
        stays: Duration,
        deed: &Deed,
    ) -> Result<Restored, StoreError> {
        let work = async |conn: &mut Conn| archive::restore(conn, messages, stays, deed).await;
        self.desk.call("put archived messages back; nothing was changed", work).await
    }

    async fn forget_restored(&self) -> Result<u64, StoreError> {
        let what = "remove what came back from the archive";
        self.desk.call(what, async |conn: &mut Conn| archive::forget_restored(conn).await).await
    }
}

#[async_trait]
impl Reconcilable for Database {
    async fn outbox_times(&self, plausible: Span) -> Result<Option<Span>, StoreError> {
        self.desk.call(COMPARE, async |conn: &mut Conn| reconcile::outbox_times(conn, plausible).await).await
    }

    async fn outbox_outside(&self, span: Span) -> Result<u64, StoreError> {
        self.desk.call(COMPARE, async |conn: &mut Conn| reconcile::outbox_outside(conn, span).await).await
    }

    async fn outbox_prints(&self, topics: &TopicFilter, span: Span, piece_ms: i64) -> Result<IdPrints, StoreError> {
        let work = async |conn: &mut Conn| reconcile::outbox_prints(conn, topics, span, piece_ms).await;
        self.desk.call(COMPARE, work).await
    }

    async fn outbox_ids(&self, topics: &TopicFilter, span: Span) -> Result<Vec<MessageId>, StoreError> {
        self.desk.call(COMPARE, async |conn: &mut Conn| reconcile::outbox_ids(conn, topics, span).await).await
    }

    async fn inbox_begins(&self, consumer: &Consumer) -> Result<Option<i64>, StoreError> {
        self.desk.call(COMPARE, async |conn: &mut Conn| reconcile::inbox_begins(conn, consumer).await).await
    }

    async fn inbox_prints(&self, consumer: &Consumer, span: Span, piece_ms: i64) -> Result<IdPrints, StoreError> {
        let work = async |conn: &mut Conn| reconcile::inbox_prints(conn, consumer, span, piece_ms).await;
        self.desk.call(COMPARE, work).await
    }

    async fn inbox_ids(&self, consumer: &Consumer, span: Span) -> Result<Vec<MessageId>, StoreError> {
        self.desk.call(COMPARE, async |conn: &mut Conn| reconcile::inbox_ids(conn, consumer, span).await).await
    }

    async fn inbox_unhandled(&self, consumer: &Consumer, span: Span) -> Result<Unhandled, StoreError> {
        self.desk.call(COMPARE, async |conn: &mut Conn| reconcile::inbox_unhandled(conn, consumer, span).await).await
    }

    async fn dead_at(&self, consumer: &Consumer, ids: &[MessageId]) -> Result<Vec<MessageId>, StoreError> {
        self.desk.call(COMPARE, async |conn: &mut Conn| reconcile::dead_at(conn, consumer, ids).await).await
    }

    async fn fates(&self, route: &str, ids: &[MessageId]) -> Result<Vec<(MessageId, Fate)>, StoreError> {
        self.desk.call(COMPARE, async |conn: &mut Conn| reconcile::fates(conn, route, ids).await).await
    }

    async fn tallies(&self, route: &str, topics: &TopicFilter, span: Span) -> Result<Vec<Tally>, StoreError> {
        self.desk.call(COMPARE, async |conn: &mut Conn| reconcile::tallies(conn, route, topics, span).await).await
    }

    async fn business(&self, query: &str, span: Span) -> Result<Vec<(Option<String>, String, u64)>, StoreError> {
        self.desk.call(COMPARE, async |conn: &mut Conn| reconcile::business(conn, query, span).await).await
    }

    async fn unwritten(
        &self,
        query: &str,
        topics: &TopicFilter,
        changed: Span,
        written: Span,
        limit: usize,
    ) -> Result<Unwritten, StoreError> {
        let work = async |conn: &mut Conn| reconcile::unwritten(conn, query, topics, changed, written, limit).await;
        self.desk.call(COMPARE, work).await
    }

    async fn note_reconciled(&self, result: &Reconciled) -> Result<(), StoreError> {
        self.desk.call(COMPARE, async |conn: &mut Conn| reconcile::note(conn, result).await).await
    }

    async fn reconciled(&self, name: Option<&str>) -> Result<Vec<Reconciled>, StoreError> {
        self.desk.call(COMPARE, async |conn: &mut Conn| reconcile::reconciled(conn, name).await).await
    }
}

#[async_trait]
impl Store for Database {
    fn intakes(&self) -> Option<&dyn Intakes> {
        Some(self)
    }

    fn shown(&self) -> String {
        self.shown.clone()
    }

    async fn source(&self, route: &Route, owner: &str) -> Result<Arc<dyn Source>, StoreError> {
        Ok(Arc::new(MysqlSource::open(self.opts(), route, owner).await?))
    }

    fn keeper(&self, consumer: &Consumer) -> Arc<dyn Keeper> {
        let opts = self.opts().clone();
        SessionKeeper::<Mysql>::new(consumer.clone(), move || MysqlSession::new(&opts))
    }

    async fn discover(&self, query: &str) -> Result<Vec<Discovered>, StoreError> {
        self.desk.call(DISCOVER, async |conn: &mut Conn| reconcile::discover(conn, query).await).await
    }

    async fn send(&self, message: &Message) -> Result<(), StoreError> {
        self.desk.call("write the message", async |conn: &mut Conn| operate::send(conn, message).await).await
    }

    async fn check(&self, _: Needs) -> Result<Vec<Finding>, StoreError> {
        let version =
            self.desk.call("check the store", async |conn: &mut Conn| Ok(migrate::present(conn).await?)).await?;
        let known = migrate::schema_version();
        Ok(vec![
            Finding::good("the database can be reached"),
            match version {
                0 => Finding::bad("it has no tables of postroom", "run `postroom migrate` on it"),
                version if version < known => {
                    let found = format!("its schema is at version {version}, and this program needs version {known}");
                    Finding::bad(found, "run `postroom migrate`; `postroom migrate --plan` shows what it would do")
                }
                version => {
                    Finding::good(format!("its schema is at version {version}; this program knows version {known}"))
                }
            },
        ])
    }

    async fn diagnose(&self) -> Result<Vec<Diagnosis>, StoreError> {
        self.desk.call("examine the store", async |conn: &mut Conn| operate::diagnose(conn).await).await
    }

    async fn migrate(&self, lanes: Option<u16>) -> Result<Migrated, MigrateError> {
        migrate::migrate(self.opts(), lanes).await
    }

    async fn plan(&self) -> Result<MigrationPlan, MigrateError> {
        let present = async |conn: &mut Conn| Ok(migrate::present(conn).await?);
        migrate::plan_of(self.desk.call("read the applied migrations", present).await?)
    }

    fn print_sql(&self, lanes: Option<u16>) -> Result<String, MigrateError> {
        migrate::print_sql(lanes)
    }
}
