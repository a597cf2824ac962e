//! Pieces of a text that are tokenized apart: which tokenizers allow it, and where the ids of a piece begin otherwise.
//!
//! A tokenizer may write a space before every text (`Metaspace` with `prepend_scheme` "first", the `Prepend` normalizer), strip
//! one, or take the white space behind an added token: a piece alone then has other ids than in its place. Such a
//! piece is encoded together with the text before it, from the last added token on. Called by `encoder`.

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::AddedToken;

/// A text and the text behind it, between which every tokenizer that allows it has a boundary.
pub(super) const PAIRS: [(&str, &str); 9] = [
    ("\n", "It"),
    ("\n", "é"),
    ("\n", "4"),
    ("\n", "<"),
    ("]", " It"),
    ("a", " It"),
    ("a", "\nIt"),
    ("a", "  It"),
    ("a", "<"),
];
/// Added tokens that are tried before pieces.
pub(super) const TRIED: usize = 64;
/// What is put before a piece whose first token reaches into the text before it.
pub(super) const STAND_INS: [&str; 4] = ["\n", "]", ".", "a"];

/// Finds the last added token of a text: what is behind one does not depend on what is before.
#[derive(Debug)]
pub(super) struct Anchors(Option<AhoCorasick>);

impl Anchors {
    /// The tokens of `added` that are found in the text as it is.
    pub fn new(added: &[(u32, AddedToken)]) -> Self {
        let plain = |token: &&AddedToken| !token.normalized && !token.single_word && !token.content.is_empty();
        let tokens: Vec<&str> =
            added.iter().map(|(_, token)| token).filter(plain).map(|token| token.content.as_str()).collect();
        Self(AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(tokens).ok())
    }

    /// The byte at which the last added token of `text` begins; 0 if there is none.
    pub fn last(&self, text: &str) -> usize {
        let found = self.0.as_ref().and_then(|tokens| tokens.find_iter(text).last());
        found.map_or(0, |found| found.start())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_token_that_is_found_from_the_left_is_the_anchor() {
        let token = |text: &str, normalized: bool| AddedToken::from(text, true).normalized(normalized);
        let added = [token("<a>", false), token("<a><b>", false), token("<b>", false), token("n", true)];
        let anchors = Anchors::new(&(7..).zip(added).collect::<Vec<_>>());
        assert_eq!(anchors.last("x<a><b>n"), 1);
        assert_eq!(anchors.last("x<b>y<b>n"), 5);
        assert_eq!(anchors.last("nothing"), 0);
        assert_eq!(Anchors::new(&[]).last("<a>"), 0);
    }
}
