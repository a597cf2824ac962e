//! One row of ids with a mask: each run of sampled ids is a generation, and all ids before it are its prompt.
//!
//! Trainers store trajectories in this form (slime, AReaL, verl, TRL, SkyRL): the input of the model, and which of its
//! tokens were sampled. Numbers of tokens that were not sampled are filler and are ignored.

use super::super::interface::{Body, Decoded, Reason, Rejection, Sampling, note, reject};
use crate::findings;
use crate::format::build::message::plain;
use crate::format::token_list::Reading;
use crate::trace::{Generation, Message, Note, Prompt, Tokens, VersionSpan};
use serde_json::Value;

/// A row: ids, which of them were sampled, and a number for each id.
#[derive(Default)]
pub struct Row {
    pub ids: Vec<u32>,
    pub sampled: Vec<bool>,
    /// One entry per id, or `None` if the row has none.
    pub logprobs: Option<Vec<Reading>>,
    /// Policy version of each id; -1 means unknown.
    pub versions: Option<Vec<i32>>,
    /// Messages of the first prompt, if the row contains them.
    pub messages: Vec<Message>,
    /// Recorded text of everything after the first prompt.
    pub text: Option<String>,
    /// Finish reason of the last generation.
    pub finish_reason: Option<String>,
}

impl Row {
    /// Creates a row from a prompt and a response. The other columns start at the response's first id. Without a mask
    /// all of the response was sampled.
    pub fn after_prompt(
        prompt: Vec<u32>,
        response: Vec<u32>,
        mask: Option<Vec<bool>>,
        logprobs: Option<Vec<Reading>>,
    ) -> Decoded<Self> {
        let (prompt_length, count) = (prompt.len(), response.len());
        let mask = mask.unwrap_or_else(|| vec![true; count]);
        if mask.len() != count {
            return Err(lengths("mask", mask.len(), count));
        }
        if let Some(logprobs) = logprobs.as_ref().filter(|logprobs| logprobs.len() != count) {
            return Err(lengths("list of logprobs", logprobs.len(), count));
        }
        let mut ids = prompt;
        ids.extend(response);
        let sampled = std::iter::repeat_n(false, prompt_length).chain(mask).collect();
        let filler = std::iter::repeat_n(Reading::Missing, prompt_length);
        let logprobs = logprobs.map(|logprobs| filler.chain(logprobs).collect());
        Ok(Self { ids, sampled, logprobs, ..Self::default() })
    }

    /// Returns an error unless all columns have the same length.
    pub fn check(&self) -> Decoded<()> {
        let columns = [
            ("mask", Some(self.sampled.len())),
            ("list of logprobs", self.logprobs.as_ref().map(Vec::len)),
            ("list of versions", self.versions.as_ref().map(Vec::len)),
        ];
        let count = self.ids.len();
        match columns.into_iter().find(|(_, length)| length.is_some_and(|length| length != count)) {
            Some((what, Some(length))) => Err(lengths(what, length, count)),
            _ => Ok(()),
        }
    }

    /// Removes the tokens that the row's attention mask marks as padding.
    pub fn without_padding(mut self, attention_mask: &[bool]) -> Decoded<Self> {
        if attention_mask.len() != self.ids.len() {
            return Err(lengths("attention mask", attention_mask.len(), self.ids.len()));
        }
        keep(&mut self.ids, attention_mask);
        keep(&mut self.sampled, attention_mask);
        self.logprobs.iter_mut().for_each(|column| keep(column, attention_mask));
        self.versions.iter_mut().for_each(|column| keep(column, attention_mask));
        Ok(self)
    }

    pub fn decode(mut self, sampling: &Sampling) -> Decoded<Body> {
        let count = self.ids.len();
        self.check()?;
        let mut body = Body { messages: std::mem::take(&mut self.messages), ..Body::default() };
        let context: Vec<u32> = (0..body.messages.len() as u32).collect();
        body.conversation.clone_from(&context);
        let (mut at, mut prompt_start) = (0, 0);
        while let Some(start) = find(&self.sampled, at, true) {
            let end = find(&self.sampled, start, false).unwrap_or(count);
            let turn = body.generations.len() as u32;
            let ids = self.ids[prompt_start..start].to_vec();
            let mut generation = self.generation(start, end, sampling);
            (generation.prompt, generation.context) = match turn.checked_sub(1) {
                None => (Prompt::Ids(ids), context.clone()),
                Some(turn) => (Prompt::Follows { turn, ids }, Vec::new()),
            };
            generation.message = body.messages.len() as u32;
            body.conversation.push(generation.message);
            body.messages.push(plain("assistant", Value::Null));
            body.generations.push(generation);
            (at, prompt_start) = (end, end);
        }
        self.set_end(&mut body);
        Ok(body)
    }

    fn generation(&self, start: usize, end: usize, sampling: &Sampling) -> Generation {
        let mut tokens = Tokens { ids: Some(self.ids[start..end].to_vec()), ..Tokens::default() };
        let readings = self.logprobs.as_ref().map(|column| &column[start..end]);
        tokens.logprobs = readings.map(|readings| readings.iter().map(|reading| tokens.take(*reading)).collect());
        let (version, versions) = self.versions.as_ref().map_or((-1, Vec::new()), |column| spans(&column[start..end]));
        Generation {
            notes: all_zero(&tokens).into_iter().collect(),
            tokens,
            policy_version: sampling.policy_version.unwrap_or(version),
            versions,
            ..sampling.generation()
        }
    }

    /// Sets the finish reason of the last generation. Sets its text too, if it is the only generation and ends the row.
    fn set_end(self, body: &mut Body) {
        let is_single = body.generations.len() == 1 && self.sampled.last() == Some(&true);
        let Some(last) = body.generations.last_mut() else { return };
        last.finish_reason = self.finish_reason;
        if let Some(text) = self.text.filter(|text| is_single && !text.is_empty()) {
            body.messages[last.message as usize].value["content"] = text.clone().into();
            last.text = Some(text);
        }
    }
}

fn find(mask: &[bool], from: usize, wanted: bool) -> Option<usize> {
    mask[from..].iter().position(|&bit| bit == wanted).map(|offset| from + offset)
}

fn keep<T: Copy>(column: &mut Vec<T>, mask: &[bool]) {
    let mut bits = mask.iter();
    column.retain(|_| *bits.next().unwrap_or(&true));
}

/// Returns the oldest version (-1 if one is unknown), and the spans of equal versions (empty if there is only one).
fn spans(versions: &[i32]) -> (i32, Vec<VersionSpan>) {
    let mut spans: Vec<VersionSpan> = Vec::new();
    for (at, &version) in versions.iter().enumerate() {
        match spans.last_mut().filter(|span| span.version == version) {
            Some(span) => span.end = at as u32 + 1,
            None => spans.push(VersionSpan { start: at as u32, end: at as u32 + 1, version }),
        }
    }
    let oldest = versions.iter().copied().min().unwrap_or(-1).max(-1);
    if spans.len() < 2 {
        spans.clear();
    }
    (oldest, spans)
}

/// Reports several logprobs that are all exactly 0. They are filler, or processed logprobs of greedy sampling; both
/// look the same.
pub fn all_zero(tokens: &Tokens) -> Option<Note> {
    let logprobs = tokens.logprobs.as_deref().filter(|logprobs| logprobs.len() > 1)?;
    logprobs.iter().all(|&logprob| logprob == 0.0).then(|| {
        let detail = "every logprob is exactly 0: filler of a recorder that had none, or greedy sampling";
        note(findings::Reason::InvalidLogprob, logprobs.len(), detail)
    })
}

/// Creates the rejection of columns with different lengths.
pub fn lengths(what: &str, found: usize, ids: usize) -> Rejection {
    reject(Reason::Contradiction, "TG-FORMAT-067", format!("a {what} of {found} for {ids} ids"))
        .why("It is ambiguous which number belongs to which token")
        .fix("Record one number for each id")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(values: &[f32]) -> Vec<Reading> {
        values.iter().map(|&value| Reading::Value(value)).collect()
    }

    #[test]
    fn each_sampled_run_follows_the_run_before_it() {
        let row = Row {
            ids: vec![1, 2, 3, 4, 5, 6, 7],
            sampled: vec![false, true, true, false, true, true, false],
            logprobs: Some(known(&[0.0, -1.0, -2.0, 0.0, -3.0, -4.0, 0.0])),
            versions: Some(vec![-1, 3, 3, -1, 3, 4, -1]),
            ..Row::default()
        };
        let body = row.decode(&Sampling::default()).unwrap();
        let [first, second] = &body.generations[..] else { panic!("two runs") };
        assert_eq!(first.prompt, Prompt::Ids(vec![1]));
        assert_eq!(second.prompt, Prompt::Follows { turn: 0, ids: vec![4] });
        assert_eq!(first.tokens.ids, Some(vec![2, 3]));
        assert_eq!(second.tokens.logprobs, Some(vec![-3.0, -4.0]));
        assert_eq!((first.policy_version, first.versions.len()), (3, 0));
        let cut = VersionSpan { start: 1, end: 2, version: 4 };
        assert_eq!((second.policy_version, second.versions[1]), (3, cut));
    }

    #[test]
    fn missing_numbers_are_counted_where_they_were_sampled_only() {
        let readings = Some(vec![Reading::Missing, Reading::Invalid, Reading::Value(-1.0)]);
        let mask = Some(vec![false, true, true]);
        let row = Row::after_prompt(vec![9], vec![1, 2, 3], mask, readings).unwrap();
        let body = row.decode(&Sampling::default()).unwrap();
        let tokens = &body.generations[0].tokens;
        assert_eq!((tokens.missing, tokens.invalid), (0, 1));
        assert_eq!(body.generations[0].prompt, Prompt::Ids(vec![9, 1]));
    }

    #[test]
    fn a_text_that_goes_on_behind_what_was_sampled_is_not_what_was_sampled() {
        // The text covers the complete response: the sampled token 1, and the tool's result 2 after it.
        let decode = |mask: Vec<bool>| {
            let row = Row::after_prompt(vec![9], vec![1, 2], Some(mask), None).unwrap();
            Row { text: Some("ab".to_owned()), ..row }.decode(&Sampling::default()).unwrap()
        };
        let body = decode(vec![true, false]);
        assert_eq!(body.generations[0].text, None);
        assert!(body.messages[0].value["content"].is_null());
        let body = decode(vec![true, true]);
        assert_eq!(body.generations[0].text.as_deref(), Some("ab"));
        assert_eq!(body.messages[0].value["content"], "ab");
    }

    #[test]
    fn zeros_alone_are_noted_and_kept() {
        let row = Row::after_prompt(vec![9], vec![1, 2], None, Some(known(&[0.0, 0.0]))).unwrap();
        let body = row.decode(&Sampling::default()).unwrap();
        assert_eq!(body.generations[0].notes[0].reason, findings::Reason::InvalidLogprob);
        assert_eq!(body.generations[0].tokens.logprobs, Some(vec![0.0, 0.0]));
    }

    #[test]
    fn columns_of_other_lengths_are_refused() {
        assert!(Row::after_prompt(vec![], vec![1, 2], Some(vec![true]), None).is_err());
        assert!(Row::after_prompt(vec![], vec![1, 2], None, Some(known(&[-1.0]))).is_err());
        let row = Row { ids: vec![1], ..Row::default() };
        assert!(row.decode(&Sampling::default()).is_err());
    }
}
