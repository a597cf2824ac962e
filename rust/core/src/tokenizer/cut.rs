//! Cuts a text at its added tokens, where the ids of each part do not depend on its neighbours.
//!
//! The `tokenizers` crate takes added tokens out first and encodes what is left part by part. What it does at a cut is
//! only repeated here where that is certain; otherwise the text stays whole. Called by `encoder`.

use super::outline::values_under;
use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::Value;
use tokenizers::AddedToken;

/// Pairs of added tokens that are compared.
const PAIRS: usize = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part<'a> {
    Added(u32),
    /// Text without one, never empty.
    Text(&'a str),
}

/// Added tokens with their ids.
type Listed<'t> = Vec<&'t (u32, AddedToken)>;

/// Finds added tokens as the `tokenizers` crate finds them.
#[derive(Debug)]
pub(super) struct Cutter {
    /// Taken out one after another: tokens that are not normalised, then in what is left those that are. One stage
    /// where the order cannot show.
    stages: Vec<Stage>,
}

#[derive(Debug)]
struct Stage {
    tokens: AhoCorasick,
    ids: Vec<u32>,
}

impl Cutter {
    /// A cutter for `added`, or why texts must stay whole.
    pub fn new(document: &Value, added: &[(u32, AddedToken)]) -> Result<Self, &'static str> {
        if !position_free(document) {
            return Err("a part's ids depend on where in the text it stands");
        }
        let mut listed: Vec<&(u32, AddedToken)> = added.iter().filter(|(_, token)| !token.content.is_empty()).collect();
        listed.sort_by_key(|(id, _)| *id);
        if listed.iter().any(|(_, token)| token.lstrip || token.rstrip || token.single_word) {
            return Err("an added token looks at its neighbours (lstrip, rstrip or single_word)");
        }
        let (late, early): (Listed<'_>, Listed<'_>) = listed.iter().copied().partition(|(_, token)| token.normalized);
        // A normaliser without steps changes nothing.
        let mut steps = kinds(document.get("normalizer").unwrap_or(&Value::Null));
        if !late.is_empty() && steps.any(|kind| kind != "Sequence") {
            return Err("an added token is looked for in normalised text");
        }
        // Two stages are right for any tokens; very many pairs are not compared.
        let mut pairs = late.iter().flat_map(|(_, a)| early.iter().map(move |(_, b)| (a, b)));
        let apart = late.len() * early.len() > PAIRS || pairs.any(|(a, b)| overlap(&a.content, &b.content));
        let stages = if apart { vec![early, late] } else { vec![listed] };
        let stages = stages.iter().filter(|tokens| !tokens.is_empty()).map(|tokens| Stage::new(tokens));
        Ok(Self { stages: stages.collect::<Result<_, _>>()? })
    }

    pub fn parts<'s>(&self, text: &'s str) -> Vec<Part<'s>> {
        let mut parts = Vec::new();
        cut(&self.stages, text, &mut parts);
        parts
    }
}

impl Stage {
    fn new(tokens: &[&(u32, AddedToken)]) -> Result<Self, &'static str> {
        let contents = tokens.iter().map(|(_, token)| token.content.as_str());
        let found = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(contents);
        let ids = tokens.iter().map(|(id, _)| *id).collect();
        Ok(Self { tokens: found.map_err(|_| "there are too many added tokens")?, ids })
    }
}

fn cut<'s>(stages: &[Stage], text: &'s str, parts: &mut Vec<Part<'s>>) {
    let Some((stage, later)) = stages.split_first() else {
        parts.extend((!text.is_empty()).then_some(Part::Text(text)));
        return;
    };
    let mut at = 0;
    for found in stage.tokens.find_iter(text) {
        cut(later, &text[at..found.start()], parts);
        parts.push(Part::Added(stage.ids[found.pattern().as_usize()]));
        at = found.end();
    }
    cut(later, &text[at..], parts);
}

/// Whether neither normaliser nor pre-tokenizer treats the beginning of a text apart.
fn position_free(document: &Value) -> bool {
    let parts = ["normalizer", "pre_tokenizer"].map(|name| document.get(name).unwrap_or(&Value::Null));
    let free = |part: &Value| kinds(part).all(|kind| FREE.contains(&kind));
    let prefix = |part: &Value| values_under(part, "add_prefix_space").iter().any(|value| **value != false);
    parts.iter().all(|part| free(part) && !prefix(part))
}

/// Components that see nothing but the piece they are given.
const FREE: [&str; 10] =
    ["Sequence", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "ByteLevel", "Split", "Digits", "Punctuation"];

/// The types of a component and of all below it.
fn kinds(part: &Value) -> impl Iterator<Item = &str> {
    values_under(part, "type").into_iter().filter_map(Value::as_str)
}

/// Whether `a` and `b` can share characters of a text.
fn overlap(a: &str, b: &str) -> bool {
    let tail_meets_head = |a: &str, b: &str| a.char_indices().skip(1).any(|(at, _)| b.starts_with(&a[at..]));
    a.contains(b) || b.contains(a) || tail_meets_head(a, b) || tail_meets_head(b, a)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn token(content: &str, normalized: bool) -> AddedToken {
        AddedToken::from(content, !normalized).normalized(normalized)
    }

    fn cutter(document: &Value, tokens: Vec<AddedToken>) -> Result<Cutter, &'static str> {
        Cutter::new(document, &(7..).zip(tokens).collect::<Vec<_>>())
    }

    #[test]
    fn the_longest_added_token_that_begins_first_is_taken() {
        let cutter =
            cutter(&json!({}), vec![token("<a>", false), token("<a><b>", false), token("b>x", false)]).unwrap();
        let parts = cutter.parts("..<a><b>x<a>é");
        let expected = [Part::Text(".."), Part::Added(8), Part::Text("x"), Part::Added(7), Part::Text("é")];
        assert_eq!(parts, expected);
        assert_eq!(cutter.parts(""), []);
    }

    #[test]
    fn a_text_stays_whole_where_a_cut_could_show() {
        let prefix = json!({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": true}});
        let metaspace = json!({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Metaspace"}]}});
        let nfc = json!({"normalizer": {"type": "NFC"}});
        assert!(cutter(&prefix, vec![]).is_err());
        assert!(cutter(&metaspace, vec![]).is_err());
        assert!(cutter(&nfc, vec![token("<a>", true)]).is_err());
        assert!(cutter(&nfc, vec![token("<a>", false)]).is_ok());
        assert!(cutter(&json!({}), vec![token("<a>", false).lstrip(true)]).is_err());
    }

    #[test]
    fn tokens_that_are_not_normalised_are_taken_out_first() {
        let cutter = cutter(&json!({}), vec![token("b>c", false), token("<a><b>", true)]).unwrap();
        assert_eq!(cutter.parts("<a><b>c"), [Part::Text("<a><"), Part::Added(7)]);
        assert_eq!(cutter.parts("<a><b>"), [Part::Added(8)]);
    }
}
