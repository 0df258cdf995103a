//! After a restore into another cluster the stored transaction ids mean nothing: re-base on what they meant before.

use postroom::StoreError;

use crate::link::Link;

/// Compares the cluster with the one that the positions were written in; in another one, parks every message that the old
/// positions had not consumed and that a new snapshot could not tell, and gives rows and positions ids of this cluster.
/// One transaction, which rewrites the outbox and may take long; nothing happens in the cluster we know.
pub(crate) async fn rebase_if_restored(link: &Link, generation: u64) -> Result<(), StoreError> {
    let known = "select s.system_identifier = c.system_identifier from postroom.settings s, pg_control_system() c";
    let rebased = link
        .call(generation, "compare the cluster's identity", async |session| {
            let same = async |client: &tokio_postgres::Transaction<'_>| {
                client.query_opt(known, &[]).await.map(|row| row.is_none_or(|row| row.get::<_, bool>(0)))
            };
            let tx = session.client.transaction().await?;
            if same(&tx).await? {
                return Ok(false);
            }
            tx.batch_execute(
                "set local statement_timeout = 0; set local lock_timeout = 0;
                 lock table postroom.lanes, postroom.outbox, postroom.settings in access exclusive mode",
            )
            .await?;
            // Another relay may have done it while we waited for the lock.
            if same(&tx).await? {
                return Ok(false);
            }
            tx.batch_execute(include_str!("sql/rebase.sql")).await?;
            tx.commit().await?;
            Ok(true)
        })
        .await?;
    if rebased {
        tracing::warn!("the database was restored into another cluster: positions were re-based, nothing was skipped");
    }
    Ok(())
}
