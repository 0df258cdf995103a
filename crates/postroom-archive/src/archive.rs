//! Writing, checking and reading segments.

use std::collections::{HashMap, HashSet};
use std::io::{Read, Write};
use std::sync::Arc;

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use jiff::Timestamp;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use postroom::{ArchivedMessage, SegmentId, crash_point};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::line;
use crate::manifest::{Manifest, ParquetObject};
use crate::place::Place;

const FOLDER: &str = "outbox";
const OBJECT: &str = ".jsonl.zst";
const PARQUET: &str = ".parquet";
const MANIFEST: &str = ".manifest.json";
/// Larger than any segment that we write.
const LINES_BYTES_MAX: u64 = 2 << 30;
const MANIFEST_BYTES_MAX: u64 = 64 << 10;
/// Manifests that are read at once: one after the other, years of them take long.
const READ_AT_ONCE: usize = 16;
const LEVEL: i32 = 3;

/// Why an archive did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The folder or bucket could not be used.
    #[error("{what} in the archive {place}")]
    Unreachable {
        /// What was being done.
        what: &'static str,
        /// Which archive.
        place: String,
        /// The reason.
        #[source]
        source: object_store::Error,
    },
    /// What was read is not what was written.
    #[error("read {object} in the archive {place}: {problem}")]
    Damaged {
        /// Which archive.
        place: String,
        /// Which object.
        object: String,
        /// What is wrong.
        problem: String,
    },
    /// A message that has no line.
    #[error("write a message as JSON")]
    Line(#[from] serde_json::Error),
    /// Messages that have no Parquet file.
    #[cfg(feature = "parquet")]
    #[error("write messages as a Parquet file")]
    Parquet(#[from] parquet::errors::ParquetError),
}

/// What an archive has.
#[derive(Debug, Clone, Default)]
pub struct Found {
    /// Of whole segments, as far as the manifests tell; oldest first.
    pub manifests: Vec<Manifest>,
    /// Manifests that cannot be read, and why.
    pub damaged: Vec<(String, String)>,
    /// Objects that no manifest names: of segments that were not finished, or were finished by another process.
    pub unfinished: Vec<String>,
}

/// Which archive, and what it has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArchiveOptions {
    /// Where it is.
    pub place: Place,
    /// Segments that are written from now on have a Parquet file beside their lines. Needs the feature `parquet`.
    pub parquet: bool,
}

impl From<Place> for ArchiveOptions {
    fn from(place: Place) -> Self {
        Self { place, parquet: false }
    }
}

/// An archive that can be reached, as far as is known without asking.
#[derive(Debug, Clone)]
pub struct Archive {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
    options: ArchiveOptions,
}

/// Archived messages have their payloads.
#[cfg(unix)]
fn warn_if_readable(folder: &std::path::Path) {
    use std::os::unix::fs::PermissionsExt;
    if std::fs::metadata(folder).is_ok_and(|about| about.permissions().mode() & 0o005 == 0o005) {
        let folder = folder.display();
        tracing::warn!("every user of this machine can read the archived messages in {folder}; run `chmod o-rx` on it");
    }
}

#[cfg(not(unix))]
fn warn_if_readable(_: &std::path::Path) {}

impl Archive {
    /// The archive at this place. A folder must be there: one that is missing may be a volume that is not mounted.
    pub fn open(options: &ArchiveOptions) -> Result<Self, ArchiveError> {
        let place = &options.place;
        let opened = place.open();
        let (store, prefix) = opened.map_err(|source| ArchiveError::Unreachable {
            what: "open the folder or bucket (a folder must exist before it is used)",
            place: place.to_string(),
            source,
        })?;
        if let Place::Folder(folder) = place {
            warn_if_readable(folder);
        }
        Ok(Self { store, prefix, options: options.clone() })
    }

    /// Where it is.
    pub fn place(&self) -> &Place {
        &self.options.place
    }

    fn failed(&self, what: &'static str) -> impl Fn(object_store::Error) -> ArchiveError {
        move |source| ArchiveError::Unreachable { what, place: self.options.place.to_string(), source }
    }

    fn damaged(&self, object: &str, problem: impl Into<String>) -> ArchiveError {
        ArchiveError::Damaged {
            place: self.options.place.to_string(),
            object: object.to_owned(),
            problem: problem.into(),
        }
    }

    fn path(&self, name: &str) -> Path {
        let mut path = self.prefix.clone();
        name.split('/').for_each(|part| path = path.clone().join(part));
        path
    }

    /// Writes a segment and reads it back; when this returns, the archive has it. If it has it already, whole and with all of these
    /// messages, nothing is written.
    ///
    /// Two processes may do this at once: objects are named by what is in them too, so that none replaces another's, and whichever manifest
    /// is written last is about an object that is there.
    pub async fn store(
        &self,
        outbox: Uuid,
        segment: SegmentId,
        messages: Vec<ArchivedMessage>,
    ) -> Result<Manifest, ArchiveError> {
        if let Some(manifest) = self.found(outbox, segment, &messages).await? {
            return Ok(manifest);
        }
        let parquet = self.options.parquet;
        let encoded = tokio::task::spawn_blocking(move || {
            let (mut manifest, bytes) = encode(outbox, segment, &messages)?;
            let mut objects = vec![(manifest.object.clone(), bytes)];
            if parquet {
                let (about, bytes) = encode_parquet(outbox, segment, &messages)?;
                objects.push((about.object.clone(), bytes));
                manifest.parquet = Some(about);
            }
            Ok::<_, ArchiveError>((manifest, objects, messages))
        });
        let (manifest, objects, messages) = encoded.await.map_err(|error| serde_json::Error::io(error.into()))??;
        let put = self.failed("write a segment");
        for (object, bytes) in objects {
            self.store.put(&self.path(&object), bytes.into()).await.map_err(&put)?;
            crash_point("archive-object");
        }
        let text = serde_json::to_vec_pretty(&manifest)?;
        self.store.put(&self.path(&manifest_of(outbox, segment)), text.into()).await.map_err(&put)?;
        crash_point("archive-manifest");
        let found = self.found(outbox, segment, &messages).await?;
        if let Some(found) = found {
            return Ok(found);
        }
        let here = self.verify(&manifest).await?;
        let other = messages.iter().find(|message| !here.contains(message)).map(|message| message.id);
        let which = other.map(|id| format!("message {id} read back is not as it was written")).unwrap_or_default();
        Err(self.damaged(&manifest.object, which))
    }

    /// The manifest of a segment that is here whole and has all of these messages.
    async fn found(
        &self,
        outbox: Uuid,
        segment: SegmentId,
        messages: &[ArchivedMessage],
    ) -> Result<Option<Manifest>, ArchiveError> {
        let read = async {
            let manifest = self.manifest(&manifest_of(outbox, segment)).await?;
            let here = self.verify(&manifest).await?;
            Ok((manifest, here))
        };
        let (manifest, here) = match read.await {
            Ok(read) => read,
            Err(error @ ArchiveError::Unreachable { .. }) if !is_missing(&error) => return Err(error),
            Err(_) => return Ok(None),
        };
        if self.options.parquet && manifest.parquet.is_none() {
            return Ok(None);
        }
        // Whoever removed some of them from the outbox by hand meanwhile does not remove them here.
        let here: HashMap<_, _> = here.iter().map(|message| (message.id, message)).collect();
        let all = messages.iter().all(|message| here.get(&message.id) == Some(&message));
        Ok(all.then_some(manifest))
    }

    async fn bytes(&self, object: &str, bytes_max: u64) -> Result<Bytes, ArchiveError> {
        let read = self.failed("read");
        let found = self.store.get(&self.path(object)).await.map_err(&read)?;
        if found.meta.size > bytes_max {
            return Err(
                self.damaged(object, format!("it has {} bytes; {bytes_max} were expected at most", found.meta.size))
            );
        }
        found.bytes().await.map_err(read)
    }

    async fn manifest(&self, name: &str) -> Result<Manifest, ArchiveError> {
        let text = self.bytes(name, MANIFEST_BYTES_MAX).await?;
        let manifest: Manifest =
            serde_json::from_slice(&text).map_err(|error| self.damaged(name, format!("it is no manifest: {error}")))?;
        if manifest.format != 1 {
            let problem =
                format!("its format is {}, and this program knows format 1; use a newer one", manifest.format);
            return Err(self.damaged(name, problem));
        }
        let stem = stem_of(manifest.outbox, manifest.segment);
        let its_own = name == manifest_of(manifest.outbox, manifest.segment)
            && manifest.object.starts_with(&stem)
            && manifest.parquet.as_ref().is_none_or(|parquet| parquet.object.starts_with(&stem));
        if !its_own {
            return Err(self.damaged(name, "it is about another segment"));
        }
        Ok(manifest)
    }

    /// All manifests.
    pub async fn manifests(&self) -> Result<Found, ArchiveError> {
        let list = self.failed("list the segments");
        let folder = self.path(FOLDER);
        let found: Vec<_> = self.store.list(Some(&folder)).try_collect().await.map_err(&list)?;
        let names: Vec<String> = found
            .iter()
            .filter_map(|object| {
                let parts = object.location.prefix_match(&self.prefix)?;
                Some(parts.map(|part| part.as_ref().to_owned()).collect::<Vec<_>>().join("/"))
            })
            .collect();
        let mut manifests: Vec<Manifest> = Vec::new();
        let mut damaged = Vec::new();
        let reading = names.iter().filter(|name| name.ends_with(MANIFEST));
        let reading: Vec<_> = reading.map(|name| async move { (name, self.manifest(name).await) }).collect();
        let mut read = std::pin::pin!(stream::iter(reading).buffered(READ_AT_ONCE));
        while let Some((name, manifest)) = read.next().await {
            match manifest {
                Ok(manifest) => manifests.push(manifest),
                Err(ArchiveError::Damaged { problem, .. }) => damaged.push((name.clone(), problem)),
                Err(error) => return Err(error),
            }
        }
        let of =
            |manifest: &Manifest| [Some(manifest.object.clone()), manifest.parquet.clone().map(|about| about.object)];
        let meant: HashSet<String> = manifests.iter().flat_map(of).flatten().collect();
        let is_object = |name: &str| name.ends_with(OBJECT) || name.ends_with(PARQUET);
        let unmeant = names.iter().filter(|name| is_object(name) && !meant.contains(name.as_str()));
        let unfinished = unmeant.cloned().collect();
        manifests.sort_by_key(|manifest| manifest.segment);
        Ok(Found { manifests, damaged, unfinished })
    }

    /// The messages of a segment, as they were written, which is checked.
    pub async fn read(&self, manifest: &Manifest) -> Result<Vec<ArchivedMessage>, ArchiveError> {
        let bytes = self.bytes(&manifest.object, manifest.bytes).await?;
        let expected = manifest.clone();
        let decoded = tokio::task::spawn_blocking(move || decode(&expected, &bytes)).await;
        let decoded = decoded.unwrap_or_else(|error| Err(error.to_string()));
        decoded.map_err(|problem| self.damaged(&manifest.object, problem))
    }

    /// The messages of a segment, if all of its objects are as they were written. A program without the feature `parquet` compares
    /// the SHA-256 of a Parquet file alone, and not its rows.
    pub async fn verify(&self, manifest: &Manifest) -> Result<Vec<ArchivedMessage>, ArchiveError> {
        let messages = self.read(manifest).await?;
        let Some(about) = &manifest.parquet else { return Ok(messages) };
        let bytes = self.bytes(&about.object, about.bytes).await?;
        if bytes.len() as u64 != about.bytes || hex(&Sha256::digest(&bytes)) != about.sha256 {
            return Err(self.damaged(&about.object, "its SHA-256 or its length is not that of the manifest"));
        }
        let compared = tokio::task::spawn_blocking(move || (has_rows(bytes, &messages), messages)).await;
        let (same, messages) = compared.map_err(|error| self.damaged(&about.object, error.to_string()))?;
        match same {
            Ok(true) => Ok(messages),
            Ok(false) => Err(self.damaged(&about.object, "its rows are not the messages of the lines beside it")),
            Err(problem) => Err(self.damaged(&about.object, problem)),
        }
    }
}

#[cfg(feature = "parquet")]
fn encode_parquet(
    outbox: Uuid,
    segment: SegmentId,
    messages: &[ArchivedMessage],
) -> Result<(ParquetObject, Vec<u8>), ArchiveError> {
    let bytes = crate::parquet_file::write(messages)?;
    let sha256 = hex(&Sha256::digest(&bytes));
    let object = format!("{}-{}{PARQUET}", stem_of(outbox, segment), &sha256[..16]);
    Ok((ParquetObject { object, bytes: bytes.len() as u64, sha256 }, bytes))
}

#[cfg(feature = "parquet")]
fn has_rows(bytes: Bytes, messages: &[ArchivedMessage]) -> Result<bool, String> {
    crate::parquet_file::has(bytes, messages).map_err(|error| error.to_string())
}

/// Nothing asks for one without the feature.
#[cfg(not(feature = "parquet"))]
fn encode_parquet(_: Uuid, _: SegmentId, _: &[ArchivedMessage]) -> Result<(ParquetObject, Vec<u8>), ArchiveError> {
    Err(serde_json::Error::io(std::io::ErrorKind::Unsupported.into()).into())
}

#[cfg(not(feature = "parquet"))]
fn has_rows(_: Bytes, _: &[ArchivedMessage]) -> Result<bool, String> {
    Ok(true)
}

fn is_missing(error: &ArchiveError) -> bool {
    matches!(error, ArchiveError::Unreachable { source: object_store::Error::NotFound { .. }, .. })
}

/// The names of a segment begin like this: with the outbox, and the day on which it was begun.
fn stem_of(outbox: Uuid, segment: SegmentId) -> String {
    format!("{FOLDER}/{outbox}/{}/{segment}", begun_at(segment).strftime("%Y/%m/%d"))
}

fn manifest_of(outbox: Uuid, segment: SegmentId) -> String {
    format!("{}{MANIFEST}", stem_of(outbox, segment))
}

/// A segment's name has the time in it.
fn begun_at(segment: SegmentId) -> Timestamp {
    let ms = segment.as_uuid().get_timestamp().map_or(0, |time| {
        let (seconds, nanos) = time.to_unix();
        i64::try_from(seconds).unwrap_or_default().saturating_mul(1000) + i64::from(nanos / 1_000_000)
    });
    Timestamp::from_millisecond(ms).unwrap_or_default()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn encode(
    outbox: Uuid,
    segment: SegmentId,
    messages: &[ArchivedMessage],
) -> Result<(Manifest, Vec<u8>), serde_json::Error> {
    let io = serde_json::Error::io;
    let mut encoder = zstd::Encoder::new(Vec::new(), LEVEL).map_err(io)?;
    encoder.include_checksum(true).map_err(io)?;
    let mut lines_bytes = 0;
    for message in messages {
        let mut line = line::write(message)?;
        line.push(b'\n');
        lines_bytes += line.len() as u64;
        encoder.write_all(&line).map_err(io)?;
    }
    let bytes = encoder.finish().map_err(io)?;
    let sha256 = hex(&Sha256::digest(&bytes));
    let object = format!("{}-{}{OBJECT}", stem_of(outbox, segment), &sha256[..16]);
    let (first_seq, last_seq, first_at, last_at) = about(messages);
    let manifest = Manifest {
        format: 1,
        outbox,
        segment,
        object,
        messages: messages.len() as u64,
        first_seq,
        last_seq,
        first_at,
        last_at,
        begun_at: begun_at(segment),
        bytes: bytes.len() as u64,
        lines_bytes,
        sha256,
        parquet: None,
    };
    Ok((manifest, bytes))
}

/// The lowest and the highest seq, and the first and the last time.
fn about(messages: &[ArchivedMessage]) -> (i64, i64, Timestamp, Timestamp) {
    let seqs = messages.iter().map(|message| message.seq);
    let times = messages.iter().map(|message| message.occurred_us);
    let at = |us: Option<i64>| us.and_then(|us| Timestamp::from_microsecond(us).ok()).unwrap_or_default();
    (seqs.clone().min().unwrap_or_default(), seqs.max().unwrap_or_default(), at(times.clone().min()), at(times.max()))
}

fn decode(manifest: &Manifest, bytes: &[u8]) -> Result<Vec<ArchivedMessage>, String> {
    if bytes.len() as u64 != manifest.bytes || hex(&Sha256::digest(bytes)) != manifest.sha256 {
        return Err("its SHA-256 or its length is not that of the manifest".to_owned());
    }
    if manifest.lines_bytes > LINES_BYTES_MAX {
        return Err(format!("it says to have {} bytes of lines; {LINES_BYTES_MAX} is the most", manifest.lines_bytes));
    }
    let decoder = zstd::Decoder::new(bytes).map_err(|error| error.to_string())?;
    let mut lines = Vec::new();
    // One byte more than there should be shows that there are more.
    decoder.take(manifest.lines_bytes + 1).read_to_end(&mut lines).map_err(|error| error.to_string())?;
    if lines.len() as u64 != manifest.lines_bytes {
        return Err("its lines are not as long as the manifest says".to_owned());
    }
    let lines = lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let read = |(index, line): (usize, &[u8])| line::read(line).map_err(|error| format!("line {}: {error}", index + 1));
    let messages: Vec<ArchivedMessage> = lines.enumerate().map(read).collect::<Result<_, _>>()?;
    let mut ids = HashSet::new();
    if let Some(twice) = messages.iter().find(|message| !ids.insert(message.id)) {
        return Err(format!("it has message {} twice", twice.id));
    }
    let about = about(&messages);
    if about != (manifest.first_seq, manifest.last_seq, manifest.first_at, manifest.last_at) {
        return Err("the manifest says other seqs or times than its messages have".to_owned());
    }
    if messages.len() as u64 != manifest.messages {
        return Err(format!("it has {} messages, and the manifest says {}", messages.len(), manifest.messages));
    }
    Ok(messages)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fmt;
    use std::sync::atomic::{AtomicBool, Ordering};

    use futures_util::stream::BoxStream;
    use object_store::memory::InMemory;
    use object_store::{
        CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, PutMultipartOptions, PutOptions,
        PutPayload, PutResult, Result,
    };
    use uuid::Uuid;

    use super::*;

    /// Says that it has stored something, and has stored something else.
    #[derive(Debug, Default)]
    struct Lying {
        honest: AtomicBool,
        inner: InMemory,
    }

    impl fmt::Display for Lying {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Lying")
        }
    }

    #[async_trait::async_trait]
    impl ObjectStore for Lying {
        async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
            let mut bytes: Vec<u8> = Bytes::from(payload).to_vec();
            if !self.honest.load(Ordering::Relaxed) && location.as_ref().ends_with(OBJECT) {
                bytes.pop();
            }
            self.inner.put_opts(location, bytes.into(), options).await
        }

        async fn put_multipart_opts(
            &self,
            at: &Path,
            options: PutMultipartOptions,
        ) -> Result<Box<dyn MultipartUpload>> {
            self.inner.put_multipart_opts(at, options).await
        }

        async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
            self.inner.get_opts(location, options).await
        }

        fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
            self.inner.delete_stream(locations)
        }

        fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
            self.inner.list(prefix)
        }

        async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
            self.inner.list_with_delimiter(prefix).await
        }

        async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
            self.inner.copy_opts(from, to, options).await
        }
    }

    const OUTBOX: Uuid = Uuid::from_u128(3);

    fn in_memory(store: Arc<dyn ObjectStore>, parquet: bool) -> Archive {
        let options = ArchiveOptions { place: Place::Folder("memory".into()), parquet };
        Archive { store, prefix: Path::default(), options }
    }

    fn messages(count: i64) -> Vec<ArchivedMessage> {
        let message = |seq| ArchivedMessage { seq, id: Uuid::from_u128(seq as u128), ..ArchivedMessage::default() };
        (1..=count).map(message).collect()
    }

    #[tokio::test]
    async fn what_cannot_be_read_back_is_not_stored() {
        let store = Arc::new(Lying::default());
        let archive = in_memory(store.clone(), false);
        let segment = SegmentId::from(Uuid::from_u128(7));
        let error = archive.store(OUTBOX, segment, messages(5)).await.unwrap_err();
        assert!(matches!(error, ArchiveError::Damaged { .. }), "{error}");
        store.honest.store(true, Ordering::Relaxed);
        let manifest = archive.store(OUTBOX, segment, messages(5)).await.unwrap();
        assert_eq!(archive.read(&manifest).await.unwrap(), messages(5));
        // Again, as after a death; with fewer, as when some were removed by hand; with more, which it does not have.
        assert_eq!(archive.store(OUTBOX, segment, messages(5)).await.unwrap(), manifest);
        assert_eq!(archive.store(OUTBOX, segment, messages(3)).await.unwrap(), manifest);
        let more = archive.store(OUTBOX, segment, messages(6)).await.unwrap();
        assert_eq!((more.messages, archive.read(&more).await.unwrap()), (6, messages(6)));
        let found = archive.manifests().await.unwrap();
        assert_eq!(
            (found.manifests, found.unfinished.len()),
            (vec![more], 1),
            "the object of before has no manifest any more"
        );
    }

    #[tokio::test]
    async fn a_hostile_manifest_is_an_error_and_not_a_path() {
        let store = Arc::new(InMemory::new());
        let archive = in_memory(store.clone(), false);
        let segment = SegmentId::from(Uuid::from_u128(7));
        let manifest = archive.store(OUTBOX, segment, messages(2)).await.unwrap();
        let name = archive.path(&manifest_of(OUTBOX, segment));
        let elsewhere = serde_json::json!({ "object": "../../etc/passwd", "bytes": 1, "sha256": "" });
        let hostile: [(&str, serde_json::Value); 7] = [
            ("parquet", elsewhere),
            ("last_at", "2000-01-01T00:00:00Z".into()),
            ("outbox", Uuid::from_u128(4).to_string().into()),
            ("object", "../../etc/passwd".into()),
            ("format", 2.into()),
            ("lines_bytes", u64::MAX.into()),
            ("messages", 3.into()),
        ];
        for (field, value) in hostile {
            let mut text = serde_json::to_value(&manifest).unwrap();
            text[field] = value;
            store.put(&name, text.to_string().into()).await.unwrap();
            let read = async {
                let found = archive.manifests().await?;
                match found.manifests.first() {
                    Some(manifest) => archive.read(manifest).await.map(drop),
                    None => Err(archive.damaged("manifest", "refused")),
                }
            };
            let error = read.await.unwrap_err();
            assert!(matches!(error, ArchiveError::Damaged { .. }), "{field}: {error}");
        }
    }
    #[cfg(feature = "parquet")]
    #[tokio::test]
    async fn a_parquet_file_is_part_of_its_segment() {
        let store = Arc::new(InMemory::new());
        let lines = in_memory(store.clone(), false);
        let segment = SegmentId::from(Uuid::from_u128(7));
        let without = lines.store(OUTBOX, segment, messages(5)).await.unwrap();
        assert_eq!(without.parquet, None);
        // The configuration has changed since a process died over this segment.
        let archive = in_memory(store.clone(), true);
        let manifest = archive.store(OUTBOX, segment, messages(5)).await.unwrap();
        let about = manifest.parquet.clone().unwrap();
        assert_eq!(manifest.object, without.object);
        assert_eq!(lines.store(OUTBOX, segment, messages(5)).await.unwrap(), manifest, "nothing is taken away");
        assert_eq!(archive.verify(&manifest).await.unwrap(), messages(5));
        let found = archive.manifests().await.unwrap();
        assert_eq!((found.manifests.len(), found.unfinished.len(), found.damaged.len()), (1, 0, 0));
        // A file of other messages, with the right sum in the manifest, and one that is not there.
        let (other, bytes) = encode_parquet(OUTBOX, segment, &messages(4)).unwrap();
        store.put(&archive.path(&other.object), bytes.into()).await.unwrap();
        let swapped = Manifest { parquet: Some(other), ..manifest.clone() };
        let error = archive.verify(&swapped).await.unwrap_err();
        assert!(matches!(error, ArchiveError::Damaged { .. }), "{error}");
        store.delete(&archive.path(&about.object)).await.unwrap();
        assert!(archive.verify(&manifest).await.is_err());
        assert_eq!(archive.read(&manifest).await.unwrap(), messages(5), "the lines are what is restored");
        assert_eq!(archive.store(OUTBOX, segment, messages(5)).await.unwrap(), manifest, "it is written once more");
        assert_eq!(archive.verify(&manifest).await.unwrap(), messages(5));
    }
}
