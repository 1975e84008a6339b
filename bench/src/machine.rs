//! What the machine says of itself and of a process.

use anyhow::Context as _;

/// Peak resident memory of this process in MiB.
pub(crate) fn memory_peak_mib() -> anyhow::Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).context("no VmHWM")?;
    let kib: f64 = line.split_whitespace().nth(1).context("no number")?.parse()?;
    Ok(kib / 1024.0)
}

/// Bytes this process has handed to the kernel to write: files, sockets and all.
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

/// Processor time a process and its children, those that have ended too, have used, in seconds.
pub(crate) fn processor_seconds_of_family(pid: u32) -> anyhow::Result<f64> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).context("the children")?;
    // A child that ends meanwhile is counted by its parent.
    let living: f64 = children.split_whitespace().filter_map(|child| times(child).ok()).flatten().sum();
    Ok(living + times(&pid.to_string())?.iter().sum::<f64>())
}

/// User and system time of a process, and of its children that have ended, in seconds.
fn times(pid: &str) -> anyhow::Result<[f64; 4]> {
    /// What Linux counts in, on every architecture we run on (`sysconf(_SC_CLK_TCK)`).
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).context("no such process")?;
    // The name in parentheses may contain anything; fields count from behind it.
    let fields = stat.rsplit_once(')').context("no name")?.1.split_whitespace();
    let mut ticks = fields.skip(11).map(|field| field.parse::<f64>().unwrap_or(0.0));
    Ok(std::array::from_fn(|_| ticks.next().unwrap_or(0.0) / TICKS_PER_SECOND))
}

/// One line about the machine and how busy it is: ratios taken in one run compare, absolute figures
/// of a shared machine do not.
pub(crate) fn describe() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split_whitespace().next().unwrap_or("?").to_owned();
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    format!(
        "{cores} cores, load {load} at the start; compare ratios, not absolute figures, and processor time where others are at work"
    )
}
