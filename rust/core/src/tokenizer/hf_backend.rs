//! The tokenizer of the `tokenizers` crate, which is the reference for every id, run within a budget of time and
//! bytes.
//!
//! Its post-processor is used once, for the ids before a text; its decoder is never used. `pattern` runs its regular
//! expressions. The length of the text is checked between steps.

use super::budget::{bounded, in_bytes, in_time, spend};
use super::check::refused;
use super::pattern::Bounded;
use crate::error::{Error, Result};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::collections::HashMap;
use std::fmt::Debug;
use tokenizers::models::bpe::BPE;
use tokenizers::tokenizer::Offsets;
use tokenizers::tokenizer::pattern::{Invert, Pattern};
use tokenizers::{
    AddedToken, DecoderWrapper, Encoding, Model, ModelWrapper, NormalizedString, Normalizer, NormalizerWrapper,
    OffsetReferential, OffsetType, PostProcessorWrapper, PreTokenizedString, PreTokenizer, PreTokenizerWrapper,
    SplitDelimiterBehavior, TokenizerImpl, TruncationParams,
};

/// The functions that every tokenizer offers, regardless of its model.
pub(super) trait Reference: Debug + Send + Sync {
    /// Returns ids and, if requested, offsets.
    fn encode(&self, text: &str, special: bool, offsets: bool) -> tokenizers::Result<Encoding>;
    /// Returns the ordinary vocabulary.
    fn vocabulary(&self) -> HashMap<String, u32>;
    /// Returns the id of an entry or an added token.
    fn id(&self, token: &str) -> Option<u32>;
    /// Returns the added tokens with their ids.
    fn added(&self) -> Vec<(u32, AddedToken)>;
    fn add(&mut self, tokens: Vec<AddedToken>) -> tokenizers::Result<usize>;
}

type Whole<M> = TokenizerImpl<M, Normalise, PreTokenise, PostProcessorWrapper, DecoderWrapper>;

impl<M: Model + Debug + Send + Sync> Reference for Whole<M> {
    fn encode(&self, text: &str, special: bool, offsets: bool) -> tokenizers::Result<Encoding> {
        if offsets { self.encode(text, special) } else { self.encode_fast(text, special) }
    }

    fn vocabulary(&self) -> HashMap<String, u32> {
        self.get_vocab(false)
    }

    fn id(&self, token: &str) -> Option<u32> {
        self.token_to_id(token)
    }

    fn added(&self) -> Vec<(u32, AddedToken)> {
        self.get_added_tokens_decoder().into_iter().collect()
    }

    fn add(&mut self, tokens: Vec<AddedToken>) -> tokenizers::Result<usize> {
        self.add_tokens(tokens)
    }
}

/// Builds the tokenizer of a checked file. Trying BPE first halves the time for the most common model.
pub(super) fn build(json: &[u8]) -> Result<Box<dyn Reference>> {
    let result = bounded(json.len(), "loading the tokenizer", || {
        Ok(match serde_json::from_slice::<Whole<BPE>>(json) {
            Ok(tokenizer) => Ok(plain(tokenizer)),
            Err(_) => serde_json::from_slice::<Whole<ModelWrapper>>(json).map(plain),
        })
    });
    result?.map_err(|error| refused(&format!("it is no tokenizer: {error}")))
}

/// Disables truncation and padding.
fn plain<M: Model + Debug + Send + Sync + 'static>(mut tokenizer: Whole<M>) -> Box<dyn Reference> {
    let _ = tokenizer.with_truncation(None::<TruncationParams>);
    tokenizer.with_padding(None);
    Box::new(tokenizer)
}

/// Returns the ids that the post-processor puts before a text: BOS, if there is one.
pub(super) fn prefix(inner: &dyn Reference) -> Result<Vec<u32>, Error> {
    const TEXT: &str = "a";
    let ids = |special, what| {
        let encoded = bounded(TEXT.len(), what, || inner.encode(TEXT, special, false));
        encoded.map(|encoding| encoding.get_ids().to_vec())
    };
    // A vocabulary may lack the letter.
    let Ok(plain) = ids(false, "encoding a letter") else { return Ok(Vec::new()) };
    let processed = ids(true, "post-processing a letter")?;
    let at = processed.windows(plain.len().max(1)).position(|window| window == plain);
    Ok(at.map(|at| processed[..at].to_vec()).unwrap_or_default())
}

/// The steps of a normalizer.
#[derive(Debug)]
pub(super) struct Normalise(Vec<Change>);

#[derive(Debug)]
enum Change {
    Replace(Bounded, String),
    Other(NormalizerWrapper),
}

impl<'de> Deserialize<'de> for Normalise {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut steps = Vec::new();
        changes(NormalizerWrapper::deserialize(deserializer)?, &mut steps).map_err(serde::de::Error::custom)?;
        Ok(Self(steps))
    }
}

fn changes(part: NormalizerWrapper, steps: &mut Vec<Change>) -> Result<(), String> {
    match part {
        NormalizerWrapper::Sequence(parts) => parts.into_iter().try_for_each(|part| changes(part, steps))?,
        NormalizerWrapper::Replace(replace) => {
            let description = serde_json::to_value(&replace).map_err(|error| error.to_string())?;
            let text = |kind: &str| description.pointer(kind).and_then(Value::as_str);
            let pattern = match text("/pattern/Regex") {
                Some(source) => Bounded::new(source)?,
                None => Bounded::literal(text("/pattern/String").unwrap_or_default())?,
            };
            steps.push(Change::Replace(pattern, replace.content));
        }
        other => steps.push(Change::Other(other)),
    }
    Ok(())
}

impl Normalizer for Normalise {
    fn normalize(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        for step in &self.0 {
            match step {
                Change::Replace(pattern, content) => {
                    let matches = Found(pattern.find_matches(text.get())?);
                    let count = matches.0.iter().filter(|(_, is_match)| *is_match).count();
                    in_bytes(text.len() + count * content.len(), "normalizer")?;
                    text.replace(&matches, content)?;
                }
                Change::Other(NormalizerWrapper::Prepend(prepend)) => {
                    in_bytes(text.len() + prepend.prepend.len(), "normalizer")?;
                    prepend.normalize(text)?;
                }
                Change::Other(other) => other.normalize(text)?,
            }
            in_bytes(text.len(), "normalizer")?;
            in_time("normalizer")?;
        }
        spend(text.len());
        Ok(())
    }
}

/// Matches that were found before.
struct Found(Vec<(Offsets, bool)>);

impl Pattern for &Found {
    fn find_matches(&self, _: &str) -> tokenizers::Result<Vec<(Offsets, bool)>> {
        Ok(self.0.clone())
    }
}

/// The steps of a pre-tokenizer.
#[derive(Debug)]
pub(super) struct PreTokenise(Vec<Cut>);

#[derive(Debug)]
enum Cut {
    Split(Bounded, SplitDelimiterBehavior, bool),
    Other(PreTokenizerWrapper),
}

impl<'de> Deserialize<'de> for PreTokenise {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut steps = Vec::new();
        cuts(PreTokenizerWrapper::deserialize(deserializer)?, &mut steps).map_err(serde::de::Error::custom)?;
        Ok(Self(steps))
    }
}

fn cuts(part: PreTokenizerWrapper, steps: &mut Vec<Cut>) -> Result<(), String> {
    use tokenizers::pre_tokenizers::split::SplitPattern;
    match part {
        PreTokenizerWrapper::Sequence(parts) => parts.into_iter().try_for_each(|part| cuts(part, steps))?,
        PreTokenizerWrapper::Split(split) => match &split.pattern {
            SplitPattern::Regex(source) => steps.push(Cut::Split(Bounded::new(source)?, split.behavior, split.invert)),
            SplitPattern::String(_) => steps.push(Cut::Other(PreTokenizerWrapper::Split(split))),
        },
        other => steps.push(Cut::Other(other)),
    }
    Ok(())
}

impl PreTokenizer for PreTokenise {
    fn pre_tokenize(&self, text: &mut PreTokenizedString) -> tokenizers::Result<()> {
        self.0.iter().try_for_each(|step| match step {
            Cut::Split(pattern, behavior, false) => text.split(|_, part| part.split(pattern, *behavior)),
            Cut::Split(pattern, behavior, true) => text.split(|_, part| part.split(Invert(pattern), *behavior)),
            Cut::Other(other) => {
                // Each step turns a byte into a few at most and adds one per part. Checking after each step therefore
                // bounds the size.
                other.pre_tokenize(text)?;
                let parts = text.get_splits(OffsetReferential::Normalized, OffsetType::None);
                in_bytes(parts.iter().map(|(part, ..)| part.len()).sum(), "pre-tokenizer")?;
                in_time("pre-tokenizer")
            }
        })
    }
}
