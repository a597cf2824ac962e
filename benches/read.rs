//! Throughput of `tracegrad_core::read` in GB/s of records (after decompression) to the traces that a user gets: one file
//! of long texts, one of token lists in three layouts. *kept* keeps all traces until the end of the file and drops them
//! outside the time; the others drop each when the next arrives. Making the records takes longer than reading them: allow
//! `--profile-time` some ten seconds, and leave out paths outside of `read`.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use serde_json::{Value, json};
use std::hint::black_box;
use std::io::Cursor;
use std::sync::Arc;
use tracegrad_core::read::{Options, Reader};
use tracegrad_core::trace::Trace;

/// The allocator of the extension.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const WORDS: &[&str] =
    &["the", "price", "of", "three", "lamps", "is", "42", "€", "so", "we", "call", "`stock`", "\n", "\"x\"", "naïve"];

/// A small generator of its own, so that every run reads the same bytes.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn word(&mut self) -> &'static str {
        WORDS[self.next() as usize % WORDS.len()]
    }

    fn text(&mut self, words: usize) -> String {
        (0..words).map(|_| self.word()).collect::<Vec<_>>().join(" ")
    }
}

/// Twelve messages of some 1.5 kB each, no token lists.
fn text_record(dice: &mut Dice, index: usize) -> Value {
    let roles = ["user", "assistant", "tool"];
    let messages: Vec<_> = (0..12).map(|turn| json!({"role": roles[turn % 3], "content": dice.text(300)})).collect();
    json!({"id": format!("t{index}"), "group": index / 8, "reward": 1.0, "messages": messages})
}

/// A call with 400 sampled tokens as vLLM lists them: text, logprob, bytes, and the ids next to them.
fn token_record(dice: &mut Dice, index: usize) -> Value {
    let entries: Vec<_> = (0..400)
        .map(|_| {
            let token = dice.word();
            let logprob = -(dice.next() as f64) / f64::from(u32::MAX) * 4.0;
            json!({"token": token, "logprob": logprob, "bytes": token.as_bytes(), "top_logprobs": []})
        })
        .collect();
    let ids: Vec<_> = (0..400).map(|_| dice.next() % 151_936).collect();
    let choice = json!({"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": dice.text(400)},
        "logprobs": {"content": entries}, "token_ids": ids});
    json!({"id": format!("t{index}"), "request": {"messages": [{"role": "user", "content": dice.text(50)}]},
        "response": {"prompt_token_ids": ids, "choices": [choice]}})
}

fn lines(record: fn(&mut Dice, usize) -> Value, count: usize, colon: &str, comma: &str) -> Vec<u8> {
    let mut dice = Dice(1);
    let mut line = |index| spaced(&record(&mut dice, index).to_string(), colon, comma) + "\n";
    (0..count).flat_map(|index| line(index).into_bytes()).collect()
}

/// Compact JSON with other separators.
fn spaced(compact: &str, colon: &str, comma: &str) -> String {
    let (mut out, mut in_string, mut escaped) = (String::new(), false, false);
    for character in compact.chars() {
        match character {
            ':' if !in_string => out.push_str(colon),
            ',' if !in_string => out.push_str(comma),
            other => out.push(other),
        }
        in_string ^= character == '"' && !escaped;
        escaped = character == '\\' && !escaped;
    }
    out
}

fn open(bytes: &Arc<[u8]>) -> impl Iterator<Item = Trace> {
    let reader = Reader::from_reader(Cursor::new(Arc::clone(bytes)), "bench", Options::default()).expect("it opens");
    reader.map(|trace| trace.expect("a good record"))
}

fn read(bytes: &Arc<[u8]>) -> usize {
    open(bytes).map(|trace| trace.generations.len()).sum()
}

fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("read");
    group.sample_size(10);
    let files = [
        ("text", lines(text_record, 2000, ":", ",")),
        ("logprobs", lines(token_record, 800, ":", ",")),
        ("logprobs, spaced", lines(token_record, 800, ": ", ", ")),
        ("logprobs, odd layout", lines(token_record, 800, " :  ", " ,")),
    ];
    for (name, plain) in files {
        group.throughput(Throughput::Bytes(plain.len() as u64));
        let packed: Arc<[u8]> = zstd::encode_all(&plain[..], 3).expect("memory takes it").into();
        let plain: Arc<[u8]> = plain.into();
        for (container, bytes) in [("plain", &plain), ("zstd", &packed)] {
            group.bench_with_input(BenchmarkId::new(name, container), bytes, |bencher, bytes| {
                bencher.iter(|| black_box(read(bytes)));
            });
        }
        group.bench_with_input(BenchmarkId::new(name, "plain, kept"), &plain, |bencher, bytes| {
            bencher.iter_with_large_drop(|| open(bytes).map(Arc::new).collect::<Vec<_>>());
        });
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
