//! One session: it has taken the consumer groups, reads the streams, and moves the groups' places behind what is settled.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::address::Address;
use super::connection::{Connection, Unanswered};
use super::entry::{Entry, EntryId};
use super::note::{Note, Place, reserved_for};
use super::resp::Reply;
use super::sink::advice;
use super::subscription::RedisSubscriptionOptions;
use crate::deliveries::{Deliveries, Taken};
use crate::sessions;

const TAKE: &str = include_str!("take.lua");
const KEEP: &str = include_str!("keep.lua");

/// A session that the server has not heard of for so long is gone, and another one may begin.
pub(super) const GONE_AFTER: Duration = Duration::from_secs(10);
/// So often the server hears of it.
const KEPT_EVERY: Duration = Duration::from_secs(2);
/// And no more often of what was settled.
const COMMITTED_EVERY: Duration = Duration::from_millis(50);
/// Longest that the server waits for the next entry.
const READ_WAITS: Duration = Duration::from_secs(1);
/// Most entries of one read: they may be much larger than those before.
const READ_MAX: usize = 64;
const ANSWERS_WITHIN: Duration = Duration::from_secs(5);
const READ_WITHIN: Duration = Duration::from_secs(3_600);
/// Entries that are all as large as the largest that was seen have no more bytes together than there is room for. Before one was seen:
pub(super) const LARGEST_AT_FIRST: u64 = 1 << 20;

/// What its task and the receiver share.
pub(super) type Session = sessions::Session<Deliveries<Place>>;

/// Takes the groups, and begins to read.
pub(super) async fn begin(
    address: &Address,
    options: &RedisSubscriptionOptions,
    (token, largest): (&str, Arc<AtomicU64>),
) -> Result<Arc<Session>, String> {
    let (control, reader) =
        tokio::try_join!(Connection::open(address, "postroom-inbox"), Connection::open(address, "postroom-inbox"))?;
    let mut taken = Vec::with_capacity(options.streams.len());
    for stream in &options.streams {
        match take(&control, options, stream, token).await {
            Ok(one) => taken.push(one),
            Err(problem) => {
                for one in taken {
                    // Whoever is next need not wait until this one counts as gone.
                    let _ = one.keep(&control, options, None, false, false).await;
                }
                return Err(format!("stream {stream:?}: {problem}"));
            }
        }
    }
    let number = sessions::number();
    let mut deliveries = Deliveries::new(number, options.prefetch, options.unsettled_bytes_max);
    for part in &mut taken {
        part.number = deliveries.begin(part.at, Place::behind(part.note.reserved, 0));
    }
    let session = Arc::new(Session::new(number, deliveries));
    let task = Task {
        session: session.clone(),
        options: options.clone(),
        control,
        parts: taken,
        turn: 0,
        fruitless: 0,
        largest,
        looked: None,
    };
    tokio::spawn(task.run(reader));
    Ok(session)
}

/// A stream, as this session reads it.
struct Part {
    stream: String,
    number: u32,
    /// Behind the last entry that was read.
    at: Place,
    /// Whether anybody knows how many entries that is, and how many are to be added: those that were never received.
    is_counted: bool,
    uncounted: i64,
    note: Note,
    /// What is up to this one may have been handed out by sessions before.
    known_up_to: EntryId,
    /// Where the group is.
    committed: EntryId,
}

/// Takes the group of a stream.
async fn take(
    control: &Connection,
    options: &RedisSubscriptionOptions,
    stream: &str,
    token: &str,
) -> Result<Part, String> {
    let gone_after = GONE_AFTER.as_millis().to_string();
    let arguments = ["EVAL", TAKE, "1", stream, &options.group, token, &options.consumer, &gone_after];
    let reply = control.ask(arguments, Instant::now() + ANSWERS_WITHIN).await.map_err(told)?;
    let shape = || "its answer has another shape".to_owned();
    let all = reply.array().ok_or_else(shape)?;
    let text = |index: usize| all.get(index).and_then(Reply::text).ok_or_else(shape);
    let number = |index: usize| all.get(index).and_then(Reply::number).ok_or_else(shape);
    match text(0)?.as_str() {
        "taken" => {}
        "foreign" => {
            let (group, name, pending, place) = (&options.group, text(1)?, number(2)?, text(3)?);
            return Err(if place.is_empty() {
                format!(
                    "group {group:?} has the consumer {name:?}, which is not postroom's, with {pending} entries that it has not acked; name another \
                     group, or delete the consumer when nobody needs those (`XGROUP DELCONSUMER`)"
                )
            } else {
                format!(
                    "another program has read in group {group:?}, as consumer {name:?}, and was handed what is to come here; stop it, and put the \
                     group back: `XGROUP DELCONSUMER {stream} {group} {name}`, then `XGROUP SETID {stream} {group} {place} ENTRIESREAD {}`",
                    number(4)?.max(0)
                )
            });
        }
        "owner" => {
            return Err(format!("group {:?} belongs to consumer {:?}; name another group", options.group, text(1)?));
        }
        "busy" => {
            return Err(format!(
                "somebody else receives in group {:?}, and was heard of {:.1} s ago; it is free when that one stops, or is gone for {} s",
                options.group,
                number(1)? as f64 / 1000.0,
                GONE_AFTER.as_secs()
            ));
        }
        _ => {
            return Err(format!(
                "group {:?} has {} entries that were handed to another program and not acked (`XPENDING`); name another group, or settle \
                 them first",
                options.group,
                number(1)?
            ));
        }
    }
    let id = |index: usize| EntryId::parse(&text(index)?).ok_or_else(shape);
    let (committed, entries_read) = (id(1)?, number(2)?);
    let note = Note::read(&text(3)?).ok_or_else(shape)?;
    let is_counted = entries_read >= 0;
    if !is_counted {
        tracing::warn!(
            "the server does not know how many entries of stream {stream:?} group {:?} has received (it was made or moved without ENTRIESREAD): \
             until all that is there is received, entries that are removed before are not noticed",
            options.group
        );
    }
    Ok(Part {
        stream: stream.to_owned(),
        number: 0,
        at: Place::behind(committed, entries_read.max(0)),
        is_counted,
        uncounted: 0,
        known_up_to: note.reserved,
        note,
        committed,
    })
}

fn told(error: Unanswered) -> String {
    match &error {
        Unanswered::Refused(said) if said.contains("unknown subcommand") || said.contains("nil") => {
            format!("{error}; Redis 7 or newer is needed")
        }
        Unanswered::Refused(said) => format!("{error}{}", advice(said)),
        Unanswered::Silent(_) => error.to_string(),
    }
}

impl Part {
    /// Tells the server how far this is, and what may have been handed out (none: neither has changed); `is_kept` is false to give the group back.
    async fn keep(
        &self,
        control: &Connection,
        options: &RedisSubscriptionOptions,
        floor: Option<(Place, EntryId)>,
        is_kept: bool,
        removes: bool,
    ) -> Result<(Note, EntryId), String> {
        let (place, reserved) = match floor {
            Some((floor, reserved)) => (floor, reserved),
            None => (Place::behind(self.committed, -1), self.note.reserved),
        };
        let session = self.note.session.clone().filter(|_| is_kept);
        let count = if self.is_counted && place.count >= 0 { place.count + self.uncounted } else { -1 };
        let to = place.read_up_to();
        let note = Note { reserved, session, place: to, count, consumer: self.note.consumer.clone() };
        let arguments = [
            "EVAL".to_owned(),
            KEEP.to_owned(),
            "1".to_owned(),
            self.stream.clone(),
            options.group.clone(),
            self.note.written(),
            note.written(),
            self.committed.to_string(),
            to.to_string(),
            count.to_string(),
            u8::from(removes).to_string(),
        ];
        let reply = control.ask(arguments, Instant::now() + ANSWERS_WITHIN).await.map_err(told)?;
        let all = reply.array().unwrap_or_default();
        let what = all.first().and_then(Reply::text).unwrap_or_default();
        match what.as_str() {
            "kept" => Ok((note, to)),
            "moved" => {
                let to = all.get(1).and_then(Reply::text).unwrap_or_default();
                Err(format!("somebody has moved the group to {to} (`XGROUP SETID`); it goes on from there"))
            }
            "gone" => Err(format!(
                "somebody else has taken the group, or reads in it; it was behind {} (entries read: {})",
                self.note.place, self.note.count
            )),
            _ => Err("the server's answer has another shape".to_owned()),
        }
    }

    /// Says what was removed before it was received, from what the server says of the stream while nothing of it is on its way.
    fn look(&mut self, options: &RedisSubscriptionOptions, stream: &Reply) {
        let number = |name: &str| stream.field(name).and_then(Reply::number);
        let id = |reply: Option<&Reply>| reply.and_then(Reply::text).as_deref().and_then(EntryId::parse);
        let (Some(added), Some(length)) = (number("entries-added"), number("length")) else { return };
        let Some(last) = id(stream.field("last-generated-id")) else { return };
        let first = stream.field("first-entry").and_then(Reply::array).and_then(<[Reply]>::first);
        let read = self.at.read_up_to();
        let received = self.at.count + self.uncounted;
        let lost = match id(first) {
            // All that it ever had was received, or is gone.
            _ if read >= last => added - received,
            None => added - received,
            // All that it has is still to be received.
            Some(first) if first > read => added - received - length,
            // What it has lost shows when that is received.
            Some(_) => return,
        };
        if self.is_counted && lost > 0 {
            tracing::error!(
                "{lost} entries of stream {:?} of Redis were removed before group {:?} had received them (`MAXLEN`, `XTRIM`, `XDEL`): their \
                 messages are lost to this inbox",
                self.stream,
                options.group
            );
        }
        self.uncounted += lost;
        self.is_counted = true;
    }
}

/// What a read brings: the connection again, and the reply.
type Reading = Pin<Box<dyn Future<Output = (Connection, Result<Reply, Unanswered>)> + Send>>;

/// What is read next.
enum Next {
    Entries(Vec<String>),
    /// Nothing is on its way then, so what the server says of the streams can be compared with what was read.
    Look,
}

struct Task {
    session: Arc<Session>,
    options: RedisSubscriptionOptions,
    control: Connection,
    parts: Vec<Part>,
    /// Which stream is read first where not all can be, and how many in a row had nothing.
    turn: usize,
    fruitless: usize,
    /// Bytes of the largest entry of late, for this session and those after it.
    largest: Arc<AtomicU64>,
    /// When it was looked last what was removed.
    looked: Option<Instant>,
}

impl Task {
    async fn run(mut self, reader: Connection) {
        let how = self.work(reader).await;
        self.session.ended(how);
    }

    /// Until nobody receives any more, or something fails.
    async fn work(&mut self, reader: Connection) -> Result<(), String> {
        let (mut idle, mut reading): (Option<Connection>, Option<Reading>) = (Some(reader), None);
        let (mut kept, mut committed) = (Instant::now(), Instant::now());
        loop {
            if reading.is_none()
                && let Some(reader) = idle.take()
            {
                match self.next() {
                    Some(Next::Entries(command)) => reading = Some(Box::pin(read(reader, command))),
                    Some(Next::Look) => {
                        self.look(&reader).await?;
                        idle = Some(reader);
                        continue;
                    }
                    None => idle = Some(reader),
                }
            }
            let is_dirty = self.is_dirty();
            let due = if is_dirty { (committed + COMMITTED_EVERY).min(kept + KEPT_EVERY) } else { kept + KEPT_EVERY };
            let come = async {
                match reading.as_mut() {
                    Some(reading) => reading.await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                (reader, came) = come => {
                    (reading, idle) = (None, Some(reader));
                    if came.is_err() {
                        // Whatever it was that could not be read: one at a time from now on.
                        self.largest.store(u64::MAX, Ordering::Relaxed);
                    }
                    self.take(came).await?;
                }
                () = self.session.told() => {}
                () = tokio::time::sleep_until(due) => {}
            }
            let leaves = self.session.state().leaves;
            let now = Instant::now();
            if leaves || now >= kept + KEPT_EVERY {
                self.keep_all(!leaves, true).await?;
                (kept, committed) = (now, now);
            } else if self.is_dirty() && now >= committed + COMMITTED_EVERY {
                self.keep_all(true, false).await?;
                committed = now;
            }
            if leaves {
                return Ok(());
            }
        }
    }

    /// Something was settled that the server was not told of.
    fn is_dirty(&self) -> bool {
        let state = self.session.state();
        self.parts.iter().any(|part| state.held.to_commit(part.number, false).is_some())
    }

    /// Tells the server how far all streams are.
    async fn keep_all(&mut self, is_kept: bool, all: bool) -> Result<(), String> {
        for index in 0..self.parts.len() {
            let floor = self.session.state().held.to_commit(self.parts[index].number, all);
            if let Some((floor, reserved)) = floor {
                self.keep(index, floor, reserved.id, is_kept).await?;
            }
        }
        Ok(())
    }

    async fn keep(&mut self, index: usize, floor: Place, reserved: EntryId, is_kept: bool) -> Result<(), String> {
        let Self { parts, control, options, session, .. } = self;
        let part = &mut parts[index];
        let kept = part.keep(control, options, Some((floor, reserved)), is_kept, options.removes).await;
        let (note, committed) = kept.map_err(|problem| format!("stream {:?}: {problem}", part.stream))?;
        (part.note, part.committed) = (note, committed);
        session.state().held.committed(part.number, floor, Some(Place::behind(reserved, 0)));
        Ok(())
    }

    /// The next read, as far as there is room.
    fn next(&mut self) -> Option<Next> {
        if self.looked.is_none_or(|looked| looked.elapsed() >= KEPT_EVERY) {
            return Some(Next::Look);
        }
        let (room, bytes) = {
            let state = self.session.state();
            (state.held.room(), state.held.bytes_room())
        };
        if room == 0 {
            return None;
        }
        let fits = usize::try_from(bytes / self.largest.load(Ordering::Relaxed).max(1)).unwrap_or(usize::MAX).max(1);
        let (room, all) = (room.min(fits).min(READ_MAX), self.parts.len());
        // Where there is no room for an entry of each, some are read in turn; when none of them has any, all of them are waited for.
        let waits = room >= all || self.fruitless >= all;
        let count = if waits { all } else { room };
        let mut command = vec!["XREAD".to_owned(), "COUNT".to_owned(), (room / count).max(1).to_string()];
        if waits {
            command.extend(["BLOCK".to_owned(), READ_WAITS.as_millis().to_string()]);
        }
        command.push("STREAMS".to_owned());
        let some: Vec<&Part> = self.parts.iter().cycle().skip(self.turn).take(count).collect();
        command.extend(some.iter().map(|part| part.stream.clone()));
        command.extend(some.iter().map(|part| part.at.read_up_to().to_string()));
        self.turn = (self.turn + count) % all;
        self.fruitless = self.fruitless.saturating_add(count);
        Some(Next::Entries(command))
    }

    /// Looks what was removed before it was received.
    async fn look(&mut self, reader: &Connection) -> Result<(), String> {
        for part in &mut self.parts {
            let about = reader.ask(["XINFO", "STREAM", &part.stream], Instant::now() + ANSWERS_WITHIN).await;
            part.look(&self.options, &about.map_err(told)?);
        }
        self.looked = Some(Instant::now());
        Ok(())
    }

    /// Takes what was read. What there is no room for is read again.
    async fn take(&mut self, came: Result<Reply, Unanswered>) -> Result<(), String> {
        let reply = came.map_err(told)?;
        let shape = || "a read has an answer of another shape".to_owned();
        let Some(streams) = reply.array() else { return Ok(()) };
        self.fruitless = 0;
        let mut entries = HashMap::new();
        for stream in streams {
            let [name, found] = stream.array().ok_or_else(shape)? else { return Err(shape()) };
            let found: Option<Vec<Entry>> = found.array().ok_or_else(shape)?.iter().map(Entry::read).collect();
            entries.insert(name.text().ok_or_else(shape)?, found.ok_or_else(shape)?);
        }
        drop(reply);
        let largest = entries.values().flatten().map(Entry::bytes).max();
        if let Some(largest) = largest {
            let before = self.largest.load(Ordering::Relaxed);
            self.largest.store(largest.max(before / 2).max(1), Ordering::Relaxed);
        }
        let all = self.parts.len();
        let turn = self.turn;
        for index in (0..all).map(|index| (index + turn) % all) {
            let Some(found) = entries.remove(&self.parts[index].stream) else { continue };
            let Some(last) = found.last().map(|entry| entry.at) else { continue };
            if last > self.parts[index].note.reserved {
                // The server is told before anybody is handed one.
                let number = self.parts[index].number;
                let floor = self.session.state().held.to_commit(number, true);
                let Some((floor, _)) = floor else { continue };
                self.keep(index, floor, reserved_for(last), true).await?;
            }
            let part = &mut self.parts[index];
            let mut state = self.session.state();
            for entry in found {
                if state.held.room() == 0 {
                    break;
                }
                let at = entry.at;
                if at <= part.at.read_up_to() {
                    return Err("a read brought an entry twice".to_owned());
                }
                let (place, next) = (Place::at(at, part.at.count), Place::behind(at, part.at.count + 1));
                let redelivered = at <= part.known_up_to;
                let (id, message) = entry.message(&part.stream);
                let taken = Taken { partition: part.number, place, next, redelivered, id, message };
                state.held.arrived(taken);
                part.at = next;
            }
        }
        self.session.has_arrived();
        Ok(())
    }
}

/// A reply may take as long as its bytes come; a server that says nothing at all is given up by the connection.
async fn read(reader: Connection, command: Vec<String>) -> (Connection, Result<Reply, Unanswered>) {
    let reply = reader.ask(command, Instant::now() + READ_WITHIN).await;
    (reader, reply)
}
