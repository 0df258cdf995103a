//! `cargo xtask seeded-bugs`: proof that the tests can fail.
//!
//! A bug is code under `#[cfg(seeded_bug = "NAME")]`. Each is switched on alone, for the workspace's crates only, and
//! the test that is to catch it must then fail. A test that hangs or does not compile has caught nothing.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use crate::failure::Failure;
use crate::held::Held;
use crate::packages;
use crate::services::Scratch;
use crate::sources;
use crate::steps::step;
use crate::test::start_services;
use crate::workspace::Workspace;

/// A bug must make its test fail; one that only hangs until this is over counts as not caught.
const RUN_WITHIN: Duration = Duration::from_secs(300);

struct Bug {
    name: &'static str,
    breaks: &'static str,
    package: &'static str,
    test: &'static [&'static str],
    /// The test starts the `postroom` program, which then has the bug too.
    needs_bin: bool,
}

const BUGS: &[Bug] = &[
    Bug {
        name: "cursor_by_id",
        breaks: "reads by seq alone, without the late path",
        package: "postroom-postgres",
        test: &["--test", "store", "every_committed_message_is_read_exactly_once"],
        needs_bin: false,
    },
    Bug {
        name: "floor_at_the_newest_seq",
        breaks: "looks for late rows of unlisted transactions above the newest seq only",
        package: "postroom-postgres",
        test: &["--test", "store", "every_committed_message_is_read_exactly_once"],
        needs_bin: false,
    },
    Bug {
        name: "trusts_a_replaced_server",
        breaks: "keeps its positions when the server went back in time",
        package: "postroom-postgres",
        test: &["--test", "store", "a_server_that_went_back_in_time_under_a_running_relay_loses_no_new_message"],
        needs_bin: false,
    },
    Bug {
        name: "settle_before_confirm",
        breaks: "settles a message when it is handed to the sink",
        package: "postroom-relay",
        test: &["--test", "engine", "a_message_is_settled_only_after_the_broker_confirmed_it"],
        needs_bin: false,
    },
    Bug {
        name: "outage_burns_an_attempt",
        breaks: "takes an unreachable broker for a verdict",
        package: "postroom-relay",
        test: &["--test", "engine", "an_unreachable_sink_burns_no_attempt_and_keeps_the_order"],
        needs_bin: false,
    },
    Bug {
        name: "one_verdict_for_the_batch",
        breaks: "gives every message of a batch the first one's verdict",
        package: "postroom-relay",
        test: &["--test", "engine", "a_failed_message_parks_its_key_and_others_flow"],
        needs_bin: false,
    },
    Bug {
        name: "forgets_what_is_being_parked",
        breaks: "lets a read that began before the parking overtake it",
        package: "postroom-relay",
        test: &["--test", "engine", "what_a_read_brings_that_began_before_the_parking_queues_up_too"],
        needs_bin: false,
    },
    Bug {
        name: "silence_is_success",
        breaks: "takes a message without a verdict for stored",
        package: "postroom-relay",
        test: &["--test", "engine", "a_message_is_settled_only_after_the_broker_confirmed_it"],
        needs_bin: false,
    },
    Bug {
        name: "two_of_a_key_with_the_sink",
        breaks: "sends the next message of a key before the one before it is confirmed",
        package: "postroom-relay",
        test: &["--test", "engine", "at_most_one_message_of_a_key_is_with_the_sink"],
        needs_bin: false,
    },
    Bug {
        name: "stops_with_messages_in_flight",
        breaks: "gives its lanes back at a stop before it has finished",
        package: "postroom-relay",
        test: &["--test", "engine", "a_stop_claims_nothing_more_and_finishes_what_is_in_flight"],
        needs_bin: false,
    },
    Bug {
        name: "outage_makes_poison",
        breaks: "holds an outage against the message that happened to be alone",
        package: "postroom-relay",
        test: &["--test", "engine", "an_outage_that_comes_back_again_and_again_makes_no_poison"],
        needs_bin: false,
    },
    Bug {
        name: "poison_goes_round_for_ever",
        breaks: "never gives a message up that ends every connection",
        package: "postroom-relay",
        test: &["--test", "engine", "a_message_that_kills_its_connection_is_found_and_the_others_are_stored"],
        needs_bin: false,
    },
    Bug {
        name: "a_suspect_keeps_its_place",
        breaks: "leaves a message that ends every connection where it is, and its followers with it",
        package: "postroom-relay",
        test: &["--test", "sim", "no_seed_breaks_an_invariant"],
        needs_bin: false,
    },
    Bug {
        name: "follower_overtakes_the_failed_one",
        breaks: "sends parked messages of a key that failed while they were read",
        package: "postroom-relay",
        test: &["--test", "engine", "what_a_read_of_the_parked_ones_brings_goes_back_when_its_key_failed_meanwhile"],
        needs_bin: false,
    },
    Bug {
        name: "block_lets_the_key_go_on",
        breaks: "lets a key go on over its dead message although it is to be blocked",
        package: "postroom-relay",
        test: &["--test", "engine", "a_blocked_key_waits_and_a_skipped_one_goes_on"],
        needs_bin: false,
    },
    Bug {
        name: "key_goes_on_before_the_dead_letter_is_written",
        breaks: "lets a key go on while its dead letter may still be lost",
        package: "postroom-relay",
        test: &["--test", "sim", "no_seed_breaks_an_invariant"],
        needs_bin: false,
    },
    Bug {
        name: "position_passes_what_is_open",
        breaks: "moves the position past deliveries that are not settled",
        package: "postroom",
        test: &["--lib", "it_never_passes_an_unsettled_delivery"],
        needs_bin: false,
    },
    Bug {
        name: "pushing_back_burns_an_attempt",
        breaks: "takes a full queue for a failure of the message",
        package: "postroom",
        test: &["--lib", "pushing_back_and_not_knowing_burn_no_attempt"],
        needs_bin: false,
    },
    Bug {
        name: "late_rows_beyond_a_read_are_forgotten",
        breaks: "takes one read of many late rows for all of them",
        package: "postroom-postgres",
        test: &["--lib", "more_late_rows_than_a_read_takes_are_caught_up_under_one_snapshot"],
        needs_bin: false,
    },
    Bug {
        name: "gives_back_while_writing",
        breaks: "gives a lane back while its position is on its way",
        package: "postroom-postgres",
        test: &["--lib", "a_lane_is_not_given_back_while_its_position_is_on_its_way"],
        needs_bin: false,
    },
    Bug {
        name: "xmin_barrier",
        breaks: "reads only below the oldest running transaction",
        package: "postroom-postgres",
        test: &["--test", "store", "a_transaction_held_open_delays_no_other_message"],
        needs_bin: false,
    },
    Bug {
        name: "unfenced_settle",
        breaks: "writes positions whoever holds the lane",
        package: "postroom-postgres",
        test: &["--test", "store", "a_position_of_a_stale_epoch_is_not_written"],
        needs_bin: false,
    },
    Bug {
        name: "renewal_loses_lanes_that_are_being_written",
        breaks: "takes a lane for lost when its position is written during the renewal",
        package: "postroom-postgres",
        test: &["--test", "store", "a_renewal_and_a_write_of_positions_that_wait_for_each_other_lose_no_lane"],
        needs_bin: false,
    },
    Bug {
        name: "reads_again_what_was_parked",
        breaks: "reads parked messages again after a crash",
        package: "postroom-postgres",
        test: &["--test", "store", "what_was_parked_or_buried_before_a_crash_is_not_read_again"],
        needs_bin: false,
    },
    Bug {
        name: "parked_ones_go_before_they_are_due",
        breaks: "does not wait for the time of parked messages",
        package: "postroom-postgres",
        test: &["--test", "store", "a_delayed_message_waits_for_its_time_and_holds_up_nobody"],
        needs_bin: false,
    },
    Bug {
        name: "follower_overtakes_a_second_head",
        breaks: "hands out followers past a head that waits for its own time",
        package: "postroom-postgres",
        test: &["--test", "store", "a_follower_never_overtakes_a_second_head_of_its_key"],
        needs_bin: false,
    },
    Bug {
        name: "nobody_becomes_the_head",
        breaks: "leaves a key without a head when the one before is through",
        package: "postroom-postgres",
        test: &["--test", "store", "the_next_message_of_a_key_becomes_its_head_when_only_the_head_is_through"],
        needs_bin: false,
    },
    Bug {
        name: "what_was_queued_up_stays_parked",
        breaks: "lets what a dead relay had queued up overtake what it had in hand",
        package: "postroom-postgres",
        test: &["--test", "store", "what_a_dead_relay_had_queued_up_does_not_overtake_what_it_had_in_hand"],
        needs_bin: false,
    },
    Bug {
        name: "deaths_are_not_counted",
        breaks: "does not count the relays that died over a message",
        package: "postroom-postgres",
        test: &["--test", "store", "relays_that_die_are_counted_and_the_message_that_was_alone_is_told"],
        needs_bin: false,
    },
    Bug {
        name: "one_lane_takes_every_place",
        breaks: "lets one busy lane fill the window",
        package: "postroom-postgres",
        test: &["--test", "store", "one_busy_key_does_not_take_every_place"],
        needs_bin: false,
    },
    Bug {
        name: "operator_beside_the_relay",
        breaks: "gives a dead letter back beside a relay that records about its key",
        package: "postroom-postgres",
        test: &["--test", "store", "a_dead_letter_given_back_while_the_relay_records_about_its_key_is_not_forgotten"],
        needs_bin: false,
    },
    Bug {
        name: "dead_letter_is_dropped_on_its_way",
        breaks: "deletes a parked message without writing its dead letter",
        package: "postroom-postgres",
        test: &["--test", "store", "a_dead_letter_keeps_the_whole_message_and_leaves_its_key_free"],
        needs_bin: false,
    },
    Bug {
        name: "payload_through_text",
        breaks: "carries the payload as text",
        package: "postroom-postgres",
        test: &["--test", "store", "payload_bytes_in_are_payload_bytes_out"],
        needs_bin: false,
    },
    Bug {
        name: "enqueue_swallows_its_failure",
        breaks: "reports success when the message could not be written",
        package: "postroom-postgres",
        test: &["--test", "store", "a_message_written_twice_is_a_distinct_error_and_aborts_the_transaction"],
        needs_bin: false,
    },
    Bug {
        name: "inbox_key_without_consumer",
        breaks: "admits a message once for all consumers together",
        package: "postroom-postgres",
        test: &["--test", "store", "consumers_are_admitted_each_for_itself_and_a_rollback_gives_the_claim_back"],
        needs_bin: false,
    },
    Bug {
        name: "nack_is_success",
        breaks: "takes a negative confirm for a positive one",
        package: "postroom-brokers",
        test: &["--test", "rabbitmq", "a_queue_that_is_full_pushes_back_and_nothing_is_stored"],
        needs_bin: false,
    },
    Bug {
        name: "return_matched_to_its_confirm",
        breaks: "takes a returned message for the one whose confirm carried it",
        package: "postroom-cli",
        test: &["--test", "relay", "unroutable_messages_are_never_marked_stored"],
        needs_bin: false,
    },
    Bug {
        name: "inbox_after_effect",
        breaks: "records the inbox row after the effect committed",
        package: "postroom-consumer",
        test: &[
            "--test",
            "receiving",
            "a_failed_effect_gives_its_claim_back_on_sqlite_and_a_second_delivery_is_a_duplicate",
        ],
        needs_bin: false,
    },
    Bug {
        name: "failed_message_is_forgotten",
        breaks: "acks a message whose handler failed without keeping it",
        package: "postroom-consumer",
        test: &["--test", "receiving", "a_message_that_passes_later_has_its_effect_once_and_in_its_place"],
        needs_bin: false,
    },
    Bug {
        name: "waiting_messages_are_overtaken",
        breaks: "handles a message although another of its key waits before it",
        package: "postroom-consumer",
        test: &["--test", "receiving", "a_message_that_passes_later_has_its_effect_once_and_in_its_place"],
        needs_bin: false,
    },
    Bug {
        name: "redelivered_is_begun_like_any_other",
        breaks: "does not commit that a redelivered message is begun, so that one that kills its consumer kills for ever",
        package: "postroom-consumer",
        test: &[
            "--test",
            "receiving",
            "a_message_that_kills_its_consumer_every_time_is_dead_in_the_end_and_delays_only_its_key",
        ],
        needs_bin: false,
    },
    Bug {
        name: "window_without_end",
        breaks: "lets an early version wait for ever",
        package: "postroom-consumer",
        test: &[
            "--test",
            "receiving",
            "a_gap_that_outlives_its_window_goes_to_the_compensation_and_so_does_what_comes_later",
        ],
        needs_bin: false,
    },
    Bug {
        name: "key_is_not_kept_busy",
        breaks: "gives two workers messages of one key",
        package: "postroom-consumer",
        test: &["--lib", "a_key_waits_until_its_batch_is_released_and_others_flow"],
        needs_bin: false,
    },
    Bug {
        name: "deaths_count_although_nothing_was_stored",
        breaks: "blames a message for the death of its relay in an outage",
        package: "postroom-relay",
        test: &["--test", "sim", "no_seed_breaks_an_invariant"],
        needs_bin: false,
    },
    Bug {
        name: "idle_deaths_are_counted",
        breaks: "counts the death of a relay that had nothing in flight",
        package: "postroom-postgres",
        test: &["--test", "store", "a_relay_that_dies_with_nothing_in_flight_is_not_counted"],
        needs_bin: false,
    },
    Bug {
        name: "few_places_are_looked_for_lane_by_lane",
        breaks: "reads a few lanes of many at a time when few places are free, most of which have nothing",
        package: "postroom-postgres",
        test: &["--test", "store", "a_few_places_over_many_lanes_find_what_there_is_in_few_reads"],
        needs_bin: false,
    },
];

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Caught,
    Survived,
    /// The test says nothing about the bug, for this reason.
    Unproven(&'static str),
}

pub(crate) fn run(args: &[String]) -> Result<ExitCode, Failure> {
    let bugs = match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        [] => BUGS.iter().collect(),
        ["--list"] => {
            for bug in BUGS {
                println!("{:<46} {} ({} {})", bug.name, bug.breaks, bug.package, bug.test.join(" "));
            }
            return Ok(ExitCode::SUCCESS);
        }
        ["--only", name] => vec![find(name)?],
        other => {
            let said = other.join(" ");
            return Err(Failure::usage(format!("`{said}` is not understood; seeded-bugs takes --only NAME or --list")));
        }
    };
    let workspace = Workspace::find()?;
    require_seeds(&workspace, &bugs)?;
    let held = Held::until_interrupted()?;
    packages::ensure(&held)?;
    let scratch = Scratch::create(&workspace)?;
    let judged = start_services(&workspace, &held).and_then(|mut environment| {
        environment.push(("POSTROOM_TEST_DIR", scratch.0.clone().into()));
        judge_all(&Bench { workspace: &workspace, held: &held, environment }, &bugs)
    });
    held.let_go();
    let all_caught = judged.as_ref().is_ok_and(|verdicts| verdicts.iter().all(|verdict| *verdict == Verdict::Caught));
    scratch.close(all_caught);
    print_table(&bugs, &judged?);
    Ok(if all_caught { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn find(name: &str) -> Result<&'static Bug, Failure> {
    BUGS.iter().find(|bug| bug.name == name).ok_or_else(|| {
        let names: Vec<&str> = BUGS.iter().map(|bug| bug.name).collect();
        Failure::usage(format!("there is no bug `{name}`; there are: {}", names.join(", ")))
    })
}

/// A name that no file mentions would look like a bug that survived; one that is not listed is caught by nothing.
fn require_seeds(workspace: &Workspace, bugs: &[&Bug]) -> Result<(), Failure> {
    let mut text = String::new();
    for file in sources::rust_files(&workspace.root.join("crates"))? {
        text.push_str(&sources::read(&file)?);
    }
    for bug in bugs {
        if !text.contains(&format!("seeded_bug = \"{}\"", bug.name)) {
            return Err(Failure::work(format!(
                "no file in crates/ has `cfg(seeded_bug = \"{}\")`; seed the bug, or take it off the list in \
                 xtask/src/seeded_bugs.rs",
                bug.name
            )));
        }
    }
    let seeded = text.split("seeded_bug = \"").skip(1).filter_map(|rest| rest.split('"').next());
    match seeded.into_iter().find(|name| !BUGS.iter().any(|bug| bug.name == *name)) {
        None => Ok(()),
        Some(name) => Err(Failure::work(format!(
            "the bug {name} is seeded in crates/ and is not on the list in xtask/src/seeded_bugs.rs"
        ))),
    }
}

/// Where tests are built and run.
struct Bench<'a> {
    workspace: &'a Workspace,
    held: &'a Held,
    environment: Vec<(&'static str, OsString)>,
}

fn judge_all(bench: &Bench<'_>, bugs: &[&Bug]) -> Result<Vec<Verdict>, Failure> {
    let mut green: Vec<&Bug> = Vec::new();
    for bug in bugs {
        let known = |other: &&Bug| other.package == bug.package && other.test == bug.test;
        if !green.iter().any(known) {
            bench.require_green(bug)?;
            green.push(bug);
        }
    }
    bugs.iter().map(|bug| bench.judge(bug)).collect()
}

impl Bench<'_> {
    /// Without its bug the test must run and pass, or its failing would prove nothing.
    fn require_green(&self, bug: &Bug) -> Result<(), Failure> {
        step(&format!("{} without a bug", told(bug)), || {
            let run = Run { bug, folder: self.folder("none")?, wrapper: None };
            self.build(&run)?;
            let (ended, output) = self.test(&run)?;
            let log = run.log();
            match ended {
                Some(true) if passed(&output) > 0 => Ok(()),
                Some(true) => {
                    Err(Failure::work(format!("no test of {} is called like that; see {}", told(bug), log.display())))
                }
                _ => Err(Failure::work(format!("{} fails without a bug; see {}", told(bug), log.display()))),
            }
        })
    }

    fn judge(&self, bug: &Bug) -> Result<Verdict, Failure> {
        step(&format!("{} with the bug {}", told(bug), bug.name), || {
            let folder = self.folder(bug.name)?;
            let wrapper = write_wrapper(&folder, bug.name)?;
            let run = Run { bug, folder, wrapper: Some(wrapper) };
            self.build(&run)?;
            let (ended, output) = self.test(&run)?;
            let verdict = verdict(ended, &output);
            if verdict != Verdict::Caught {
                eprintln!("    what the test printed is in {}", run.log().display());
            }
            Ok(verdict)
        })
    }

    /// Compiles apart from running, so that a bug that does not compile is not taken for a failing test.
    fn build(&self, run: &Run<'_>) -> Result<(), Failure> {
        let mut commands = vec![self.cargo_test(run)];
        commands[0].arg("--no-run");
        if run.bug.needs_bin {
            let mut cargo = self.workspace.cargo();
            cargo.args(["build", "-p", "postroom-cli"]);
            commands.push(cargo);
        }
        for mut cargo in commands {
            cargo.arg("--quiet");
            run.wrap(&mut cargo);
            if !self.held.run(&mut cargo)?.success() {
                let with = if run.wrapper.is_some() { run.bug.name } else { "no bug" };
                return Err(Failure::work(format!("{} does not compile with {with}, see above", run.bug.package)));
            }
        }
        if run.bug.needs_bin {
            // A copy: the next build overwrites the one in the build output.
            fs::copy(self.workspace.built("debug", "postroom"), run.program())
                .map_err(|error| io::Error::new(error.kind(), format!("copy the program postroom: {error}")))?;
        }
        Ok(())
    }

    /// Whether the test passed (`None`: it did not end in time), and what it printed.
    fn test(&self, run: &Run<'_>) -> Result<(Option<bool>, String), Failure> {
        let log = File::create(run.log())?;
        let mut cargo = self.cargo_test(run);
        run.wrap(&mut cargo);
        cargo.envs(self.environment.iter().map(|(name, value)| (*name, value)));
        if run.bug.needs_bin {
            cargo.env("POSTROOM_BIN", run.program());
        }
        cargo.stdout(log.try_clone()?).stderr(log);
        let status = self.held.run_within(&mut cargo, Some(RUN_WITHIN))?;
        let output = String::from_utf8_lossy(&fs::read(run.log())?).into_owned();
        Ok((status.map(|status| status.success()), output))
    }

    fn cargo_test(&self, run: &Run<'_>) -> Command {
        let mut cargo = self.workspace.cargo();
        cargo.args(["test", "--all-features", "-p", run.bug.package]).args(run.bug.test);
        cargo
    }

    fn folder(&self, name: &str) -> io::Result<PathBuf> {
        let folder = self.workspace.target.join("seeded-bugs").join(name);
        fs::create_dir_all(&folder)
            .map_err(|error| io::Error::new(error.kind(), format!("create {}: {error}", folder.display())))?;
        Ok(folder)
    }
}

/// One test, with its bug or without.
struct Run<'a> {
    bug: &'a Bug,
    folder: PathBuf,
    wrapper: Option<PathBuf>,
}

impl Run<'_> {
    /// Cargo keeps what a workspace wrapper built apart by the wrapper's path, and uses it for our crates only.
    fn wrap(&self, cargo: &mut Command) {
        if let Some(wrapper) = &self.wrapper {
            cargo.env("RUSTC_WORKSPACE_WRAPPER", wrapper);
        }
    }

    fn log(&self) -> PathBuf {
        self.folder.join(format!("{}.log", self.bug.name))
    }

    fn program(&self) -> PathBuf {
        self.folder.join("postroom")
    }
}

/// A stand-in for rustc that adds the bug's `--cfg`.
fn write_wrapper(folder: &Path, bug: &str) -> io::Result<PathBuf> {
    let file = folder.join("rustc.sh");
    fs::write(&file, format!("#!/bin/sh\nexec \"$@\" --cfg 'seeded_bug=\"{bug}\"'\n"))?;
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755))?;
    Ok(file)
}

fn verdict(ended: Option<bool>, output: &str) -> Verdict {
    match ended {
        None => Verdict::Unproven("hung; let the test fail by itself"),
        Some(true) => Verdict::Survived,
        Some(false) if output.contains("test result: FAILED") => Verdict::Caught,
        Some(false) => Verdict::Unproven("died without a failed test"),
    }
}

/// How many tests passed, over all the test programs that ran.
fn passed(output: &str) -> u64 {
    let results = output.lines().filter_map(|line| line.strip_prefix("test result: ok. "));
    results.filter_map(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).sum()
}

/// The test as a reader would name it: package and function.
fn told(bug: &Bug) -> String {
    format!("{}::{}", bug.package, bug.test.last().copied().unwrap_or_default())
}

fn print_table(bugs: &[&Bug], verdicts: &[Verdict]) {
    let caught_by: Vec<String> = bugs.iter().map(|bug| told(bug)).collect();
    let widest = |lengths: &mut dyn Iterator<Item = usize>| lengths.max().unwrap_or(0).max(12);
    let first = widest(&mut bugs.iter().map(|bug| bug.name.len()));
    let second = widest(&mut caught_by.iter().map(String::len));
    println!("{:<first$}  {:<second$}  verdict", "bug", "caught by");
    for ((bug, by), verdict) in bugs.iter().zip(&caught_by).zip(verdicts) {
        let (by, verdict) = match verdict {
            Verdict::Caught => (by.as_str(), String::from("caught")),
            Verdict::Survived => ("-", format!("SURVIVED: {by} passes although it {}", bug.breaks)),
            Verdict::Unproven(why) => ("-", format!("UNPROVEN: {by} {why}")),
        };
        println!("{:<first$}  {by:<second$}  {verdict}", bug.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_failed_test_catches_a_bug() {
        assert_eq!(verdict(Some(false), "test result: FAILED. 0 passed; 1 failed"), Verdict::Caught);
        assert_eq!(verdict(Some(true), "test result: ok. 1 passed"), Verdict::Survived);
        assert!(matches!(verdict(Some(false), "error: could not compile"), Verdict::Unproven(_)));
        assert!(matches!(verdict(None, "test result: FAILED"), Verdict::Unproven(_)));
    }

    #[test]
    fn a_run_without_any_test_is_not_green() {
        assert_eq!(passed("test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 3 filtered out"), 0);
        assert_eq!(passed("test result: ok. 2 passed; 0 failed\n\ntest result: ok. 1 passed; 0 failed"), 3);
    }

    #[test]
    fn no_two_bugs_share_a_name() {
        let names: std::collections::BTreeSet<&str> = BUGS.iter().map(|bug| bug.name).collect();
        assert_eq!(names.len(), BUGS.len());
    }
}
