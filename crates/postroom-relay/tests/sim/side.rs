//! What a relay's source keeps in memory: the book that every store keeps, and how an answer of the simulated database changes
//! it.

use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

use postroom::lane_book::{Asked, Found, Granted, Move, Passed, Reached, Tenant};
use postroom::{Claimed, Entry, LaneBook, Settlement, Standing, Token, Want};

use crate::database::{self, Place};

#[derive(Default)]
pub struct Side {
    pub owner: String,
    pub book: LaneBook<usize>,
    /// What is noted as alone with the sink.
    pub marked: Option<(Token, Place, i64)>,
    /// A write of positions is under way.
    writing: bool,
}

/// What a claim asks.
pub struct Ask {
    pub want: Want,
    pub lanes: Vec<Asked<usize>>,
    pub parked_lanes: Vec<u16>,
    pub in_hand: BTreeSet<Place>,
}

/// What the database answered: for each lane asked what it found.
pub struct Answer {
    pub ask: Ask,
    pub parked: Vec<database::Found>,
    pub fresh: Vec<Vec<database::Found>>,
}

pub fn place(lane: u16, seq: i64) -> Place {
    (lane, seq as usize)
}

impl Side {
    pub fn new(owner: String) -> Self {
        Self { owner, ..Self::default() }
    }

    /// Takes in a renewal; returns the lanes to give back.
    pub fn renewed(
        &mut self,
        held: &[Tenant],
        share: usize,
        granted: Vec<Granted<usize>>,
        deadline: Duration,
    ) -> Vec<Tenant> {
        self.book.renewed(held, granted, deadline);
        self.book.keep_to(share)
    }

    pub fn standing(&mut self) -> Standing {
        Standing {
            held: self.book.held().len(),
            lost_lanes: self.book.take_lost(),
            settled_ahead: self.book.settled_ahead(),
            deaths: self.book.deaths(),
            ..Standing::default()
        }
    }

    pub fn ask(&mut self, now: Duration, want: Want) -> Ask {
        self.book.begin_claim();
        self.book.wants(want.messages);
        // Alone: each lane is asked, and only the first that has something is taken in.
        let messages = if want.single { usize::MAX / 2 } else { want.messages };
        let lanes = self.book.ask(now, messages, if want.single { 1 } else { want.lane_messages_max });
        let in_hand = self.book.parked_in_hand().map(|(lane, seq)| place(lane, seq)).collect();
        Ask { want, lanes, parked_lanes: self.book.claimable(now), in_hand }
    }

    pub fn claimed(&mut self, answer: Answer) -> Claimed {
        self.book.end_claim();
        let mut claimed = Claimed::default();
        let Answer { ask, parked, fresh } = answer;
        for row in parked {
            claimed.deliveries.extend(self.book.took_in_parked(row.place.0, found(row)));
        }
        let places = if ask.want.single { 1 } else { ask.want.messages };
        let mut lanes_taken = 0;
        for (asked, rows) in ask.lanes.iter().zip(fresh) {
            let Some(last) = rows.last().map(|row| row.place.1 + 1) else { continue };
            claimed.more = true;
            // With fewer places than lanes the others are as if they had not been asked.
            if (ask.want.single && !claimed.deliveries.is_empty()) || lanes_taken >= places {
                self.book.have_more(&[(asked.lane, asked.epoch)]);
                continue;
            }
            lanes_taken += 1;
            let full = rows.len() >= asked.limit;
            let rows = rows.into_iter().map(|row| {
                let position = row.place.1 + 1;
                Passed { position, found: row.wanted.then(|| found(row)) }
            });
            claimed.deliveries.extend(self.book.took_in(asked, Reached { position: last, full }, rows));
        }
        claimed.lost_lanes = self.book.take_lost();
        claimed.unwritten = self.book.has_unwritten();
        claimed
    }

    pub fn place_of(&self, token: Token) -> Option<(Place, i64)> {
        self.book.out(token).map(|out| (place(out.lane, out.seq), out.epoch))
    }

    /// The outcomes are recorded; how many changed nothing.
    pub fn settled(&mut self, settlements: &[Settlement]) -> usize {
        settlements.iter().filter(|settlement| !self.book.settle(settlement.token)).count()
    }

    pub fn entries(&self, settlements: &[Settlement], ordered: bool) -> Vec<Entry> {
        self.book.entries(settlements, ordered)
    }

    /// What is to be written now; nothing while a write is under way.
    pub fn begin_write(&mut self, now: Duration) -> Vec<Move<usize>> {
        if self.writing {
            return Vec::new();
        }
        let moves = self.book.begin_write(now);
        self.writing = !moves.is_empty();
        moves
    }

    pub fn end_write(&mut self, now: Duration, moves: Vec<Move<usize>>, written: Option<&HashSet<u16>>) {
        self.writing = false;
        self.book.end_write(now, moves, written);
    }
}

fn found(row: database::Found) -> Found {
    let database::Found { place, row, behind, attempts, deaths, doubts, .. } = row;
    let (seq, scheduled, unreadable) = (place.1 as i64, false, None);
    Found {
        seq,
        key: row.key,
        attempts,
        scheduled,
        behind,
        deaths,
        doubts,
        unreadable,
        replay: None,
        message: row.message,
    }
}
