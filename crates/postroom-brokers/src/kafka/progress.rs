//! Pure: what a group is told of a partition, and where the next session begins.

/// What a group has committed for a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Committed {
    pub offset: i64,
    /// None: somebody else wrote it, and anything may have been handed out.
    pub note: Option<Note>,
}

/// A record that a session has seen: a partition where it is another one was made anew, or has lost its end and got another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Anchor {
    pub offset: i64,
    pub print: u64,
}

/// What goes along with a committed offset, in its metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Note {
    /// What is before this one may have been handed out.
    pub reserved: i64,
    pub anchor: Option<Anchor>,
    /// Whose group it is; empty: that was not said.
    pub consumer: String,
}

const POSTROOM: &str = "postroom";

impl Note {
    pub fn written(&self) -> String {
        let anchor =
            self.anchor.map_or_else(|| "-".to_owned(), |anchor| format!("{}:{:016x}", anchor.offset, anchor.print));
        format!("{POSTROOM} {} {anchor} {}", self.reserved, self.consumer)
    }

    pub fn read(metadata: &str) -> Option<Self> {
        let rest = metadata.strip_prefix(POSTROOM)?.strip_prefix(' ')?;
        let (reserved, rest) = rest.split_once(' ')?;
        let (anchor, consumer) = rest.split_once(' ')?;
        let anchor = match anchor {
            "-" => None,
            anchor => {
                let (offset, print) = anchor.split_once(':')?;
                Some(Anchor { offset: offset.parse().ok()?, print: u64::from_str_radix(print, 16).ok()? })
            }
        };
        Some(Self { reserved: reserved.parse().ok()?, anchor, consumer: consumer.to_owned() })
    }
}

/// Tells records apart: FNV-1a of what they are made of. <https://datatracker.ietf.org/doc/html/draft-eastlake-fnv>
pub(super) fn print_of<'p>(parts: impl IntoIterator<Item = &'p [u8]>) -> u64 {
    let mut print = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |byte: u8| print = (print ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    for part in parts {
        part.iter().for_each(|byte| add(*byte));
        // So that no byte passes from one part into the next.
        part.len().to_le_bytes().iter().for_each(|byte| add(*byte));
    }
    print
}

/// Where a session begins in a partition.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Begin {
    pub offset: i64,
    /// What is before this one may have been handed out before.
    pub known_before: i64,
    /// What a person has to know.
    pub told: Option<Told>,
}

/// What happened to a partition while nobody looked.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// So many were removed before they were received.
    Removed(i64),
    /// The partition ends before what was received.
    WentBack { received: i64, end: i64 },
}

/// From what the group has committed, and the first and last offset that are there.
pub(super) fn begin(committed: Option<&Committed>, low: i64, high: i64) -> Begin {
    match committed {
        // Nobody can have been handed anything: that is told the group first.
        None => Begin { offset: low, known_before: low, told: None },
        Some(Committed { offset, .. }) if *offset > high => {
            let told = Some(Told::WentBack { received: *offset, end: high });
            Begin { offset: low, known_before: high, told }
        }
        Some(Committed { offset, note }) => Begin {
            offset: (*offset).max(low),
            known_before: note.as_ref().map_or(high, |note| note.reserved),
            told: (*offset < low).then(|| Told::Removed(low - offset)),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_begins_where_the_one_before_was_settled() {
        let note = |reserved| Note { reserved, anchor: None, consumer: String::new() };
        let at = |offset, reserved: Option<i64>| Some(Committed { offset, note: reserved.map(note) });
        assert_eq!(begin(None, 3, 9), Begin { offset: 3, known_before: 3, told: None });
        assert_eq!(begin(at(5, Some(7)).as_ref(), 3, 9), Begin { offset: 5, known_before: 7, told: None });
        assert_eq!(begin(at(5, None).as_ref(), 3, 9).known_before, 9, "what another program committed");
        let removed = begin(at(1, Some(2)).as_ref(), 3, 9);
        assert_eq!((removed.offset, removed.told), (3, Some(Told::Removed(2))));
        let back = begin(at(12, Some(20)).as_ref(), 3, 9);
        assert_eq!((back.offset, back.known_before), (3, 9));
        assert_eq!(back.told, Some(Told::WentBack { received: 12, end: 9 }));
        assert_eq!(begin(at(9, Some(9)).as_ref(), 3, 9).told, None);
    }

    #[test]
    fn the_metadata_is_read_as_it_was_written() {
        let anchor = Some(Anchor { offset: 76, print: 7 });
        for note in [
            Note { reserved: 77, anchor, consumer: "billing of x".to_owned() },
            Note { reserved: 0, anchor: None, consumer: String::new() },
        ] {
            assert_eq!(Note::read(&note.written()), Some(note));
        }
        for foreign in ["", "x 7", "postroom", "postroom 7", "postroom x - y", "postroom 7 8 y", "postroom 7 8:xyz y"] {
            assert_eq!(Note::read(foreign), None, "{foreign}");
        }
    }

    #[test]
    fn records_are_told_apart() {
        let print = |parts: &[&str]| print_of(parts.iter().map(|part| part.as_bytes()));
        assert_eq!(print(&["a", "b"]), print(&["a", "b"]));
        assert!(print(&["a", "b"]) != print(&["ab", ""]) && print(&["a"]) != print(&["b"]));
    }
}
