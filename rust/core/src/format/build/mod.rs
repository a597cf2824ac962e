//! Builds the normal form: what all formats share on the way from messages, calls and token lists to a `Body`.
//!
//! A `Body` is what every format's reader returns: messages, generations and the fields that differ between formats.

pub(super) mod calls;
pub(super) mod extras;
pub(super) mod history;
pub(super) mod message;
pub(super) mod tokens;

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
    /// Of the requests, where the record itself does not say.
    pub model: Option<String>,
    pub tools: Option<Schemas>,
    pub template_kwargs: Fields,
    /// What its generations may still repeat of the messages before them.
    pub budget: Budget,
    /// Choices beside the one that was used.
    pub unused_choices: u32,
}

impl Body {
    /// Makes text of a prompt of what an assistant says before anybody else does, if the conversation goes on behind it and
    /// nothing is recorded of its tokens: a greeting that was not sampled. One that was has no prompt that could be
    /// rendered.
    pub fn take_greetings(&mut self) {
        let begins = |turn: &Generation| turn.context.is_empty() && turn.prompt == Prompt::Rendered;
        if !self.generations.iter().any(begins) {
            return;
        }
        // Turns are named by their numbers there.
        let named = self.generations.iter().any(|turn| matches!(turn.prompt, Prompt::Follows { .. }));
        let goes_on: Vec<u32> = self.generations.iter().filter_map(|turn| turn.context.first().copied()).collect();
        let mut greetings: Vec<u32> = Vec::new();
        self.generations.retain_mut(|turn| {
            let first = turn.context.first().unwrap_or(&turn.message);
            let greets = turn.prompt == Prompt::Rendered && turn.context.iter().all(|index| greetings.contains(index));
            if named || !greets || !goes_on.contains(first) {
                return true;
            }
            greetings.push(turn.message);
            turn.prompt = Prompt::Unknown;
            !turn.tokens.is_empty() || turn.text.is_some()
        });
    }
}

/// What a reader noticed about `count` tokens of a generation.
pub fn note(reason: findings::Reason, count: usize, detail: impl Into<String>) -> Note {
    Note { reason, count: count as u32, detail: detail.into() }
}

/// Items of contexts and prompts that the generations of one record may hold together.
const MOST_COPIES: usize = 1 << 26;

/// What a record may still copy.
#[derive(Debug, Default)]
pub struct Budget(usize);

impl Budget {
    pub fn spend(&mut self, copies: usize) -> Decoded<()> {
        self.0 += copies;
        if self.0 <= MOST_COPIES {
            return Ok(());
        }
        let what = format!("the prompts of its generations hold more than {MOST_COPIES} items together");
        Err(reject(Reason::TooLong, what)
            .why("Each generation is kept with all that it was sampled after, which would not fit in memory")
            .cure("Write a record for each branch of the trajectory"))
    }
}
