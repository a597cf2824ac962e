//! Throughput of `tracegrad_core::align` in tokens/s. *whole, ...*: the bundled example's recorded traces, by what their
//! records contain: ids (T0, T1), bytes of tokens (T2, T3), and all of them, with all that a turn costs (template, cache of
//! renders, findings). *byte remap* and *ids recorded*: one turn of a megabyte.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;
use tracegrad_core::align::{Options, align};
use tracegrad_core::read::{self, Reader};
use tracegrad_core::tokenizer::Tokenizer;
use tracegrad_core::trace::{Generation, Pieces, Prompt, Tokens, Trace};

/// The allocator of the extension.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn example() -> (Vec<Arc<Trace>>, Tokenizer) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/quickstart");
    let reader =
        Reader::open(&folder.join("traces.jsonl.zst"), read::Options::default()).expect("the example is there");
    let traces = reader.map(|trace| trace.map(Arc::new)).collect::<Result<Vec<_>, _>>().expect("its records are good");
    (traces, Tokenizer::from_dir(&folder.join("model")).expect("its tokenizer loads"))
}

fn has_ids(trace: &Trace) -> bool {
    trace.generations.iter().all(|generation| generation.tokens.ids.is_some())
}

fn bench(c: &mut Criterion) {
    let (traces, tokenizer) = example();
    let (ids, bytes): (Vec<_>, Vec<_>) = traces.iter().cloned().partition(|trace| has_ids(trace));
    let mut group = c.benchmark_group("align");
    group.sample_size(10);
    for (name, traces) in [("whole, ids", ids), ("whole, bytes", bytes), ("whole, all", traces)] {
        let tokens = align(&traces, &tokenizer, None, Options::default()).expect("they align").ids.len();
        group.throughput(Throughput::Elements(tokens as u64));
        group.bench_with_input(BenchmarkId::from_parameter(name), &traces, |b, traces| {
            b.iter(|| align(black_box(traces), &tokenizer, None, Options::default()).expect("they align").ids.len());
        });
    }
    group.finish();
}

/// One turn of a megabyte, its tokens recorded as bytes or as ids: the remap itself, hardly a template.
///
/// Included: each token's bytes to its id, the columns of its branch and of the flat result. Nothing may be quadratic.
fn one_turn(c: &mut Criterion) {
    let (traces, tokenizer) = example();
    let text = "the price of two red lamps is 12 €, さき. ".repeat(25_000);
    let ids = tokenizer.encode(&text).expect("it encodes");
    let mut pieces = Pieces::default();
    for &id in &ids {
        pieces.push(tokenizer.token_bytes(id));
    }
    let logprobs = Some(vec![-0.5; ids.len()]);
    let by_bytes = Tokens { bytes: Some(pieces), logprobs: logprobs.clone(), ..Tokens::default() };
    let by_ids = Tokens { ids: Some(ids.clone()), logprobs, ..Tokens::default() };
    let mut group = c.benchmark_group("align");
    group.sample_size(10).throughput(Throughput::Elements(ids.len() as u64));
    for (name, tokens) in [("byte remap", by_bytes), ("ids recorded", by_ids)] {
        let prompt = Prompt::Ids(vec![1]);
        let generation = Generation { tokens, prompt, text: Some(text.clone()), ..Generation::default() };
        let trace = Trace { generations: vec![generation], ..Trace::clone(&traces[0]) };
        let traces = [Arc::new(trace)];
        group.bench_function(name, |b| {
            b.iter(|| align(black_box(&traces), &tokenizer, None, Options::default()).expect("it aligns").ids.len());
        });
    }
    group.finish();
}

criterion_group!(benches, bench, one_turn);
criterion_main!(benches);
