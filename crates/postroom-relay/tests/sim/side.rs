//! What a relay's source keeps in memory, and how an answer of the database changes it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use postroom::{Claimed, Delivery, LostLane, Origin, ReadId, Settlement, Standing, Token, Want, Watermark};

use crate::database::{Entry, Found, Granted, Place};

#[derive(Default)]
pub struct Side {
    pub owner: String,
    lanes: BTreeMap<u16, Lane>,
    out: HashMap<Token, Out>,
    /// What is noted as alone with the sink.
    pub marked: Option<(Token, Place, i64)>,
    next_token: u64,
    lost: Vec<LostLane>,
    claiming: bool,
    turn: usize,
}

struct Lane {
    epoch: i64,
    cursor: usize,
    watermark: Watermark<usize>,
    unwritten: Option<usize>,
    writing: bool,
    deadline: Duration,
    leaving: bool,
    deaths: u32,
}

struct Out {
    place: Place,
    epoch: i64,
    read: Option<ReadId>,
}

/// What a claim asks.
pub struct Asked {
    pub want: Want,
    /// Lane, epoch, from where, how many.
    pub lanes: Vec<(u16, i64, usize, usize)>,
    pub parked_lanes: Vec<u16>,
    pub in_hand: BTreeSet<Place>,
}

/// What the database answered.
pub struct Answer {
    pub asked: Asked,
    pub parked: Vec<Found>,
    pub fresh: Vec<(u16, i64, Vec<Found>)>,
}

impl Side {
    pub fn new(owner: String) -> Self {
        Self { owner, ..Self::default() }
    }

    pub fn held(&self) -> Vec<(u16, i64)> {
        self.lanes.iter().map(|(number, lane)| (*number, lane.epoch)).collect()
    }

    /// Takes in a renewal; returns the lanes to give back.
    pub fn renewed(
        &mut self,
        held: &[(u16, i64)],
        share: usize,
        granted: Vec<Granted>,
        deadline: Duration,
    ) -> Vec<(u16, i64)> {
        let kept: BTreeSet<u16> = granted.iter().map(|granted| granted.lane).collect();
        for Granted { lane: number, epoch, kept, position, deaths } in granted {
            match self.lanes.get_mut(&number) {
                Some(lane) if kept && lane.epoch == epoch => (lane.deadline, lane.deaths) = (deadline, deaths),
                _ => {
                    self.lose(number);
                    let (watermark, cursor) = (Watermark::default(), position);
                    let lane = Lane {
                        epoch,
                        cursor,
                        watermark,
                        unwritten: None,
                        writing: false,
                        deadline,
                        leaving: false,
                        deaths,
                    };
                    self.lanes.insert(number, lane);
                }
            }
        }
        for (number, epoch) in held {
            if !kept.contains(number) && self.lanes.get(number).is_some_and(|lane| lane.epoch == *epoch) {
                self.lose(*number);
            }
        }
        let over = self.lanes.len().saturating_sub(share);
        for (index, lane) in self.lanes.values_mut().rev().enumerate() {
            lane.leaving = index < over;
        }
        let busy: BTreeSet<u16> = self.out.values().map(|out| out.place.0).collect();
        if self.claiming {
            return Vec::new();
        }
        let given: Vec<(u16, i64)> = self
            .lanes
            .iter()
            .filter(|(number, lane)| {
                lane.leaving && lane.unwritten.is_none() && !lane.writing && !busy.contains(number)
            })
            .map(|(number, lane)| (*number, lane.epoch))
            .collect();
        for (number, _) in &given {
            self.lanes.remove(number);
        }
        given
    }

    pub fn standing(&mut self) -> Standing {
        Standing {
            held: self.lanes.len(),
            lost_lanes: std::mem::take(&mut self.lost),
            settled_ahead: self.settled_ahead(),
            deaths: self.lanes.values().map(|lane| lane.deaths).max().unwrap_or_default(),
            ..Standing::default()
        }
    }

    pub fn settled_ahead(&self) -> usize {
        self.lanes.values().map(|lane| lane.watermark.settled_ahead()).sum()
    }

    pub fn describe(&self) -> String {
        let lanes: Vec<String> = self
            .lanes
            .iter()
            .map(|(n, l)| {
                format!(
                    "{n}: cursor {} open {} leaving {} deaths {} unwritten {:?} writing {} until {:?}",
                    l.cursor,
                    l.watermark.open(),
                    l.leaving,
                    l.deaths,
                    l.unwritten,
                    l.writing,
                    l.deadline
                )
            })
            .collect();
        format!("out {} claiming {} lanes [{}]", self.out.len(), self.claiming, lanes.join("; "))
    }

    pub fn lose(&mut self, number: u16) {
        if self.lanes.remove(&number).is_some() {
            self.lost.push(LostLane { lane: number, before: Token(self.next_token) });
            self.out.retain(|_, out| out.place.0 != number);
        }
    }

    pub fn take_lost(&mut self) -> Vec<LostLane> {
        std::mem::take(&mut self.lost)
    }

    pub fn ask(&mut self, now: Duration, want: Want) -> Asked {
        self.claiming = true;
        let open: Vec<u16> = self
            .lanes
            .iter()
            .filter(|(_, lane)| lane.deadline > now && !lane.leaving)
            .map(|(number, _)| *number)
            .collect();
        let share = (want.messages / open.len().max(1)).max(1);
        let mut lanes = Vec::new();
        // Alone: each is asked, and only the first that has something is taken in.
        let mut left = if want.alone { usize::MAX } else { want.messages };
        self.turn += 1;
        for index in 0..open.len() {
            let number = &open[(index + self.turn) % open.len()];
            let lane = &self.lanes[number];
            let limit = share.min(left).min(want.lane_messages_max.saturating_sub(lane.watermark.open()));
            if limit > 0 {
                left = left.saturating_sub(limit);
                lanes.push((*number, lane.epoch, lane.cursor, limit));
            }
        }
        let in_hand = self.out.values().filter(|out| out.read.is_none()).map(|out| out.place).collect();
        Asked { want, lanes, parked_lanes: open, in_hand }
    }

    pub fn claim_failed(&mut self) {
        self.claiming = false;
    }

    pub fn claimed(&mut self, answer: Answer) -> Claimed {
        self.claiming = false;
        let mut claimed = Claimed::default();
        let Answer { asked, parked, fresh } = answer;
        for found in parked {
            let Some(epoch) = self.lanes.get(&found.place.0).map(|lane| lane.epoch) else { continue };
            claimed.deliveries.push(self.hand_out(found, Origin::Parked, epoch, None));
        }
        for (number, epoch, found) in fresh {
            if asked.want.alone && !claimed.deliveries.is_empty() {
                claimed.more = true;
                break;
            }
            let Some(lane) = self.lanes.get_mut(&number).filter(|lane| lane.epoch == epoch) else { continue };
            let Some(last) = found.last().map(|found| found.place.1 + 1) else { continue };
            claimed.more = true;
            lane.cursor = last;
            let wanted: Vec<Found> = found.into_iter().filter(|found| found.wanted).collect();
            let read = lane.watermark.opened(last, wanted.len());
            if let Some(position) = lane.watermark.advance() {
                lane.unwritten = Some(position);
            }
            for found in wanted {
                claimed.deliveries.push(self.hand_out(found, Origin::Outbox, epoch, Some(read)));
            }
        }
        claimed.lost_lanes = self.take_lost();
        claimed.unwritten = self.has_unwritten();
        claimed
    }

    fn hand_out(&mut self, found: Found, origin: Origin, epoch: i64, read: Option<ReadId>) -> Delivery {
        let token = Token(self.next_token);
        self.next_token += 1;
        self.out.insert(token, Out { place: found.place, epoch, read });
        Delivery {
            token,
            lane: found.place.0,
            origin,
            attempts: found.attempts,
            scheduled: false,
            behind: found.behind && origin == Origin::Outbox,
            deaths: found.deaths,
            doubts: found.doubts,
            unreadable: None,
            message: found.row.message,
        }
    }

    pub fn place_of(&self, token: Token) -> Option<(Place, i64)> {
        self.out.get(&token).map(|out| (out.place, out.epoch))
    }

    pub fn entries(&self, settlements: &[Settlement]) -> Vec<Entry> {
        let entry = |settlement: &Settlement| {
            let out = self.out.get(&settlement.token)?;
            let (place, epoch, parked) = (out.place, out.epoch, out.read.is_none());
            Some(Entry { place, epoch, parked, outcome: settlement.outcome.clone() })
        };
        settlements.iter().filter_map(entry).collect()
    }

    /// The outcomes are recorded; how many changed nothing.
    pub fn settled(&mut self, settlements: &[Settlement]) -> usize {
        let mut fenced = 0;
        for settlement in settlements {
            let Some(out) = self.out.remove(&settlement.token) else {
                fenced += 1;
                continue;
            };
            let Some(lane) = self.lanes.get_mut(&out.place.0).filter(|lane| lane.epoch == out.epoch) else { continue };
            if let Some(read) = out.read {
                lane.watermark.settled(read);
            }
            if let Some(position) = lane.watermark.advance() {
                lane.unwritten = Some(position);
            }
        }
        fenced
    }

    /// What is to be written now; nothing while a write is under way.
    pub fn begin_write(&mut self) -> Vec<(u16, i64, usize)> {
        if self.lanes.values().any(|lane| lane.writing) {
            return Vec::new();
        }
        let lanes = self.lanes.iter_mut();
        let taken = lanes.filter_map(|(number, lane)| {
            let at = lane.unwritten.take()?;
            lane.writing = true;
            Some((*number, lane.epoch, at))
        });
        taken.collect()
    }

    pub fn has_unwritten(&self) -> bool {
        self.lanes.values().any(|lane| lane.unwritten.is_some())
    }

    pub fn end_write(&mut self, moves: Vec<(u16, i64, usize)>, written: bool) {
        for (number, epoch, position) in moves {
            if let Some(lane) = self.lanes.get_mut(&number).filter(|lane| lane.epoch == epoch) {
                lane.writing = false;
                if !written {
                    lane.unwritten.get_or_insert(position);
                }
            }
        }
    }
}
