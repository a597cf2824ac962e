//! Throughput of `tracegrad_core::pack`.

fn main() {}
