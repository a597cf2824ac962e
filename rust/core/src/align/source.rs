//! Where a token comes from, as `Sequences.source` has it.

/// User, tool, system text; text copied from elsewhere.
pub const GIVEN: u8 = 0;
/// Role headers, separators, closers.
pub const TEMPLATE: u8 = 1;
/// Drawn from the policy.
pub const SAMPLED: u8 = 2;
