//! The trail of what operators do.

use mysql_async::Error;
use mysql_async::prelude::Queryable;
use postroom::Deed;

use crate::log::json;

/// Writes what an operator does, in the transaction that does it.
pub(crate) async fn audit<T: AsRef<str>>(
    tx: &mut impl Queryable,
    deed: &Deed,
    action: &str,
    conditions: &str,
    ids: &[T],
) -> Result<(), Error> {
    let ids: Vec<&str> = ids.iter().map(AsRef::as_ref).collect();
    let sql = "insert into postroom_audit (actor, action, reason, filter, message_ids) values (?, ?, ?, ?, ?)";
    tx.exec_drop(sql, (&deed.actor, action, &deed.reason, conditions, json(&ids))).await
}
