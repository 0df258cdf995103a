//! Stands in for a SQL Server, of which none can be had here: it speaks enough of TDS for the driver, and executes each statement on PostgreSQL, put
//! into its words. It shows that statements can be read by a T-SQL grammar and say what they are to say. It shows nothing of SQL Server's locks,
//! isolation, collations, limits or plans.

// What it cannot do is a panic, which the test that asked for it shows.
#![allow(clippy::unwrap_used)]

mod statements;
mod wire;

use tokio::net::{TcpListener, TcpStream};
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

use self::statements::{Said, Translated, said};
use self::wire::{Answer, Asked, Wire};

/// Listens for as long as the runtime lives; its port.
pub async fn start(postgres: String) -> u16 {
    let admin = crate::postgres::connect(&postgres).await;
    admin.batch_execute(include_str!("functions.sql")).await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let postgres = postgres.clone();
            tokio::spawn(async move { Session::new(&postgres, socket).await.serve().await });
        }
    });
    port
}

/// Whether the grammar has read the statement: false for what it does not know. Otherwise the reason why it cannot be read.
pub fn readable(sql: &str) -> Result<bool, String> {
    match said(sql) {
        Said::Definition(_) => Ok(true),
        Said::Statement => statements::read(sql).map(|_| true),
        _ => Ok(false),
    }
}

struct Session {
    wire: Wire,
    postgres: Client,
    open: bool,
    implicit: bool,
    xact_abort: bool,
}

impl Session {
    async fn new(postgres: &str, socket: TcpStream) -> Self {
        let postgres = crate::postgres::connect(postgres).await;
        postgres.batch_execute("set lock_timeout = '5s'; set timezone = 'UTC'").await.unwrap();
        Self { wire: Wire::new(socket), postgres, open: false, implicit: false, xact_abort: false }
    }

    async fn serve(mut self) -> Option<()> {
        loop {
            let asked = self.wire.asked().await?;
            let answer = match &asked {
                Asked::Batch(sql) => self.batch(sql).await,
                Asked::Statement(sql, values) => self.statement(sql, values).await,
            };
            let answer = answer.unwrap_or_else(|(number, message)| Answer::Error(number, message));
            self.wire.answer(&asked, answer).await?;
        }
    }

    async fn begin(&mut self) {
        if !self.open {
            self.postgres.batch_execute("begin").await.unwrap();
            self.open = true;
        }
    }

    async fn end(&mut self, how: &str) {
        if self.open {
            self.postgres.batch_execute(how).await.unwrap();
            self.open = false;
        }
    }

    async fn number(&self) -> i64 {
        let sql = "select pg_current_xact_id()::text::bigint";
        self.postgres.query_one(sql, &[]).await.unwrap().get(0)
    }

    async fn batch(&mut self, sql: &str) -> Result<Answer, (u32, String)> {
        match said(sql) {
            Said::Settings => {
                self.implicit |= sql.contains("implicit_transactions on");
                self.xact_abort = (self.xact_abort || sql.contains("xact_abort on")) && !sql.contains("xact_abort off");
                Ok(Answer::Done(0))
            }
            Said::Begin => {
                self.begin().await;
                Ok(Answer::Done(0))
            }
            Said::BeginAndNumber => {
                self.begin().await;
                Ok(Answer::number(self.number().await))
            }
            Said::Commit(number) => {
                if let Some(number) = number
                    && (!self.open || self.number().await != number)
                {
                    return Err((50002, "its transaction was ended by a statement in it".to_owned()));
                }
                self.end("commit").await;
                Ok(Answer::Done(0))
            }
            Said::Rollback => {
                self.end("rollback").await;
                Ok(Answer::Done(0))
            }
            Said::Save => {
                self.postgres.batch_execute("savepoint postroom_rows").await.unwrap();
                Ok(Answer::Done(0))
            }
            Said::BackToSaved => {
                self.postgres.batch_execute("rollback to savepoint postroom_rows").await.unwrap();
                Ok(Answer::Done(0))
            }
            Said::Lock => Ok(Answer::number(0)),
            Said::Definition(sql) => self
                .postgres
                .batch_execute(&sql)
                .await
                .map(|()| Answer::Done(0))
                .map_err(|error| self::failure(&error, &sql)),
            Said::Nothing => Ok(Answer::Done(0)),
            Said::Statement => self.statement(sql, &[]).await,
        }
    }

    async fn statement(&mut self, sql: &str, values: &[wire::Value]) -> Result<Answer, (u32, String)> {
        let within = sql.trim_start().strip_prefix("if @@trancount = 0 begin; throw 50001");
        let mut sql = match within {
            Some(_) if !self.open => return Err((50001, "there is no transaction".to_owned())),
            Some(rest) => rest.split_once(" end;").map_or("", |(_, sql)| sql),
            None => sql,
        };
        // Settings of the statement alone, and how many rows it was about as a row of its own.
        let alone = sql.trim_start().strip_prefix("set nocount on; set xact_abort off;");
        let counted = alone.and_then(|sql| sql.trim_end().strip_suffix("select @@rowcount as admitted"));
        if let Some(insert) = counted {
            sql = insert.trim_end().trim_end_matches(';');
        }
        let rest = sql.trim_start().strip_prefix("set xact_abort off;");
        sql = rest.unwrap_or(sql);
        let answer = self.alone(sql, values, self.xact_abort && counted.is_none() && rest.is_none()).await?;
        Ok(match answer {
            Answer::Done(count) if counted.is_some() => Answer::number(count as i64),
            answer => answer,
        })
    }

    async fn alone(&mut self, sql: &str, values: &[wire::Value], xact_abort: bool) -> Result<Answer, (u32, String)> {
        let Translated { sql, reads, parameters } =
            statements::translated(sql, values).map_err(|problem| (102, format!("{problem}: {sql}")))?;
        if self.implicit {
            self.begin().await;
        }
        if self.open {
            self.postgres.batch_execute("savepoint s").await.unwrap();
        }
        let parameters: Vec<&(dyn tokio_postgres::types::ToSql + Sync)> =
            parameters.iter().map(|index| values[*index].parameter()).collect();
        let done = match reads {
            true => self.postgres.query(&sql, &parameters).await.map(|rows| Answer::rows(&rows)),
            false => self.postgres.execute(&sql, &parameters).await.map(Answer::Done),
        };
        match done {
            Ok(answer) => {
                if self.open {
                    self.postgres.batch_execute("release savepoint s").await.unwrap();
                }
                Ok(answer)
            }
            Err(error) => {
                if xact_abort || error.code() == Some(&SqlState::T_R_DEADLOCK_DETECTED) {
                    self.end("rollback").await;
                } else if self.open {
                    self.postgres.batch_execute("rollback to savepoint s").await.unwrap();
                }
                Err(failure(&error, &sql))
            }
        }
    }
}

/// The number and the words of SQL Server for what PostgreSQL says.
fn failure(error: &tokio_postgres::Error, sql: &str) -> (u32, String) {
    let constraint = error.as_db_error().and_then(|error| error.constraint()).unwrap_or_default();
    let number = match error.code() {
        Some(&SqlState::UNIQUE_VIOLATION) => {
            return (
                2627,
                format!(
                    "Violation of UNIQUE KEY constraint '{constraint}'. Cannot insert duplicate key in object 'x'."
                ),
            );
        }
        Some(&SqlState::CHECK_VIOLATION) => {
            return (547, format!("The INSERT statement conflicted with the CHECK constraint \"{constraint}\"."));
        }
        Some(&SqlState::NOT_NULL_VIOLATION) => 515,
        Some(&SqlState::STRING_DATA_RIGHT_TRUNCATION) => 2628,
        Some(&SqlState::T_R_DEADLOCK_DETECTED) => 1205,
        Some(&SqlState::LOCK_NOT_AVAILABLE) => 1222,
        Some(&SqlState::UNDEFINED_TABLE) => 208,
        _ => 50000,
    };
    (number, format!("{error:?}: {sql}"))
}
