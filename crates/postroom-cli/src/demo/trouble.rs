//! A sink that sends some messages twice, as a relay does that crashed before it could note the confirm.

use async_trait::async_trait;
use postroom::{Batch, Sink, SinkLimits, Unavailable, Verdicts};

const EVERY: usize = 20;

pub struct SendsSomeTwice<S>(S);

impl<S: Sink> SendsSomeTwice<S> {
    pub fn new(sink: S) -> Self {
        Self(sink)
    }
}

#[async_trait]
impl<S: Sink> Sink for SendsSomeTwice<S> {
    fn limits(&self) -> SinkLimits {
        self.0.limits()
    }

    async fn publish(&self, batch: &Batch) -> Result<Verdicts, Unavailable> {
        let verdicts = self.0.publish(batch).await?;
        let again =
            batch.messages().iter().filter(|message| (message.id.as_uuid().as_u128() as usize).is_multiple_of(EVERY));
        let again = Batch::new(again.cloned());
        if !again.messages().is_empty() {
            // Its verdicts do not matter: the first ones do.
            let _ = self.0.publish(&again).await;
        }
        Ok(verdicts)
    }

    async fn probe(&self) -> Result<(), Unavailable> {
        self.0.probe().await
    }

    async fn close(&self) {
        self.0.close().await;
    }
}
