//! The two encoders of one tokenizer, each built at once or when it is first asked for a text.
//!
//! A tokenizer that was verified before builds neither when it is loaded: ids and bytes need none of them. Called by
//! `load` and `encoder`.

use super::allowance::bounded;
use super::config::{ExtraToken, TokenizerConfig};
use super::fast::Fast;
use super::reference::{Reference, build};
use crate::error::{Error, Kind, Result};
use serde_json::Value;
use std::collections::HashSet;
use std::sync::{Arc, OnceLock};
use tokenizers::AddedToken;

/// The encoders, and what they are built from.
#[derive(Debug)]
pub(super) struct Backends {
    json: Arc<[u8]>,
    config: Arc<TokenizerConfig>,
    /// The outline of `json`.
    document: Value,
    reference: OnceLock<Result<Box<dyn Reference>>>,
    fast: OnceLock<Option<Fast>>,
}

impl Backends {
    /// None built yet; `has_fast` says whether the fast one is to be asked at all.
    pub fn new(json: Arc<[u8]>, config: Arc<TokenizerConfig>, document: Value, has_fast: bool) -> Self {
        let fast = if has_fast { OnceLock::new() } else { OnceLock::from(None) };
        Self { json, config, document, reference: OnceLock::new(), fast }
    }

    /// With encoders that are built already.
    pub fn with(mut self, reference: Box<dyn Reference>, fast: Option<Fast>) -> Self {
        (self.reference, self.fast) = (OnceLock::from(Ok(reference)), OnceLock::from(fast));
        self
    }

    /// Takes the fast one away.
    pub fn distrust(&mut self) {
        self.fast = OnceLock::from(None);
    }

    /// What every id is measured by.
    pub fn reference(&self) -> Result<&dyn Reference> {
        let built = self.reference.get_or_init(|| checked_reference(&self.json, &self.document, &self.config));
        built.as_ref().map(AsRef::as_ref).map_err(Clone::clone)
    }

    /// The faster one, where there is one that agrees.
    pub fn fast(&self) -> Option<&Fast> {
        let extra = || missing_tokens(&self.document, &self.config.extra_tokens);
        self.fast.get_or_init(|| Fast::build(&self.json, &self.document, &extra()).ok()).as_ref()
    }
}

/// The reference with all added tokens, each with the id that is stated.
pub(super) fn checked_reference(json: &[u8], document: &Value, config: &TokenizerConfig) -> Result<Box<dyn Reference>> {
    let mut inner = build(json)?;
    let own = document.get("added_tokens").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let stated = own.iter().filter_map(|token| Some((token.get("content")?.as_str()?, token.get("id")?.as_u64()?)));
    check_stated(&*inner, stated)?;
    add_extra(&mut *inner, &missing_tokens(document, &config.extra_tokens), &config.extra_tokens)?;
    Ok(inner)
}

/// Those of `extra` that the document does not list itself.
pub(super) fn missing_tokens(document: &Value, extra: &[ExtraToken]) -> Vec<ExtraToken> {
    let listed = document.get("added_tokens").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let known: HashSet<&str> = listed.iter().filter_map(|token| token.get("content")?.as_str()).collect();
    extra.iter().filter(|token| !token.content.is_empty() && !known.contains(&*token.content)).cloned().collect()
}

/// Refuses tokens, by their texts and ids, that would get other ids than are stated.
fn check_stated<'a>(inner: &dyn Reference, tokens: impl Iterator<Item = (&'a str, u64)>) -> Result<()> {
    for (content, stated) in tokens.filter(|(content, _)| !content.is_empty()) {
        let loaded = inner.id(content);
        if loaded.map(u64::from) != Some(stated) {
            let loaded = loaded.map_or_else(|| "none".to_owned(), |id| id.to_string());
            let what = format!("added token '{content}' has id {stated} but would be loaded with {loaded}");
            return Err(Error::new(Kind::Tokenizer, what)
                .why("The ids before it leave a gap, and the tokenizers library fills it by renumbering: prompts would not be what the model saw")
                .cure("Add the ids that are missing to added_tokens, as reserved tokens"));
        }
    }
    Ok(())
}

/// Adds the tokens that only tokenizer_config.json lists, and checks the ids of all that it lists.
fn add_extra(inner: &mut dyn Reference, missing: &[ExtraToken], all: &[ExtraToken]) -> Result<()> {
    let added = |token: &ExtraToken| {
        AddedToken::from(token.content.clone(), token.special)
            .normalized(token.normalized)
            .lstrip(token.strips.0)
            .rstrip(token.strips.1)
            .single_word(token.single_word)
    };
    if !missing.is_empty() {
        let tokens: Vec<AddedToken> = missing.iter().map(added).collect();
        bounded(missing.len(), "adding the tokens of tokenizer_config.json", || inner.add(tokens))?;
    }
    check_stated(inner, all.iter().map(|token| (token.content.as_str(), u64::from(token.id))))
}
