//! The normalisers and pre-tokenizers of the `tokenizers` crate, within an allowance of time and bytes for each call.
//!
//! What they do is the crate's; the regular expressions are run by `pattern`, and between two steps it is looked at how
//! long the text has become. Called by `reference`.

use super::allowance::{in_bytes, in_time, spend};
use super::pattern::Bounded;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use tokenizers::tokenizer::Offsets;
use tokenizers::tokenizer::pattern::{Invert, Pattern};
use tokenizers::{
    NormalizedString, Normalizer, NormalizerWrapper, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
    PreTokenizerWrapper, SplitDelimiterBehavior,
};

/// A normaliser's steps.
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
            let written = serde_json::to_value(&replace).map_err(|error| error.to_string())?;
            let text = |kind: &str| written.pointer(kind).and_then(Value::as_str);
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
                    let found = Found(pattern.find_matches(text.get())?);
                    let matches = found.0.iter().filter(|(_, is_match)| *is_match).count();
                    in_bytes(text.len() + matches * content.len(), "normalizer")?;
                    text.replace(&found, content)?;
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

/// A pre-tokenizer's steps.
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
                // Each step makes of a byte a few at most, and of a part one more: looked at after each, it is bounded.
                other.pre_tokenize(text)?;
                let parts = text.get_splits(OffsetReferential::Normalized, OffsetType::None);
                in_bytes(parts.iter().map(|(part, ..)| part.len()).sum(), "pre-tokenizer")?;
                in_time("pre-tokenizer")
            }
        })
    }
}
