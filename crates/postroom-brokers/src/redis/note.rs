//! Pure: what a session leaves in its consumer group for the next one: the name of the group's only consumer.
//!
//! A group keeps no text of anybody's, and names of consumers are free. So everything about a stream is in its own key: what happens to that
//! (a failover, a restore, a `DEL`) happens to all of it.

use super::entry::EntryId;

const POSTROOM: &str = "postroom";
const FREE: &str = "free";

/// Of a session's ids, messages of so many milliseconds are reserved ahead.
const AHEAD_MS: u64 = 1_000;

/// Who receives, and what may have been handed out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Note {
    /// What is up to this one may have been handed out.
    pub reserved: EntryId,
    /// The session; none: nobody receives.
    pub session: Option<String>,
    /// Where the group is, and how many entries are before that (-1: nobody knows), for a person who has to put it back.
    pub place: EntryId,
    pub count: i64,
    /// Whose group it is; empty: that was not said.
    pub consumer: String,
}

impl Note {
    pub fn written(&self) -> String {
        let session = self.session.as_deref().unwrap_or(FREE);
        format!("{POSTROOM} {} {session} {} {} {}", self.reserved, self.place, self.count, self.consumer)
    }

    pub fn read(name: &str) -> Option<Self> {
        let words: Vec<&str> = name.splitn(6, ' ').collect();
        let [POSTROOM, reserved, session, place, count, consumer] = words.as_slice() else { return None };
        Some(Self {
            reserved: EntryId::parse(reserved)?,
            session: (*session != FREE).then(|| (*session).to_owned()),
            place: EntryId::parse(place)?,
            count: count.parse().ok()?,
            consumer: (*consumer).to_owned(),
        })
    }
}

/// What is reserved so that an entry with this id can be handed out: everything up to it. Ids are times, so most messages need no reservation of
/// their own.
pub(super) fn reserved_for(id: EntryId) -> EntryId {
    EntryId(id.0.saturating_add(AHEAD_MS), 0).max(id)
}

/// A place in a stream: an entry, or just behind one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub id: EntryId,
    is_behind: bool,
    /// How many entries the stream ever had before it, as far as that is known.
    pub count: i64,
}

impl Place {
    /// Of an entry, which has so many before it.
    pub fn at(id: EntryId, count: i64) -> Self {
        Self { id, is_behind: false, count }
    }

    /// Behind the entry with this id, whether there is one or not.
    pub fn behind(id: EntryId, count: i64) -> Self {
        Self { id, is_behind: true, count }
    }

    /// What a reader has read that begins here.
    pub fn read_up_to(self) -> EntryId {
        if self.is_behind { self.id } else { self.id.before() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_read_as_they_were_written() {
        let reserved = EntryId(1_700_000_001_000, 3);
        for note in [
            Note {
                reserved,
                session: Some("0199-x".to_owned()),
                place: reserved,
                count: 7,
                consumer: "billing of x".to_owned(),
            },
            Note { reserved, session: None, place: EntryId(0, 0), count: -1, consumer: String::new() },
        ] {
            assert_eq!(Note::read(&note.written()), Some(note));
        }
        for foreign in
            ["", "x", "postroom", "postroom 1-1 free", "postroom x free 1-1 7 y", "worker-1 1-1 free 1-1 7 y"]
        {
            assert_eq!(Note::read(foreign), None, "{foreign}");
        }
    }

    #[test]
    fn what_is_reserved_is_behind_what_it_is_for() {
        assert_eq!(reserved_for(EntryId(5, 7)), EntryId(1_005, 0));
        assert_eq!(reserved_for(EntryId(u64::MAX, 7)), EntryId(u64::MAX, 7));
        let last = EntryId(u64::MAX, u64::MAX);
        assert!(Place::at(last, 4) < Place::behind(last, 5), "also behind the last one that there can be");
        assert_eq!((Place::at(last, 4).read_up_to(), Place::behind(last, 5).read_up_to()), (last.before(), last));
    }
}
