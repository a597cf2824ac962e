//! Throughput of `tracegrad_core::read`.

fn main() {}
