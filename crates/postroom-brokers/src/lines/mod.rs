//! JSON lines in a file or on standard output: for trying things out, for audits, and for piping into other programs.
//!
//! A message is stored when its whole line was written and synced; a failed write is an outage of the sink, never a verdict.

mod appended_file;
mod line;
mod standard_output;
mod write;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{Batch, FailureKind, Sink, SinkLimits, Unavailable, Verdict, Verdicts};
use serde::Deserialize;
use tokio::sync::{Mutex, oneshot};

use crate::{Broker, CheckFailed, OpenSinkError, Section, SinkOptions};

use appended_file::AppendedFile;
use standard_output::StandardOutput;

/// A batch is one text in memory.
const BATCH_BYTES_MAX: usize = 16 << 20;
/// A disk or a reader of the pipe that needs longer than this counts as an outage.
const ANSWERS_WITHIN: Duration = Duration::from_secs(30);

/// `[routes.sink]` with `kind = "file"`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileOptions {
    /// The file; lines are appended, and synced to the disk before a message counts as stored.
    pub path: PathBuf,
}

/// A file of JSON lines.
pub const FILE: Broker = Broker {
    kind: "file",
    about: "JSON lines appended to a file: for trying things out, and for audits",
    sink: Some(Section::sink::<FileOptions>("kind = \"file\"\npath = \"audit.jsonl\"\n")),
    subscription: None,
};

/// JSON lines on standard output.
pub const STDOUT: Broker = Broker {
    kind: "stdout",
    about: "JSON lines on standard output: for piping into other programs",
    sink: Some(Section::sink::<StdoutOptions>("kind = \"stdout\"\n")),
    subscription: None,
};

#[async_trait]
impl SinkOptions for FileOptions {
    fn open(&self) -> Result<Arc<dyn Sink>, OpenSinkError> {
        Ok(Arc::new(LinesSink::file(self)))
    }

    fn shown(&self) -> String {
        format!("file {}", self.path.display())
    }

    async fn check(&self) -> Result<String, CheckFailed> {
        let wrong = |problem: String, advice: &str| CheckFailed {
            problem: format!("{}: {problem}", self.path.display()),
            advice: advice.to_owned(),
        };
        if self.path.exists() {
            let opened = std::fs::OpenOptions::new().append(true).open(&self.path);
            return opened.map(|_| "it can be appended to".to_owned()).map_err(|error| {
                wrong(error.to_string(), "let the user who runs postroom write to it, or name another file")
            });
        }
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if folder.is_dir() {
            Ok("it will be created".to_owned())
        } else {
            Err(wrong(format!("the folder {} does not exist", folder.display()), "create the folder"))
        }
    }
}

#[async_trait]
impl SinkOptions for StdoutOptions {
    fn open(&self) -> Result<Arc<dyn Sink>, OpenSinkError> {
        Ok(Arc::new(LinesSink::stdout()))
    }

    fn shown(&self) -> String {
        "stdout".to_owned()
    }

    async fn check(&self) -> Result<String, CheckFailed> {
        Ok("messages go to standard output".to_owned())
    }
}

/// `[routes.sink]` with `kind = "stdout"`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StdoutOptions {}

/// Writes one JSON object per message, one per line.
///
/// A payload that is not UTF-8 is written as an array of numbers under `payload_bytes`. Several sinks, also of several
/// processes, may append to one file: they take turns under an advisory lock on it.
pub struct LinesSink {
    shown: String,
    target: Arc<Mutex<Target>>,
}

enum Target {
    File(AppendedFile),
    Stdout(StandardOutput),
}

impl Target {
    fn append(&mut self, text: &[u8], abandoned: &dyn Fn() -> bool) -> io::Result<()> {
        match self {
            Self::File(file) => file.append(text, abandoned),
            Self::Stdout(stdout) => stdout.append(text, abandoned),
        }
    }

    fn probe(&mut self) -> io::Result<()> {
        match self {
            Self::File(file) => file.probe(),
            Self::Stdout(stdout) => stdout.probe(),
        }
    }

    fn close(&mut self) {
        match self {
            Self::File(file) => file.close(),
            Self::Stdout(stdout) => stdout.close(),
        }
    }
}

impl LinesSink {
    /// Appends to a file.
    pub fn file(options: &FileOptions) -> Self {
        let target = Target::File(AppendedFile::new(options.path.clone()));
        Self { shown: format!("file {}", options.path.display()), target: Arc::new(Mutex::new(target)) }
    }

    /// Writes to standard output.
    pub fn stdout() -> Self {
        let target = Target::Stdout(StandardOutput::new());
        Self { shown: "standard output".to_owned(), target: Arc::new(Mutex::new(target)) }
    }

    /// Runs `work` on a thread of its own, which goes on to its end when this future is dropped; the next call waits for it.
    ///
    /// Not on the runtime's pool: a runtime waits for its pool when it ends, and a full pipe or a dead disk can hold a write
    /// forever. `work` is told when nobody waits for it any more.
    async fn with_target(
        &self,
        work: impl FnOnce(&mut Target, &dyn Fn() -> bool) -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        let done = async {
            let mut target = Arc::clone(&self.target).lock_owned().await;
            let (tell, told) = oneshot::channel();
            std::thread::Builder::new().name("postroom-lines".to_owned()).spawn(move || {
                let result = work(&mut target, &|| tell.is_closed());
                drop(target);
                // Whoever waited may have gone.
                let _ = tell.send(result);
            })?;
            told.await.unwrap_or_else(|_| Err(io::Error::other("the thread that writes has panicked")))
        };
        tokio::time::timeout(ANSWERS_WITHIN, done).await.unwrap_or_else(|_| {
            let why =
                format!("not done within {} s; its disk or its reader does not respond", ANSWERS_WITHIN.as_secs());
            Err(io::Error::new(io::ErrorKind::TimedOut, why))
        })
    }

    fn unavailable(&self, error: io::Error) -> Unavailable {
        Unavailable::new(self.shown.clone(), error)
    }
}

#[async_trait]
impl Sink for LinesSink {
    fn system(&self) -> &'static str {
        "file"
    }

    fn limits(&self) -> SinkLimits {
        SinkLimits { batch_messages_max: 500, batch_bytes_max: BATCH_BYTES_MAX, batches_in_flight_max: 1 }
    }

    async fn publish(&self, batch: &Batch) -> Result<Verdicts, Unavailable> {
        let mut verdicts = batch.silent();
        let mut text = Vec::new();
        let mut written = Vec::with_capacity(batch.messages().len());
        for (place, message) in batch.messages().iter().enumerate() {
            match line::of(message) {
                Ok(line) => {
                    text.extend_from_slice(&line);
                    text.push(b'\n');
                    written.push(place);
                }
                Err(error) => {
                    let reason = format!("cannot be written as JSON: {error}");
                    verdicts.judge(place, Verdict::failed(FailureKind::Permanent, reason));
                }
            }
        }
        if let Err(error) = self.with_target(move |target, abandoned| target.append(&text, abandoned)).await {
            let [place] = written[..] else { return Err(self.unavailable(error)) };
            if !matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
                return Err(self.unavailable(error));
            }
            // Smaller ones may still find room: that they do says nothing against this one.
            verdicts.judge(place, Verdict::failed(FailureKind::Busy, format!("{}: {error}", self.shown)));
            return Ok(verdicts);
        }
        for place in written {
            verdicts.judge(place, Verdict::Stored);
        }
        Ok(verdicts)
    }

    async fn probe(&self) -> Result<(), Unavailable> {
        self.with_target(|target, _| target.probe()).await.map_err(|error| self.unavailable(error))
    }

    async fn close(&self) {
        // A write under way keeps what it writes to; it is closed with the last reference.
        if let Ok(mut target) = self.target.try_lock() {
            target.close();
        }
    }
}
