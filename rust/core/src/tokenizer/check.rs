//! Checks the demands of a tokenizer.json before anything is built from it, in one pass that stores no entries and
//! merges.
//!
//! Tables are as long as the largest id, automata as large as all added tokens together, and engines recurse as deeply
//! as parts are nested. Each of these has a bound, in most cases in proportion to the file. `hf_backend` bounds costs
//! that depend on the text. A name that occurs twice in the document or in its model is rejected, because JSON readers
//! differ in which one they use.

use super::config::ExtraToken;
use crate::error::{Error, Kind, Result};
use base64::engine::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;

/// Ids may have gaps: the largest id is below this, or below this many times the number of entries, whichever is more.
const IDS: (u64, u64) = (1 << 18, 16);
/// Bytes of one added token. A text is searched for all added tokens at once, with a lookahead as long as the longest.
const ADDED_BYTES: usize = 1024;
/// Bytes of all added tokens without shared prefixes: at most the first number, or the file's bytes divided by the
/// second.
const ADDED_NODES: (usize, usize) = (1 << 16, 16);
/// Bytes of one entry of the vocabulary.
const ENTRY_BYTES: usize = 4096;
/// Nesting depth of lists and objects of a part. A sequence in a sequence uses two levels.
const DEPTH: usize = 16;
/// Number of normalizers and pre-tokenizers in total.
const STEPS: usize = 256;
/// Bytes of a regular expression, and number of its opening brackets.
const PATTERN: (usize, usize) = (1 << 14, 512);
/// Bytes of the text that a model adds around a word or a part of one.
const AFFIX_BYTES: usize = 256;
/// Characters of the longest word that WordPiece splits. Splitting takes cubic time.
const WORD_CHARS: u64 = 500;
/// Number of pieces of a post-processor's template.
const TEMPLATE_PIECES: usize = 64;
/// Output bytes per character of a compiled character table. SentencePiece's own table writes up to 33.
const CHARACTER_BYTES: usize = 64;

/// Returns the document without its entries and merges, after checking it together with the tokens that
/// tokenizer_config.json adds.
pub(super) fn checked(json: &[u8], extra: &[ExtraToken]) -> Result<Value> {
    let (document, entries) = outline(json)?;
    let mut added: Vec<(&str, u64)> = extra.iter().map(|token| (token.content.as_str(), u64::from(token.id))).collect();
    if let Some(Value::Array(tokens)) = document.get("added_tokens") {
        let stated = |token: &Value| token.get("id").and_then(Value::as_u64).unwrap_or(0);
        added.extend(tokens.iter().filter_map(|token| Some((token.get("content")?.as_str()?, stated(token)))));
    }
    check_ids(&entries, &added)?;
    check_added(&mut added, json.len())?;
    if let Some(Value::Object(model)) = document.get("model") {
        check_model(model, &entries)?;
    }
    let mut steps = 0;
    for name in ["normalizer", "pre_tokenizer", "post_processor", "decoder"] {
        let part = document.get(name).unwrap_or(&Value::Null);
        check_part(part, DEPTH, &mut steps).map_err(|what| refused(&format!("{name}: {what}")))?;
    }
    Ok(Value::Object(document))
}

/// Returns the error for a file whose demands exceed those of real tokenizers.
fn beyond(what: String) -> Error {
    Error::new(Kind::Tokenizer, "TG-TOKENIZER-003", what)
        .why("No tokenizer of a language model is like that, and loading it could take all memory or never end")
        .fix("Copy the file again from where the model came from")
}

fn check_ids(entries: &Entries, added: &[(&str, u64)]) -> Result<()> {
    let largest = added.iter().map(|(_, id)| *id).fold(entries.largest, u64::max);
    let count = entries.count + added.len() as u64;
    if largest < IDS.0.max(IDS.1 * count) {
        return Ok(());
    }
    Err(beyond(format!("an entry has id {largest}, but there are only {count} entries")))
}

fn check_added(added: &mut [(&str, u64)], file: usize) -> Result<()> {
    let longest = added.iter().map(|(content, _)| content.len()).max().unwrap_or(0);
    if longest > ADDED_BYTES {
        return Err(beyond(format!("an added token has {longest} bytes, more than {ADDED_BYTES}")));
    }
    added.sort_unstable();
    let shared_prefix = |a: &str, b: &str| a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count();
    let new_bytes = |pair: &[(&str, u64)]| pair[1].0.len() - shared_prefix(pair[0].0, pair[1].0);
    let nodes = added.first().map_or(0, |(content, _)| content.len()) + added.windows(2).map(new_bytes).sum::<usize>();
    if nodes > ADDED_NODES.0.max(file / ADDED_NODES.1) {
        return Err(beyond(format!("{} added tokens have {nodes} bytes that no other begins with", added.len())));
    }
    Ok(())
}

fn check_model(model: &Map<String, Value>, entries: &Entries) -> Result<()> {
    if entries.longest > ENTRY_BYTES {
        return Err(beyond(format!("an entry of the vocabulary has {} bytes", entries.longest)));
    }
    for (name, value) in model {
        if value.as_str().is_some_and(|text| text.len() > AFFIX_BYTES) {
            return Err(beyond(format!("{name} of the model is longer than {AFFIX_BYTES} bytes")));
        }
    }
    let word = model.get("max_input_chars_per_word").and_then(Value::as_u64).unwrap_or(0);
    if word > WORD_CHARS {
        return Err(beyond(format!("max_input_chars_per_word is {word}, more than {WORD_CHARS}")));
    }
    Ok(())
}

/// Checks one part of a tokenizer and everything inside it. `steps` counts the parts that have a type.
fn check_part(part: &Value, depth: usize, steps: &mut usize) -> Result<(), String> {
    let Some(depth) = depth.checked_sub(1) else { return Err(format!("its parts are nested more than {DEPTH} deep")) };
    match part {
        Value::Array(items) => items.iter().try_for_each(|item| check_part(item, depth, steps)),
        Value::Object(map) => {
            if let Some(kind) = map.get("type").and_then(Value::as_str) {
                *steps += 1;
                if *steps > STEPS {
                    return Err(format!("there are more than {STEPS} steps"));
                }
                check_kind(kind, map)?;
            }
            check_pattern(map.get("Regex"))?;
            map.values().try_for_each(|value| check_part(value, depth, steps))
        }
        _ => Ok(()),
    }
}

fn check_kind(kind: &str, part: &Map<String, Value>) -> Result<(), String> {
    match kind {
        "FixedLength" if part.get("length").and_then(Value::as_u64) == Some(0) => {
            Err("FixedLength has pieces of length 0".to_owned())
        }
        "Precompiled" => check_charsmap(part.get("precompiled_charsmap").and_then(Value::as_str).unwrap_or_default()),
        "TemplateProcessing" => check_template(part),
        _ => Ok(()),
    }
}

fn check_pattern(pattern: Option<&Value>) -> Result<(), String> {
    let Some(pattern) = pattern.and_then(Value::as_str) else { return Ok(()) };
    let open = pattern.bytes().filter(|byte| matches!(byte, b'(' | b'[')).count();
    if pattern.len() > PATTERN.0 || open > PATTERN.1 {
        return Err(format!("a regular expression has {} bytes and {open} opening brackets", pattern.len()));
    }
    Ok(())
}

/// Checks SentencePiece's table: the length of a trie in bytes, the trie, and the texts that replace characters.
fn check_charsmap(encoded: &str) -> Result<(), String> {
    let table = STANDARD.decode(encoded).map_err(|error| format!("precompiled_charsmap is no base64: {error}"))?;
    let size = table.first_chunk().map(|size| u32::from_le_bytes(*size) as usize);
    let texts = size.and_then(|size| table.get(4..)?.get(size..)).filter(|_| size.is_some_and(|size| size > 0));
    let Some(texts) = texts else { return Err("precompiled_charsmap is shorter than it says".to_owned()) };
    let longest = texts.split(|byte| *byte == 0).map(<[u8]>::len).max().unwrap_or(0);
    if longest > CHARACTER_BYTES {
        return Err(format!("precompiled_charsmap writes {longest} bytes for a character"));
    }
    Ok(())
}

/// Checks that a post-processor's template names only tokens that it lists.
fn check_template(part: &Map<String, Value>) -> Result<(), String> {
    let listed = part.get("special_tokens").and_then(Value::as_object);
    for name in ["single", "pair"] {
        let pieces = part.get(name).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        if pieces.len() > TEMPLATE_PIECES {
            return Err(format!("its template '{name}' has {} pieces, more than {TEMPLATE_PIECES}", pieces.len()));
        }
        let tokens = pieces.iter().filter_map(|piece| piece.get("SpecialToken")?.get("id")?.as_str());
        let unknown = tokens.into_iter().find(|token| listed.is_none_or(|listed| !listed.contains_key(*token)));
        if let Some(token) = unknown {
            return Err(format!("its template '{name}' names the token '{token}', which special_tokens does not list"));
        }
    }
    Ok(())
}

/// Statistics of a vocabulary.
#[derive(Debug, Default)]
pub(super) struct Entries {
    pub count: u64,
    pub largest: u64,
    /// Bytes of the longest entry.
    pub longest: usize,
}

impl Entries {
    fn add(&mut self, bytes: usize, id: u64) {
        self.count += 1;
        self.largest = self.largest.max(id);
        self.longest = self.longest.max(bytes);
    }
}

/// Returns the document's parts and the statistics of its entries.
pub(super) fn outline(json: &[u8]) -> Result<(Map<String, Value>, Entries)> {
    let mut entries = Entries::default();
    let mut reader = serde_json::Deserializer::from_slice(json);
    let outcome = Parts { entries: &mut entries, model: false }.deserialize(&mut reader);
    let document = outcome.and_then(|document| reader.end().map(|()| document)).map_err(|error| {
        let what = if error.is_data() { "it is no tokenizer" } else { "it is not JSON" };
        refused(&format!("{what}: {error}"))
    })?;
    Ok((document, entries))
}

/// Returns the error for a file that is not a tokenizer.
pub(super) fn refused(what: &str) -> Error {
    Error::new(Kind::Tokenizer, "TG-TOKENIZER-004", what.to_owned())
        .why("Ids are made by the fast tokenizer that tokenizer.json describes")
        .fix("Copy the file again from where the model came from")
}

/// Returns all values under a key, in a part of a document and everything inside it.
pub(super) fn values_under<'a>(part: &'a Value, key: &str) -> Vec<&'a Value> {
    match part {
        Value::Object(map) => map.get(key).into_iter().chain(map.values().flat_map(|v| values_under(v, key))).collect(),
        Value::Array(items) => items.iter().flat_map(|item| values_under(item, key)).collect(),
        _ => Vec::new(),
    }
}

/// The parts of the document, or those of its model.
struct Parts<'a> {
    entries: &'a mut Entries,
    model: bool,
}

impl<'de> DeserializeSeed<'de> for Parts<'_> {
    type Value = Map<String, Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Parts<'_> {
    type Value = Map<String, Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.model { "the parts of a model" } else { "the parts of a tokenizer" })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut parts, mut skipped) = (Map::new(), Vec::new());
        while let Some(name) = map.next_key::<String>()? {
            if parts.contains_key(&name) || skipped.contains(&name) {
                return Err(de::Error::custom(format!("'{name}' stands there twice")));
            }
            match (self.model, name.as_str()) {
                (false, "model") => {
                    let model = map.next_value_seed(Parts { entries: self.entries, model: true })?;
                    parts.insert(name, Value::Object(model));
                }
                (true, "vocab") => {
                    map.next_value_seed(Vocabulary(self.entries))?;
                    skipped.push(name);
                }
                (true, "merges") => {
                    map.next_value::<IgnoredAny>()?;
                    skipped.push(name);
                }
                _ => {
                    let value = map.next_value()?;
                    parts.insert(name, value);
                }
            }
        }
        Ok(parts)
    }
}

/// Entries with their ids, or in the order of their ids with a score each.
struct Vocabulary<'a>(&'a mut Entries);

impl<'de> DeserializeSeed<'de> for Vocabulary<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Vocabulary<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a vocabulary")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(Bytes(bytes)) = map.next_key()? {
            let id = map.next_value()?;
            self.0.add(bytes, id);
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some((Bytes(bytes), IgnoredAny)) = seq.next_element()? {
            self.0.add(bytes, self.0.count);
        }
        Ok(())
    }

    fn visit_unit<E: de::Error>(self) -> Result<(), E> {
        Ok(())
    }
}

/// The number of bytes of a string.
struct Bytes(usize);

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Counting).map(Bytes)
    }
}

struct Counting;

impl Visitor<'_> for Counting {
    type Value = usize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an entry's text")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<usize, E> {
        Ok(text.len())
    }
}
