//! Pure: what became of the message of a row that was taken, and what is written about it.

/// A message on one route that takes its topic.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OnRoute {
    /// The route's position has passed it.
    pub passed: bool,
    /// It waits among the parked messages.
    pub parked: bool,
    /// It is a dead letter, for this reason.
    pub dead: Option<String>,
    /// The route may have passed it without sending it: before it began, before a restore, or while it did not take the topic.
    pub unsure: bool,
}

/// What became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RowFate {
    /// Some route has not finished with it, or none takes it.
    Waits,
    /// Every route that takes it has sent it.
    Sent,
    /// It is a dead letter.
    Dead(String),
    /// An operator discarded it, or retention did, as a dead letter.
    Discarded(String),
    /// Nobody knows.
    Unclear,
}

impl RowFate {
    /// By what is known of it; `discarded` by whom.
    pub fn of(in_outbox: bool, routes: &[OnRoute], discarded: Option<String>) -> Self {
        if let Some(error) = routes.iter().find_map(|route| route.dead.clone()) {
            return Self::Dead(error);
        }
        let finished = routes.iter().all(|route| route.passed && !route.parked);
        match discarded {
            Some(by) if !in_outbox || finished => Self::Discarded(by),
            _ if !in_outbox => Self::Unclear,
            _ if routes.is_empty() || !finished => Self::Waits,
            _ if routes.iter().any(|route| route.unsure) => Self::Unclear,
            _ => Self::Sent,
        }
    }
}

/// What a step of marking writes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Marking {
    /// Rows that are done.
    pub sent: Vec<String>,
    /// Rows whose message has died, and of what.
    pub dead: Vec<(String, String)>,
    /// Rows that get another state, and why.
    pub changed: Vec<(String, &'static str, String)>,
}

impl Marking {
    /// Notes what became of a row; `was_dead`: that is known already.
    pub fn note(&mut self, row: String, was_dead: bool, fate: RowFate) {
        const UNKNOWN: &str = "the outbox no longer has its message, or its route passed it without sending it; ask the receiver, then mark \
                               the row, or let it be taken again with `postroom intake again`";
        match fate {
            RowFate::Waits => {}
            RowFate::Sent => self.sent.push(row),
            RowFate::Dead(_) if was_dead => {}
            RowFate::Dead(error) => {
                self.changed.push((row.clone(), "dead", error.clone()));
                self.dead.push((row, error));
            }
            RowFate::Discarded(by) => self.changed.push((row, "discarded", by)),
            RowFate::Unclear => self.changed.push((row, "unclear", UNKNOWN.to_owned())),
        }
    }

    /// A row was sent, and refuses to be marked, for this reason.
    pub fn unmarked(&mut self, row: &str, error: &str) {
        self.sent.retain(|sent| sent != row);
        let error = format!("its message was sent, and the row cannot be marked: {error}");
        self.changed.push((row.to_owned(), "unmarked", error));
    }

    /// How many were sent and are not marked.
    pub fn unmarked_count(&self) -> u64 {
        self.changed.iter().filter(|(_, state, _)| *state == "unmarked").count() as u64
    }

    /// How many are not known.
    pub fn unclear(&self) -> u64 {
        self.changed.iter().filter(|(_, state, _)| *state == "unclear").count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_every_route_has_sent_is_called_sent() {
        let done = OnRoute { passed: true, ..OnRoute::default() };
        let parked = OnRoute { parked: true, ..done.clone() };
        let dead = OnRoute { dead: Some("no".to_owned()), ..done.clone() };
        let unsure = OnRoute { unsure: true, ..done.clone() };
        let ann = || Some("ann".to_owned());
        for (in_outbox, routes, discarded, fate) in [
            (true, vec![done.clone(), done.clone()], None, RowFate::Sent),
            (true, vec![done.clone(), OnRoute::default()], None, RowFate::Waits),
            (true, vec![done.clone(), parked.clone()], None, RowFate::Waits),
            (true, vec![], None, RowFate::Waits),
            (true, vec![done.clone(), dead], None, RowFate::Dead("no".to_owned())),
            (true, vec![done.clone(), unsure], None, RowFate::Unclear),
            (true, vec![done.clone()], ann(), RowFate::Discarded("ann".to_owned())),
            (true, vec![parked], ann(), RowFate::Waits),
            (false, vec![], ann(), RowFate::Discarded("ann".to_owned())),
            (false, vec![], None, RowFate::Unclear),
        ] {
            assert_eq!(
                RowFate::of(in_outbox, &routes, discarded.clone()),
                fate,
                "{in_outbox} {routes:?} {discarded:?}"
            );
        }
    }
}
