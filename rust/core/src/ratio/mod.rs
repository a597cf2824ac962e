//! Importance ratios of recorded terms: levels, gates and weights, everything that carries no gradient.
//!
//! Flat slices in, vectors out. A plan whose levels are all tokens runs block by block in cache; one with turns or
//! traces makes its passes over the whole arrays with the same kernels. Denominators are in [`count`].

mod count;
mod kernel;
mod level;
mod real;
mod stats;

use crate::error::{Error, Kind, Result};

pub use count::{Counts, count};
pub use level::Segments;
pub use real::Real;
pub use stats::Stats;

/// Log-ratios are clamped to plus or minus this many nats before they are exponentiated.
pub const LOG_RATIO_LIMIT: f64 = 20.0;

/// Terms of one block: small enough for the first-level cache, a multiple of every lane count.
const BLOCK: usize = 1024;

/// A rollout logprob above this is not a logprob.
const POSITIVE_TOLERANCE: f64 = 1e-3;

/// How some servers write a logprob that they do not have, or minus infinity.
const SENTINEL: f64 = -9999.0;

/// What a log-ratio is aggregated over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    /// Each term alone.
    Token,
    /// The terms of one generation of a trace.
    Turn,
    /// The terms of a trace, all its branches together.
    Trace,
}

/// How terms become one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Agg {
    /// The sum.
    Sum,
    /// The sum over the number of terms counted.
    Mean,
    /// The largest.
    Max,
}

/// Over which terms, how, and whether only those still kept are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Level {
    /// Token, turn or trace.
    pub over: Over,
    /// Read where `over` is not a token.
    pub agg: Agg,
    /// Count only the terms that the gates before have kept.
    pub kept: bool,
}

impl Level {
    /// Each term alone.
    pub const TOKEN: Self = Self { over: Over::Token, agg: Agg::Sum, kept: false };
}

/// On which sign of the advantage a gate or weight applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// On every term.
    Always,
    /// A > 0.
    Positive,
    /// A >= 0.
    NonNegative,
    /// A < 0.
    Negative,
    /// A <= 0.
    NonPositive,
}

impl When {
    fn holds(self, advantage: f64) -> bool {
        match self {
            Self::Always => true,
            Self::Positive => advantage > 0.0,
            Self::NonNegative => advantage >= 0.0,
            Self::Negative => advantage < 0.0,
            Self::NonPositive => advantage <= 0.0,
        }
    }
}

/// A function of the log-ratio l that a gate bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stat {
    /// exp of the aggregated l.
    Ratio,
    /// l.
    K1,
    /// l^2 / 2.
    K2,
    /// exp(l) - 1 - l.
    K3,
}

/// Keeps a term iff low <= stat <= high, of old/rollout.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gate {
    /// Which function of the log-ratio.
    pub stat: Stat,
    /// Over which terms.
    pub level: Level,
    /// Lower bound, included.
    pub low: f64,
    /// Upper bound, included.
    pub high: f64,
    /// Terms that it can drop.
    pub when: When,
    /// What falls with a term that fails; at least as wide as the level.
    pub scope: Over,
}

/// What becomes of a ratio on its way to a weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Shape {
    /// Itself.
    Identity,
    /// Held between two bounds.
    Clamp(f64, f64),
    /// Itself between two bounds, 0 elsewhere.
    Window(f64, f64),
}

/// A factor of the loss, made of old/rollout.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Weight {
    /// Over which terms the log-ratio is aggregated.
    pub level: Level,
    /// What becomes of the ratio.
    pub shape: Shape,
    /// Terms that it applies to; 1 elsewhere.
    pub when: When,
}

/// What a missing (NaN) rollout logprob means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// keep 0.
    Mask,
    /// Weight 1, no part in sums and means.
    Neutral,
    /// An error.
    Refuse,
}

/// Gates in order, then weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Applied in order.
    pub gates: Vec<Gate>,
    /// Multiplied.
    pub weights: Vec<Weight>,
    /// The policy for NaN.
    pub missing: Missing,
}

impl Plan {
    fn only_tokens(&self) -> bool {
        let gates = self.gates.iter().all(|gate| gate.level.over == Over::Token && gate.scope == Over::Token);
        gates && self.weights.iter().all(|weight| weight.level.over == Over::Token)
    }

    fn uses(&self, over: Over) -> bool {
        self.gates.iter().any(|gate| gate.level.over == over || gate.scope == over)
            || self.weights.iter().any(|weight| weight.level.over == over)
    }

    fn conditional(&self) -> bool {
        self.gates.iter().any(|gate| gate.when != When::Always)
            || self.weights.iter().any(|weight| weight.when != When::Always)
    }
}

/// The terms of a step, flat.
#[derive(Debug, Clone, Copy)]
pub struct Terms<'a, F> {
    /// Logprobs of the proximal policy, nats; `None` in the direct form, where no weight and no gate can be.
    pub old: Option<&'a [F]>,
    /// Recorded logprobs, nats, NaN where not known.
    pub rollout: &'a [F],
    /// Trace of each term, any integers.
    pub trace: &'a [i64],
    /// Generation of its trace, read where a turn is named.
    pub turn: Option<&'a [i64]>,
    /// Advantages, read where `when` is not always.
    pub advantages: Option<&'a [F]>,
}

/// What the loss takes of each term, and what the run reports.
#[derive(Debug, Clone)]
pub struct Corrected<F> {
    /// Product of the weights; 0 where masked as missing, 1 where neutral.
    pub weight: Vec<F>,
    /// Whether the term trains.
    pub keep: Vec<bool>,
    /// Sums and extrema.
    pub stats: Stats,
    /// For each weight the sum of its values and their number, each token, turn or trace once.
    pub unit_sums: Vec<(f64, f64)>,
}

/// Weights and gates of the terms.
///
/// # Errors
/// [`Kind::Argument`] for slices of unequal length, a plan that names what was not given, `old` that is not finite,
/// `rollout` that is positive or infinite, and NaN under [`Missing::Refuse`].
pub fn correct<F: Real>(terms: Terms<'_, F>, plan: &Plan) -> Result<Corrected<F>> {
    check(terms, plan)?;
    let total = terms.rollout.len();
    let mut out = Corrected {
        weight: vec![F::ONE; total],
        keep: vec![true; total],
        stats: Stats::default(),
        unit_sums: vec![(0.0, 0.0); plan.weights.len()],
    };
    let turns = plan.uses(Over::Turn).then(|| Segments::of_pairs(terms.trace, terms.turn.unwrap_or(&[])));
    let traces = plan.uses(Over::Trace).then(|| Segments::of(terms.trace));
    let segments = kernel::Levels { turn: turns.as_ref(), trace: traces.as_ref() };
    let block = if plan.only_tokens() { BLOCK } else { total.max(1) };
    let mut scratch = kernel::Scratch::new(block.min(total));
    for start in (0..total).step_by(block) {
        let range = start..(start + block).min(total);
        kernel::run(terms, plan, segments, range, &mut scratch, &mut out)?;
    }
    Ok(out)
}

fn check<F: Real>(terms: Terms<'_, F>, plan: &Plan) -> Result<()> {
    let total = terms.rollout.len();
    let lengths = [
        ("old", terms.old.map(<[F]>::len)),
        ("trace", Some(terms.trace.len())),
        ("turn", terms.turn.map(<[i64]>::len)),
        ("advantages", terms.advantages.map(<[F]>::len)),
    ];
    for (name, length) in lengths {
        if let Some(length) = length.filter(|&length| length != total) {
            return Err(argument(format!("{name} has {length} entries but rollout has {total}"))
                .cure("Pass one entry per term in every array"));
        }
    }
    let absent = |what: &str, given: &str| {
        argument(format!("{what} without {given}")).cure(format!("Pass {given}, one entry per term"))
    };
    if terms.old.is_none() && !(plan.gates.is_empty() && plan.weights.is_empty()) {
        return Err(absent("a weight or gate on old and rollout", "old").why("Its ratio is not known"));
    }
    if terms.turn.is_none() && plan.uses(Over::Turn) {
        return Err(absent("a turn level", "turn"));
    }
    if terms.advantages.is_none() && plan.conditional() {
        return Err(absent("a weight or gate that depends on the sign of A", "advantages"));
    }
    Ok(())
}

fn argument(what: String) -> Error {
    Error::new(Kind::Argument, what)
}

#[cfg(test)]
mod tests;
