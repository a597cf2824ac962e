//! llama.cpp's `/completion`: `{"content", "tokens", "completion_probabilities": [{"id", "token", "bytes",
//! "logprob"}]}`.
//!
//! Source: llama.cpp `tools/server/server-task.cpp`. The list is also called `probs`. With `post_sampling_probs` an
//! entry has `prob`, of the distribution that was sampled from, instead of `logprob`, of the model's own; the reader
//! uses its logarithm. Old servers list `{"content", "probs": [{"tok_str", "prob"}]}` for each token. The list omits
//! stop words but contains the end token.

use super::interface::{
    CallContext, Columns, Decoded, Entry, Form, Id, Outline, Reading, Request, Server, Shape, TokenText, sampling_of,
    sampling_under, spoken,
};
use crate::findings;
use crate::format::build::message;
use crate::format::fields::Sampling;
use crate::trace::{Generation, LogprobKind, Note, Prompt, Stop};
use serde::Deserialize;
use serde_json::Value;

pub(super) const SERVER: Server = Server {
    form: Form {
        name: "llama_cpp",
        reason: "it has `content` and `completion_probabilities`, `stop_type` or `tokens_predicted`",
    },
    signs: &["completion_probabilities", "stop_type", "tokens_predicted", "probs"],
    recognizes: |response| {
        let keys = ["completion_probabilities", "stop_type", "tokens_predicted", "probs"];
        response.is("content", Shape::Text) && keys.iter().any(|key| response.has(key))
    },
    answer,
    request,
    defaults: Sampling::UNKNOWN,
};

/// A sampled token, in the new format or in the old one.
#[derive(Deserialize)]
struct Listed {
    id: Option<Id>,
    #[serde(default)]
    token: TokenText,
    bytes: Option<Vec<u8>>,
    logprob: Option<Reading>,
    prob: Option<f64>,
    /// Old format: the sampled text. At the top level of a response with one token: the candidate's text.
    #[serde(default, alias = "tok_str")]
    content: TokenText,
    probs: Option<Vec<Candidate>>,
}

/// A candidate of the old format.
#[derive(Deserialize)]
struct Candidate {
    #[serde(default)]
    tok_str: TokenText,
    prob: f64,
}

impl Listed {
    /// Returns the logprob, and whether it was recorded as a probability.
    fn reading(&self) -> (Reading, bool) {
        if let Some(reading) = self.logprob {
            return (reading, false);
        }
        let among = || self.probs.iter().flatten().find(|candidate| candidate.tok_str.0 == self.content.0);
        match self.prob.or_else(|| among().map(|candidate| candidate.prob)) {
            Some(prob) => (if prob < 0.0 { Reading::Invalid } else { Reading::of(prob.ln()) }, true),
            None => (Reading::Missing, false),
        }
    }
}

fn answer(response: &Outline<'_>, context: &CallContext<'_>) -> Decoded<Entry> {
    let text = response.text("content")?.unwrap_or_default();
    let key = if response.has("completion_probabilities") { "completion_probabilities" } else { "probs" };
    let entries = response.typed::<Vec<Listed>>(key)?.unwrap_or_default();
    let (mut listing, mut probabilities) = (Columns::default(), 0);
    for entry in &entries {
        let (reading, probability) = entry.reading();
        probabilities += u32::from(probability);
        let text = entry.token.0.as_deref().or(entry.content.0.as_deref());
        listing.push(entry.id.map(|id| id.0), reading, text, entry.bytes.as_deref());
    }
    let kind = if probabilities > 0 { LogprobKind::Processed } else { LogprobKind::Raw };
    let mut generation = context.generation(kind);
    generation.tokens = listing.into_tokens();
    if generation.tokens.ids.is_none() {
        let count = generation.tokens.len();
        generation.tokens.ids =
            response.ids("tokens")?.filter(|ids| !ids.is_empty() && (count == 0 || ids.len() == count));
    }
    if probabilities > 0 {
        let detail = format!("{probabilities} probabilities in place of logprobs: their logarithms are taken");
        generation.notes.push(Note { reason: findings::Reason::InvalidLogprob, count: probabilities, detail });
    }
    // The response repeats the sampling parameters.
    let settings = sampling_under(response, "generation_settings")?;
    generation.temperature = generation.temperature.or(settings.temperature);
    generation.top_p = generation.top_p.or(settings.top_p);
    generation.options = std::mem::take(&mut generation.options).or(&settings.options);
    finish_of(response, &mut generation)?;
    generation.prompt = response.get("prompt").map_or(Ok(Prompt::Rendered), |_| prompt(response))?;
    generation.text = Some(text.clone());
    Ok(Entry::sampled(spoken(&text), generation, 0))
}

/// Reads `stop_type`, or the three flags of old servers.
fn finish_of(response: &Outline<'_>, generation: &mut Generation) -> Decoded<()> {
    let flag = |key: &str| Ok(response.value(key)? == Some(Value::Bool(true)));
    let word = response.text("stopping_word")?.filter(|word| !word.is_empty());
    let kind = match response.text("stop_type")? {
        Some(kind) if kind == "none" => None,
        Some(kind) => Some(kind),
        None if flag("stopped_limit")? => Some("limit".to_owned()),
        None if flag("stopped_word")? => Some("word".to_owned()),
        None if flag("stopped_eos")? => Some("eos".to_owned()),
        None => None,
    };
    generation.finish_reason = kind.map(|kind| message::common(&kind).to_owned());
    generation.stop = word.map_or(Stop::Unknown, Stop::Text);
    Ok(())
}

fn prompt(outline: &Outline<'_>) -> Decoded<Prompt> {
    Ok(match outline.get("prompt").map(Shape::of) {
        Some(Shape::Text) => {
            outline.text("prompt")?.filter(|text| !text.is_empty()).map_or(Prompt::Rendered, Prompt::Text)
        }
        Some(Shape::List) => outline.ids("prompt").ok().flatten().map_or(Prompt::Unknown, Prompt::Ids),
        _ => Prompt::Unknown,
    })
}

fn request(request: &Outline<'_>) -> Decoded<Request> {
    let sampling = sampling_of(request, "top_p")?;
    Ok(Request { prompt: prompt(request)?, sampling, ..Request::default() })
}
