//! What to compute: ratios, levels, gates, weights and reductions, as plain values, and the constants that the steps share.

/// A policy whose logprobs are known before the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// The proximal policy: the model being trained, before the step.
    Old,
    /// The policy that sampled, as recorded.
    Rollout,
    /// The reference model.
    Reference,
}

impl Policy {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Old => "old",
            Self::Rollout => "rollout",
            Self::Reference => "ref",
        }
    }
}

/// The probability ratio of two policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ratio {
    /// Above.
    pub num: Policy,
    /// Below.
    pub den: Policy,
}

impl Ratio {
    /// old/rollout, which the statistics are of.
    pub const MISMATCH: Self = Self { num: Policy::Old, den: Policy::Rollout };
}

/// What a log-ratio is aggregated over; each is wider than the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Over {
    /// Each term alone.
    Token,
    /// The terms of one generation of a trace.
    Turn,
    /// The terms of a trace, all its branches together.
    Trace,
    /// The terms of a group of traces.
    Group,
    /// All terms of the step, over all ranks.
    Batch,
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
    /// For each term the sum up to it, itself included, in the order of the arrays.
    PrefixSum,
    /// For each term the smallest up to it, itself included.
    PrefixMin,
}

impl Agg {
    /// Whether terms of one segment get different numbers.
    pub fn is_prefix(self) -> bool {
        matches!(self, Self::PrefixSum | Self::PrefixMin)
    }
}

/// The mean of a level's ratio and the token's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blend {
    /// (e^l + e^L) / 2.
    Arithmetic,
    /// e^((l + L) / 2).
    Geometric,
}

/// Over which terms, how, and whether only those still kept are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Level {
    /// Token to batch.
    pub over: Over,
    /// Read where `over` is not a token.
    pub agg: Agg,
    /// Count only the terms that the gates before have kept.
    pub kept: bool,
    /// Read by weights.
    pub blend: Option<Blend>,
}

impl Level {
    /// Each term alone.
    pub const TOKEN: Self = Self { over: Over::Token, agg: Agg::Sum, kept: false, blend: None };
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
    /// Whether it applies to a term with this advantage.
    pub(super) fn holds(self, advantage: f64) -> bool {
        match self {
            Self::Always => true,
            Self::Positive => advantage > 0.0,
            Self::NonNegative => advantage >= 0.0,
            Self::Negative => advantage < 0.0,
            Self::NonPositive => advantage <= 0.0,
        }
    }
}

/// A function of the log-ratio l of two probabilities p (above) and q (below).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stat {
    /// exp of the aggregated l.
    Ratio,
    /// l.
    K1,
    /// l^2 / 2.
    K2,
    /// exp(l) - 1 - l, of the clamped l.
    K3,
    /// |l|.
    Abs,
    /// l^2.
    Square,
    /// p - q.
    Dprob,
    /// The KL of (q, 1 - q) from (p, 1 - p), with the sign of p - q.
    BinaryKl,
}

/// Keeps a term iff low <= stat <= high.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gate {
    /// Of which policies.
    pub ratio: Ratio,
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

/// Keeps the terms with the smallest stat, as many as leave its mean over the step at most `mean`; at least one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Budget {
    /// Of which policies.
    pub ratio: Ratio,
    /// A function that is never negative: K2, K3, Abs or Square.
    pub stat: Stat,
    /// What the mean over the kept terms may be.
    pub mean: f64,
    /// Choose among the terms that the gates before have kept.
    pub kept: bool,
    /// Choose among the terms with A > 0 and a ratio above 1, or A < 0 and a ratio below 1.
    pub active: bool,
}

/// What drops terms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum AnyGate {
    /// Bounds on a statistic.
    Gate(Gate),
    /// A mean that the rest may have.
    Budget(Budget),
}

/// What becomes of a ratio w on its way to a weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Shape {
    /// Itself.
    Identity,
    /// Held between two bounds.
    Clamp(f64, f64),
    /// Itself between two bounds that are inside, 0 elsewhere.
    Window(f64, f64),
    /// Itself between two bounds that are outside, 0 elsewhere.
    StrictWindow(f64, f64),
    /// exp(rate) w^power exp(-rate w).
    Gamma {
        /// Exponent of w.
        power: f64,
        /// Rate of the decay.
        rate: f64,
    },
    /// exp(-(log w)^2 / (2 sigma^2)), by sigma.
    Gaussian(f64),
}

/// A factor of the loss.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Weight {
    /// Of which policies.
    pub ratio: Ratio,
    /// Over which terms the log-ratio is aggregated.
    pub level: Level,
    /// What becomes of the ratio.
    pub shape: Shape,
    /// Terms that it applies to; 1 elsewhere.
    pub when: When,
    /// Divide by the mean over the step, each token, turn, trace or group once.
    pub normalize: bool,
}

impl Weight {
    /// Whether it is of each term alone, and nothing but it decides.
    pub(super) fn is_of_tokens(&self) -> bool {
        self.level.over == Over::Token && self.when == When::Always && !self.normalize
    }
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

/// What the scale of a term is 1 over; see `tracegrad.objective.Reduce`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Per {
    /// The terms of the step.
    Token,
    /// Traces, then the terms of the trace.
    Trace,
    /// Groups, then the traces of the group, then the terms of the trace.
    Group,
    /// Groups, then the terms of the group.
    Prompt,
    /// A number.
    Constant,
}

/// A reduction of terms to one number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reduction {
    /// What counts alike.
    pub per: Per,
    /// Divide by the terms of the trace or prompt instead of by `norm`; read by Trace, Group and Prompt.
    pub mean: bool,
    /// What an inner sum is divided by.
    pub norm: f64,
    /// Count what the gates have kept instead of all terms.
    pub kept: bool,
}

/// Gates in order, then weights, then reductions.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Applied in order.
    pub gates: Vec<AnyGate>,
    /// Multiplied.
    pub weights: Vec<Weight>,
    /// The policy for NaN.
    pub missing: Missing,
    /// One scale for each.
    pub reductions: Vec<Reduction>,
}

impl Plan {
    /// The ratios of gates and weights.
    pub(super) fn ratios(&self) -> impl Iterator<Item = Ratio> {
        let gates = self.gates.iter().map(|gate| match gate {
            AnyGate::Gate(gate) => gate.ratio,
            AnyGate::Budget(budget) => budget.ratio,
        });
        gates.chain(self.weights.iter().map(|weight| weight.ratio))
    }

    /// Whether a gate or weight aggregates over it, or drops it whole.
    pub(super) fn spans(&self, over: Over) -> bool {
        let gates = self.gates.iter().any(|gate| match gate {
            AnyGate::Gate(gate) => gate.level.over == over || gate.scope == over,
            AnyGate::Budget(_) => over == Over::Batch,
        });
        gates || self.weights.iter().any(|weight| weight.level.over == over)
    }

    /// Whether the sign of the advantage matters.
    pub(super) fn is_conditional(&self) -> bool {
        let gates = self.gates.iter().any(|gate| match gate {
            AnyGate::Gate(gate) => gate.when != When::Always,
            AnyGate::Budget(budget) => budget.active,
        });
        gates || self.weights.iter().any(|weight| weight.when != When::Always)
    }
}

/// Log-ratios are clamped to plus or minus this many nats before they are exponentiated.
pub const LOG_RATIO_LIMIT: f64 = 20.0;

/// Fewest terms that a thread takes at a time. It does not depend on the number of threads, nor does any result.
pub(super) const SHARE: usize = 1 << 16;

/// A rollout logprob above this is not a logprob.
pub(super) const POSITIVE_TOLERANCE: f64 = 1e-3;

/// How some servers write a logprob that they do not have, or minus infinity.
pub(super) const SENTINEL: f64 = -9999.0;
