//! Information about the machine and its processes.

use anyhow::Context as _;

/// Peak resident memory of this process in MiB.
pub(crate) fn memory_peak_mib() -> anyhow::Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).context("no VmHWM")?;
    let kib: f64 = line.split_whitespace().nth(1).context("no number")?.parse()?;
    Ok(kib / 1024.0)
}

/// Bytes this process has written: to files, sockets and everything else.
pub(crate) fn written_bytes() -> anyhow::Result<f64> {
    let io = std::fs::read_to_string("/proc/self/io").context("/proc/self/io")?;
    let line = io.lines().find_map(|line| line.strip_prefix("wchar: ")).context("no wchar")?;
    Ok(line.trim().parse()?)
}

/// Processor time this process has used, in seconds.
pub(crate) fn processor_seconds() -> anyhow::Result<f64> {
    let [user, system, ..] = times("self")?;
    Ok(user + system)
}

/// Processor time used by a process and its children, ended ones included, in seconds.
pub(crate) fn processor_seconds_of_family(pid: u32) -> anyhow::Result<f64> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).context("the children")?;
    // A child that ends meanwhile is counted by its parent.
    let living: f64 = children.split_whitespace().filter_map(|child| times(child).ok()).flatten().sum();
    Ok(living + times(&pid.to_string())?.iter().sum::<f64>())
}

/// User and system time of a process, and of its ended children, in seconds.
fn times(pid: &str) -> anyhow::Result<[f64; 4]> {
    /// Linux's unit for these times on every architecture we support (`sysconf(_SC_CLK_TCK)`).
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).context("no such process")?;
    // The name in parentheses may contain anything; fields are counted after it.
    let fields = stat.rsplit_once(')').context("no name")?.1.split_whitespace();
    let mut ticks = fields.skip(11).map(|field| field.parse::<f64>().unwrap_or(0.0));
    Ok(std::array::from_fn(|_| ticks.next().unwrap_or(0.0) / TICKS_PER_SECOND))
}

/// One line about the machine and its load. Ratios within one run are comparable; absolute figures
/// of a shared machine are not.
pub(crate) fn describe() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split_whitespace().next().unwrap_or("?").to_owned();
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    format!(
        "{cores} cores, load {load} at the start; compare ratios, not absolute figures, and processor time where others are at work"
    )
}
