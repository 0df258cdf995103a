//! `postroom sizes`: how large the tables are, how fast they grow, and when the store is full.

use clap::Args;
use postroom::{Growth, TableVitals, lasting};

use crate::StoreArgs;
use crate::config;
use crate::exit::Failure;
use crate::say::show;
use crate::table::{Table, number};

#[derive(Debug, Args)]
pub struct SizesArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// How large the store may become, in bytes; by default, store.capacity_bytes of the configuration
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(i64).range(1..))]
    capacity: Option<i64>,
}

pub async fn sizes(args: &SizesArgs, json: bool) -> Result<(), Failure> {
    let vitals = args.store.open().await?.vitals().await?;
    // Whoever names a store by its URL need not have a configuration.
    let capacity = args.capacity.or_else(|| {
        let named = args.store.config.exists().then(|| config::load(&args.store.config).ok());
        named.flatten().and_then(|config| config.capacity_bytes)
    });
    let days = capacity.and_then(|capacity| vitals.days_until(capacity));
    if json {
        let mut object = serde_json::to_value(&vitals).unwrap_or_default();
        (object["capacity_bytes"], object["days_until_full"]) = (capacity.into(), days.into());
        show!("{object}");
        return Ok(());
    }
    let mut table = Table::new(&["TABLE", ">ROWS", ">DEAD ROWS", ">SIZE", ">INDEXES", ">ROWS A DAY", ">SIZE A DAY"]);
    for TableVitals { table: name, rows, dead_rows, bytes, index_bytes, growth } in &vitals.tables {
        let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
        table.row([
            name.clone(),
            number(*rows, false),
            or_dash(dead_rows.map(|rows| number(rows, false))),
            or_dash(bytes.map(size)),
            or_dash(index_bytes.map(size)),
            or_dash(
                growth.and_then(|growth| growth.rows_per_day).map(|rows| signed(rows, &|rows| number(rows, false))),
            ),
            or_dash(growth.and_then(|growth| growth.bytes_per_day).map(|bytes| signed(bytes, &size))),
        ]);
    }
    table.lines().iter().for_each(|line| show!("{line}"));
    let grows = match vitals.growth {
        Some(Growth { over_seconds, bytes_per_day: Some(bytes), .. }) => {
            format!("{} a day, measured over {}", signed(bytes, &size), lasting(over_seconds))
        }
        _ => "its growth is known after an hour; a relay with [admin] notes the sizes".to_owned(),
    };
    show!("in all {}; {grows}", size(vitals.bytes));
    match (capacity, days) {
        (None, _) => {}
        (Some(capacity), Some(0.0)) => show!("the capacity of {} is reached", size(capacity)),
        (Some(capacity), Some(days)) => {
            show!("about {days:.0} days until {}, if it grows on like this", size(capacity))
        }
        (Some(capacity), None) => {
            show!("it does not grow towards its capacity of {}, as far as is known", size(capacity))
        }
    }
    Ok(())
}

/// Bytes for people, in powers of 1024.
fn size(bytes: i64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = "B";
    for larger in units {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, larger);
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") }
}

/// With a sign, since what is removed counts as well.
fn signed(value: f64, shown: &dyn Fn(i64) -> String) -> String {
    format!("{}{}", if value < 0.0 { '-' } else { '+' }, shown(value.abs() as i64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short() {
        let shown: Vec<String> = [0, 1023, 1024, 1536, 5 << 30].into_iter().map(size).collect();
        assert_eq!(shown, ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 GiB"]);
        assert_eq!((signed(2048.0, &size), signed(-3.0, &size)), ("+2.0 KiB".to_owned(), "-3 B".to_owned()));
    }
}
