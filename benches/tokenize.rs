//! Throughput of `tracegrad_core::tokenizer`.

fn main() {}
