//! The drivers of the relays, and the way between them and their servers.

use super::*;

impl World {
    pub(super) fn start(&mut self, index: usize) {
        if self.relays[index].engine.is_some() {
            return;
        }
        let retry = RetryPolicy {
            base: 2.0,
            cap: Duration::from_secs(10),
            jitter: Duration::from_millis(500),
            attempts_max: ATTEMPTS_MAX,
            limits: Vec::new(),
        };
        let options = EngineOptions {
            in_flight_max: self.in_flight_max,
            in_flight_bytes_max: 1 << 20,
            order: self.order,
            on_dead: self.on_dead,
            rate: None,
            breaker_after: 10,
            poll_idle: Duration::from_millis(500),
            retry,
            renew_every: Duration::from_secs(1),
            sink: SinkLimits { batch_messages_max: 8, batch_bytes_max: 3000, batches_in_flight_max: 3 },
            seed: self.chance.number(),
        };
        let relay = &mut self.relays[index];
        relay.incarnation += 1;
        relay.side = Side::new(format!("relay-{index}-{}", relay.incarnation));
        relay.engine = Some(Engine::new(options));
        relay.stopping = false;
        relay.blocked = false;
        relay.paused_until = Duration::ZERO;
        relay.step_at = None;
        self.step_soon(index);
    }

    pub(super) fn step_soon(&mut self, index: usize) {
        let (at, incarnation) = (self.now, self.relays[index].incarnation);
        self.at(at, Event::Step(index, incarnation));
    }

    /// The relay's driver: does what the engine asks for, and comes again when the engine says.
    pub(super) fn steps(&mut self, index: usize, incarnation: u64) {
        if self.relays[index].incarnation != incarnation || self.relays[index].engine.is_none() {
            return;
        }
        if self.relays[index].paused_until > self.now {
            let at = self.relays[index].paused_until;
            self.at(at, Event::Step(index, incarnation));
            return;
        }
        let now = self.now;
        let Some(engine) = self.relays[index].engine.as_mut() else { return };
        let actions = engine.next(now);
        let wake_at = engine.wake_at();
        let in_flight = engine.in_flight();
        // As many parked ones may come with a claim.
        if in_flight > 2 * self.in_flight_max {
            self.violated("I19", format!("{in_flight} in flight, {} were permitted", self.in_flight_max));
        }
        for action in actions {
            let side = &mut self.relays[index].side;
            let op = match action {
                Action::Renew(report) => {
                    let (held, survived) = (side.book.held(), report.survived);
                    Op::Renew { held, survived, blocked: self.relays[index].blocked, deadline: now + LEASE }
                }
                Action::Claim(want) => Op::Claim(side.ask(now, want)),
                Action::Note { token, proven } => {
                    let Some((place, epoch)) = side.place_of(token) else {
                        // Its lane was lost.
                        let (incarnation, noted) = (self.relays[index].incarnation, Noted::default());
                        self.answer(index, incarnation, Reply::Noted(noted));
                        continue;
                    };
                    side.marked = Some((token, place, epoch));
                    Op::Note { token, place, epoch, proven: proven && !self.relays[index].blocked }
                }
                Action::ClearNote => Op::ClearNote,
                Action::Settle(settlements) => {
                    let entries = side.entries(&settlements, self.order != Order::None);
                    Op::Settle { settlements, entries }
                }
                Action::Publish(id, batch) => Op::Publish(id, batch),
                Action::Probe => Op::Probe,
                Action::Finish => {
                    let lanes = side.book.held();
                    self.relays[index].engine = None;
                    self.relays[index].incarnation += 1;
                    let incarnation = self.relays[index].incarnation;
                    // What is not written of the positions is written before the lanes are given back.
                    let moves = self.relays[index].side.begin_write(now);
                    if self.database_up {
                        let owner = self.relays[index].side.owner.clone();
                        for Move { lane, epoch, position } in moves {
                            self.write_position(&owner, lane, epoch, position);
                        }
                        self.database.release(&owner, &lanes);
                        self.database.relays.remove(&owner);
                    }
                    let at = self.soon(10, 3000);
                    let _ = incarnation;
                    self.at(at, Event::Start(index));
                    return;
                }
            };
            self.send(index, op);
        }
        if let Some(at) = wake_at
            && self.relays[index].step_at.is_none_or(|planned| at < planned || planned <= now)
        {
            self.relays[index].step_at = Some(at);
            let at = at.max(now + Duration::from_micros(100));
            self.at(at, Event::Step(index, incarnation));
        }
    }

    pub(super) fn send(&mut self, index: usize, op: Op) {
        let slow = !self.calm && self.chance.percent(3);
        let at = if slow { self.soon(5, 3000) } else { self.soon(0, 8) };
        let incarnation = self.relays[index].incarnation;
        self.at(at, Event::Effect(index, incarnation, op));
    }

    pub(super) fn answer(&mut self, index: usize, incarnation: u64, reply: Reply) {
        let slow = !self.calm && self.chance.percent(3);
        let at = if slow { self.soon(5, 3000) } else { self.soon(0, 8) };
        self.at(at, Event::Reply(index, incarnation, reply));
    }

    /// An operation reaches its server. What was sent before a crash arrives all the same; what a process that died never
    /// read, nobody reads.
    pub(super) fn effect(&mut self, index: usize, incarnation: u64, op: Op) {
        let owner = self.relays[index].side.owner.clone();
        let alive = self.relays[index].incarnation == incarnation;
        // A stale side is the side of another incarnation: a dead process' database calls are not carried out later.
        if !alive && !matches!(op, Op::Publish(..)) {
            return;
        }
        // The answer of a statement may be lost although it was carried out.
        let lost = !self.calm && self.chance.percent(2);
        self.tally.slips += u64::from(lost);
        let up = self.database_up;
        let reply = match op {
            Op::Renew { held, survived, blocked, deadline } => {
                if survived {
                    self.note(|| format!("relay {index} has survived"));
                }
                if blocked
                    && up
                    && let Some((_, place, epoch)) = self.relays[index].side.marked
                {
                    self.database.unmark(&owner, epoch, place, false);
                }
                let done = up.then(|| self.database.renew(self.now, &owner, &held, LEASE, survived));
                Reply::Renewed(done.filter(|_| !lost).map(|(share, granted)| Renewal {
                    held,
                    share,
                    granted,
                    deadline,
                }))
            }
            Op::Release { lanes, renewal } => {
                if up {
                    self.database.release(&owner, &lanes);
                }
                Reply::GaveBack { renewal }
            }
            Op::Claim(ask) => {
                let answer = (up && !lost).then(|| {
                    let parked = if ask.want.parked {
                        let limit = ask.want.messages;
                        self.database.read_parked(self.now, &ask.parked_lanes, &ask.in_hand, limit)
                    } else {
                        Vec::new()
                    };
                    let read = |lane: &Asked<usize>| self.database.read(lane.lane, lane.position, lane.limit);
                    let fresh = ask.lanes.iter().map(read).collect();
                    Answer { ask, parked, fresh }
                });
                Reply::Claimed(answer)
            }
            Op::Note { token, place, epoch, proven } => {
                let suspect =
                    if up { self.database.mark_alone(&owner, epoch, place, proven) } else { Default::default() };
                self.note(|| format!("relay {index} notes {token:?} {place:?}, proven {proven}: {suspect:?}"));
                Reply::Noted(Noted { deaths: suspect.deaths, doubts: suspect.doubts, proven })
            }
            Op::ClearNote => {
                if let Some((_, place, epoch)) = self.relays[index].side.marked.filter(|_| up) {
                    self.database.unmark(&owner, epoch, place, false);
                }
                Reply::NoteCleared(up && !lost)
            }
            Op::Settle { settlements, entries } => {
                let held = up.then(|| {
                    self.check_attempts(&entries);
                    let marked = self.relays[index].side.marked;
                    if let Some((token, place, epoch)) = marked
                        && let Some(settlement) = settlements.iter().find(|settlement| settlement.token == token)
                    {
                        let outcome = &settlement.outcome;
                        let through = matches!(outcome, postroom::Outcome::Done | postroom::Outcome::Dead { .. });
                        self.database.unmark(&owner, epoch, place, through);
                    }
                    for entry in &entries {
                        let number = self.known[&entry.id].number;
                        self.note(|| format!("relay {index} records {entry:?}, number {number}"));
                    }
                    self.database.record(self.now, &owner, self.order != Order::None, &entries)
                });
                Reply::Settled { settlements, held: held.filter(|_| !lost) }
            }
            Op::Positions { moves, then } => {
                let written = up.then(|| {
                    let mut written = HashSet::new();
                    for Move { lane, epoch, position } in &moves {
                        if self.write_position(&owner, *lane, *epoch, *position) {
                            written.insert(*lane);
                        }
                    }
                    written
                });
                Reply::Positions { moves, written: written.filter(|_| !lost), then }
            }
            Op::Probe => Reply::Probed(self.sink_up),
            Op::Publish(id, batch) if self.waits_for_the_alarm(&batch) => {
                if alive {
                    self.relays[index].blocked = true;
                }
                let at = self.alarm_until + Duration::from_micros(1);
                return self.at(at, Event::Effect(index, incarnation, Op::Publish(id, batch)));
            }
            Op::Publish(id, batch) => {
                if alive {
                    self.relays[index].blocked = false;
                }
                let Some(verdicts) = self.publish(index, alive, &batch) else { return };
                Reply::Published(id, verdicts)
            }
        };
        if alive {
            self.answer(index, incarnation, reply);
        }
    }

    pub(super) fn replied(&mut self, index: usize, incarnation: u64, reply: Reply) {
        if self.relays[index].incarnation != incarnation || self.relays[index].engine.is_none() {
            return;
        }
        if self.relays[index].paused_until > self.now {
            let at = self.relays[index].paused_until;
            self.at(at, Event::Reply(index, incarnation, reply));
            return;
        }
        let side = &mut self.relays[index].side;
        let input = match reply {
            Reply::Renewed(None) => Input::Renewed(None),
            Reply::Renewed(Some(Renewal { held, share, granted, deadline })) => {
                let lanes = side.renewed(&held, share, granted, deadline);
                if lanes.is_empty() {
                    Input::Renewed(Some(side.standing()))
                } else {
                    return self.send(index, Op::Release { lanes, renewal: true });
                }
            }
            Reply::GaveBack { renewal } => {
                if !renewal {
                    return;
                }
                Input::Renewed(Some(side.standing()))
            }
            Reply::Claimed(None) => {
                side.book.end_claim();
                Input::Claimed(None)
            }
            Reply::Claimed(Some(answer)) => Input::Claimed(Some(side.claimed(answer))),
            Reply::Noted(noted) => Input::Noted(noted),
            Reply::NoteCleared(done) => Input::NoteCleared(done),
            Reply::Settled { held: None, .. } => Input::Settled(None),
            Reply::Settled { settlements, held: Some(held) } => {
                for entry in side.entries(&settlements, true) {
                    if !held.contains(&entry.lane) {
                        side.book.lose(entry.lane, entry.epoch);
                    }
                }
                let fenced = side.settled(&settlements);
                let now = self.now;
                let moves = if side.book.due(now, POSITIONS_EVERY) { side.begin_write(now) } else { Vec::new() };
                let settled = Settled { fenced, more_parked: true, ..Settled::default() };
                return self.send(index, Op::Positions { moves, then: Some(settled) });
            }
            Reply::Positions { moves, written, then } => {
                if !moves.is_empty() {
                    side.end_write(self.now, moves, written.as_ref());
                }
                match then {
                    None => return,
                    Some(mut settled) => {
                        settled.lost_lanes = side.book.take_lost();
                        settled.settled_ahead = side.book.settled_ahead();
                        settled.unwritten = side.book.has_unwritten();
                        Input::Settled(Some(settled))
                    }
                }
            }
            Reply::Published(id, verdicts) => Input::Published(id, verdicts),
            Reply::Probed(up) => Input::Probed(if up { Ok(()) } else { Err("connection refused".to_owned()) }),
        };
        let now = self.now;
        if let Some(engine) = self.relays[index].engine.as_mut() {
            engine.on(now, input);
        }
        self.steps(index, incarnation);
        // After everything has healed an operator decides about the keys that are blocked over dead messages, and new
        // traffic shows that the sink takes messages.
        if self.now > HEALED_AT && self.chance.below(15) == 0 {
            let blocked: Vec<Place> = self.database.blocked.iter().filter_map(|(_, place)| *place).collect();
            for place in blocked {
                self.database.skip(place);
            }
            if self.now < RESTED_BY - Duration::from_secs(120) && self.poison {
                self.write_good();
            }
        }
    }
}
