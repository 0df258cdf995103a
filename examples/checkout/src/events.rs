//! What the services tell each other.

use postroom::Event;
use serde::{Deserialize, Serialize};

macro_rules! event {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $version:literal) => {
        $(#[$doc])*
        #[derive(Debug, Serialize, Deserialize)]
        pub struct $name {
            pub order: String,
            pub cents: i64,
        }

        impl Event for $name {
            const TOPIC: &'static str = "checkout";
            const TYPE: &'static str = $kind;
            const AGGREGATE_TYPE: &'static str = "order";

            fn aggregate_id(&self) -> String {
                self.order.clone()
            }

            fn aggregate_version(&self) -> i64 {
                $version
            }
        }
    };
}

event!(
    /// A customer ordered.
    OrderPlaced, "order.placed", 1
);
event!(
    /// The money is there.
    PaymentTaken, "payment.taken", 2
);
event!(
    /// There is no money.
    PaymentRefused, "payment.refused", 2
);
event!(
    /// The goods are set aside.
    StockReserved, "stock.reserved", 3
);
