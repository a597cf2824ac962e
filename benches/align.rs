//! Throughput of `tracegrad_core::align`.

fn main() {}
