//! Admitting a message once.

use async_trait::async_trait;
use futures_io::{AsyncRead, AsyncWrite};
use postroom::{Admission, Consumer, Inbox, MessageId, StoreError};
use tiberius::error::Error;
use tiberius::{Client, ToSql};

use crate::Mssql;
use crate::connect::{is_duplicate, store_error};
use crate::inbox::Transaction;
use crate::sql::{distinct, get, named, numbered};

/// A transaction that claims the same id is waited for, and a violated key means "already there". No `holdlock`: it locks the gap between two ids, and ids of
/// one time lie in one gap, so that consumers would wait for each other's transactions. Whether a row came is read and not counted by the driver, which knows
/// nothing of it in a session with `nocount on`. What is set here ends with the statement.
const ADMIT_SQL: &str = "
if @@trancount = 0 begin; throw 50001, N'postroom: there is no transaction; begin the one that has the effect first', 1; end;
set nocount on; set xact_abort off;
insert into postroom_inbox (consumer, message_id)
select @consumer, convert(uniqueidentifier, @id)
 where not exists (select 1 from postroom_inbox i with (updlock, rowlock, forceseek)
                    where i.consumer = @consumer and i.message_id = convert(uniqueidentifier, @id));
select @@rowcount as admitted";

/// Whether the message is new to the consumer.
pub(crate) async fn admit<S: AsyncRead + AsyncWrite + Unpin + Send>(
    tx: &mut Client<S>,
    consumer: &str,
    id: &str,
) -> Result<bool, Error> {
    distinct("consumer", consumer)?;
    let parameters = named! { "consumer" => consumer, "id" => id };
    let values: Vec<&dyn ToSql> = parameters.iter().map(|(_, value)| value as &dyn ToSql).collect();
    let rows = match tx.query(numbered(ADMIT_SQL, &parameters), &values).await {
        Ok(rows) => rows.into_first_result().await,
        Err(error) => Err(error),
    };
    match rows {
        Ok(rows) => match rows.first() {
            Some(row) => get(row, 0_usize),
            None => Err(Error::Protocol("the server did not say whether the message is new".into())),
        },
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
