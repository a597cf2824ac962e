//! Aligns one trace: each generation extends a branch or starts a new one. Calls that were repeated are left out.
//!
//! Sampled ids are the data; the template only supplies the text that was not sampled. Recorded prompt ids take
//! precedence over rendering. Only the tokenizer's caches are shared state. Parallel samples (n > 1) that no call
//! continues are not duplicates, and all of them are kept.

use super::branch::{Branch, Sampling, common_prefix};
use super::images::Keyed;
use super::prompt::{Scaffold, Text};
use super::prompt_cache::Prompts;
use super::resolve::{self, Lookup, Recorder, Resolution};
use super::types::{Mode, Options};
use super::{extras, filled};
use crate::error::Result;
use crate::findings::{Finding, Reason};
use crate::template::{Rendered, Session};
use crate::tokenizer::Tokenizer;
use crate::trace::{Extra, Generation, LogprobKind, Prompt, Trace};
use foldhash::fast::RandomState;
use std::borrow::Cow;
use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};

/// Branches and findings of one trace.
#[derive(Debug, Default)]
pub struct AlignedTrace<'a> {
    /// Branches in the order in which they were opened.
    pub branches: Vec<Branch<'a>>,
    /// Mismatches between the record, the template and the tokenizer.
    pub findings: Vec<Finding>,
    /// Number of tokens that were sampled according to the record.
    pub recorded: u64,
    /// Number of these tokens that have level T0 to T3 and are in a branch with a logprob.
    pub exact: u64,
    /// For each generation, whether logprobs were used that were measured after the recording.
    pub filled: Vec<bool>,
}

/// The place for text that was not sampled.
pub(super) enum Placement {
    /// Extends branch `.0`.
    Extend(usize, Text),
    /// Starts a new branch.
    Fork(Text),
    /// Starts a branch over the first `.1` tokens of branch `.0`.
    ForkAt(usize, usize, Text),
    /// Starts a branch whose beginning is unknown.
    UnknownPrefix,
}

/// State that a worker keeps between traces.
#[derive(Debug, Default)]
pub struct WorkerCache<'a> {
    /// The last conversation, as prompts and as finished text.
    pub sessions: [Session<'a>; 2],
    pub prompts: Prompts,
    pub lookup: Lookup,
}

/// Aligns one trace. `images` has the keys of the images in its prompts.
pub fn align_trace<'a>(
    trace: &'a Trace,
    images: Option<&'a Keyed<'a>>,
    scaffold: &'a Scaffold<'a>,
    options: Options,
    memory: &mut WorkerCache<'a>,
) -> Result<AlignedTrace<'a>> {
    let tokenizer = scaffold.tokenizer;
    let mut aligner = TraceAligner {
        trace,
        images,
        tokenizer,
        scaffold,
        options,
        ends: vec![None; trace.generations.len()],
        dated: false,
        shown: vec![false; trace.messages.len()],
        unshown: 0,
        recorder: Recorder::new(trace, tokenizer),
        media: OnceCell::new(),
        memory,
        aligned: AlignedTrace { filled: vec![false; trace.generations.len()], ..AlignedTrace::default() },
    };
    let abandoned = abandoned(trace);
    if options.mode == Mode::Align {
        trace.generations.iter().enumerate().for_each(|(turn, generation)| aligner.note(turn, generation));
        return aligner.rerender();
    }
    for (turn, generation) in trace.generations.iter().enumerate() {
        aligner.note(turn, generation);
        if abandoned[turn] {
            let detail = "the call was made again and the other answer was used; this one is left out";
            aligner.leave_out(turn, generation, Reason::DuplicateGeneration, detail.to_owned());
            continue;
        }
        aligner.add(turn, generation).map_err(|error| error.in_turn(turn).at(&trace.location))?;
    }
    Ok(aligner.aligned)
}

/// A part of a message that is not text: index of the message and kind of the part.
pub type Part<'a> = (u32, &'a str);

pub(super) struct TraceAligner<'a, 'm> {
    pub trace: &'a Trace,
    pub images: Option<&'a Keyed<'a>>,
    pub tokenizer: &'a Tokenizer,
    pub scaffold: &'a Scaffold<'a>,
    pub options: Options,
    /// For each generation, its branch and the length at which its sampled tokens end; `None` unless all of them are
    /// in the branch.
    pub ends: Vec<Option<(usize, usize)>>,
    /// True after a finding reported that the template prints a date.
    pub dated: bool,
    /// For each message, whether it was searched for in a prompt; then the number of messages that were missing.
    pub shown: Vec<bool>,
    pub unshown: usize,
    pub recorder: Recorder<'a>,
    /// The messages that contain more than text.
    pub media: OnceCell<Vec<Part<'a>>>,
    pub memory: &'m mut WorkerCache<'a>,
    pub aligned: AlignedTrace<'a>,
}

impl<'a> TraceAligner<'a, '_> {
    /// Adds the findings of the reader.
    fn note(&mut self, turn: usize, generation: &Generation) {
        for note in &generation.notes {
            self.report(note.reason, turn, -1, note.count as usize, note.detail.clone());
        }
    }

    /// Counts and reports a call that is left out completely.
    pub fn leave_out(&mut self, turn: usize, generation: &Generation, reason: Reason, detail: String) {
        let count = generation.tokens.len();
        self.aligned.recorded += count as u64;
        self.report(reason, turn, -1, count, detail);
    }

    /// Describes an id outside the model's vocabulary in the prompt or the sampling masks of a call.
    fn outside(&self, turn: usize, generation: &Generation) -> Option<String> {
        let keyed = self.images.filter(|keyed| keyed.has_keys(turn));
        let prompt = match &generation.prompt {
            Prompt::Ids(ids) | Prompt::Follows { ids, .. } => {
                keyed.map_or(Cow::Borrowed(ids.as_slice()), |keyed| keyed.collapse(ids).ids.into())
            }
            _ => Cow::Borrowed(&[][..]),
        };
        let mut masks = generation.extras.iter().filter(|extra| extra.name == "sampling_mask");
        let mask = |extra: &Extra| {
            let ids: Vec<u32> = extra.values.iter().map(|&id| u32::try_from(id).unwrap_or(u32::MAX)).collect();
            self.tokenizer.first_outside(&ids).map(|at| ("a sampling mask", extra.values[at]))
        };
        let in_prompt = self.tokenizer.first_outside(&prompt).map(|at| ("the prompt", prompt[at] as i32));
        let (place, id) = in_prompt.or_else(|| masks.find_map(mask))?;
        let size = self.tokenizer.model_vocab_size();
        Some(format!("id {} of {place} is not in the model's vocabulary of {size}; the turn is left out", id as u32))
    }

    fn add(&mut self, turn: usize, generation: &'a Generation) -> Result<()> {
        if let Some(detail) = self.outside(turn, generation) {
            self.leave_out(turn, generation, Reason::VocabOutOfRange, detail);
            return Ok(());
        }
        let (place, rendered) = self.place(turn, generation)?;
        // Recorded ids were checked above.
        if !matches!(generation.prompt, Prompt::Ids(_) | Prompt::Follows { .. })
            && let Placement::Extend(_, text) | Placement::Fork(text) | Placement::ForkAt(_, _, text) = &place
            && let Some(at) = self.tokenizer.first_outside(&text.ids)
        {
            let id = text.ids[at];
            let detail =
                format!("id {id} of the rendered prompt is not in the model's vocabulary; the turn is left out");
            self.leave_out(turn, generation, Reason::VocabOutOfRange, detail);
            return Ok(());
        }
        let at = match place {
            Placement::Extend(at, text) => {
                self.aligned.branches[at].push_unsampled(text);
                at
            }
            Placement::Fork(text) => self.fork(turn, text),
            Placement::ForkAt(other, length, text) => {
                let mut branch = Branch::fork_at(&self.aligned.branches[other], length);
                branch.push_unsampled(text);
                self.open(turn, branch)
            }
            Placement::UnknownPrefix => {
                let branch = Branch { prefix_unknown: true, ..Branch::default() };
                self.aligned.branches.push(branch);
                self.aligned.branches.len() - 1
            }
        };
        let branch = &mut self.aligned.branches[at];
        branch.path.clone_from(&generation.context);
        branch.path.push(generation.message);
        branch.prompt = rendered.unwrap_or_default();
        branch.body = branch.len();
        if let Some(added) = self.images.map(|keyed| keyed.added(turn)).filter(|&added| added > 0) {
            let detail =
                format!("the prompt is recorded as it was sent; the server made {added} ids more of its pictures");
            self.report(Reason::PictureExpanded, turn, -1, added, detail);
        }
        let media = self.media_before(turn, generation, at);
        self.aligned.branches[at].follows_media |= media.is_some();
        self.add_sampled(turn, generation, at)?;
        if let Some(media) = media {
            let count = self.aligned.branches[at].len() - self.aligned.branches[at].body;
            self.hold(turn, count, media);
        }
        let branch = &mut self.aligned.branches[at];
        extras::note(branch, turn, generation, self.aligned.filled[turn]);
        if !branch.ended {
            self.ends[turn] = Some((at, branch.len()));
        }
        Ok(())
    }

    /// Renders the messages `context` (indices) as the prompt of generation `turn`, or as a finished conversation.
    pub fn render(&mut self, turn: usize, context: &[u32], is_prompt: bool) -> Result<Rendered> {
        let session = &mut self.memory.sessions[usize::from(!is_prompt)];
        self.scaffold.render(session, self.trace, (turn, context), is_prompt, None)
    }

    /// Returns ids and sources of a complete prompt.
    pub fn encode(&mut self, rendered: &Rendered) -> Result<Text> {
        Ok(self.memory.prompts.encode(self.scaffold, rendered)?.tail(0))
    }

    /// Starts a branch over `text`. It shares the tokens that an earlier branch sampled on the same ids.
    fn fork(&mut self, turn: usize, text: Text) -> usize {
        let shared = |branch: &&Branch<'a>| common_prefix(&branch.ids, &text.ids);
        let nearest = self.aligned.branches.iter().filter(|branch| !branch.prefix_unknown).max_by_key(shared);
        let branch = Branch::fork(text, nearest);
        self.open(turn, branch)
    }

    fn open(&mut self, turn: usize, branch: Branch<'a>) -> usize {
        if !self.aligned.branches.is_empty() {
            let detail = format!("the prompt extends no earlier turn: branch {}", self.aligned.branches.len());
            self.report(Reason::PrefixNotExtended, turn, -1, 0, detail);
        }
        self.aligned.branches.push(branch);
        self.aligned.branches.len() - 1
    }

    /// Resolves the sampled tokens of a generation, with the logprobs that were filled.
    pub fn resolve(&mut self, turn: usize, generation: &'a Generation, content: Option<&str>) -> Resolution<'a> {
        let mut resolution = resolve::resolve(generation, content, &self.recorder, &mut self.memory.lookup);
        filled::fill(&mut resolution, generation, self.options, self.tokenizer);
        self.aligned.filled[turn] = resolution.is_filled();
        resolution
    }

    pub fn sampling(&self, turn: usize, generation: &Generation) -> Sampling {
        let inv_temperature = match filled::distribution(generation, self.aligned.filled[turn], self.options) {
            (LogprobKind::Processed, Some(temperature)) if temperature > 0.0 => 1.0 / temperature,
            _ => 1.0,
        };
        Sampling { turn: turn as i32, version: generation.policy_version, inv_temperature }
    }

    pub fn report(&mut self, reason: Reason, turn: usize, token: i32, count: usize, detail: String) {
        let finding = Finding { reason, turn: turn as i32, token, count: count as i32, detail };
        self.aligned.findings.push(finding);
    }
}

/// Returns, for each generation, whether it was repeated and abandoned: another one with the same prompt was
/// continued, but this one was not.
pub fn abandoned(trace: &Trace) -> Vec<bool> {
    let generations = &trace.generations;
    let mut is_abandoned = vec![false; generations.len()];
    if generations.len() < 2 {
        return is_abandoned;
    }
    // Reserve space for all entries: a growing table would hash complete prompts again.
    let count = generations.len();
    let mut same_prompt: HashMap<(&[u32], &Prompt), Vec<usize>, RandomState> =
        HashMap::with_capacity_and_hasher(count, RandomState::default());
    for (turn, generation) in generations.iter().enumerate() {
        if !matches!(generation.prompt, Prompt::Unknown) {
            same_prompt.entry((generation.context.as_slice(), &generation.prompt)).or_default().push(turn);
        }
    }
    let context_messages: HashSet<u32> = generations.iter().flat_map(|later| &later.context).copied().collect();
    for turns in same_prompt.into_values().filter(|turns| turns.len() > 1) {
        let continued: Vec<bool> =
            turns.iter().map(|&turn| is_continued(generations, turn, &context_messages)).collect();
        if continued.contains(&true) {
            for (&turn, &continued) in turns.iter().zip(&continued) {
                is_abandoned[turn] = !continued;
            }
        }
    }
    is_abandoned
}

/// Returns true if another call followed the output of `turn`. `context_messages` are the messages of all contexts.
fn is_continued(generations: &[Generation], turn: usize, context_messages: &HashSet<u32>) -> bool {
    let generation = &generations[turn];
    if context_messages.contains(&generation.message) {
        return true;
    }
    let with_ids = generation.prompt.ids().zip(generation.tokens.ids.as_deref());
    generations[turn + 1..].iter().any(|later| match &later.prompt {
        Prompt::Follows { turn: earlier, .. } => *earlier as usize == turn,
        Prompt::Ids(ids) if later.context.is_empty() => with_ids.is_some_and(|(prompt, sampled)| {
            ids.strip_prefix(prompt)
                .is_some_and(|continuation| !sampled.is_empty() && continuation.starts_with(sampled))
        }),
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Tokens;

    #[test]
    fn a_call_made_again_is_left_where_only_another_was_continued() {
        /// Generations by (context, message they produced).
        type Calls<'a> = &'a [(&'a [u32], u32)];
        let cases: [(&str, Calls<'_>, &[bool]); 3] = [
            ("the other was continued", &[(&[0], 1), (&[0], 2), (&[0, 2, 3], 4)], &[true, false, false]),
            ("parallel samples that nobody continues", &[(&[0], 1), (&[0], 2)], &[false; 2]),
            ("both are continued", &[(&[0], 1), (&[0], 2), (&[0, 1, 3], 4), (&[0, 2, 3], 5)], &[false; 4]),
        ];
        for (case, calls, expected) in cases {
            let call = |&(context, message): &(&[u32], u32)| (context.to_vec(), message);
            let generation = |(context, message)| Generation { message, context, ..Generation::default() };
            let generations = calls.iter().map(call).map(generation).collect();
            assert_eq!(abandoned(&Trace { generations, ..Trace::default() }), expected, "{case}");
        }
    }

    #[test]
    fn a_prompt_that_goes_on_with_ids_or_names_the_turn_continues_it() {
        let call = |prompt, sampled: &[u32], message| {
            let tokens = Tokens { ids: Some(sampled.to_vec()), ..Tokens::default() };
            Generation { message, prompt, tokens, ..Generation::default() }
        };
        for (later, expected) in [
            (Prompt::Ids(vec![1, 2, 9]), [false, true, false]),
            (Prompt::Follows { turn: 1, ids: vec![9] }, [true, false, false]),
        ] {
            let ids = || Prompt::Ids(vec![1]);
            let generations = vec![call(ids(), &[2], 0), call(ids(), &[3], 1), call(later, &[4], 2)];
            assert_eq!(abandoned(&Trace { generations, ..Trace::default() }), expected);
        }
    }
}
