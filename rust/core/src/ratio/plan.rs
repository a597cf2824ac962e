//! The computation as plain values: ratios, levels, rejections, weights and reductions, and the constants that the steps
//! share.

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
    /// Numerator.
    pub num: Policy,
    /// Denominator.
    pub den: Policy,
}

impl Ratio {
    /// old/rollout, the ratio of the statistics.
    pub const MISMATCH: Self = Self { num: Policy::Old, den: Policy::Rollout };
}

/// The terms over which a log-ratio is aggregated. Each level is wider than the previous one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Over {
    /// Each term separately.
    Token,
    /// The terms of one generation of a trace.
    Turn,
    /// The terms of a trace, of all its branches together.
    Trace,
    /// The terms of a group of traces.
    Group,
    /// All terms of the step, over all ranks.
    Batch,
}

/// The function that aggregates terms to one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduce {
    /// The sum.
    Sum,
    /// The sum divided by the number of counted terms.
    Mean,
    /// The maximum.
    Max,
    /// For each term, the sum up to and including it, in the order of the arrays.
    PrefixSum,
    /// For each term, the minimum up to and including it.
    PrefixMin,
}

impl Reduce {
    /// Returns true if terms of one segment get different numbers.
    pub fn is_prefix(self) -> bool {
        matches!(self, Self::PrefixSum | Self::PrefixMin)
    }
}

/// The mean of a level's ratio and the token's own ratio.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blend {
    /// (e^l + e^L) / 2.
    Arithmetic,
    /// e^((l + L) / 2).
    Geometric,
}

/// The terms to aggregate, the aggregation, and whether only kept terms count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Aggregation {
    /// Token to batch.
    pub over: Over,
    /// Used if `over` is not a token.
    pub agg: Reduce,
    /// Count only the terms that the previous rejections have kept.
    pub kept: bool,
    /// Used by weights only.
    pub blend: Option<Blend>,
}

impl Aggregation {
    /// Each term separately.
    pub const TOKEN: Self = Self { over: Over::Token, agg: Reduce::Sum, kept: false, blend: None };
}

/// The sign of the advantage for which a rejection or weight applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// Every term.
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
    /// Returns true if it applies to a term with this advantage.
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

/// A function of the log-ratio l of two probabilities p (numerator) and q (denominator).
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
pub struct Rejection {
    /// The policies of the ratio.
    pub ratio: Ratio,
    /// The function of the log-ratio.
    pub stat: Stat,
    /// The terms to aggregate over.
    pub level: Aggregation,
    /// Lower bound, included.
    pub low: f64,
    /// Upper bound, included.
    pub high: f64,
    /// The terms that it can reject.
    pub when: When,
    /// The terms that are rejected together with a failing term; at least as wide as the level.
    pub scope: Over,
}

/// Keeps the terms with the smallest stat, as many as keep its mean over the step at most `mean`, but at least one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RejectionBudget {
    /// The policies of the ratio.
    pub ratio: Ratio,
    /// A function that is never negative: K2, K3, Abs or Square.
    pub stat: Stat,
    /// Maximum of the mean over the kept terms.
    pub mean: f64,
    /// Choose among the terms that the previous rejections have kept.
    pub kept: bool,
    /// Choose among the terms with A > 0 and a ratio above 1, or A < 0 and a ratio below 1.
    pub active: bool,
}

/// A rejection of either kind.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum AnyRejection {
    /// Bounds on a statistic.
    Rejection(Rejection),
    /// A bound on the mean of the kept terms.
    RejectionBudget(RejectionBudget),
}

/// The function from a ratio w to a weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Shape {
    /// w itself.
    Identity,
    /// w clamped to two bounds (TIS truncates this way).
    Truncate(f64, f64),
    /// w between two bounds (included), else 0.
    MaskOutside(f64, f64),
    /// w between two bounds (excluded), else 0.
    MaskOutsideStrict(f64, f64),
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
    /// The policies of the ratio.
    pub ratio: Ratio,
    /// The terms over which the log-ratio is aggregated.
    pub level: Aggregation,
    /// The function from the ratio to the weight.
    pub shape: Shape,
    /// Terms that it applies to; the factor is 1 for all others.
    pub when: When,
    /// Divide by the mean over the step. Each token, turn, trace or group counts once.
    pub normalize: bool,
}

impl Weight {
    /// Returns true if the weight of each term depends on that term only.
    pub(super) fn is_of_tokens(&self) -> bool {
        self.level.over == Over::Token && self.when == When::Always && !self.normalize
    }
}

/// The handling of a missing (NaN) rollout logprob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// keep 0.
    Mask,
    /// Weight 1, not counted in sums and means.
    RatioOne,
    /// An error.
    Error,
}

/// The denominator of a term's scale; see `tracegrad.objective.Reduce`.
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
    /// A constant.
    Constant,
}

/// A reduction of terms to one number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reduction {
    /// The denominator.
    pub per: Per,
    /// Divide by the terms of the trace or prompt instead of by `norm`. Used by Trace, Group and Prompt.
    pub mean: bool,
    /// Divisor of an inner sum.
    pub norm: f64,
    /// Count only the terms that the rejections have kept.
    pub kept: bool,
}

/// Gates in order, then weights, then reductions.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Applied in order.
    pub rejections: Vec<AnyRejection>,
    /// Multiplied.
    pub weights: Vec<Weight>,
    /// The handling of NaN.
    pub missing: Missing,
    /// One scale for each reduction.
    pub reductions: Vec<Reduction>,
}

impl Plan {
    /// Returns the ratios of rejections and weights.
    pub(super) fn ratios(&self) -> impl Iterator<Item = Ratio> {
        let rejections = self.rejections.iter().map(|rejection| match rejection {
            AnyRejection::Rejection(rejection) => rejection.ratio,
            AnyRejection::RejectionBudget(budget) => budget.ratio,
        });
        rejections.chain(self.weights.iter().map(|weight| weight.ratio))
    }

    /// Returns true if a rejection or weight aggregates over this level, or rejects its terms together.
    pub(super) fn spans(&self, over: Over) -> bool {
        let rejections = self.rejections.iter().any(|rejection| match rejection {
            AnyRejection::Rejection(rejection) => rejection.level.over == over || rejection.scope == over,
            AnyRejection::RejectionBudget(_) => over == Over::Batch,
        });
        rejections || self.weights.iter().any(|weight| weight.level.over == over)
    }

    /// Returns true if the sign of the advantage matters.
    pub(super) fn is_conditional(&self) -> bool {
        let rejections = self.rejections.iter().any(|rejection| match rejection {
            AnyRejection::Rejection(rejection) => rejection.when != When::Always,
            AnyRejection::RejectionBudget(budget) => budget.active,
        });
        rejections || self.weights.iter().any(|weight| weight.when != When::Always)
    }
}

/// Log-ratios are clamped to plus or minus this many nats before they are exponentiated.
pub const LOG_RATIO_LIMIT: f64 = 20.0;

/// Minimum number of terms per task of a thread. Neither it nor any result depends on the number of threads.
pub(super) const SHARE: usize = 1 << 16;

/// A rollout logprob above this is not a logprob.
pub(super) const POSITIVE_TOLERANCE: f64 = 1e-3;

/// Value that some servers write for a missing logprob, or for minus infinity.
pub(super) const SENTINEL: f64 = -9999.0;
