//! Admitting through mysql_async.

use async_trait::async_trait;
use mysql_async::prelude::Queryable;
use mysql_async::{Error, Transaction};
use postroom::{Admission, Consumer, Inbox, MessageId, StoreError};

use crate::Mysql;
use crate::connect::{DUPLICATE_ENTRY, store_error};

/// Waits for a transaction that claims the same id. A duplicate is known by the error alone: how many rows a statement changed depends on how the
/// connection was opened.
pub(crate) const ADMIT_SQL: &str = "insert into postroom_inbox (consumer, message_id) values (?, ?)";

#[async_trait]
impl<'t> Inbox<Transaction<'t>> for Mysql {
    async fn admit(
        &self,
        tx: &mut Transaction<'t>,
        consumer: &Consumer,
        id: MessageId,
    ) -> Result<Admission, StoreError> {
        match tx.exec_drop(ADMIT_SQL, (consumer.as_str(), id.to_string())).await {
            Ok(()) => Ok(Admission::New),
            Err(Error::Server(server)) if server.code == DUPLICATE_ENTRY => Ok(Admission::Duplicate),
            Err(error) => Err(store_error("claim a message in the inbox", error)),
        }
    }
}
