//! Writers, the operator, and faults.

use super::*;

impl World {
    pub(super) fn write(&mut self) {
        let mut rows = Vec::new();
        let mut ids = Vec::new();
        for _ in 0..1 + self.chance.below(4) {
            let id = MessageId::from(uuid::Uuid::from_u128(u128::from(self.next_id)));
            self.next_id += 1;
            let key = self.chance.percent(85).then(|| format!("k{}", self.chance.below(6)));
            let nature = match self.chance.below(100) {
                0..80 => Nature::Good,
                80..92 => Nature::Flaky(1 + self.chance.below(6) as u32),
                92..96 => Nature::Permanent,
                96..98 if self.poison && !self.calm => Nature::KillsConnection,
                98..100 if self.poison && !self.calm => Nature::KillsProcess,
                _ => Nature::Good,
            };
            let mut message = Message::new("orders", "order.placed", "x");
            message.id = id;
            message.key.clone_from(&key);
            let lane = key.as_ref().map_or(self.next_id, |key| u64::from(key.as_bytes()[1])) % u64::from(LANES);
            let number = match &key {
                Some(key) => {
                    let number = self.numbers.entry(key.clone()).or_default();
                    *number += 1;
                    *number
                }
                None => 0,
            };
            let known = Known::new(key.clone(), number, nature);
            self.known.insert(id, known);
            ids.push((id, lane as u16));
            rows.push(Row { message, key });
        }
        // Numbers are taken under the keys' row locks, so commits of a key are in their order: at once here.
        self.happens(Event::Commit(ids, rows));
    }

    pub(super) fn commit(&mut self, ids: Vec<(MessageId, u16)>, rows: Vec<Row>) {
        for ((id, lane), row) in ids.into_iter().zip(rows) {
            self.database.lanes[usize::from(lane)].log.push(row);
            self.committed.push(id);
        }
    }

    pub(super) fn operator(&mut self) {
        let ordered = self.order != Order::None;
        match self.chance.below(3) {
            0 => {
                let key = format!("k{}", self.chance.below(6));
                self.note(|| format!("operator parks {key}"));
                self.database.park_key(&key);
                let at = self.soon(100, 5000);
                self.at(at, Event::Unpark(key));
            }
            _ => self.decide_about_the_dead(ordered),
        }
    }

    /// Everything is old enough; what is not finished stays.
    pub(super) fn retain(&mut self) {
        if !self.database_up {
            return;
        }
        let (lane, most) = (self.chance.below(u64::from(LANES)) as u16, 1 + self.chance.below(50) as usize);
        let removed = self.database.retain(lane, most);
        self.tally.removed += removed as u64;
        self.note(|| format!("retention removes {removed} rows of lane {lane}"));
    }

    pub(super) fn decide_about_the_dead(&mut self, ordered: bool) {
        let places: Vec<Place> = self.database.dead.keys().copied().collect();
        if places.is_empty() {
            return;
        }
        let place = places[self.chance.below(places.len() as u64) as usize];
        if self.chance.percent(50) {
            self.note(|| format!("operator retries {place:?}"));
            self.database.retry_dead(self.now, place, ordered);
        } else {
            self.note(|| format!("operator skips {place:?}"));
            self.database.skip(place);
        }
    }

    pub(super) fn fault(&mut self) {
        self.tally.faults += 1;
        let relay = self.chance.below(self.relays.len() as u64) as usize;
        match self.chance.below(8) {
            0 | 1 => {
                self.note(|| format!("relay {relay} is killed"));
                self.kill(relay);
            }
            2 => {
                let until = self.soon(100, 12_000);
                self.note(|| format!("relay {relay} is paused until {:.3}", until.as_secs_f64()));
                self.relays[relay].paused_until = until;
                self.tally.pauses += 1;
            }
            3 => {
                self.note(|| "the sink goes down".to_owned());
                self.sink_up = false;
                self.tally.outages += 1;
                let at = self.soon(50, 15_000);
                self.at(at, Event::Sink(true));
            }
            4 => {
                self.note(|| "the database goes down".to_owned());
                self.database_up = false;
                self.tally.outages += 1;
                let at = self.soon(50, 10_000);
                self.at(at, Event::Database(true));
            }
            7 => {
                let until = self.soon(100, 8_000);
                self.happens(Event::Alarm(until));
            }
            5 => {
                self.note(|| format!("relay {relay} is stopped gracefully"));
                self.stop(relay);
            }
            _ => {
                // A flapping sink: down and up in quick succession.
                for _ in 0..5 {
                    let (down, up) = (self.soon(0, 2000), self.soon(2000, 2500));
                    self.at(down, Event::Sink(false));
                    self.at(up, Event::Sink(true));
                }
                let last = self.now + Duration::from_millis(2500);
                self.at(last, Event::Sink(true));
                self.tally.outages += 5;
            }
        }
    }

    /// An alarm for most of the run, while an orchestrator kills relays again and again, each time after the lanes of the ones
    /// before were taken over.
    pub(super) fn long_alarm(&mut self) {
        let (from, until) = (self.millis(1_000, 15_000), self.millis(40_000, 55_000));
        self.at(from, Event::Alarm(until));
        let mut at = from;
        while at < until {
            at += self.millis(5_500, 8_000);
            self.at(at, Event::KillInAlarm);
        }
    }

    pub(super) fn kill_in_alarm(&mut self) {
        self.note(|| "an orchestrator kills all relays".to_owned());
        self.tally.faults += 1;
        for relay in 0..self.relays.len() {
            if self.relays[relay].engine.is_some() {
                self.tally.kills_in_alarms += 1;
                self.kill_for(relay, 10, 300);
            }
        }
    }

    pub(super) fn kill(&mut self, relay: usize) {
        self.kill_for(relay, 10, 8000);
    }

    /// Killed now, started again after so many milliseconds.
    fn kill_for(&mut self, relay: usize, from: u64, to: u64) {
        self.tally.kills += 1;
        self.relays[relay].incarnation += 1;
        self.relays[relay].engine = None;
        let at = self.soon(from, to);
        self.at(at, Event::Start(relay));
    }

    pub(super) fn stop(&mut self, relay: usize) {
        if let Some(engine) = &mut self.relays[relay].engine {
            engine.on(self.now, Input::Stop);
            self.relays[relay].stopping = true;
            self.step_soon(relay);
        }
    }

    /// One more good message.
    pub(super) fn write_good(&mut self) {
        let id = MessageId::from(uuid::Uuid::from_u128(u128::from(self.next_id)));
        self.next_id += 1;
        let mut message = Message::new("orders", "order.placed", "x");
        message.id = id;
        let known = Known::new(None, 0, Nature::Good);
        self.known.insert(id, known);
        let lane = (self.next_id % u64::from(LANES)) as u16;
        self.commit(vec![(id, lane)], vec![Row { message, key: None }]);
    }
}
