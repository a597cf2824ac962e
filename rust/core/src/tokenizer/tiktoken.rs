//! Converts tiktoken files (ranks of byte strings) to the tokenizer.json that gives the same ids.
//!
//! Such a file contains neither the pattern that splits a text nor the special tokens. Both are known for the families
//! listed here, and a family is recognized by its ranks.

use super::config::{ExtraToken, TokenizerConfig};
use super::vocab_bytes::glyphs;
use crate::error::{Error, Kind, Result};
use base64::engine::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};
use std::collections::{HashMap, HashSet};

/// Maximum bytes of a token of a file. The longest token of the known families has 256.
const TOKEN_BYTES: usize = 1024;

/// The facts about a family that its file does not contain.
struct Family {
    name: &'static str,
    ranks: usize,
    /// [`fingerprint`] of its ranks.
    fingerprint: u64,
    /// `None` for GPT-2's own pattern.
    pattern: Option<&'static str>,
    nfc: bool,
    special: &'static [(u32, &'static str)],
    /// Number of numbered tokens that follow, if tokenizer_config.json lists none.
    extras: u32,
}

const QWEN: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const CL100K: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const FAMILIES: [Family; 5] = [
    Family {
        name: "qwen",
        ranks: 151_643,
        fingerprint: 0x73d0_8bfd_6a24_f3ee,
        pattern: Some(QWEN),
        nfc: true,
        special: &[(151_643, "<|endoftext|>"), (151_644, "<|im_start|>"), (151_645, "<|im_end|>")],
        extras: 205,
    },
    Family {
        name: "o200k_base",
        ranks: 199_998,
        fingerprint: 0x9f43_7a89_c844_3bf6,
        pattern: Some(O200K),
        nfc: false,
        special: &[(199_999, "<|endoftext|>"), (200_018, "<|endofprompt|>")],
        extras: 0,
    },
    Family {
        name: "cl100k_base",
        ranks: 100_256,
        fingerprint: 0x21c0_8d5e_50b8_a036,
        pattern: Some(CL100K),
        nfc: false,
        special: &[
            (100_257, "<|endoftext|>"),
            (100_258, "<|fim_prefix|>"),
            (100_259, "<|fim_middle|>"),
            (100_260, "<|fim_suffix|>"),
            (100_276, "<|endofprompt|>"),
        ],
        extras: 0,
    },
    Family {
        name: "p50k_base",
        ranks: 50_280,
        fingerprint: 0x9caa_626e_e8e4_710c,
        pattern: None,
        nfc: false,
        special: &[(50_256, "<|endoftext|>")],
        extras: 0,
    },
    Family {
        name: "r50k_base",
        ranks: 50_256,
        fingerprint: 0x7186_f565_2610_c2f8,
        pattern: None,
        nfc: false,
        special: &[(50_256, "<|endoftext|>")],
        extras: 0,
    },
];

/// Returns the tokenizer.json of a tiktoken file. Added tokens that `config` lists move from it to the result.
pub(super) fn document(file: &[u8], config: &mut TokenizerConfig) -> Result<Vec<u8>> {
    let ranks = ranks(file)?;
    let print = fingerprint(&ranks);
    let family = FAMILIES.iter().find(|family| family.ranks == ranks.len() && family.fingerprint == print);
    let family = family.ok_or_else(|| unknown(ranks.len(), print))?;
    let mut added: Vec<Value> = family.special.iter().map(|(id, content)| special(*id, content)).collect();
    let listed = std::mem::take(&mut config.extra_tokens);
    let first = family.special.iter().map(|(id, _)| id + 1).max().unwrap_or(0);
    if listed.is_empty() {
        added.extend((0..family.extras).map(|extra| special(first + extra, &format!("<|extra_{extra}|>"))));
    }
    let missing = listed.iter().filter(|token| added.iter().all(|a| a["content"] != token.content));
    added.extend(missing.map(ExtraToken::stated).collect::<Vec<_>>());
    let mut vocab: Map<String, Value> = ranks.iter().map(|(token, rank)| (glyphs(token), Value::from(*rank))).collect();
    // Ids that the vocabulary lists are never renumbered. An unused id gets an entry that no text produces: U+FDD0 is
    // not in the alphabet of byte-level entries.
    for token in &added {
        vocab.insert(token["content"].as_str().unwrap_or_default().to_owned(), token["id"].clone());
    }
    let used: HashSet<u64> = vocab.values().filter_map(Value::as_u64).collect();
    let size = used.iter().max().map_or(0, |last| last + 1);
    if size > 2 * ranks.len() as u64 + 4096 {
        return Err(malformed(&format!("an added token has id {}, far beyond the ranks", size - 1)));
    }
    vocab.extend((0..size).filter(|id| !used.contains(id)).map(|id| (format!("\u{fdd0}{id}"), Value::from(id))));
    let document = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": if family.nfc { json!({"type": "NFC"}) } else { Value::Null },
        "pre_tokenizer": pre_tokenizer(family.pattern), "post_processor": null, "decoder": byte_level(true),
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": true,
            "vocab": vocab, "merges": merges(&ranks)},
    });
    serde_json::to_vec(&document).map_err(|error| malformed(&error.to_string()))
}

fn special(id: u32, content: &str) -> Value {
    json!({"id": id, "content": content, "special": true, "normalized": false, "lstrip": false, "rstrip": false,
        "single_word": false})
}

fn byte_level(use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": use_regex})
}

fn pre_tokenizer(pattern: Option<&str>) -> Value {
    let Some(pattern) = pattern else { return byte_level(true) };
    let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    json!({"type": "Sequence", "pretokenizers": [split, byte_level(false)]})
}

/// Returns every way to join two entries to a third one, in the order of the joined entries' ranks.
fn merges(ranks: &[(Vec<u8>, u32)]) -> Vec<String> {
    let rank_of: HashMap<&[u8], u32> = ranks.iter().map(|(token, rank)| (token.as_slice(), *rank)).collect();
    let mut merges = Vec::with_capacity(ranks.len() * 2);
    for (token, _) in ranks {
        let halves = (1..token.len()).map(|at| token.split_at(at));
        let mut pairs: Vec<_> = halves.filter_map(|(a, b)| Some((*rank_of.get(a)?, *rank_of.get(b)?, a, b))).collect();
        pairs.sort_unstable();
        merges.extend(pairs.iter().map(|(_, _, a, b)| format!("{} {}", glyphs(a), glyphs(b))));
    }
    merges
}

/// Parses the entries of a file and sorts them by rank. Each line is a token in base64 and its rank.
fn ranks(file: &[u8]) -> Result<Vec<(Vec<u8>, u32)>> {
    let mut ranks = Vec::new();
    for (number, line) in file.split(|byte| *byte == b'\n').enumerate() {
        let line = line.trim_ascii();
        if line.is_empty() {
            continue;
        }
        let mut words = line.split(|byte| *byte == b' ');
        let token = words
            .next()
            .and_then(|word| STANDARD.decode(word).ok())
            .filter(|token| !token.is_empty() && token.len() <= TOKEN_BYTES);
        let rank = words.next().and_then(|word| std::str::from_utf8(word).ok()?.parse().ok());
        let (Some(token), Some(rank), None) = (token, rank, words.next()) else {
            return Err(malformed(&format!("line {} is no token in base64 and its rank", number + 1)));
        };
        ranks.push((token, rank));
    }
    ranks.sort_unstable_by_key(|(_, rank)| *rank);
    Ok(ranks)
}

/// Computes FNV-1a over ranks and tokens.
fn fingerprint(ranks: &[(Vec<u8>, u32)]) -> u64 {
    let bytes = ranks.iter().flat_map(|(token, rank)| rank.to_le_bytes().into_iter().chain(token.iter().copied()));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

fn unknown(ranks: usize, print: u64) -> Error {
    let names: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
    Error::new(
        Kind::Tokenizer,
        "TG-TOKENIZER-015",
        format!("the {ranks} ranks (fingerprint {print:016x}) are of an unsupported family"),
    )
    .why("A tiktoken file has neither the pattern that splits a text nor the special tokens")
    .fix(format!(
        "Put the model's tokenizer.json beside it (transformers' save_pretrained); known are {}",
        names.join(", ")
    ))
}

fn malformed(what: &str) -> Error {
    Error::new(Kind::Tokenizer, "TG-TOKENIZER-016", format!("it is not a tiktoken file: {what}"))
        .why("Ids are the ranks that it lists")
        .fix("Copy the file again from where the model came from")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_are_every_pair_in_order_of_rank() {
        let ranks = [("a", 0), ("b", 1), ("ab", 2), ("bb", 3), ("abb", 4)];
        let ranks: Vec<(Vec<u8>, u32)> = ranks.map(|(token, rank)| (token.as_bytes().to_vec(), rank)).to_vec();
        assert_eq!(merges(&ranks), ["a b", "b b", "a bb", "ab b"]);
    }

    #[test]
    fn other_files_and_unknown_families_are_rejected() {
        let mut config = TokenizerConfig::default();
        let error_of = |file: &[u8], config: &mut TokenizerConfig| document(file, config).unwrap_err().to_string();
        assert!(error_of(b"IQ== 0\nnope", &mut config).contains("line 2"));
        assert!(error_of(b"IQ== 0\nIg== 1\n", &mut config).contains("unsupported family"));
    }
}
