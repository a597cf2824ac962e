//! Loops over slices in fixed lanes, so that a sum is vector code with one order of its additions on every machine.

use super::Real;

/// Independent partial sums.
pub(super) const LANES: usize = 16;

/// One partial result for each lane.
pub(super) type Lanes<F> = [F; LANES];

/// Calls `f` with the lane and the inputs of each position, and writes what it gives.
#[inline(always)]
pub(super) fn each<F: Real, const I: usize, const O: usize>(
    inputs: [&[F]; I],
    outputs: [&mut [F]; O],
    mut f: impl FnMut(usize, [F; I]) -> [F; O],
) {
    let size = inputs[0].len();
    let inputs = inputs.map(|input| input[..size].as_chunks::<LANES>());
    let mut outputs = outputs.map(|output| output[..size].as_chunks_mut::<LANES>());
    for chunk in 0..size / LANES {
        for lane in 0..LANES {
            let found = f(lane, std::array::from_fn(|input| inputs[input].0[chunk][lane]));
            for (output, found) in outputs.iter_mut().zip(found) {
                output.0[chunk][lane] = found;
            }
        }
    }
    for lane in 0..size % LANES {
        let found = f(lane, std::array::from_fn(|input| inputs[input].1[lane]));
        for (output, found) in outputs.iter_mut().zip(found) {
            output.1[lane] = found;
        }
    }
}

/// The sum of the lanes.
pub(super) fn sum<F: Real>(lanes: &Lanes<F>) -> f64 {
    lanes.iter().map(|lane| lane.wide()).sum()
}

/// The largest of the lanes.
pub(super) fn largest<F: Real>(lanes: &Lanes<F>) -> f64 {
    lanes.iter().fold(f64::NEG_INFINITY, |most, lane| most.max(lane.wide()))
}

/// How many are true; counted in bytes, which a vector holds most of.
#[inline(always)]
pub(super) fn ones(flags: &[bool]) -> f64 {
    let count = |flags: &[bool]| usize::from(flags.iter().map(|&flag| u8::from(flag)).sum::<u8>());
    flags.chunks(128).map(count).sum::<usize>() as f64
}

/// The sum in f64, whatever the type of the values.
#[inline(always)]
pub(super) fn wide_sum<F: Real>(values: &[F]) -> f64 {
    let mut lanes = [0.0; LANES];
    let (chunks, tail) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += value.wide();
        }
    }
    for (lane, value) in lanes.iter_mut().zip(tail) {
        *lane += value.wide();
    }
    lanes.iter().sum()
}

/// The largest value, minus infinity without one; NaN is passed over.
#[inline(always)]
pub(super) fn maximum<F: Real>(values: &[F]) -> f64 {
    let mut lanes = [F::of(f64::NEG_INFINITY); LANES];
    each([values], [], |lane, [value]| {
        lanes[lane] = value.at_least(lanes[lane]);
        []
    });
    largest(&lanes)
}
