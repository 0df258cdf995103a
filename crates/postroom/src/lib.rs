//! Transactional outbox and inbox: the contracts and domain types that every other part of postroom shares.
//!
//! No I/O, no runtime, no driver and no broker in here. An application that writes messages needs this crate and one
//! store (`postroom-postgres` or `postroom-sqlite`); `ARCHITECTURE.md` is the map of the rest.

mod archive;
mod consumer_store;
mod crash;
mod dead_group;
mod dead_letter;
mod delivery;
mod diagnosis;
pub mod envelope;
mod error;
mod event;
mod filler;
mod fingerprint;
mod guard;
mod inbox;
mod intake;
mod keeper;
mod keys;
pub mod lane_book;
mod lasting;
mod limits;
mod listing;
mod message;
mod observer;
mod operation;
mod operator;
mod order;
mod outbox;
mod projection;
mod reception;
mod reconcile;
mod redact;
mod retention;
mod retry;
mod route;
mod shards;
mod sink;
mod source;
mod status;
mod store;
mod subscription;
mod topics;
mod trace;
mod unit_of_work;
mod unseen;
mod verdict;
mod vitals;
mod wake;
mod watermark;
mod words;

pub use archive::{Archivable, ArchiveState, ArchivedMessage, Expired, Restored, Segment, SegmentId, Turn};
pub use consumer_store::{Admitted, Aggregate, ConsumerStore, Keep, Session, Settle, Transactions, Waiting};
pub use crash::{crash_point, crash_point_over};
pub use dead_group::{DeadGroup, DeadNote, Grouping, Headline, normal_error};
pub use dead_letter::{DeadCursor, DeadDeed, DeadFilter, DeadLetter, Deed, FailedAttempt, Side};
pub use delivery::{Cause, Change, Delivery, Entry, Origin, Outcome, ParkedState, Settlement, Token};
pub use diagnosis::{Diagnosis, Severity};
pub use error::{BoxError, StoreError, Unavailable};
pub use event::{Event, EventError};
pub use filler::{FillerReport, FillerSeen, FillerStore, Tenure};
pub use fingerprint::{fingerprint, set_log_key};
pub use guard::{GuardError, expect_rows};
pub use inbox::{Admission, Consumer, Inbox, InvalidConsumer, OnceError};
pub use intake::{
    Cell, Column as IntakeColumn, Done, DoneWhen, FoundTable, Holds, Intake, IntakeStatus, Intakes, InvalidTemplate,
    Literal, Mapping, MarkedRows, Marking, OnRoute, Previewed, Row as IntakeRow, RowFate, Search, Searched, SetAside,
    Setting, Shape, Stuck, TableIndex, TableName, Template, TookIn, Trial, number_of, rows_within,
};
pub use keeper::{Keeper, Kept, SessionKeeper};
pub use keys::{CAME_BACK, KeyDeed, Place, WaitingKey, WaitsFor, Whereabouts};
pub use lane_book::LaneBook;
pub use lasting::lasting;
pub use limits::{
    CONTENT_TYPE_BYTES_MAX, HEADERS_BYTES_MAX, KEY_BYTES_MAX, LimitExceeded, NAME_BYTES_MAX, PAYLOAD_BYTES_MAX,
};
pub use listing::{
    Forgotten, Listed, ListedAfter, ListedEntry, ListedMessage, ListedPlace, MessageFilter, StoredMessage,
};
pub use message::{Headers, Message, MessageId, UNREADABLE_HEADER, headers_from_json};
pub use observer::{Happened, Live, Observed, Observer};
pub use operation::{
    Candidate, Candidates, NewOperation, OperationEffects, OperationFilter, OperationId, OperationKind, OperationState,
    ReplayPlace, ShownOperation, Steer, Stepped, Survey,
};
pub use operator::Operator;
pub use order::{OnDead, Order, StartAt};
pub use outbox::{EnqueueError, Outbox};
pub use projection::NewerUpsert;
pub use reception::{DeadFound, ReceivedPlace, Reception, ReceptionFound, WaitingFound, attempts_of};
pub use reconcile::{
    AggregateChange, ConsumerCompared, DayCompared, Fate, IdPrint, IdPrints, Reconcilable, Reconciled, Span, Tally,
    Unhandled, Unwritten, differing, id_ms,
};
pub use redact::{redact_text, redact_url};
pub use retention::{Part, Removed, Retention, Sweep, TopicRetention};
pub use retry::{AttemptLimit, Disposition, RetryPolicy, decide, tidy_reason};
pub use route::{Route, RouteChange, RouteSettings, ShownRoute};
pub use shards::{InvalidShards, NoShard, Shards};
pub use sink::{Batch, Sink, SinkLimits, Way};
pub use source::{Claimed, LostLane, Noted, Report, Settled, Source, Standing, Want};
pub use status::{
    InboxStatus, LinkStatus, LinkTrouble, ReconciledStatus, RouteStatus, StoreStatus, UnroutedTopic, WorkerStatus,
};
pub use store::{
    DISCOVER, DISCOVERED_MAX, Discovered, Finding, LANES_DEFAULT, MigrateError, Migrated, MigrationPlan, MigrationStep,
    Needs, Store,
};
pub use subscription::{Answer, Arrival, Bound, Partition, Receipt, Received, Subscription};
pub use topics::{InvalidTopicPattern, TopicFilter};
pub use trace::{MessageSpan, Step};
pub use unit_of_work::{RaisesEvents, UnitOfWork};
pub use unseen::is_unseen;
pub use verdict::{Failure, FailureKind, Verdict, Verdicts};
pub use vitals::{Growth, TableVitals, Vitals};
pub use wake::Wake;
pub use watermark::{StepId, Watermark};
