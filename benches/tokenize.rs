//! Throughput of `tracegrad_core::tokenizer`, in bytes of text and in tokens.
//!
//! Uses the example's tokenizer, or the directory in the first argument that names one with a tokenizer.json.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use std::path::{Path, PathBuf};
use tracegrad_core::tokenizer::Tokenizer;

fn directory() -> Option<PathBuf> {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/quickstart/model");
    let named = std::env::args().skip(1).map(PathBuf::from);
    named.chain([example]).find(|directory| directory.join("tokenizer.json").exists())
}

/// Prose, code, numbers and other scripts, no two paragraphs alike.
fn text() -> String {
    let paragraph = |n: usize| {
        format!(
            "<|im_start|>user\nOrder {n}: {} crates at {}.{:02} € each, “naïve” pricing — 你好，世界 😊\n\
             def total_{n}(items):\n    return sum(item['price'] * {n} for item in items)\n<|im_end|>\n",
            n * 7 % 113,
            n % 97,
            n % 100,
        )
    };
    (0..400).map(paragraph).collect()
}

fn encode(criterion: &mut Criterion) {
    let Some(directory) = directory() else {
        eprintln!("no tokenizer.json: make the example first, or name a directory that has one");
        return;
    };
    let tokenizer = Tokenizer::from_dir(&directory).expect("the tokenizer loads");
    let text = text();
    let tokens = tokenizer.encode(&text).expect("the text is encoded").len();
    let mut group = criterion.benchmark_group("tokenize");
    group.sample_size(20);
    for (unit, throughput) in
        [("bytes", Throughput::Bytes(text.len() as u64)), ("tokens", Throughput::Elements(tokens as u64))]
    {
        group.throughput(throughput);
        group.bench_function(format!("encode/{unit}"), |bencher| bencher.iter(|| tokenizer.encode(black_box(&text))));
        group.bench_function(format!("encode_with_ends/{unit}"), |bencher| {
            bencher.iter(|| tokenizer.encode_with_ends(black_box(&text)));
        });
    }
    let rows: Vec<&str> = text.split_inclusive("<|im_end|>\n").collect();
    group.throughput(Throughput::Elements(tokens as u64));
    group.bench_function("encode_batch/tokens", |bencher| bencher.iter(|| tokenizer.encode_batch(black_box(&rows))));
    group.finish();
}

criterion_group!(benches, encode);
criterion_main!(benches);
