//! A conversation in progress: the ids of its next prompt, with every sampled id kept as it was sampled.
//!
//! The template's own text between sampled ids is found by the same splice that `align` uses. If the template does not
//! keep sampled text (it drops earlier thoughts, for example), the prompt is tokenized again and the fork is reported.
//! In `align` such a fork becomes a new branch. Every prompt is rendered completely.

use super::prompt::{JOINED, Scaffold};
use super::splice::{Ending, splice};
use crate::error::{Error, Kind, Result};
use crate::findings::{Finding, Reason};
use crate::media::media_part_type;
use crate::template::Rendered;
use crate::tokenizer::Tokenizer;
use serde_json::{Map, Value};
use std::sync::Arc;

/// A list of messages, some of them sampled, with the ids of the sampled ones.
#[derive(Debug, Clone)]
pub struct Conversation {
    tokenizer: Arc<Tokenizer>,
    messages: Vec<Arc<Value>>,
    tools: Option<Arc<Value>>,
    kwargs: Map<String, Value>,
    /// All ids up to the last sampled one.
    ids: Vec<u32>,
    last: Option<Turn>,
    turns: usize,
    forks: Vec<Finding>,
    next: Option<Next>,
}

/// The turn that was sampled last.
#[derive(Debug, Clone)]
struct Turn {
    /// Its rendered prompt.
    prompt: Arc<str>,
    /// Index of its first id.
    start: usize,
    stopped: bool,
    message: usize,
}

/// The prompt of the next turn.
#[derive(Debug, Clone)]
struct Next {
    text: Arc<str>,
    ids: Vec<u32>,
    fork: Option<Finding>,
}

impl Conversation {
    /// Creates a conversation in which nothing was sampled yet.
    ///
    /// # Errors
    /// Fails if a message is not an object or contains anything but text.
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        messages: Vec<Value>,
        tools: Option<Arc<Value>>,
        kwargs: Map<String, Value>,
    ) -> Result<Self> {
        let mut conversation = Self {
            tokenizer,
            messages: Vec::new(),
            tools,
            kwargs,
            ids: Vec::new(),
            last: None,
            turns: 0,
            forks: Vec::new(),
            next: None,
        };
        conversation.append(messages)?;
        Ok(conversation)
    }

    /// Adds messages that were not sampled. If one of them is rejected, none is added.
    ///
    /// # Errors
    /// Same as [`Conversation::new`].
    pub fn append(&mut self, messages: Vec<Value>) -> Result<()> {
        let before = self.messages.len();
        messages.iter().enumerate().try_for_each(|(index, message)| checked(before + index, message))?;
        self.messages.extend(messages.into_iter().map(Arc::new));
        self.next = None;
        Ok(())
    }

    /// Adds the turn that was sampled after [`Conversation::prompt_ids`]: its ids as sampled, and the message that
    /// templates receive.
    ///
    /// # Errors
    /// Fails if the model's vocabulary lacks an id or the message is not an assistant's. Also fails if `prompt_ids`
    /// fails.
    pub fn append_sampled(&mut self, ids: &[u32], message: Value) -> Result<()> {
        if let Some(at) = self.tokenizer.first_outside(ids) {
            let size = self.tokenizer.model_vocab_size();
            let mut error = Error::new(
                Kind::Argument,
                "TG-ALIGN-501",
                format!("id {} is not in the model's vocabulary of {size}", ids[at]),
            )
            .why("The model could not read the next prompt")
            .fix("Pass the ids that the server sampled with this tokenizer")
            .in_turn(self.turns);
            error.location.token = Some(at);
            return Err(error);
        }
        checked(self.messages.len(), &message)?;
        if message.get("role").and_then(Value::as_str) != Some("assistant") {
            return Err(Error::new(
                Kind::Argument,
                "TG-ALIGN-502",
                "the message of a sampled turn is not an assistant's",
            )
            .why("The template would show it in another position")
            .fix(r#"Pass {"role": "assistant", ...}"#)
            .in_turn(self.turns));
        }
        self.prompt_ids()?;
        let Some(next) = self.next.take() else { return Ok(()) };
        let start = next.ids.len();
        self.ids = next.ids;
        self.ids.extend_from_slice(ids);
        let stopped = ids.last().is_some_and(|&id| self.tokenizer.is_special(id));
        self.forks.extend(next.fork);
        self.last = Some(Turn { prompt: next.text, start, stopped, message: self.messages.len() });
        self.messages.push(Arc::new(message));
        self.turns += 1;
        Ok(())
    }

    /// Returns the number of sampled turns.
    pub fn turns(&self) -> usize {
        self.turns
    }

    /// Returns the ids after which the next turn is sampled.
    ///
    /// # Errors
    /// Fails if the template raises an error or does not finish.
    pub fn prompt_ids(&mut self) -> Result<&[u32]> {
        if self.next.is_none() {
            self.next = Some(self.prompt().map_err(|error| error.in_turn(self.turns))?);
        }
        Ok(self.next.as_ref().map_or(&[], |next| &next.ids))
    }

    /// Returns the places where the template did not keep sampled text. Each entry's turn is the one before which the
    /// prompt was tokenized again.
    pub fn forks(&self) -> impl Iterator<Item = &Finding> {
        self.forks.iter().chain(self.next.as_ref().and_then(|next| next.fork.as_ref()))
    }

    fn prompt(&self) -> Result<Next> {
        let scaffold = Scaffold::new(&self.tokenizer, None)?;
        let messages: Vec<&Value> = self.messages.iter().map(Arc::as_ref).collect();
        let (template, tools) = (self.tokenizer.template_for(self.tools.as_ref())?, self.tools.as_ref());
        let rendered = template.render(&messages, tools, true, &self.kwargs)?;
        let text = Arc::clone(&rendered.text);
        let Some(last) = &self.last else {
            return Ok(Next { ids: scaffold.encode(&rendered, 0)?.ids, text, fork: None });
        };
        match self.behind(last, &rendered, &scaffold)? {
            Ok(from) => {
                let suffix = scaffold.encode(&rendered, from)?;
                if suffix.joined {
                    let fork = self.fork(Reason::NormalizerChanged, JOINED);
                    return Ok(Next { text, ids: scaffold.encode(&rendered, 0)?.ids, fork: Some(fork) });
                }
                Ok(Next { text, ids: [&self.ids[..], &suffix.ids].concat(), fork: None })
            }
            Err(fork) => Ok(Next { text, ids: scaffold.encode(&rendered, 0)?.ids, fork: Some(fork) }),
        }
    }

    /// Returns the byte of the rendered prompt after the last turn. If the prompt does not contain the turn, returns
    /// the reason.
    fn behind(
        &self,
        last: &Turn,
        rendered: &Rendered,
        scaffold: &Scaffold<'_>,
    ) -> Result<std::result::Result<usize, Finding>> {
        let ending = Ending {
            prompt: &last.prompt,
            sampled: &self.ids[last.start..],
            stopped: last.stopped,
            cut: !last.stopped,
            unmarked: false,
            overrun: false,
            message: last.message as u32,
            produced: &self.messages[last.message],
        };
        let (spliced, findings) = splice(&ending, rendered, scaffold)?;
        let turn = self.turns as i32;
        Ok(spliced.from.ok_or_else(|| match findings.into_iter().next_back() {
            Some(finding) => Finding { turn, ..finding },
            None => self.fork(
                Reason::PrefixNotExtended,
                "the template does not show the last turn as it was sampled and go on behind it",
            ),
        }))
    }

    /// Builds the finding that explains why the prompt of the next turn is tokenized again.
    fn fork(&self, reason: Reason, detail: &str) -> Finding {
        Finding { reason, turn: self.turns as i32, token: -1, count: 0, detail: detail.to_owned() }
    }
}

/// Checks that a conversation can contain the message.
fn checked(index: usize, message: &Value) -> Result<()> {
    if !message.is_object() {
        return Err(Error::new(Kind::Argument, "TG-ALIGN-503", format!("message {index} is not an object"))
            .why("Templates read its role and content")
            .fix(r#"Pass {"role": ..., "content": ...}"#));
    }
    if message.get("role").and_then(Value::as_str).is_none() {
        return Err(Error::new(Kind::Argument, "TG-ALIGN-504", format!("message {index} has no role"))
            .why("Its author is unknown")
            .fix(r#"Pass {"role": ..., "content": ...}"#));
    }
    match media_part_type(message) {
        None => Ok(()),
        Some(kind) => {
            let kind: String = kind.chars().take(40).collect();
            Err(Error::new(Kind::Argument, "TG-ALIGN-505", format!("message {index} has a part of kind {kind:?}"))
                .why("Ids do not contain its content")
                .fix("Pass text alone"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::example;
    use serde_json::json;

    fn conversation() -> Conversation {
        let tokenizer = Arc::new(example());
        let messages = vec![json!({"role": "user", "content": "the price of a red lamp"})];
        Conversation::new(tokenizer, messages, None, Map::new()).unwrap()
    }

    #[test]
    fn sampled_ids_stay_where_the_same_text_has_other_canonical_ones() {
        let mut talk = conversation();
        let tokenizer = Arc::clone(&talk.tokenizer);
        // Byte by byte: no encoder would write it this way.
        let mut sampled: Vec<u32> = b"12 lamps".iter().map(|&byte| tokenizer.id_of_bytes(&[byte]).unwrap()).collect();
        assert_ne!(tokenizer.encode("12 lamps").unwrap(), sampled);
        sampled.extend(tokenizer.stop_id());
        let prompt = talk.prompt_ids().unwrap().to_vec();
        talk.append_sampled(&sampled, json!({"role": "assistant", "content": "12 lamps"})).unwrap();
        talk.append(vec![json!({"role": "user", "content": "thanks"})]).unwrap();
        let suffix = tokenizer.encode("\n<|im_start|>user\nthanks<|im_end|>\n<|im_start|>assistant\n").unwrap();
        assert_eq!(talk.prompt_ids().unwrap(), [prompt, sampled, suffix].concat());
        assert_eq!(talk.forks().count(), 0);
    }

    #[test]
    fn a_refused_append_leaves_the_conversation_as_it_was() {
        let mut talk = conversation();
        let before = talk.prompt_ids().unwrap().to_vec();
        let answer = json!({"role": "assistant", "content": "1"});
        let error = talk.append_sampled(&[5, u32::MAX], answer).unwrap_err();
        assert_eq!((error.location.turn, error.location.token), (Some(0), Some(1)));
        talk.append_sampled(&[5], json!({"role": "user", "content": "1"})).unwrap_err();
        let image = json!({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]});
        talk.append(vec![json!({"role": "user", "content": "2"}), image]).unwrap_err();
        assert_eq!(talk.messages.len(), 1);
        assert_eq!(talk.prompt_ids().unwrap(), before);
    }

    #[test]
    fn a_message_that_shows_something_else_than_was_sampled_is_a_fork() {
        let mut talk = conversation();
        let ids = talk.tokenizer.encode("one lamp").unwrap();
        talk.append_sampled(&ids, json!({"role": "assistant", "content": "two chairs"})).unwrap();
        let forks: Vec<_> = {
            talk.prompt_ids().unwrap();
            talk.forks().cloned().collect()
        };
        assert_eq!((forks.len(), forks[0].reason, forks[0].turn), (1, Reason::HistoryRewritten, 1));
        let messages: Vec<&Value> = talk.messages.iter().map(Arc::as_ref).collect();
        let template = talk.tokenizer.template().unwrap();
        let text = template.render_text(&messages, None, true, &Map::new()).unwrap();
        let ids_of_text = talk.tokenizer.encode(&text).unwrap();
        assert_eq!(talk.prompt_ids().unwrap(), ids_of_text);
    }
}
