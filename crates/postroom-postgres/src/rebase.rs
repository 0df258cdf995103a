//! After a restore into another cluster the stored transaction ids mean nothing: re-base on what they meant before.

use postroom::StoreError;

use crate::link::Link;

/// Compares the cluster with the one that the positions were written in; in another one, parks every message that the old
/// positions had not consumed and that a new snapshot could not tell, and gives rows and positions ids of this cluster.
/// One transaction; nothing happens in the cluster we know.
pub(crate) async fn rebase_if_restored(link: &Link) -> Result<(), StoreError> {
    let rebased = link
        .call("compare the cluster's identity", async |session| {
            let known =
                "select s.system_identifier = c.system_identifier from postroom.settings s, pg_control_system() c";
            let row = session.client.query_opt(known, &[]).await?;
            if row.is_none_or(|row| row.get::<_, bool>(0)) {
                return Ok(false);
            }
            session.client.batch_execute(include_str!("sql/rebase.sql")).await?;
            Ok(true)
        })
        .await?;
    if rebased {
        tracing::warn!("the database was restored into another cluster: positions were re-based, nothing was skipped");
    }
    Ok(())
}
