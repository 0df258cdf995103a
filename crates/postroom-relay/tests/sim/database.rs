//! The store as the simulation has it: what a database would hold, and what each statement of a source does to it. Each method
//! is one transaction. It keeps the rules of the PostgreSQL log source, with commit order in place of snapshots: that late
//! rows are found is proven there, against a real server.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use postroom::lane_book::{Granted, Tenant};
use postroom::{Cause, Change, Entry, Message, ParkedState};

use crate::side::place;

/// A committed message.
#[derive(Debug, Clone)]
pub struct Row {
    pub message: Message,
    pub key: Option<String>,
}

#[derive(Debug, Default, Clone)]
pub struct Lane {
    pub owner: Option<String>,
    pub epoch: i64,
    pub expires: Duration,
    /// Rows of the log that are consumed.
    pub position: usize,
    pub log: Vec<Row>,
    pub deaths: u32,
}

#[derive(Debug, Clone)]
pub struct Parked {
    pub row: Row,
    pub state: ParkedState,
    pub due: Duration,
    pub attempts: u32,
    /// It failed before, or an operator gave it back: it is not just queued up.
    pub failed: bool,
}

/// Names a row: its lane and its place in the lane's log.
pub type Place = (u16, usize);

#[derive(Debug, Default)]
pub struct Database {
    pub lanes: Vec<Lane>,
    pub relays: HashMap<String, Duration>,
    pub parked: BTreeMap<Place, Parked>,
    pub dead: BTreeMap<Place, (Row, u32, Cause)>,
    pub blocked: BTreeSet<(String, Option<Place>)>,
    pub suspects: BTreeMap<Place, Suspect>,
    /// Rows that retention has removed: no read finds them, and nothing can be copied from them.
    pub removed: BTreeSet<Place>,
}

/// What is known of a message that was alone with the sink.
#[derive(Debug, Default, Clone, Copy)]
pub struct Suspect {
    alone: bool,
    proven: bool,
    pub deaths: u32,
    pub doubts: u32,
}

/// A row that a read found.
pub struct Found {
    pub place: Place,
    pub row: Row,
    /// Dealt with already, as the tables of trouble say.
    pub wanted: bool,
    pub behind: bool,
    pub attempts: u32,
    pub deaths: u32,
    pub doubts: u32,
}

impl Database {
    pub fn new(lanes: u16) -> Self {
        Self { lanes: vec![Lane::default(); usize::from(lanes)], ..Self::default() }
    }

    pub fn renew(
        &mut self,
        now: Duration,
        owner: &str,
        held: &[Tenant],
        lease: Duration,
        survived: bool,
    ) -> (usize, Vec<Granted<usize>>) {
        self.relays.insert(owner.to_owned(), now + lease);
        let alive = self.relays.values().filter(|expires| **expires > now).count();
        let share = self.lanes.len().div_ceil(alive.max(1));
        let mut granted = Vec::new();
        let mut room = share.saturating_sub(held.len());
        for (number, lane) in self.lanes.iter_mut().enumerate() {
            let number = number as u16;
            let ours = lane.owner.as_deref() == Some(owner);
            let kept = ours && held.contains(&(number, lane.epoch));
            let free = lane.owner.is_none() || lane.expires < now || ours;
            let granted_now = kept || (free && room > 0);
            if !granted_now {
                continue;
            }
            if kept {
                if survived {
                    lane.deaths = 0;
                    let parked = &self.parked;
                    self.suspects
                        .retain(|place, suspect| place.0 != number || suspect.alone || parked.contains_key(place));
                }
            } else {
                room -= 1;
                let orphaned = lane.owner.is_some() && !ours;
                let due = |(place, parked): (&Place, &Parked)| {
                    place.0 == number && parked.state == ParkedState::Retry && parked.due <= now
                };
                let busy = lane.position < lane.log.len() || self.parked.iter().any(due);
                lane.deaths += u32::from(orphaned && busy);
                for (_, suspect) in self.suspects.range_mut((number, 0)..(number + 1, 0)).filter(|_| orphaned) {
                    let alone = std::mem::take(&mut suspect.alone);
                    suspect.deaths += u32::from(alone && suspect.proven);
                    suspect.doubts += u32::from(alone && !suspect.proven);
                }
                let position = lane.position;
                let unread = |place: &Place, parked: &Parked| {
                    place.0 == number && place.1 >= position && !parked.failed && parked.attempts == 0
                };
                self.parked.retain(|place, parked| !unread(place, parked));
                lane.epoch += 1;
                lane.owner = Some(owner.to_owned());
            }
            lane.expires = now + lease;
            let (epoch, position, deaths) = (lane.epoch, lane.position, lane.deaths);
            granted.push(Granted { lane: number, epoch, kept, position, deaths });
        }
        (share, granted)
    }

    pub fn release(&mut self, owner: &str, lanes: &[Tenant]) {
        for (number, epoch) in lanes {
            if self.holds(owner, *number, *epoch) {
                self.lanes[usize::from(*number)].owner = None;
                self.suspects.retain(|place, suspect| place.0 != *number || suspect.deaths > 0 || suspect.doubts > 0);
                for (_, suspect) in self.suspects.range_mut((*number, 0)..(*number + 1, 0)) {
                    suspect.alone = false;
                }
            }
        }
    }

    fn holds(&self, owner: &str, lane: u16, epoch: i64) -> bool {
        let lane = &self.lanes[usize::from(lane)];
        lane.owner.as_deref() == Some(owner) && lane.epoch == epoch
    }

    fn waits(&self, key: &str) -> bool {
        self.blocked.iter().any(|(blocked, _)| blocked == key)
            || self.parked.values().any(|parked| parked.row.key.as_deref() == Some(key))
    }

    /// Reads `limit` rows of a lane from a position on.
    pub fn read(&self, lane: u16, from: usize, limit: usize) -> Vec<Found> {
        let log = &self.lanes[usize::from(lane)].log;
        let rows = log.iter().enumerate().skip(from).take(limit);
        let found = rows.map(|(index, row)| {
            let place = (lane, index);
            Found {
                place,
                wanted: !self.parked.contains_key(&place) && !self.dead.contains_key(&place),
                behind: row.key.as_deref().is_some_and(|key| self.waits(key)),
                row: row.clone(),
                attempts: 0,
                deaths: 0,
                doubts: 0,
            }
        });
        found.filter(|found| !self.removed.contains(&found.place)).collect()
    }

    /// Heads that are due with what queues behind them, up to the next head of the key.
    pub fn read_parked(&self, now: Duration, lanes: &[u16], in_hand: &BTreeSet<Place>, limit: usize) -> Vec<Found> {
        let mut found = Vec::new();
        let mut open_keys: BTreeSet<&str> = BTreeSet::new();
        let mut closed_keys: BTreeSet<&str> = BTreeSet::new();
        for (place, parked) in &self.parked {
            let key = parked.row.key.as_deref();
            let first = key.is_none_or(|key| !open_keys.contains(key) && !closed_keys.contains(key));
            let blocked = key.is_some_and(|key| self.blocked.iter().any(|(blocked, _)| blocked == key));
            let goes = !blocked
                && lanes.contains(&place.0)
                && !in_hand.contains(place)
                && match parked.state {
                    ParkedState::Retry => first && parked.due <= now,
                    ParkedState::Queued => key.is_some_and(|key| open_keys.contains(key) && !closed_keys.contains(key)),
                    ParkedState::Scheduled => false,
                };
            if let Some(key) = key {
                if goes {
                    open_keys.insert(key);
                } else {
                    closed_keys.insert(key);
                }
            }
            if goes && found.len() < limit {
                let row = parked.row.clone();
                let Suspect { deaths, doubts, .. } = self.suspects.get(place).copied().unwrap_or_default();
                let attempts = parked.attempts;
                found.push(Found { place: *place, row, wanted: true, behind: false, attempts, deaths, doubts });
            }
        }
        found
    }

    /// Records outcomes of lanes still held; returns the lanes that were.
    pub fn record(&mut self, now: Duration, owner: &str, ordered: bool, entries: &[Entry]) -> BTreeSet<u16> {
        let held: BTreeSet<u16> =
            entries.iter().filter(|entry| self.holds(owner, entry.lane, entry.epoch)).map(|entry| entry.lane).collect();
        let mut keys = BTreeSet::new();
        for Entry { lane, seq, parked, change, .. } in entries.iter().filter(|entry| held.contains(&entry.lane)) {
            let place = place(*lane, *seq);
            // A message that waits or is dead is a copy of its row.
            if self.removed.contains(&place) && !self.parked.contains_key(&place) {
                continue;
            }
            let row = self.lanes[usize::from(place.0)].log[place.1].clone();
            keys.extend(row.key.clone());
            match change {
                Change::Unpark => drop(self.parked.remove(&place)),
                Change::ParkAgain { after, attempts, .. } => {
                    if let Some(parked) = self.parked.get_mut(&place) {
                        (parked.state, parked.due, parked.attempts) = (ParkedState::Retry, now + *after, *attempts);
                        parked.failed = true;
                    }
                }
                Change::Park { state, after, attempts, .. } => {
                    let row = Row { key: row.key.clone().filter(|_| ordered), ..row };
                    let (state, failed) = (*state, *state == ParkedState::Retry);
                    let parked = Parked { row, state, due: now + *after, attempts: *attempts, failed };
                    self.parked.entry(place).or_insert(parked);
                }
                Change::Bury { attempts, cause, blocks_key, .. } => {
                    if *parked && self.parked.remove(&place).is_none() {
                        continue;
                    }
                    self.dead.entry(place).or_insert((row.clone(), *attempts, *cause));
                    if let Some(key) = row.key.clone().filter(|_| *blocks_key) {
                        self.blocked.insert((key, Some(place)));
                    }
                }
            }
        }
        for key in keys {
            self.promote(now, &key);
        }
        held
    }

    /// Moves a position; false when the lane is not held any more.
    pub fn write_position(&mut self, owner: &str, lane: u16, epoch: i64, position: usize) -> bool {
        let held = self.holds(owner, lane, epoch);
        if held {
            self.lanes[usize::from(lane)].position = position;
        }
        held
    }

    pub fn mark_alone(&mut self, owner: &str, epoch: i64, place: Place, proven: bool) -> Suspect {
        if !self.holds(owner, place.0, epoch) {
            return Suspect::default();
        }
        for (other, suspect) in &mut self.suspects {
            suspect.alone &= self.lanes[usize::from(other.0)].owner.as_deref() != Some(owner);
        }
        let suspect = self.suspects.entry(place).or_default();
        (suspect.alone, suspect.proven) = (true, proven);
        *suspect
    }

    /// Takes the note off; forgets a message that is through.
    pub fn unmark(&mut self, owner: &str, epoch: i64, place: Place, through: bool) {
        if !self.holds(owner, place.0, epoch) {
            return;
        }
        if through {
            self.suspects.remove(&place);
        } else if let Some(suspect) = self.suspects.get_mut(&place) {
            suspect.alone = false;
        }
    }

    fn promote(&mut self, now: Duration, key: &str) {
        let first = self.parked.values_mut().find(|parked| parked.row.key.as_deref() == Some(key));
        if let Some(parked) = first.filter(|parked| parked.state == ParkedState::Queued) {
            (parked.state, parked.due) = (ParkedState::Retry, now);
        }
    }

    /// What an operator does with a dead letter: gives it back, or lets its key go on without it.
    pub fn retry_dead(&mut self, now: Duration, place: Place, ordered: bool) {
        if let Some((row, ..)) = self.dead.remove(&place) {
            let key = row.key.clone();
            self.blocked.retain(|(_, dead)| *dead != Some(place));
            let state = if key.is_some() { ParkedState::Queued } else { ParkedState::Retry };
            let row = Row { key: key.clone().filter(|_| ordered), ..row };
            let state = if ordered { state } else { ParkedState::Retry };
            self.parked.insert(place, Parked { row, state, due: now, attempts: 0, failed: true });
            if let Some(key) = key {
                self.promote(now, &key);
            }
        }
    }

    pub fn skip(&mut self, place: Place) {
        self.blocked.retain(|(_, dead)| *dead != Some(place));
    }

    /// Removes rows of a lane that are finished, at most so many; returns how many.
    pub fn retain(&mut self, lane: u16, most: usize) -> usize {
        let finished = (0..self.lanes[usize::from(lane)].position).map(|index| (lane, index));
        let kept = |place: &Place| self.parked.contains_key(place) || self.removed.contains(place);
        let gone: Vec<Place> = finished.filter(|place| !kept(place)).take(most).collect();
        self.removed.extend(&gone);
        gone.len()
    }

    pub fn park_key(&mut self, key: &str) {
        self.blocked.insert((key.to_owned(), None));
    }

    pub fn unpark_key(&mut self, now: Duration, key: &str) {
        self.blocked.remove(&(key.to_owned(), None));
        self.promote(now, key);
    }
}
