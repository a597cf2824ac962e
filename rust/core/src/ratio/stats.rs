//! What a step's ratios look like: sums and maxima, so that ranks and blocks merge exactly.

/// Sums over terms (mergeable by addition), then maxima (mergeable by the larger). All ratios are old/rollout.
#[derive(Debug, Clone, PartialEq)]
pub struct Stats {
    /// Terms.
    pub terms: f64,
    /// Terms whose rollout logprob is known.
    pub known: f64,
    /// Terms with keep 1.
    pub kept: f64,
    /// Terms that a gate dropped.
    pub gated: f64,
    /// Terms whose log-ratio was clamped at [`super::LOG_RATIO_LIMIT`].
    pub clamped: f64,
    /// Turns or traces whose aggregated log-ratio was clamped, over all gates and weights.
    pub clamped_levels: f64,
    /// Known terms where a shape changed a ratio on its way to a weight.
    pub truncated: f64,
    /// Over known terms: log-ratio.
    pub log_ratio: f64,
    /// Over known terms: its absolute value.
    pub log_ratio_abs: f64,
    /// Over known terms: ratio, clamped.
    pub ratio: f64,
    /// Over known terms: its square.
    pub ratio_squared: f64,
    /// Over known terms: ratio - 1 - log-ratio.
    pub k3: f64,
    /// Terms known and kept.
    pub weighted: f64,
    /// Over them: weight.
    pub weight: f64,
    /// Over them: its square.
    pub weight_squared: f64,
    /// Largest ratio.
    pub ratio_max: f64,
    /// Largest of minus the ratio.
    pub minus_ratio_min: f64,
    /// Largest absolute log-ratio.
    pub log_ratio_abs_max: f64,
}

impl Default for Stats {
    fn default() -> Self {
        Self {
            terms: 0.0,
            known: 0.0,
            kept: 0.0,
            gated: 0.0,
            clamped: 0.0,
            clamped_levels: 0.0,
            truncated: 0.0,
            log_ratio: 0.0,
            log_ratio_abs: 0.0,
            ratio: 0.0,
            ratio_squared: 0.0,
            k3: 0.0,
            weighted: 0.0,
            weight: 0.0,
            weight_squared: 0.0,
            ratio_max: f64::NEG_INFINITY,
            minus_ratio_min: f64::NEG_INFINITY,
            log_ratio_abs_max: f64::NEG_INFINITY,
        }
    }
}

impl Stats {
    /// Names and values that merge by addition.
    pub fn sums(&self) -> [(&'static str, f64); 15] {
        [
            ("terms", self.terms),
            ("known", self.known),
            ("kept", self.kept),
            ("gated", self.gated),
            ("clamped", self.clamped),
            ("clamped_levels", self.clamped_levels),
            ("truncated", self.truncated),
            ("log_ratio", self.log_ratio),
            ("log_ratio_abs", self.log_ratio_abs),
            ("ratio", self.ratio),
            ("ratio_squared", self.ratio_squared),
            ("k3", self.k3),
            ("weighted", self.weighted),
            ("weight", self.weight),
            ("weight_squared", self.weight_squared),
        ]
    }

    /// Names and values that merge by the larger.
    pub fn maxima(&self) -> [(&'static str, f64); 3] {
        [
            ("ratio_max", self.ratio_max),
            ("minus_ratio_min", self.minus_ratio_min),
            ("log_ratio_abs_max", self.log_ratio_abs_max),
        ]
    }
}
