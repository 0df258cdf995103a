//! The trail of what operators do.

use postroom::Deed;
use tiberius::error::Error;

use crate::conn::Conn;
use crate::sql::{json, named};

/// Writes what an operator does, in the transaction that does it.
pub(crate) async fn audit<T: AsRef<str>>(
    tx: &mut Conn,
    deed: &Deed,
    action: &str,
    conditions: &str,
    ids: &[T],
) -> Result<(), Error> {
    let ids: Vec<&str> = ids.iter().map(AsRef::as_ref).collect();
    let sql = "insert into postroom_audit (actor, action, reason, filter, message_ids) values (@actor, @action, @reason, @filter, @ids)";
    let parameters = named! {
        "actor" => &deed.actor, "action" => action, "reason" => &deed.reason, "filter" => conditions, "ids" => json(&ids)
    };
    tx.exec(sql, parameters).await.map(drop)
}
