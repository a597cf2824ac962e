//! How a trace ended: the policy stopped by itself, or was cut off (a limit of length, an abort, a filter).

use super::branch::Branch;
use crate::trace::{Generation, Stop, Trace};

/// How the last generation of a trace ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Ending {
    /// The record does not say, and no stop token shows it.
    Unknown = 0,
    /// The policy stopped: by its stop token, by a stop string, to call a tool.
    Whole = 1,
    /// By a limit of length, an abort, a filter.
    Cut = 2,
}

impl Ending {
    /// Of the last generation of a trace.
    pub fn of(trace: &Trace, branches: &[Branch<'_>]) -> Self {
        let Some(last) = trace.generations.last() else { return Self::Unknown };
        let turn = Some(trace.generations.len() as i32 - 1);
        let shown = branches.iter().any(|branch| branch.stopped && branch.last_turn() == turn);
        Self::of_generation(last, shown)
    }

    /// By its finish reason; where none is said, by what stopped it, or the stop token that its tokens end in.
    fn of_generation(generation: &Generation, shows_stop: bool) -> Self {
        match generation.finish_reason.as_deref() {
            Some("length" | "abort" | "content_filter" | "incomplete") => Self::Cut,
            Some(_) if !is_cut(generation) => Self::Whole,
            _ if shows_stop || generation.stop != Stop::Unsaid => Self::Whole,
            _ => Self::Unknown,
        }
    }
}

/// Whether the record says that something else than a stop or a tool call ended a generation, known or not: no stop token
/// was sampled.
pub fn is_cut(generation: &Generation) -> bool {
    generation.finish_reason.as_deref().is_some_and(|reason| !["stop", "tool_calls", "function_call"].contains(&reason))
}

#[cfg(test)]
mod tests {
    use super::Ending;
    use crate::trace::{Generation, Stop};

    fn said(reason: Option<&str>, stop: Stop) -> Ending {
        let generation = Generation { finish_reason: reason.map(str::to_owned), stop, ..Generation::default() };
        Ending::of_generation(&generation, false)
    }

    #[test]
    fn the_finish_reason_says_it_and_else_what_stopped_it() {
        assert_eq!(said(Some("length"), Stop::Id(2)), Ending::Cut);
        assert_eq!(said(Some("abort"), Stop::Unsaid), Ending::Cut);
        assert_eq!(said(Some("tool_calls"), Stop::Unsaid), Ending::Whole);
        assert_eq!(said(Some("other"), Stop::Unsaid), Ending::Unknown);
        assert_eq!(said(None, Stop::Text("}".to_owned())), Ending::Whole);
        assert_eq!(said(None, Stop::Unsaid), Ending::Unknown);
    }
}
