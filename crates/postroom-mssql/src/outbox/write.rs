//! Enqueueing through tiberius, which has no type for a transaction: on a connection, and refused where none is open on it.

use async_trait::async_trait;
use futures_io::{AsyncRead, AsyncWrite};
use postroom::{EnqueueError, Message, Outbox};
use tiberius::error::Error;
use tiberius::{Client, ToSql};

use crate::connect::is_duplicate;
use crate::inbox::Transaction;
use crate::outbox::columns::{ID_CONSTRAINT, enqueue_sql, row};
use crate::sql::numbered;
use crate::{Conn, Mssql};

#[async_trait]
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Outbox<Client<S>> for Mssql {
    async fn enqueue(&self, tx: &mut Client<S>, messages: &[Message]) -> Result<(), EnqueueError> {
        for message in messages {
            message.check()?;
        }
        let sql = enqueue_sql();
        for message in messages {
            let row = row(message)?;
            let values: Vec<&dyn ToSql> = row.iter().map(|(_, value)| value as &dyn ToSql).collect();
            tx.execute(numbered(&sql, &row), &values).await.map_err(|error| refused(message, error))?;
        }
        Ok(())
    }
}

#[async_trait]
impl Outbox<Conn> for Mssql {
    async fn enqueue(&self, tx: &mut Conn, messages: &[Message]) -> Result<(), EnqueueError> {
        self.enqueue(&mut tx.driver, messages).await
    }
}

#[async_trait]
impl<'t> Outbox<Transaction<'t>> for Mssql {
    async fn enqueue(&self, tx: &mut Transaction<'t>, messages: &[Message]) -> Result<(), EnqueueError> {
        self.enqueue(&mut **tx, messages).await
    }
}

fn refused(message: &Message, error: Error) -> EnqueueError {
    let written_before =
        is_duplicate(&error) && matches!(&error, Error::Server(server) if server.message().contains(ID_CONSTRAINT));
    if written_before {
        EnqueueError::AlreadyEnqueued { id: message.id.to_string(), source: error.into() }
    } else {
        EnqueueError::Store(error.into())
    }
}
