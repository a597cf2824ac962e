//! Throughput of `tracegrad_core::template`.

fn main() {}
