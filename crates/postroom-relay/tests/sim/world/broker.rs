//! The broker, and what is checked whenever something is stored or recorded.

use super::*;

impl World {
    /// Everything that a position passes has to be stored, parked or dead: nobody will read it again.
    pub(super) fn write_position(&mut self, owner: &str, lane: u16, epoch: i64, at: usize) -> bool {
        let before = self.database.lanes[usize::from(lane)].position;
        if !self.database.write_position(owner, lane, epoch, at) {
            return false;
        }
        if at < before {
            self.violated("I9", format!("the position of lane {lane} went back from {before} to {at}"));
        }
        for index in before..at {
            let id = self.database.lanes[usize::from(lane)].log[index].message.id;
            let place = (lane, index);
            let kept = self.database.parked.contains_key(&place) || self.database.dead.contains_key(&place);
            if !kept && !self.known[&id].stored {
                self.violated("I1a", format!("the position passed {id}, which is not stored, parked or dead"));
            }
        }
        true
    }

    /// Only verdicts burn attempts.
    pub(super) fn check_attempts(&mut self, entries: &[Entry]) {
        for entry in entries {
            let id = entry.id;
            let (attempts, poison) = match &entry.change {
                Change::Park { state: ParkedState::Retry, attempts, .. } | Change::ParkAgain { attempts, .. } => {
                    (*attempts, false)
                }
                Change::Bury { attempts, cause, .. } => (*attempts, *cause == Cause::Poison),
                Change::Unpark => {
                    if !self.known[&id].stored {
                        self.violated("I1a", format!("{id} is settled as done and was never stored"));
                    }
                    continue;
                }
                Change::Park { .. } => continue,
            };
            let known = self.known.get_mut(&id);
            let Some(known) = known else { continue };
            let (refusals, nature) = (known.refusals + known.cuts, known.nature);
            if let Change::Bury { .. } = entry.change {
                known.was_dead = true;
            }
            let guilty = poison && nature == Nature::KillsProcess;
            if attempts > refusals && !guilty {
                self.violated(
                    "I7",
                    format!("{id} burned {attempts} attempts after {refusals} verdicts (poison: {poison})"),
                );
            }
        }
    }

    /// Whether an alarm holds this batch up. What kills its process does so before anything is sent.
    pub(super) fn waits_for_the_alarm(&self, batch: &Batch) -> bool {
        let kills = |message: &std::sync::Arc<Message>| {
            self.known.get(&message.id).is_some_and(|known| known.nature == Nature::KillsProcess)
        };
        self.now < self.alarm_until && self.sink_up && !batch.messages().iter().any(kills)
    }

    pub(super) fn publish(&mut self, index: usize, alive: bool, batch: &Batch) -> Option<Result<Verdicts, String>> {
        let answer = self.take(index, alive, batch);
        self.tally.slips += u64::from(matches!(answer, Some(Err(_))));
        let [message] = batch.messages() else { return answer };
        let unjudged = match &answer {
            Some(Ok(_)) => !self.known[&message.id].judged,
            Some(Err(_)) => true,
            None => false,
        };
        let stored = self.stored;
        if let Some(known) = self.known.get_mut(&message.id).filter(|_| unjudged) {
            known.cuts += u32::from(known.stored_at_cut.is_some_and(|before| stored > before));
            known.stored_at_cut = Some(stored);
        }
        answer
    }

    /// The broker takes a batch. None: the process died over it, or nobody is left to hear.
    pub(super) fn take(&mut self, index: usize, alive: bool, batch: &Batch) -> Option<Result<Verdicts, String>> {
        if self.order == Order::Key {
            let keys: Vec<&str> = batch.messages().iter().filter_map(|message| message.ordering_key()).collect();
            if keys.iter().collect::<BTreeSet<_>>().len() < keys.len() {
                self.violated("I4", "two messages of a key in one batch, with strict order".to_owned());
            }
        }
        if !self.sink_up {
            return Some(Err("connection refused".to_owned()));
        }
        let mut verdicts = batch.silent();
        let cut = !self.calm && self.chance.percent(2);
        let cut_after = self.chance.below(batch.messages().len() as u64 + 1) as usize;
        let mut refused = BTreeSet::new();
        for (position, message) in batch.messages().iter().enumerate() {
            if cut && position >= cut_after {
                return Some(Err("connection reset".to_owned()));
            }
            let key = message.ordering_key().filter(|_| self.holds_back);
            if key.is_some_and(|key| refused.contains(key)) {
                verdicts.judge(position, Verdict::NotSent);
                continue;
            }
            let Some(known) = self.known.get_mut(&message.id) else {
                self.violated("I2", format!("{} was never written", message.id));
                return None;
            };
            match known.nature {
                Nature::KillsProcess => {
                    if alive {
                        let id = message.id;
                        self.note(|| format!("relay {index} dies over {id}"));
                        self.kill(index);
                    }
                    return None;
                }
                Nature::KillsConnection => return Some(Err("frame too large".to_owned())),
                Nature::Permanent => {
                    known.refusals += 1;
                    known.judged = true;
                    verdicts.judge(position, Verdict::failed(FailureKind::Permanent, "never"));
                    refused.extend(key);
                }
                Nature::Flaky(left) if left > 0 => {
                    known.nature = Nature::Flaky(left - 1);
                    known.refusals += 1;
                    known.judged = true;
                    verdicts.judge(position, Verdict::failed(FailureKind::Transient, "not now"));
                    refused.extend(key);
                }
                Nature::Good | Nature::Flaky(_) => {
                    self.store(message.id);
                    // Sometimes nobody knows.
                    let judged = self.calm || !self.chance.percent(1);
                    if let Some(known) = self.known.get_mut(&message.id) {
                        known.judged = judged;
                    }
                    self.tally.slips += u64::from(!judged);
                    if judged {
                        verdicts.judge(position, Verdict::Stored);
                    }
                }
            }
        }
        // Stored, and the answer is lost.
        if !self.calm && self.chance.percent(2) {
            return Some(Err("connection reset".to_owned()));
        }
        Some(Ok(verdicts))
    }

    pub(super) fn store(&mut self, id: MessageId) {
        let Some(known) = self.known.get_mut(&id) else { return };
        let text = format!("stored {:?} {} {id} again {}", known.key, known.number, known.stored);
        self.note(|| text);
        let Some(known) = self.known.get_mut(&id) else { return };
        self.stored += 1;
        if known.stored {
            self.tally.duplicates += 1;
            return;
        }
        known.stored = true;
        let (Some(key), number, was_dead) = (known.key.clone(), known.number, known.was_dead) else { return };
        if was_dead {
            return;
        }
        let newest = self.newest.entry(key.clone()).or_default();
        let before = *newest;
        *newest = before.max(number);
        // With pipelined order a fault may let what is behind overtake; without a fault even a refusal may, unless the sink holds it back.
        let is_kept = self.order == Order::Pipelined && self.holds_back && self.calm;
        if number < before && (self.order == Order::Key || is_kept) {
            self.violated("I4", format!("{key}: number {number} first came after number {before}"));
        }
    }
}
