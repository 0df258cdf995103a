//! The file and the stdout sink through the real binary: what counts as stored can be read, whatever happens to the disk.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use postroom::Message;
use postroom_sqlite::Sqlite;
use postroom_testkit::services::Tmpfs;
use postroom_testkit::surroundings;
use serde_json::Value;

const MESSAGES: usize = 200;
const NO_SPACE: &str = "No space left on device";
/// Nothing here takes as long as this unless it is stuck.
const STUCK: Duration = Duration::from_secs(60);

/// A SQLite store with a route to one sink.
struct Rig {
    dir: PathBuf,
    enqueued: BTreeSet<String>,
}

impl Rig {
    /// `sink` is the section's text, as `kind = "stdout"`.
    fn new(sink: &str) -> Self {
        let rig = Self { dir: surroundings::scratch("lines"), enqueued: BTreeSet::new() };
        let store = format!("sqlite:{}", rig.dir.join("outbox.db").display());
        let migrated = surroundings::postroom().args(["migrate", "--store", &store]).output();
        assert!(migrated.unwrap().status.success());
        let config = format!(
            "[store]\nurl = \"{store}\"\n[relay]\nlease = \"1s\"\nstop_deadline = \"2s\"\n[[routes]]\nname = \"orders\"\ntopics = [\"orders\"]\n[routes.sink]\n{sink}\n"
        );
        fs::write(rig.dir.join("postroom.toml"), config).unwrap();
        rig
    }

    fn to_file(path: &Path) -> Self {
        Self::new(&format!("kind = \"file\"\npath = \"{}\"", path.display()))
    }

    /// So many messages of 700 bytes.
    fn enqueue(&mut self, messages: usize) {
        let mut connection = postroom_sqlite::connect(&self.dir.join("outbox.db")).unwrap();
        let tx = connection.transaction().unwrap();
        let messages: Vec<Message> =
            (0..messages).map(|_| Message::new("orders", "order.placed", "x".repeat(700))).collect();
        Sqlite.enqueue_blocking(&tx, &messages).unwrap();
        tx.commit().unwrap();
        self.enqueued.extend(messages.iter().map(|message| message.id.to_string()));
    }

    /// `redirect` is shell text for the relay's standard output, as `>/dev/full`.
    fn relay(&self, redirect: &str) -> Relay {
        self.relay_with(Command::new("sh").args(["-c", &format!("exec \"$0\" run --config \"$1\" {redirect}")]))
    }

    fn relay_with(&self, shell: &mut Command) -> Relay {
        let log = self.dir.join(format!("log-{}", surroundings::unique()));
        surroundings::without_tests(shell);
        let child = shell
            .arg(surroundings::postroom_binary())
            .arg(self.dir.join("postroom.toml"))
            .stderr(File::create(&log).unwrap())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Relay { child, log }
    }

    /// What the store says of the route.
    /// What is still to be sent, parked messages too.
    fn backlog(&self) -> u64 {
        let store = format!("sqlite:{}", self.dir.join("outbox.db").display());
        let arguments = ["status", "--json", "--store", &store];
        let output = surroundings::postroom().args(arguments).output().unwrap();
        let status: Value = serde_json::from_slice(&output.stdout).unwrap();
        let count = |name: &str| status["routes"][0][name].as_u64().unwrap_or_else(|| panic!("{status}"));
        count("backlog") + count("parked")
    }
}

struct Relay {
    child: Child,
    log: PathBuf,
}

impl Relay {
    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    /// A graceful stop: how many messages it says were acked. It must end with 0.
    fn stop(mut self) -> usize {
        self.signal("TERM");
        let code = self.child.wait().unwrap().code();
        let log = self.log();
        assert_eq!(code, Some(0), "{log}");
        let (_, rest) = log.rsplit_once("acked ").unwrap_or_else(|| panic!("no summary: {log}"));
        rest.split(',').next().unwrap().parse().unwrap()
    }

    fn kill(mut self) {
        self.signal("KILL");
        self.child.wait().unwrap();
    }

    fn signal(&self, name: &str) {
        Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status().unwrap();
    }

    fn until(&self, what: &str, holds: impl Fn() -> bool) {
        let began = Instant::now();
        while !holds() {
            assert!(began.elapsed() < STUCK, "waited in vain until {what}; the relay said:\n{}", self.log());
            nap();
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

#[allow(clippy::disallowed_methods, reason = "a file sends no signal when it grows")]
fn nap() {
    std::thread::sleep(Duration::from_millis(10));
}

/// The ids of the lines, in their order. A line that is not a message fails, also a last one without its newline.
fn ids(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap_or_default();
    assert!(text.is_empty() || text.ends_with('\n'), "torn: {}", text.lines().last().unwrap_or_default());
    text.lines().map(|line| id(line).unwrap_or_else(|| panic!("not a message: {line}"))).collect()
}

fn id(line: &str) -> Option<String> {
    let value: Value = serde_json::from_str(line).ok()?;
    Some(value["id"].as_str()?.to_owned())
}

/// How many whole lines there are at the moment.
fn lines(path: &Path) -> usize {
    let mut text = Vec::new();
    let _ = File::open(path).and_then(|mut file| file.read_to_end(&mut text));
    text.iter().filter(|byte| **byte == b'\n').count()
}

fn set(ids: Vec<String>) -> BTreeSet<String> {
    let (count, set) = (ids.len(), BTreeSet::from_iter(ids));
    assert_eq!(set.len(), count, "a message is there twice");
    set
}

/// 64 KiB, or nothing where we may not mount.
fn small_disk() -> Option<Tmpfs> {
    let disk = Tmpfs::mount(&surroundings::scratch("disk"), 64).unwrap();
    if disk.is_none() {
        eprintln!("SKIPPED: a tmpfs can only be mounted by root; nothing was shown about a full disk");
    }
    disk
}

#[test]
fn on_a_full_disk_only_what_can_be_read_is_acked_and_the_rest_is_still_to_be_sent() {
    let Some(disk) = small_disk() else { return };
    let path = disk.dir().join("out.jsonl");
    let mut rig = Rig::to_file(&path);
    rig.enqueue(MESSAGES);
    let relay = rig.relay("");
    relay.until("the disk is full", || relay.log().contains(NO_SPACE));
    relay.until("some messages are there", || lines(&path) >= 10);
    let acked = relay.stop();
    let kept = set(ids(&path));
    assert!(kept.len() < MESSAGES, "they were not to have space");
    assert_eq!(acked, kept.len(), "acked, and readable");
    assert!(rig.backlog() as usize >= MESSAGES - acked);

    // What was acked after a message that was not is sent again: the position cannot pass that one.
    disk.resize(1024).unwrap();
    let relay = rig.relay("");
    relay.until("all are there", || rig.backlog() == 0);
    assert_eq!(acked + relay.stop(), lines(&path));
    assert_eq!(BTreeSet::from_iter(ids(&path)), rig.enqueued);
}

#[test]
fn messages_flow_again_without_a_repeat_when_a_full_disk_has_space_again() {
    let Some(disk) = small_disk() else { return };
    let path = disk.dir().join("out.jsonl");
    let mut rig = Rig::to_file(&path);
    rig.enqueue(MESSAGES);
    let relay = rig.relay("");
    relay.until("the disk is full", || relay.log().contains(NO_SPACE));
    relay.until("some messages are there", || lines(&path) >= 10);
    disk.resize(1024).unwrap();
    relay.until("all are there", || lines(&path) >= MESSAGES);
    assert_eq!(relay.stop(), MESSAGES);
    assert_eq!(set(ids(&path)), rig.enqueued);
    assert_eq!(rig.backlog(), 0);
}

#[test]
fn a_full_disk_behind_standard_output_keeps_what_is_acked_and_the_rest_waits() {
    let Some(disk) = small_disk() else { return };
    let path = disk.dir().join("out.jsonl");
    let mut rig = Rig::new("kind = \"stdout\"");
    rig.enqueue(MESSAGES);
    let relay = rig.relay(&format!(">>{}", path.display()));
    relay.until("the disk is full", || relay.log().contains(NO_SPACE));
    relay.until("some messages are there", || lines(&path) >= 10);
    disk.resize(4096).unwrap();
    let whole = || {
        let text = fs::read_to_string(&path).unwrap();
        BTreeSet::from_iter(text.lines().filter_map(id))
    };
    relay.until("all are there", || whole() == rig.enqueued);
    assert_eq!(relay.stop(), MESSAGES);
    assert_eq!(rig.backlog(), 0);
    // Nothing can be cut off a stream, but no whole line is glued to a torn one.
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.lines().all(|line| line.matches("\"aggregate_id\"").count() == 1), "{text}");
}

#[test]
fn a_standard_output_that_keeps_nothing_acks_nothing_and_says_so() {
    for (redirect, said) in [
        (">/dev/full", NO_SPACE),
        (">&-", "standard output is closed or /dev/null"),
        (">/dev/null", "standard output is closed or /dev/null"),
        // A reader that has gone.
        ("| true", "Broken pipe"),
    ] {
        let mut rig = Rig::new("kind = \"stdout\"");
        rig.enqueue(10);
        let relay = if redirect == "| true" {
            let mut reader = Command::new("true").stdin(Stdio::piped()).spawn().unwrap();
            let pipe = reader.stdin.take().unwrap();
            reader.wait().unwrap();
            rig.relay_with(Command::new("sh").args(["-c", "exec \"$0\" run --config \"$1\""]).stdout(Stdio::from(pipe)))
        } else {
            rig.relay(redirect)
        };
        relay.until("it says what is wrong", || relay.log().contains(said));
        assert_eq!(relay.stop(), 0, "{redirect}");
        // What is parked and not passed yet counts twice.
        assert!(rig.backlog() >= 10, "{redirect}");
    }
}

#[test]
fn a_pipe_gets_every_message_and_a_relay_whose_reader_stands_still_can_be_stopped() {
    let mut rig = Rig::new("kind = \"stdout\"");
    rig.enqueue(MESSAGES);
    let mut relay =
        rig.relay_with(Command::new("sh").args(["-c", "exec \"$0\" run --config \"$1\""]).stdout(Stdio::piped()));
    let mut pipe = relay.child.stdout.take().unwrap();
    let mut text = String::new();
    let mut chunk = [0; 4096];
    while text.lines().filter_map(id).count() < MESSAGES {
        let length = pipe.read(&mut chunk).unwrap();
        text.push_str(std::str::from_utf8(&chunk[..length]).unwrap());
    }
    assert_eq!(set(text.lines().filter_map(id).collect()), rig.enqueued);
    // More than a pipe holds, and nobody reads it.
    rig.enqueue(MESSAGES);
    // The newline of the last line may still be there; one byte more shows that the next write has begun.
    pipe.read_exact(&mut [0; 2]).unwrap();
    relay.signal("TERM");
    relay.until("it has stopped although a write is held up", || relay_ended(&relay));
}

/// A zombie until we wait for it.
fn relay_ended(relay: &Relay) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", relay.child.id())).unwrap();
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('Z'))
}

#[test]
fn a_line_that_a_kill_tore_is_cut_off_and_its_message_comes_again() {
    let path = surroundings::scratch("torn").join("out.jsonl");
    let mut rig = Rig::to_file(&path);
    rig.enqueue(MESSAGES);
    // Kills at random moments, and one torn line that is there for sure.
    for round in 0..5 {
        let relay = rig.relay("");
        relay.until("it writes", || lines(&path) > round * 20);
        relay.kill();
        rig.enqueue(50);
    }
    let text = fs::read(&path).unwrap();
    let first = text.split(|byte| *byte == b'\n').next().unwrap().to_owned();
    let mut torn = text;
    torn.extend_from_slice(&first[..first.len() / 2]);
    fs::write(&path, torn).unwrap();

    let relay = rig.relay("");
    relay.until("the rest is there", || {
        let text = fs::read_to_string(&path).unwrap_or_default();
        BTreeSet::from_iter(text.lines().filter_map(id)) == rig.enqueued
    });
    relay.stop();
    assert_eq!(BTreeSet::from_iter(ids(&path)), rig.enqueued);
}

#[test]
fn a_file_that_is_rotated_or_deleted_under_the_relay_is_opened_anew() {
    let dir = surroundings::scratch("rotated");
    let path = dir.join("out.jsonl");
    let mut rig = Rig::to_file(&path);
    rig.enqueue(10);
    let relay = rig.relay("");
    relay.until("the first are there", || lines(&path) == 10);
    let first = rig.enqueued.clone();

    fs::rename(&path, dir.join("old.jsonl")).unwrap();
    rig.enqueue(10);
    relay.until("the next are in a new file", || lines(&path) == 10);
    assert_eq!(set(ids(&dir.join("old.jsonl"))), first);
    let second = rig.enqueued.difference(&first).cloned().collect();
    assert_eq!(set(ids(&path)), second);

    // A file that is deleted before its messages are acked does not keep them: they would come again.
    relay.until("they are acked", || rig.backlog() == 0);
    fs::remove_file(&path).unwrap();
    rig.enqueue(10);
    relay.until("the last are in a new file", || lines(&path) == 10);
    let third: BTreeSet<String> = rig.enqueued.difference(&first).filter(|id| !second.contains(*id)).cloned().collect();
    assert_eq!(set(ids(&path)), third);
    assert_eq!(relay.stop(), 30);
}

#[test]
fn relays_of_several_stores_share_one_file_without_tearing_a_line() {
    let path = surroundings::scratch("shared").join("out.jsonl");
    let mut rigs: Vec<Rig> = (0..3).map(|_| Rig::to_file(&path)).collect();
    rigs.iter_mut().for_each(|rig| rig.enqueue(MESSAGES));
    let relays: Vec<Relay> = rigs.iter().map(|rig| rig.relay("")).collect();
    relays[0].until("all are there", || lines(&path) == 3 * MESSAGES);
    assert_eq!(relays.into_iter().map(Relay::stop).sum::<usize>(), 3 * MESSAGES);
    assert_eq!(set(ids(&path)), rigs.into_iter().flat_map(|rig| rig.enqueued).collect());
}
