//! Throughput of `tracegrad_core::ratio` in terms per second, within the cache and far beyond it, on one core and on all.
//!
//! `copy` moves as many bytes as a step with token weights reads and writes (13 per trained token). No kernel is faster
//! than that beyond the cache. Results are written into existing arrays, as in a training run.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rayon::prelude::*;
use tracegrad_core::ratio::{
    Aggregation, AnyRejection, Missing, Over, Per, Plan, Ratio, Reduce, Reduction, Rejection, Shape, SingleRank, Stat,
    Terms, Weight, When, correct_into,
};

/// The allocator of the extension.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// old and rollout read, weight and keep written.
const BYTES: usize = 4 + 4 + 4 + 1;

struct Step {
    old: Vec<f32>,
    rollout: Vec<f32>,
    trace: Vec<i64>,
}

fn step(terms: usize) -> Step {
    let noise = |seed: usize| ((seed.wrapping_mul(2_654_435_761) >> 7) % 1000) as f32 / 1000.0;
    let rollout: Vec<f32> = (0..terms).map(|t| if t % 97 == 0 { f32::NAN } else { -3.0 * noise(t) }).collect();
    let old = (0..terms).map(|t| -3.0 * noise(t) + noise(t + 1) - 0.5).map(|x| x.min(0.0)).collect();
    Step { old, rollout, trace: (0..terms).map(|t| (t / 512) as i64).collect() }
}

fn plans() -> [(&'static str, Plan); 5] {
    let weight = |level, shape| Weight { ratio: Ratio::MISMATCH, level, shape, when: When::Always, normalize: false };
    let rejection = |stat, level, low, high, scope| {
        AnyRejection::Rejection(Rejection { ratio: Ratio::MISMATCH, stat, level, low, high, when: When::Always, scope })
    };
    let trace = |agg| Aggregation { over: Over::Trace, agg, ..Aggregation::TOKEN };
    let reduction = |per| Reduction { per, mean: true, norm: 1.0, kept: false };
    let plan = |rejections, weights, per| Plan {
        rejections,
        weights,
        missing: Missing::Mask,
        reductions: vec![reduction(per)],
    };
    let tis = weight(Aggregation::TOKEN, Shape::Truncate(0.0, 2.0));
    let geometric = rejection(Stat::Ratio, trace(Reduce::Mean), 0.9, 1.1, Over::Trace);
    let token = rejection(Stat::Ratio, Aggregation::TOKEN, 0.5, 2.0, Over::Token);
    [
        ("token_tis", plan(vec![], vec![tis], Per::Token)),
        ("token_gate_and_tis", plan(vec![token], vec![tis], Per::Token)),
        ("trace_product", plan(vec![], vec![weight(trace(Reduce::Sum), Shape::Truncate(0.0, 5.0))], Per::Token)),
        ("geometric_gate_and_tis", plan(vec![geometric], vec![tis], Per::Token)),
        ("token_tis_per_trace", plan(vec![], vec![tis], Per::Trace)),
    ]
}

fn bench(criterion: &mut Criterion) {
    let cores = rayon::current_num_threads();
    for threads in if cores > 1 { vec![1, cores] } else { vec![1] } {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads can be started");
        let mut group = criterion.benchmark_group(format!("ratio, {threads} core(s)"));
        group.sample_size(20);
        for size in [1 << 14, 1 << 24] {
            let step = step(size);
            let terms = Terms::of(Some(&step.old), Some(&step.rollout), &step.trace);
            let (mut weight, mut keep) = (vec![1.0; size], vec![true; size]);
            group.throughput(Throughput::Elements(size as u64));
            let (from, mut to) = (vec![1_u8; size * BYTES / 2], vec![2_u8; size * BYTES / 2]);
            let part = from.len().div_ceil(threads);
            group.bench_function(BenchmarkId::new("copy", size), |bencher| {
                bencher.iter(|| {
                    let copy = |(to, from): (&mut [u8], &[u8])| to.copy_from_slice(black_box(from));
                    pool.install(|| to.par_chunks_mut(part).zip(from.par_chunks(part)).for_each(copy));
                });
            });
            for (name, plan) in plans() {
                group.bench_with_input(BenchmarkId::new(name, size), &plan, |bencher, plan| {
                    let mut run = || correct_into(black_box(&terms), plan, &SingleRank, &mut weight, &mut keep);
                    bencher.iter(|| pool.install(&mut run).expect("the step is well formed"));
                });
            }
        }
        group.finish();
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
