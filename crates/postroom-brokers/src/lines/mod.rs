//! JSON lines in a file or on standard output: for trying things out, for audits, and for piping into other programs.

use std::path::PathBuf;

use async_trait::async_trait;
use postroom::{Batch, Message, Sink, SinkLimits, Unavailable, Verdict, Verdicts};
use serde::Deserialize;
use tokio::fs::File;
use tokio::io::AsyncWriteExt;
use tokio::sync::Mutex;

/// `[routes.sink]` with `kind = "file"`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileOptions {
    /// The file; lines are appended, and synced to the disk before a message counts as stored.
    pub path: PathBuf,
}

impl FileOptions {
    pub(crate) const KEYS: &'static [&'static str] = &["kind", "path"];
}

/// `[routes.sink]` with `kind = "stdout"`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StdoutOptions {}

enum Target {
    File(PathBuf),
    Stdout,
}

/// Writes one JSON object a message. A payload that is not UTF-8 stands as an array of numbers under `payload_bytes`.
pub struct LinesSink {
    target: Target,
    file: Mutex<Option<File>>,
}

impl LinesSink {
    /// Appends to a file.
    pub fn file(options: &FileOptions) -> Self {
        Self { target: Target::File(options.path.clone()), file: Mutex::new(None) }
    }

    /// Writes to standard output.
    pub fn stdout() -> Self {
        Self { target: Target::Stdout, file: Mutex::new(None) }
    }

    async fn write(&self, text: &[u8]) -> Result<(), std::io::Error> {
        let Target::File(path) = &self.target else {
            let mut stdout = tokio::io::stdout();
            stdout.write_all(text).await?;
            return stdout.flush().await;
        };
        let mut slot = self.file.lock().await;
        // Taken out while it is written to: a cancelled or failed write opens the file anew.
        let mut file = match slot.take() {
            Some(file) => file,
            None => {
                let mut file = File::options().create(true).append(true).read(true).open(path).await?;
                end_torn_line(&mut file).await?;
                file
            }
        };
        file.write_all(text).await?;
        file.sync_data().await?;
        *slot = Some(file);
        Ok(())
    }
}

/// A crash may have left half a line; what follows must not be glued to it.
async fn end_torn_line(file: &mut File) -> Result<(), std::io::Error> {
    use tokio::io::{AsyncReadExt, AsyncSeekExt};
    if file.metadata().await?.len() == 0 {
        return Ok(());
    }
    file.seek(std::io::SeekFrom::End(-1)).await?;
    if file.read_u8().await? != b'\n' {
        file.write_all(b"\n").await?;
    }
    Ok(())
}

#[async_trait]
impl Sink for LinesSink {
    fn system(&self) -> &'static str {
        "file"
    }

    fn limits(&self) -> SinkLimits {
        SinkLimits { batch_messages_max: 500, batches_in_flight_max: 1 }
    }

    async fn publish(&self, batch: &Batch) -> Result<Verdicts, Unavailable> {
        let mut text = Vec::new();
        for message in batch.messages() {
            text.extend_from_slice(line(message).as_bytes());
            text.push(b'\n');
        }
        let what = match &self.target {
            Target::File(path) => format!("file {}", path.display()),
            Target::Stdout => "standard output".to_owned(),
        };
        self.write(&text).await.map_err(|error| Unavailable::new(what, error))?;
        let mut verdicts = batch.silent();
        for message in batch.messages() {
            verdicts.judge(message.id, Verdict::Stored);
        }
        Ok(verdicts)
    }

    async fn probe(&self) -> Result<(), Unavailable> {
        Ok(())
    }

    async fn close(&self) {
        self.file.lock().await.take();
    }
}

fn line(message: &Message) -> String {
    let mut object = serde_json::json!({
        "id": message.id,
        "topic": message.topic,
        "type": message.kind,
        "key": message.ordering_key(),
        "routing_key": message.address(),
        "content_type": message.content_type,
        "headers": message.headers,
        "tenant_id": message.tenant_id,
        "aggregate_type": message.aggregate_type,
        "aggregate_id": message.aggregate_id,
        "aggregate_version": message.aggregate_version,
    });
    match std::str::from_utf8(&message.payload) {
        Ok(text) => object["payload"] = text.into(),
        Err(_) => object["payload_bytes"] = message.payload.to_vec().into(),
    }
    object.to_string()
}
