//! Constants that several steps share.

/// Log-ratios are clamped to plus or minus this many nats before they are exponentiated.
pub const LOG_RATIO_LIMIT: f64 = 20.0;

/// Fewest terms that a thread takes at a time. It does not depend on the number of threads, nor does any result.
pub(super) const SHARE: usize = 1 << 16;

/// A rollout logprob above this is not a logprob.
pub(super) const POSITIVE_TOLERANCE: f64 = 1e-3;

/// How some servers write a logprob that they do not have, or minus infinity.
pub(super) const SENTINEL: f64 = -9999.0;
