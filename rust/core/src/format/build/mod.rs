//! Builds the common form of a trace: the code that all formats share to convert messages, calls and token lists to a
//! `Body`.
//!
//! A `Body` is the result of every format's reader: messages, generations, and the fields that differ between formats.

pub(super) mod calls;
pub(super) mod extras;
pub(super) mod history;
pub(super) mod message;
pub(super) mod tokens;
mod unread;

use crate::findings;
use crate::format::fields::Fields;
use crate::format::rejection::{Decoded, Reason, reject};
use crate::trace::{Generation, Message, Note, Prompt, Schemas};

/// Messages and generations of a record.
#[derive(Debug, Default)]
pub struct Body {
    pub messages: Vec<Message>,
    pub generations: Vec<Generation>,
    pub conversation: Vec<u32>,
    /// Model of the requests, if the record names none.
    pub model: Option<String>,
    pub tools: Option<Schemas>,
    pub template_kwargs: Fields,
    /// Number of context and prompt items that the generations copied.
    pub budget: Budget,
    /// Number of ignored choices.
    pub unused_choices: u32,
}

impl Body {
    /// Drops generations that are greetings: an assistant message before any other message, followed by more messages,
    /// without recorded tokens.
    ///
    /// A greeting was not sampled, so it becomes text of later prompts. Even a sampled one would have no prompt to
    /// render.
    pub fn take_greetings(&mut self) {
        let has_no_context = |turn: &Generation| turn.context.is_empty() && turn.prompt == Prompt::Rendered;
        if !self.generations.iter().any(has_no_context) {
            return;
        }
        // Such prompts refer to generations by index, so none may be removed.
        let has_references = self.generations.iter().any(|turn| matches!(turn.prompt, Prompt::Follows { .. }));
        let first_messages: Vec<u32> =
            self.generations.iter().filter_map(|turn| turn.context.first().copied()).collect();
        let mut greetings: Vec<u32> = Vec::new();
        self.generations.retain_mut(|turn| {
            let first = turn.context.first().unwrap_or(&turn.message);
            let follows_greetings =
                turn.prompt == Prompt::Rendered && turn.context.iter().all(|index| greetings.contains(index));
            if has_references || !follows_greetings || !first_messages.contains(first) {
                return true;
            }
            greetings.push(turn.message);
            turn.prompt = Prompt::Unknown;
            !turn.tokens.is_empty() || turn.text.is_some()
        });
    }
}

/// Creates a reader's observation about `count` tokens of a generation.
pub fn note(reason: findings::Reason, count: usize, detail: impl Into<String>) -> Note {
    Note { reason, count: count as u32, detail: detail.into() }
}

/// Largest total number of context and prompt items in the generations of one record.
const MOST_COPIES: usize = 1 << 26;

/// Number of items that a record has copied so far.
#[derive(Debug, Default)]
pub struct Budget(usize);

impl Budget {
    pub fn spend(&mut self, copies: usize) -> Decoded<()> {
        self.0 += copies;
        if self.0 <= MOST_COPIES {
            return Ok(());
        }
        let what = format!("the prompts of its generations hold more than {MOST_COPIES} items together");
        Err(reject(Reason::TooLong, "TG-FORMAT-015", what)
            .why("Each generation is kept with all that it was sampled after, which would not fit in memory")
            .fix("Write a record for each branch of the trajectory"))
    }
}
