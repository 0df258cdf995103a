//! The URL of an archive.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::path::Path;

/// Where an archive is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A folder of this machine.
    Folder(PathBuf),
    /// A bucket, and a prefix in it.
    S3 {
        /// Name of the bucket.
        bucket: String,
        /// In front of every name.
        prefix: String,
    },
}

/// A URL that is none of an archive, or that this program cannot use.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct InvalidPlace(String);

impl Place {
    /// From `s3://BUCKET/PREFIX`, `file:///FOLDER` or the path of a folder. Connects to nothing.
    pub fn of(url: &str) -> Result<Self, InvalidPlace> {
        if let Some(rest) = url.strip_prefix("s3://") {
            let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
            if bucket.is_empty() || bucket.contains('@') {
                // Not quoted: it may be a secret.
                return Err(InvalidPlace(
                    "the URL of a bucket is s3://BUCKET/PREFIX; credentials are taken from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
                        .to_owned(),
                ));
            }
            if !cfg!(feature = "s3") {
                return Err(InvalidPlace(
                    "this program was built without the feature s3, so it knows no buckets".to_owned(),
                ));
            }
            return Ok(Self::S3 { bucket: bucket.to_owned(), prefix: prefix.trim_matches('/').to_owned() });
        }
        let folder = match url.split_once("://") {
            None => url,
            Some(("file", folder)) if folder.starts_with('/') => folder,
            Some(_) => {
                return Err(InvalidPlace(
                    "an archive is the path of a folder, file:///FOLDER or s3://BUCKET/PREFIX".to_owned(),
                ));
            }
        };
        if folder.is_empty() {
            return Err(InvalidPlace("the folder of the archive has no name".to_owned()));
        }
        Ok(Self::Folder(PathBuf::from(folder)))
    }

    pub(crate) fn open(&self) -> Result<(Arc<dyn ObjectStore>, Path), object_store::Error> {
        match self {
            Self::Folder(folder) => {
                // Reading back says nothing of a disk that has not written yet.
                let store = LocalFileSystem::new_with_prefix(folder)?.with_fsync(true);
                Ok((Arc::new(store), Path::default()))
            }
            #[cfg(feature = "s3")]
            Self::S3 { bucket, prefix } => {
                use std::time::Duration;
                // The only TLS of this program; reqwest asks for the process's own.
                let _ = rustls::crypto::ring::default_provider().install_default();
                let retry = object_store::RetryConfig {
                    max_retries: 3,
                    retry_timeout: Duration::from_secs(30),
                    ..object_store::RetryConfig::default()
                };
                let client = object_store::ClientOptions::new()
                    .with_connect_timeout(Duration::from_secs(10))
                    .with_timeout(Duration::from_secs(120))
                    .with_allow_http(std::env::var("AWS_ALLOW_HTTP").is_ok_and(|allowed| allowed == "true"));
                let store = object_store::aws::AmazonS3Builder::from_env()
                    .with_bucket_name(bucket)
                    .with_client_options(client)
                    .with_retry(retry)
                    .build()?;
                Ok((Arc::new(store), Path::from(prefix.as_str())))
            }
            #[cfg(not(feature = "s3"))]
            Self::S3 { .. } => Err(object_store::Error::NotImplemented {
                operation: "a bucket".to_owned(),
                implementer: "a program that was built without the feature s3".to_owned(),
            }),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(folder) => write!(f, "{}", folder.display()),
            Self::S3 { bucket, prefix } if prefix.is_empty() => write!(f, "s3://{bucket}"),
            Self::S3 { bucket, prefix } => write!(f, "s3://{bucket}/{prefix}"),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_named_by_its_path_or_its_url() {
        for url in ["/var/archive", "file:///var/archive"] {
            assert_eq!(Place::of(url).unwrap(), Place::Folder(PathBuf::from("/var/archive")));
        }
        assert_eq!(Place::of("archive").unwrap(), Place::Folder(PathBuf::from("archive")));
        for wrong in ["", "ftp://host/archive", "file://host/archive", "s3://", "s3://key:secret@bucket/a"] {
            let refused = Place::of(wrong).unwrap_err().to_string();
            assert!(!refused.contains("secret"), "{refused}");
        }
    }

    #[cfg(feature = "s3")]
    #[test]
    fn a_bucket_may_have_a_prefix() {
        let place = |bucket: &str, prefix: &str| Place::S3 { bucket: bucket.to_owned(), prefix: prefix.to_owned() };
        assert_eq!(Place::of("s3://cold").unwrap(), place("cold", ""));
        assert_eq!(Place::of("s3://cold/orders/eu/").unwrap(), place("cold", "orders/eu"));
        assert_eq!(place("cold", "orders").to_string(), "s3://cold/orders");
    }
}
