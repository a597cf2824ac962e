//! Throughput of `tracegrad_core::ratio`.

fn main() {}
