//! Times for people.

/// A time as people say it: `0.4s`, `12s`, `59m 58s`, `3h 5m`, `2d 4h`.
pub fn lasting(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 0.0 {
        return "0s".to_owned();
    }
    if seconds < 9.95 {
        return format!("{seconds:.1}s");
    }
    let whole = seconds.round() as u64;
    let two = |large: u64, large_unit: &str, small: u64, small_unit: &str| match small {
        0 => format!("{large}{large_unit}"),
        small => format!("{large}{large_unit} {small}{small_unit}"),
    };
    match whole {
        0..60 => format!("{whole}s"),
        60..3600 => two(whole / 60, "m", whole % 60, "s"),
        3600..86_400 => two(whole / 3600, "h", whole % 3600 / 60, "m"),
        _ => two(whole / 86_400, "d", whole % 86_400 / 3600, "h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_as_people_say_them() {
        let said = [0.04, 9.94, 9.96, 60.0, 3598.0, 3600.0, 11_100.0, 187_200.0, -1.0, f64::NAN].map(lasting);
        assert_eq!(said, ["0.0s", "9.9s", "10s", "1m", "59m 58s", "1h", "3h 5m", "2d 4h", "0s", "0s"]);
    }
}
