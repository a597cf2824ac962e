//! Throughput of `tracegrad_core::pack`: placement in branches a second, the whole of it in tokens a second.

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use tracegrad_core::pack::{BestFit, Branches, Tokens, TooLong, lay, measure, place};

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

fn whole(criterion: &mut Criterion) {
    let lengths = lengths(2_000);
    let mut cu = vec![0i64];
    cu.extend(lengths.iter().scan(0, |total, &length| {
        *total += length as i64;
        Some(*total)
    }));
    let total = *cu.last().unwrap_or(&0) as usize;
    let trace: Vec<i32> = (0..lengths.len() as i32).collect();
    let step: Vec<i32> = trace.iter().map(|trace| trace / 128).collect();
    let trainable: Vec<bool> = {
        let mut flags: Vec<bool> = (0..total).map(|token| token % 400 > 200).collect();
        cu[..lengths.len()].iter().for_each(|&start| flags[start as usize] = false);
        flags
    };
    let ids: Vec<i32> = (0..total as i32).collect();
    let ones = vec![1f32; total];
    let mut group = criterion.benchmark_group("pack/whole");
    group.throughput(Throughput::Elements(total as u64));
    group.bench_function("2000 traces", |bencher| {
        bencher.iter(|| {
            let branches = Branches { cu_seqlens: &cu, trace: &trace, trainable: &trainable, names: &[] };
            let measured = measure(branches, 8192, false, TooLong::Refuse).expect("they fit");
            let placed = place(&measured.length, &trace, &step, 1, 8192, false).expect("they are consistent");
            let tokens = Tokens { ids: &ids, trainable: &trainable, inv_temperature: &ones, cu_seqlens: &cu };
            let mine: Vec<i32> =
                placed.rank.iter().zip(&step).map(|(&rank, &step)| if rank < 0 { -1 } else { step }).collect();
            lay(tokens, &measured.length, &mine, &placed.row, &placed.rows, 1).expect("they are consistent")
        });
    });
    group.finish();
}

criterion_group!(benches, placement, whole);
criterion_main!(benches);
