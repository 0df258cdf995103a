//! Servers that the installed Debian does not have, and that tests start themselves.

use std::ffi::OsString;

use postroom_testkit::services;

use crate::failure::Failure;
use crate::held::Held;
use crate::kafka;
use crate::python_package::{NATS, SEAWEEDFS};
use crate::unpacked::RABBITMQ;
use crate::workspace::Workspace;

/// Fetches them, once, and returns what tests need to find them.
pub(crate) fn ensure(workspace: &Workspace, held: &Held) -> Result<Vec<(&'static str, OsString)>, Failure> {
    Ok(vec![
        (services::SEAWEEDFS_PROGRAM, SEAWEEDFS.ensure(workspace, held)?.into()),
        (services::NATS_PROGRAM, NATS.ensure(workspace, held)?.into()),
        (services::KAFKA_JARS, kafka::ensure(workspace, held)?.into()),
        (services::RABBITMQ_ROOT, RABBITMQ.ensure(workspace, held)?.into()),
    ])
}
