//! How large a store is and how fast it grows.

use std::time::SystemTime;

use serde::Serialize;

/// Sizes of a store at one moment.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Vitals {
    /// The database's clock.
    #[serde(skip)]
    pub now: SystemTime,
    /// All of postroom's tables with their indexes; for a store that is one file, the whole file, whatever else is in it.
    pub bytes: i64,
    /// How fast it grows; none: it was not measured for long enough.
    pub growth: Option<Growth>,
    /// Table by table.
    pub tables: Vec<TableVitals>,
}

/// Size of one table.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TableVitals {
    /// Name of the table.
    pub table: String,
    /// Rows; an estimate where counting would be expensive.
    pub rows: i64,
    /// Rows that were deleted or replaced and whose space is not free yet; none: the store has no such thing.
    pub dead_rows: Option<i64>,
    /// Without its indexes; none: not known.
    pub bytes: Option<i64>,
    /// Of its indexes; none: not known.
    pub index_bytes: Option<i64>,
    /// How fast it grows; none: it was not measured for long enough.
    pub growth: Option<Growth>,
}

/// The difference between now and an earlier measurement, per day. What is removed counts as well, so it can be negative.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Growth {
    /// Time between the two, in seconds; a day where the store was measured for that long.
    pub over_seconds: f64,
    /// Rows a day; none: not counted.
    pub rows_per_day: Option<f64>,
    /// Bytes a day, with indexes; none: not known.
    pub bytes_per_day: Option<f64>,
}

impl Growth {
    /// The growth since rows and bytes were as given, `over_seconds` ago.
    pub fn since(over_seconds: f64, rows: Option<(i64, i64)>, bytes: Option<(i64, i64)>) -> Self {
        let per_day = |(before, now): (i64, i64)| now.saturating_sub(before) as f64 * 86_400.0 / over_seconds.max(1.0);
        Self { over_seconds, rows_per_day: rows.map(per_day), bytes_per_day: bytes.map(per_day) }
    }
}

impl Vitals {
    /// Days until the store reaches this size, if it goes on as now; zero: it has; none: it does not grow, or that is not known.
    pub fn days_until(&self, capacity_bytes: i64) -> Option<f64> {
        let left = capacity_bytes.saturating_sub(self.bytes);
        if left <= 0 {
            return Some(0.0);
        }
        let a_day = self.growth.and_then(|growth| growth.bytes_per_day).filter(|bytes| *bytes > 0.0)?;
        Some(left as f64 / a_day)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sized(bytes: i64, growth: Option<Growth>) -> Vitals {
        Vitals { now: SystemTime::UNIX_EPOCH, bytes, growth, tables: Vec::new() }
    }

    #[test]
    fn growth_is_the_difference_per_day() {
        let half_a_day = Growth::since(43_200.0, Some((100, 600)), Some((1000, 500)));
        assert_eq!((half_a_day.rows_per_day, half_a_day.bytes_per_day), (Some(1000.0), Some(-1000.0)));
    }

    #[test]
    fn a_capacity_is_reached_only_by_what_grows() {
        let growing = Growth::since(86_400.0, None, Some((0, 100)));
        let shrinking = Growth::since(86_400.0, None, Some((100, 0)));
        assert_eq!(sized(400, Some(growing)).days_until(1000), Some(6.0));
        assert_eq!(sized(400, Some(shrinking)).days_until(1000), None);
        assert_eq!(sized(400, None).days_until(1000), None);
        assert_eq!(sized(1400, None).days_until(1000), Some(0.0), "it is full already");
    }
}
