//! Admitting a message once.

use async_trait::async_trait;
use futures_io::{AsyncRead, AsyncWrite};
use postroom::{Admission, Consumer, Inbox, MessageId, StoreError};
use tiberius::error::Error;
use tiberius::{Client, ToSql};

use crate::Mssql;
use crate::connect::{is_duplicate, store_error};
use crate::inbox::Transaction;
use crate::sql::{named, numbered};

/// Waits for a transaction that claims the same id. `holdlock`: the key stays as it was found until the transaction ends, also if it was
/// not there. A violated key means "already there" too.
const ADMIT_SQL: &str = "
if @@trancount = 0 begin; throw 50001, N'postroom: there is no transaction; begin the one that has the effect first', 1; end;
merge postroom_inbox with (holdlock) as i
using (select @consumer as consumer, convert(uniqueidentifier, @id) as id) as n on i.consumer = n.consumer and i.message_id = n.id
when not matched then insert (consumer, message_id) values (n.consumer, n.id);";

/// Whether the message is new to the consumer.
pub(crate) async fn admit<S: AsyncRead + AsyncWrite + Unpin + Send>(
    tx: &mut Client<S>,
    consumer: &str,
    id: &str,
) -> Result<bool, Error> {
    let parameters = named! { "consumer" => consumer, "id" => id };
    let values: Vec<&dyn ToSql> = parameters.iter().map(|(_, value)| value as &dyn ToSql).collect();
    match tx.execute(numbered(ADMIT_SQL, &parameters), &values).await {
        Ok(done) => Ok(done.total() > 0),
        Err(error) if is_duplicate(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

#[async_trait]
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Inbox<Client<S>> for Mssql {
    async fn admit(&self, tx: &mut Client<S>, consumer: &Consumer, id: MessageId) -> Result<Admission, StoreError> {
        match admit(tx, consumer.as_str(), &id.to_string()).await {
            Ok(true) => Ok(Admission::New),
            Ok(false) => Ok(Admission::Duplicate),
            Err(error) => Err(store_error("claim a message in the inbox", error)),
        }
    }
}

#[async_trait]
impl<'t> Inbox<Transaction<'t>> for Mssql {
    async fn admit(
        &self,
        tx: &mut Transaction<'t>,
        consumer: &Consumer,
        id: MessageId,
    ) -> Result<Admission, StoreError> {
        self.admit(&mut **tx, consumer, id).await
    }
}
