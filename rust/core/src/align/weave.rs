//! One trace to its branches: each generation extends a branch, or forks a new one.
//!
//! Sampled ids are the data; the template only supplies what was not sampled. Recorded prompt ids win over rendering.
//! The decisions stand beside: `place` (where the prompt goes), `splice` (whether a rendered prompt goes on), `sampled`
//! (what was drawn). Called by `align` for every trace; pure but for the tokenizer's caches.

use super::branch::{Branch, Sampling, common_prefix};
use super::lookup::Lookup;
use super::options::{Mode, Options};
use super::pictures::Keyed;
use super::prompt::{Scaffold, Text};
use super::prompts::Prompts;
use super::recorder::Recorder;
use super::resolve;
use super::resolved::Resolved;
use super::{duplicates, extras};
use crate::drift::{Finding, Reason};
use crate::error::Result;
use crate::template::{Rendered, Session};
use crate::tokenizer::Tokenizer;
use crate::trace::{Extra, Generation, LogprobKind, Prompt, Trace};
use std::borrow::Cow;
use std::cell::OnceCell;

/// Branches and findings of one trace.
#[derive(Debug, Default)]
pub struct Woven<'a> {
    /// Branches in the order in which they were opened.
    pub branches: Vec<Branch<'a>>,
    /// What did not fit.
    pub findings: Vec<Finding>,
    /// Tokens that the record says were sampled.
    pub recorded: u64,
    /// Of those: tokens of tier T0 to T3 that stand in a branch with a logprob.
    pub exact: u64,
}

/// Where unsampled text goes.
pub(super) enum Place {
    /// Extends branch `.0`.
    Extend(usize, Text),
    /// Opens a branch.
    Fork(Text),
    /// Opens a branch over the first `.1` tokens of branch `.0`.
    Stem(usize, usize, Text),
    /// Opens a branch whose beginning is not known.
    Headless,
}

/// What a worker keeps from one trace to the next.
#[derive(Debug, Default)]
pub struct Memory<'a> {
    /// The last conversation, as prompts and as finished text.
    pub sessions: [Session<'a>; 2],
    pub prompts: Prompts,
    pub lookup: Lookup,
}

/// Aligns one trace; `pictures` is what its prompts have keys for.
pub fn weave<'a>(
    trace: &'a Trace,
    pictures: Option<&'a Keyed<'a>>,
    scaffold: &'a Scaffold<'a>,
    options: Options,
    memory: &mut Memory<'a>,
) -> Result<Woven<'a>> {
    let tokenizer = scaffold.tokenizer;
    let mut loom = Loom {
        trace,
        pictures,
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
        woven: Woven::default(),
    };
    let abandoned = duplicates::abandoned(trace);
    if options.mode == Mode::Align {
        trace.generations.iter().enumerate().for_each(|(turn, generation)| loom.note(turn, generation));
        return loom.rerender();
    }
    for (turn, generation) in trace.generations.iter().enumerate() {
        loom.note(turn, generation);
        if abandoned[turn] {
            let detail = "the call was made again and the other answer was used; this one is left out";
            loom.leave_out(turn, generation, Reason::DuplicateGeneration, detail.to_owned());
            continue;
        }
        loom.add(turn, generation).map_err(|error| error.in_turn(turn).at(&trace.location))?;
    }
    Ok(loom.woven)
}

/// A part of a message that is no text: index of the message, and what the part calls itself.
pub type Part<'a> = (u32, &'a str);

pub(super) struct Loom<'a, 'm> {
    pub trace: &'a Trace,
    pub pictures: Option<&'a Keyed<'a>>,
    pub tokenizer: &'a Tokenizer,
    pub scaffold: &'a Scaffold<'a>,
    pub options: Options,
    /// For each generation the branch and the length at which its sampled tokens end, once they are all held.
    pub ends: Vec<Option<(usize, usize)>>,
    /// Whether it was said that the template prints a date.
    pub dated: bool,
    /// Of each message whether it was looked for in a prompt, and how many were not found.
    pub shown: Vec<bool>,
    pub unshown: usize,
    pub recorder: Recorder<'a>,
    /// The messages that hold more than text.
    pub media: OnceCell<Vec<Part<'a>>>,
    pub memory: &'m mut Memory<'a>,
    pub woven: Woven<'a>,
}

impl<'a> Loom<'a, '_> {
    /// Findings of the reader.
    fn note(&mut self, turn: usize, generation: &Generation) {
        for note in &generation.notes {
            self.find(note.reason, turn, -1, note.count as usize, note.detail.clone());
        }
    }

    /// A call of which nothing is held.
    pub fn leave_out(&mut self, turn: usize, generation: &Generation, reason: Reason, detail: String) {
        let count = generation.tokens.len();
        self.woven.recorded += count as u64;
        self.find(reason, turn, -1, count, detail);
    }

    /// What of a call is no id that the model has, apart from what was sampled: its prompt, its sampling masks.
    fn outside(&self, turn: usize, generation: &Generation) -> Option<String> {
        let keyed = self.pictures.filter(|keyed| keyed.has_keys(turn));
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
        let found = self.tokenizer.first_outside(&prompt).map(|at| ("the prompt", prompt[at] as i32));
        let (what, id) = found.or_else(|| masks.find_map(mask))?;
        let size = self.tokenizer.model_vocab_size();
        Some(format!("id {} of {what} is not in the model's vocabulary of {size}; the turn is left out", id as u32))
    }

    fn add(&mut self, turn: usize, generation: &'a Generation) -> Result<()> {
        if let Some(detail) = self.outside(turn, generation) {
            self.leave_out(turn, generation, Reason::VocabOutOfRange, detail);
            return Ok(());
        }
        let (place, rendered) = self.place(turn, generation)?;
        // Recorded ids were looked through above.
        if !matches!(generation.prompt, Prompt::Ids(_) | Prompt::Follows { .. })
            && let Place::Extend(_, text) | Place::Fork(text) | Place::Stem(_, _, text) = &place
            && let Some(at) = self.tokenizer.first_outside(&text.ids)
        {
            let id = text.ids[at];
            let detail =
                format!("id {id} of the rendered prompt is not in the model's vocabulary; the turn is left out");
            self.leave_out(turn, generation, Reason::VocabOutOfRange, detail);
            return Ok(());
        }
        let at = match place {
            Place::Extend(at, text) => {
                self.woven.branches[at].give(text);
                at
            }
            Place::Fork(text) => self.fork(turn, text),
            Place::Stem(other, length, text) => {
                let mut branch = Branch::stem(&self.woven.branches[other], length);
                branch.give(text);
                self.open(turn, branch)
            }
            Place::Headless => {
                let branch = Branch { headless: true, ..Branch::default() };
                self.woven.branches.push(branch);
                self.woven.branches.len() - 1
            }
        };
        let branch = &mut self.woven.branches[at];
        branch.path.clone_from(&generation.context);
        branch.path.push(generation.message);
        branch.prompt = rendered.unwrap_or_default();
        branch.body = branch.len();
        if let Some(added) = self.pictures.map(|keyed| keyed.added(turn)).filter(|&added| added > 0) {
            let detail =
                format!("the prompt is recorded as it was sent; the server made {added} ids more of its pictures");
            self.find(Reason::PictureExpanded, turn, -1, added, detail);
        }
        let media = self.media_before(turn, generation, at);
        self.woven.branches[at].behind_media |= media.is_some();
        self.add_sampled(turn, generation, at)?;
        if let Some(media) = media {
            let held = self.woven.branches[at].len() - self.woven.branches[at].body;
            self.hold(turn, held, media);
        }
        let branch = &mut self.woven.branches[at];
        extras::note(branch, turn, generation);
        if !branch.ended {
            self.ends[turn] = Some((at, branch.len()));
        }
        Ok(())
    }

    /// The messages `context` (indices) as the prompt of generation `turn`, or as finished text.
    pub fn render(&mut self, turn: usize, context: &[u32], is_prompt: bool) -> Result<Rendered> {
        let session = &mut self.memory.sessions[usize::from(!is_prompt)];
        self.scaffold.render(session, self.trace, (turn, context), is_prompt, None)
    }

    /// Ids and sources of a whole prompt.
    pub fn encode(&mut self, rendered: &Rendered) -> Result<Text> {
        Ok(self.memory.prompts.encode(self.scaffold, rendered)?.tail(0))
    }

    /// Opens a branch over `text`, sharing what an earlier branch sampled on the same ids.
    fn fork(&mut self, turn: usize, text: Text) -> usize {
        let shared = |branch: &&Branch<'a>| common_prefix(&branch.ids, &text.ids);
        let nearest = self.woven.branches.iter().filter(|branch| !branch.headless).max_by_key(shared);
        let branch = Branch::fork(text, nearest);
        self.open(turn, branch)
    }

    fn open(&mut self, turn: usize, branch: Branch<'a>) -> usize {
        if !self.woven.branches.is_empty() {
            let detail = format!("the prompt extends no earlier turn: branch {}", self.woven.branches.len());
            self.find(Reason::PrefixNotExtended, turn, -1, 0, detail);
        }
        self.woven.branches.push(branch);
        self.woven.branches.len() - 1
    }

    /// The sampled tokens of a generation.
    pub fn resolve(&mut self, generation: &'a Generation, content: Option<&str>) -> Resolved<'a> {
        resolve::resolve(generation, content, &self.recorder, &mut self.memory.lookup)
    }

    pub fn sampling(&self, turn: usize, generation: &Generation) -> Sampling {
        let kind = self.options.logprob_kind.unwrap_or(generation.logprob_kind);
        let inv_temperature = match (kind, self.options.temperature(generation)) {
            (LogprobKind::Processed, Some(temperature)) if temperature > 0.0 => 1.0 / temperature,
            _ => 1.0,
        };
        Sampling { turn: turn as i32, version: generation.policy_version, inv_temperature }
    }

    pub fn find(&mut self, reason: Reason, turn: usize, token: i32, count: usize, detail: String) {
        let finding = Finding { reason, turn: turn as i32, token, count: count as i32, detail };
        self.woven.findings.push(finding);
    }
}
