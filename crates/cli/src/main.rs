//! The `postbox` binary.

fn main() {}
