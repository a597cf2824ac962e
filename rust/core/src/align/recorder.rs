//! How the recorder of a trace writes tokens (special tokens hidden, leading spaces kept): inferred from all its token
//! lists when first asked.

use crate::tokenizer::Tokenizer;
use crate::trace::{Pieces, Trace};
use std::cell::OnceCell;

pub struct Recorder<'a> {
    trace: &'a Trace,
    pub tokenizer: &'a Tokenizer,
    hides_specials: OnceCell<bool>,
    keeps_spaces: OnceCell<bool>,
}

impl<'a> Recorder<'a> {
    pub fn new(trace: &'a Trace, tokenizer: &'a Tokenizer) -> Self {
        Self { trace, tokenizer, hides_specials: OnceCell::new(), keeps_spaces: OnceCell::new() }
    }

    /// Whether a special token may show nothing: no token list of the trace shows one by its text.
    pub fn hides_specials(&self) -> bool {
        let special = |piece: &[u8]| {
            let id = std::str::from_utf8(piece).ok().and_then(|text| self.tokenizer.id_of_added(text));
            id.is_some_and(|id| self.tokenizer.is_special(id))
        };
        *self.hides_specials.get_or_init(|| !self.lists().any(|pieces| listed(pieces, 0).any(special)))
    }

    /// Whether tokens behind the first keep the space that they begin with: one shows a space that no other space can
    /// have stood before.
    pub fn keeps_spaces(&self) -> bool {
        let id = |bytes: &[u8]| self.tokenizer.id_of_bytes(bytes);
        let shows = |piece: &[u8]| {
            piece.len() > 1 && piece.starts_with(b" ") && id(piece).is_some() && id(&[b" ", piece].concat()).is_none()
        };
        *self.keeps_spaces.get_or_init(|| self.lists().any(|pieces| listed(pieces, 1).any(shows)))
    }

    fn lists(&self) -> impl Iterator<Item = &'a Pieces> {
        let lists = self.trace.generations.iter().flat_map(|one| [&one.tokens.bytes, &one.tokens.texts]);
        lists.flatten()
    }
}

fn listed(pieces: &Pieces, first: usize) -> impl Iterator<Item = &[u8]> {
    (first..pieces.len()).filter_map(|index| pieces.get(index))
}
