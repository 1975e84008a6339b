//! Durations and sizes, as people write them.

use std::time::Duration;

/// Longest duration accepted in a configuration: a hundred years. Larger ones overflow the
/// databases' intervals.
const DURATION_MAX: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Reads `250ms`, `1s`, `5m`, `2h`, `7d` or a sum such as `1h30m`.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let bad = || {
        format!(
            "{text:?} is not a valid duration; write a number and a unit (ms, s, m, h, d), e.g. \"30s\" or \"1h30m\""
        )
    };
    let mut rest = text.trim();
    let mut total = Duration::ZERO;
    if rest.is_empty() {
        return Err(bad());
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?;
        let number: u64 = rest[..digits].parse().map_err(|_| bad())?;
        let tail = &rest[digits..];
        let unit_end = tail.find(|c: char| c.is_ascii_digit()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit_end);
        let ms = match unit.trim() {
            "ms" => 1,
            "s" => 1_000,
            "m" | "min" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return Err(bad()),
        };
        let part = number.checked_mul(ms).map(Duration::from_millis).ok_or_else(bad)?;
        total = total
            .checked_add(part)
            .filter(|total| *total <= DURATION_MAX)
            .ok_or_else(|| format!("{text:?} is too long a time; at most 36500d"))?;
        rest = tail;
    }
    Ok(total)
}

/// Formats a duration as a person would write it in a configuration: `3d`, `90m`, `1500ms`.
pub fn duration_text(duration: Duration) -> String {
    let ms = duration.as_millis();
    let units = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000)];
    let exact = units.into_iter().find(|(_, unit)| ms >= *unit && ms.is_multiple_of(*unit));
    exact.map_or_else(|| format!("{ms}ms"), |(name, unit)| format!("{}{name}", ms / unit))
}

/// Reads `512KiB`, `8MiB`, `1MB` or a plain number of bytes.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let bad = || {
        format!("{text:?} is not a valid size; write a number and a unit (B, KB, KiB, MB, MiB, GB, GiB), e.g. \"8MiB\"")
    };
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..digits].parse().map_err(|_| bad())?;
    let factor = match text[digits..].trim() {
        "" | "B" => 1,
        "KB" | "kB" => 1_000,
        "KiB" => 1 << 10,
        "MB" => 1_000_000,
        "MiB" => 1 << 20,
        "GB" => 1_000_000_000,
        "GiB" => 1 << 30,
        _ => return Err(bad()),
    };
    number.checked_mul(factor).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_as_people_write_them() {
        for (text, ms) in
            [("250ms", 250), ("1s", 1_000), ("5m", 300_000), ("1h30m", 5_400_000), ("7d", 604_800_000), ("0s", 0)]
        {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "5", "s", "5 parsecs", "-1s", "1.5s", "99999999999999999999s", "9999999999d", "1s2"] {
            assert!(parse_duration(text).is_err(), "{text} was accepted");
        }
    }

    #[test]
    fn sizes_as_people_write_them() {
        for (text, bytes) in [("0", 0), ("12B", 12), ("8MiB", 8 << 20), ("1 MB", 1_000_000)] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "MiB", "8 elephants", "-1", "99999999999GiB"] {
            assert!(parse_size(text).is_err(), "{text} was accepted");
        }
    }
}
