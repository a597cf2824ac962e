//! Throughput of `tracegrad_core::pack`: placement in branches a second, all of it in tokens a second, without and
//! with shared prefixes.

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use tracegrad_core::pack::{
    BestFit, BranchLengths, Branches, Cost, Layout, PackRequest, Placement, Plan, RowUnit, Tokens, TooLong, measure,
    place, write_rows, write_rows_into,
};

/// The allocator of the extension.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Lengths with the long tail of real traces: about 1,000 tokens, at most 8,192, the same on every run.
fn lengths(count: usize) -> Vec<usize> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    let mut normal = || (0..12).map(|_| uniform()).sum::<f64>() - 6.0;
    (0..count).map(|_| (6.9 + 0.8 * normal()).exp().clamp(16.0, 8192.0) as usize).collect()
}

fn placement(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pack/best_fit");
    for count in [10_000, 1_000_000] {
        let mut sorted = lengths(count);
        sorted.sort_unstable_by_key(|&length| std::cmp::Reverse(length));
        group.throughput(Throughput::Elements(count as u64));
        group.bench_function(format!("{count} branches"), |bencher| {
            bencher.iter_batched_ref(
                || BestFit::new(8192),
                |rows| sorted.iter().map(|&length| rows.place(black_box(length))).fold(0, u32::max),
                BatchSize::LargeInput,
            );
        });
    }
    group.finish();
}

/// Branches as flat arrays, a trace each, `per_step` of them in a step.
struct Given {
    ids: Vec<i32>,
    cu: Vec<i64>,
    trace: Vec<i32>,
    step: Vec<i32>,
    trainable: Vec<bool>,
    inv_temperature: Vec<f32>,
}

impl Given {
    fn new(ids: Vec<i32>, lengths: &[usize], per_step: i32, term: impl Fn(usize) -> bool) -> Self {
        let mut cu = vec![0i64];
        cu.extend(lengths.iter().scan(0, |total, &length| {
            *total += length as i64;
            Some(*total)
        }));
        let trace: Vec<i32> = (0..lengths.len() as i32).collect();
        let step = trace.iter().map(|trace| trace / per_step).collect();
        let trainable = lengths.iter().flat_map(|&length| (0..length).map(&term)).collect();
        let inv_temperature = vec![1.0; ids.len()];
        Self { ids, cu, trace, step, trainable, inv_temperature }
    }

    /// The first two steps: how much of each branch, and its place.
    fn place(&self, tokens_per_row: usize, least_gain: Option<f64>) -> Spots {
        let (ids, cu_seqlens, trace, trainable) = (&self.ids, &self.cu, &self.trace, &self.trainable);
        let branches = Branches { cu_seqlens, trace, ids, trainable, names: &[] };
        let measured = measure(branches, tokens_per_row, RowUnit::Branch, TooLong::Error).expect("they fit");
        let request = PackRequest {
            ids,
            cu_seqlens,
            length: &measured.length,
            terms: &measured.terms,
            trace,
            step: &self.step,
            ranks: 1,
            tokens_per_row,
            whole_traces: false,
            cost: Cost { token: 2.2e10, pair: 2.1e6, term: 2.3e9 },
            min_sharing_gain: least_gain,
        };
        let placed = place(request).expect("they are consistent");
        // A branch without a trained token is not placed.
        let step = self.step.iter().zip(&placed.row).map(|(&step, &row)| if row < 0 { -1 } else { step }).collect();
        let shared = placed.gain.iter().map(|gain| gain.shared).collect();
        Spots { measured, placed, step, shared }
    }

    fn tokens(&self) -> Tokens<'_> {
        let (ids, trainable, inv_temperature) = (&self.ids, &self.trainable, &self.inv_temperature);
        Tokens { ids, trainable, inv_temperature, cu_seqlens: &self.cu }
    }

    /// All three steps of packing.
    fn pack(&self, tokens_per_row: usize, least_gain: Option<f64>) -> Layout {
        write_rows(self.tokens(), self.place(tokens_per_row, least_gain).plan(), 1).expect("they are consistent")
    }
}

/// The arguments of `write_rows` in addition to the tokens.
struct Spots {
    measured: BranchLengths,
    placed: Placement,
    step: Vec<i32>,
    shared: Vec<bool>,
}

impl Spots {
    fn plan(&self) -> Plan<'_> {
        Plan {
            length: &self.measured.length,
            step: &self.step,
            row: &self.placed.row,
            order: &self.placed.order,
            rows: &self.placed.rows,
            shared: &self.shared,
        }
    }
}

fn whole(criterion: &mut Criterion) {
    let lengths = lengths(2_000);
    let total = lengths.iter().sum::<usize>();
    let given = Given::new((0..total as i32).collect(), &lengths, 128, |token| token > 0 && token % 400 > 200);
    let mut group = criterion.benchmark_group("pack/whole");
    group.throughput(Throughput::Elements(total as u64));
    group.bench_function("2000 traces", |bencher| bencher.iter(|| given.pack(8192, None)));
    group.finish();
    rows(criterion, &given);
}

/// Only writing rows, into fresh memory and into memory used before, compared with a plain copy of as many bytes.
fn rows(criterion: &mut Criterion, given: &Given) {
    let spots = given.place(8192, None);
    let (tokens, plan) = (given.tokens(), spots.plan());
    let mut out = write_rows(tokens, plan, 1).expect("they are consistent");
    // Three numbers a token; five a term for the rows, and its origin and branch.
    let bytes = 12 * out.ids.len() + 32 * out.row.len();
    let source = vec![1u8; bytes];
    let mut copy = vec![0u8; bytes];
    let mut group = criterion.benchmark_group("pack/rows");
    group.throughput(Throughput::Elements(out.ids.len() as u64));
    group.bench_function("fresh memory", |bencher| bencher.iter(|| write_rows(tokens, plan, 1).expect("consistent")));
    group.bench_function("memory used again", |bencher| {
        bencher.iter(|| write_rows_into(tokens, plan, 1, black_box(&mut out)).expect("consistent"));
    });
    group.bench_function("a copy of as many bytes", |bencher| {
        bencher.iter(|| black_box(&mut copy).copy_from_slice(black_box(&source)));
    });
    group.finish();
}

/// Groups of eight traces, a prompt of 4,096 tokens and a response of 1,024 each: in, 40,960 tokens, out 12,288.
fn tree(criterion: &mut Criterion) {
    const PROMPT: usize = 4096;
    const RESPONSE: usize = 1024;
    let mut group = criterion.benchmark_group("pack/tree");
    for groups in [3, 48] {
        let mut ids = Vec::new();
        for trace in 0..8 * groups {
            ids.extend((0..PROMPT as i32).map(|token| token + trace / 8));
            ids.extend((0..RESPONSE as i32).map(|token| token * 7 + trace));
        }
        let lengths = vec![PROMPT + RESPONSE; 8 * groups as usize];
        let total = ids.len();
        let given = Given::new(ids, &lengths, 64, |token| token >= PROMPT);
        assert_eq!(given.pack(16_384, Some(1.05)).ids.len(), 12_288 * groups as usize);
        group.throughput(Throughput::Elements(total as u64));
        group.bench_function(format!("{} tokens", 12_288 * groups), |bencher| {
            bencher.iter(|| given.pack(16_384, Some(1.05)));
        });
    }
    group.finish();
}

criterion_group!(benches, placement, whole, tree);
criterion_main!(benches);
