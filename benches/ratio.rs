//! Throughput of `tracegrad_core::ratio` in terms per second, within the cache and far beyond it.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use tracegrad_core::ratio::{Agg, Gate, Level, Missing, Over, Plan, Shape, Stat, Terms, Weight, When, correct, count};

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

fn plans() -> [(&'static str, Plan); 3] {
    let weight = |level, shape| Weight { level, shape, when: When::Always };
    let trace = |agg| Level { over: Over::Trace, agg, kept: false };
    let geometric = Gate {
        stat: Stat::Ratio,
        level: trace(Agg::Mean),
        low: 0.9,
        high: 1.1,
        when: When::Always,
        scope: Over::Trace,
    };
    let missing = Missing::Mask;
    let tis = weight(Level::TOKEN, Shape::Clamp(0.0, 2.0));
    [
        ("token_tis", Plan { gates: vec![], weights: vec![tis], missing }),
        (
            "trace_product",
            Plan { gates: vec![], weights: vec![weight(trace(Agg::Sum), Shape::Clamp(0.0, 5.0))], missing },
        ),
        ("geometric_gate_and_tis", Plan { gates: vec![geometric], weights: vec![tis], missing }),
    ]
}

fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("ratio");
    group.sample_size(20);
    for size in [1 << 14, 1 << 23] {
        let step = step(size);
        let terms =
            Terms { old: Some(&step.old), rollout: &step.rollout, trace: &step.trace, turn: None, advantages: None };
        group.throughput(Throughput::Elements(size as u64));
        for (name, plan) in plans() {
            group.bench_with_input(BenchmarkId::new(name, size), &plan, |bencher, plan| {
                bencher.iter(|| correct(black_box(terms), plan).expect("the step is well formed"));
            });
        }
        group.bench_function(BenchmarkId::new("count", size), |bencher| {
            bencher.iter(|| count(black_box(&step.trace), None));
        });
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
