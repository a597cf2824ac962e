//! The `tokenizers` crate's tokenizer, which every id is measured by, its programs run within bounds.
//!
//! Its post-processor is asked once, for what stands before a text; its decoder never. Called by `load` and `encoder`.

use super::allowance::bounded;
use super::guard::{Normalise, PreTokenise};
use super::outline::refused;
use crate::error::{Error, Result};
use std::collections::HashMap;
use std::fmt::Debug;
use tokenizers::models::bpe::BPE;
use tokenizers::{
    AddedToken, DecoderWrapper, Encoding, Model, ModelWrapper, PostProcessorWrapper, TokenizerImpl, TruncationParams,
};

/// What is asked of a tokenizer, whatever its model.
pub(super) trait Reference: Debug + Send + Sync {
    /// Ids and, where they are wanted, offsets.
    fn encode(&self, text: &str, special: bool, offsets: bool) -> tokenizers::Result<Encoding>;
    /// The ordinary vocabulary.
    fn vocabulary(&self) -> HashMap<String, u32>;
    /// The id of an entry or an added token.
    fn id(&self, token: &str) -> Option<u32>;
    /// Added tokens with their ids.
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

/// The tokenizer of a checked file. One whose model is known is read in half the time.
pub(super) fn build(json: &[u8]) -> Result<Box<dyn Reference>> {
    let read = bounded(json.len(), "loading the tokenizer", || {
        Ok(match serde_json::from_slice::<Whole<BPE>>(json) {
            Ok(tokenizer) => Ok(plain(tokenizer)),
            Err(_) => serde_json::from_slice::<Whole<ModelWrapper>>(json).map(plain),
        })
    });
    read?.map_err(|error| refused(&format!("it is no tokenizer: {error}")))
}

/// Without truncation and padding.
fn plain<M: Model + Debug + Send + Sync + 'static>(mut tokenizer: Whole<M>) -> Box<dyn Reference> {
    let _ = tokenizer.with_truncation(None::<TruncationParams>);
    tokenizer.with_padding(None);
    Box::new(tokenizer)
}

/// What the post-processor puts before a text: BOS, where there is one.
pub(super) fn prefix(inner: &dyn Reference) -> Result<Vec<u32>, Error> {
    const TEXT: &str = "a";
    let ids = |special, what| {
        let encoded = bounded(TEXT.len(), what, || inner.encode(TEXT, special, false));
        encoded.map(|encoding| encoding.get_ids().to_vec())
    };
    // A vocabulary need not have the letter.
    let Ok(plain) = ids(false, "encoding a letter") else { return Ok(Vec::new()) };
    let processed = ids(true, "post-processing a letter")?;
    let at = processed.windows(plain.len().max(1)).position(|window| window == plain);
    Ok(at.map(|at| processed[..at].to_vec()).unwrap_or_default())
}
