//! A worker in the same process, on one SQLite file and without any server: an application writes a job in its own
//! transaction, a relay hands it to a queue in memory, a handler does it once. `cargo run -p postroom-consumer --example worker`

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postroom::{BoxError, Consumer, Message, MessageId, Route, Store, TopicFilter, Wake};
use postroom_brokers::in_process::InProcessBroker;
use postroom_consumer::{Handle, HandlerError, Handlers, Incoming, Receiver};
use postroom_relay::Relay;
use postroom_sqlite::{Database, Sqlite, SqliteSession, SqliteTransaction};
use rusqlite::{TransactionBehavior, params};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

#[derive(Serialize, Deserialize)]
struct SendMail {
    to: String,
}

/// Notes the mail in an outgoing folder; what is in the folder and that the job is done are one transaction.
struct Mails;

#[async_trait]
impl Handle<Sqlite, SendMail> for Mails {
    async fn handle(&self, tx: &mut SqliteTransaction<'_>, job: &Incoming<SendMail>) -> Result<(), HandlerError> {
        if job.attempts == 0 && job.body.to == "customer-3" {
            return Err(HandlerError::Again("the mail server is not there; the first time".into()));
        }
        let to = job.body.to.clone();
        tx.run(move |tx| tx.execute("insert into mails (recipient) values (?1)", [to])).await?;
        Ok(())
    }
}

/// Does so many jobs; returns how many mails there are in the end.
pub async fn run(path: &Path, jobs: i64) -> Result<i64, BoxError> {
    let mut file = postroom_sqlite::connect(path)?;
    postroom_sqlite::migrate(&mut file)?;
    file.execute_batch(
        "create table customers (name text primary key);
         create table mails (recipient text not null);",
    )?;
    let broker = InProcessBroker::new();
    broker.declare_queue("mails", TopicFilter::new(["mails"])?);
    let (stop, stopped) = watch::channel(false);
    let until = |mut stopped: watch::Receiver<bool>| async move {
        let _ = stopped.wait_for(|stopped| *stopped).await;
    };
    let route = Route::new("mails");
    let source = Database::new(path).source(&route, &format!("worker/{}", MessageId::new())).await?;
    let wake = Wake::new();
    let relay = Relay::new(route, source, Arc::new(broker.sink())).wake_by(wake.clone());
    let relay = tokio::spawn(relay.run(until(stopped.clone())));
    let sessions = path.to_owned();
    let handlers = Handlers::new().on("mail.send", Mails);
    let queue = Arc::new(broker.subscribe("mails", 100));
    let receiver = Receiver::new(queue, Consumer::new("mailer")?, handlers, move || SqliteSession::new(&sessions))?;
    let receiver = tokio::spawn(receiver.concurrency(1).run(until(stopped)));

    for n in 0..jobs {
        let tx = file.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let customer = format!("customer-{n}");
        tx.execute("insert into customers values (?1)", params![customer])?;
        let job = Message::json("mails", "mail.send", &SendMail { to: customer.clone() })?.key(customer);
        Sqlite.enqueue_blocking(&tx, &[job])?;
        tx.commit()?;
        wake.notify();
    }
    let mut mails = 0;
    while mails < jobs {
        tokio::time::sleep(Duration::from_millis(20)).await;
        mails = file.query_row("select count(*) from mails", [], |row| row.get(0))?;
    }
    let _ = stop.send(true);
    receiver.await??;
    relay.await?;
    Ok(file.query_row("select count(*) from mails", [], |row| row.get(0))?)
}

#[tokio::main]
#[allow(dead_code, reason = "the tests call `run`")]
async fn main() -> Result<(), BoxError> {
    let path = std::env::temp_dir().join(format!("postroom-worker-{}.db", MessageId::new()));
    println!("{} mails, each once", run(&path, 200).await?);
    Ok(std::fs::remove_file(path)?)
}
