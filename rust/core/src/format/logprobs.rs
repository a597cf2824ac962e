//! Every accepted form of a `logprobs` value becomes `Tokens`.
//!
//! `{"content": [{token, logprob, bytes}]}`, the same under `refusal`, a bare list of such entries or of numbers,
//! `{"tokens", "logprobs"}`, `{"values"}`, the legacy `{"tokens", "token_logprobs"}`, and `token_id:N` in place of text.
//! Nothing here looks at the message beside them.

use super::numbers::{ByteList, ID_COMPLAINT, Id, Ids, MAX_ID, Reading, TokenText};
use crate::trace::{Pieces, Tokens};
use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// Prefix of vLLM's placeholder texts (`return_tokens_as_token_ids`).
const PLACEHOLDER: &str = "token_id:";

/// Entries for which room is made at once.
const RESERVED: usize = 512;

/// The tokens of a `logprobs` value; `None` where it says that there are none.
#[derive(Debug, Default)]
pub(super) struct Logprobs(pub Option<Tokens>);

impl<'de> Deserialize<'de> for Logprobs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(LogprobsVisitor)
    }
}

/// Columns of a token list while it is being read.
#[derive(Default)]
pub(super) struct Columns {
    values: Vec<f32>,
    missing: u32,
    invalid: u32,
    texts: Pieces,
    bytes: Pieces,
    ids: Vec<u32>,
    /// Entries that named no id; an id column with holes is none.
    without_id: usize,
    /// Text and bytes of the entry that is being read.
    pub scratch: [Vec<u8>; 2],
}

impl Columns {
    fn value(&mut self, reading: Reading) {
        let value = match reading {
            Reading::Known(value) => value,
            Reading::Missing => {
                self.missing += 1;
                f32::NAN
            }
            Reading::Invalid => {
                self.invalid += 1;
                f32::NAN
            }
        };
        self.values.push(value);
    }

    /// One entry of a list, from the scratch buffers.
    pub fn entry(&mut self, reading: Reading, text: bool, bytes: bool, id: Option<Id>) {
        self.value(reading);
        match id {
            Some(Id(id)) => self.ids.push(id),
            None => self.without_id += 1,
        }
        self.texts.push(text.then_some(self.scratch[0].as_slice()));
        self.bytes.push(bytes.then_some(self.scratch[1].as_slice()));
    }

    /// Entries so far.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Room for `count` more entries, as a guess; bounded, as a wrong one must not cost more than it saves.
    pub fn reserve(&mut self, count: usize) {
        let count = count.min(RESERVED);
        self.values.reserve(count);
        for pieces in [&mut self.texts, &mut self.bytes] {
            pieces.data.reserve(8 * count);
            pieces.ends.reserve(count);
            pieces.known.reserve(count);
        }
        if self.without_id == 0 {
            self.ids.reserve(count);
        }
    }

    /// Takes the numbers of a list beside `tokens`, and its texts and bytes if its entries were objects that had them.
    fn take_values(&mut self, list: Self) {
        (self.values, self.missing, self.invalid) = (list.values, list.missing, list.invalid);
        if any_known(&list.texts) {
            self.texts = list.texts;
        }
        if any_known(&list.bytes) {
            self.bytes = list.bytes;
        }
    }

    /// Gives back room that was made for entries that did not come.
    fn fit(&mut self) {
        if self.values.capacity() / 2 < self.values.len() {
            return;
        }
        self.values.shrink_to_fit();
        self.ids.shrink_to_fit();
        for pieces in [&mut self.texts, &mut self.bytes] {
            pieces.data.shrink_to_fit();
            pieces.ends.shrink_to_fit();
            pieces.known.shrink_to_fit();
        }
    }

    /// The tokens; `None` where there are none.
    pub fn finish<E: de::Error>(mut self) -> Result<Option<Tokens>, E> {
        self.fit();
        let listed = self.values.len().max(self.texts.len()).max(self.ids.len());
        if listed == 0 {
            return Ok(None);
        }
        let mut tokens = Tokens {
            ids: (self.without_id == 0 && !self.ids.is_empty()).then_some(self.ids),
            bytes: Some(self.bytes).filter(any_known),
            texts: Some(self.texts).filter(any_known),
            logprobs: (!self.values.is_empty()).then_some(self.values),
            missing: self.missing,
            invalid: self.invalid,
        };
        take_placeholders(&mut tokens).map_err(E::custom)?;
        Ok(Some(tokens))
    }
}

fn any_known(pieces: &Pieces) -> bool {
    pieces.known.contains(&true)
}

/// Turns texts that are all `token_id:N` into ids; a model may write those words, so all or none.
pub(super) fn take_placeholders(tokens: &mut Tokens) -> Result<(), String> {
    let Some(texts) = &tokens.texts else { return Ok(()) };
    let mut ids = Vec::new();
    for index in 0..texts.len() {
        match texts.get(index).and_then(placeholder) {
            Some(id) => ids.push(id),
            None => return Ok(()),
        }
    }
    if let Some(bad) = ids.iter().find(|id| **id > MAX_ID) {
        return Err(format!("{ID_COMPLAINT}{bad} is beyond {MAX_ID}"));
    }
    if let Some(bytes) = &tokens.bytes {
        tokens.bytes = Some(without_echo(bytes, texts)).filter(any_known);
    }
    tokens.texts = None;
    tokens.ids.get_or_insert_with(|| ids.into_iter().map(|id| id as u32).collect());
    Ok(())
}

fn placeholder(text: &[u8]) -> Option<u64> {
    let digits = text.strip_prefix(PLACEHOLDER.as_bytes())?;
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    Some(std::str::from_utf8(digits).ok()?.parse().unwrap_or(u64::MAX))
}

/// vLLM gives the placeholder's own bytes where it had no entry for a step: those say nothing about the token.
fn without_echo(bytes: &Pieces, texts: &Pieces) -> Pieces {
    let mut kept = Pieces::default();
    for index in 0..bytes.len() {
        kept.push(bytes.get(index).filter(|piece| texts.get(index) != Some(piece)));
    }
    kept
}

/// Visits a whole `logprobs` value.
struct LogprobsVisitor;

impl<'de> Visitor<'de> for LogprobsVisitor {
    type Value = Logprobs;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("logprobs (null, a list, or an object with content, refusal, tokens, values or token_logprobs)")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Logprobs, E> {
        Ok(Logprobs(None))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Logprobs, A::Error> {
        let mut columns = Columns::default();
        EntryList(&mut columns).visit_seq(items)?;
        columns.finish().map(Logprobs)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Logprobs, A::Error> {
        let (mut content, mut refusal, mut flat) = (Columns::default(), Columns::default(), Columns::default());
        let (mut recognised, mut stranger) = (false, None);
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "content" => read_entries(&mut map, &mut content)?,
                "refusal" => read_entries(&mut map, &mut refusal)?,
                "logprobs" | "token_logprobs" | "values" => {
                    let mut values = Columns::default();
                    read_entries(&mut map, &mut values)?;
                    flat.take_values(values);
                }
                "tokens" => {
                    let TokenList { texts, ids } = map.next_value()?;
                    flat.texts = texts;
                    if !ids.is_empty() {
                        flat.ids = ids;
                    }
                }
                "token_ids" => flat.ids = map.next_value::<Option<Ids>>()?.unwrap_or_default().0,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                    stranger.get_or_insert(key);
                    continue;
                }
            }
            recognised = true;
        }
        if let (false, Some(key)) = (recognised, stranger) {
            return Err(de::Error::unknown_field(&key, KEYS));
        }
        for columns in [content, refusal, flat] {
            if let Some(tokens) = columns.finish()? {
                return Ok(Logprobs(Some(tokens)));
            }
        }
        Ok(Logprobs(None))
    }
}

/// Keys of a `logprobs` object that are read.
const KEYS: &[&str] = &["content", "refusal", "tokens", "token_ids", "logprobs", "token_logprobs", "values"];

fn read_entries<'de, A: MapAccess<'de>>(map: &mut A, columns: &mut Columns) -> Result<(), A::Error> {
    *columns = Columns::default();
    map.next_value_seed(EntryList(columns))
}

/// A list of entries (objects or numbers), or null.
struct EntryList<'a>(&'a mut Columns);

impl<'de> DeserializeSeed<'de> for EntryList<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for EntryList<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of logprobs or null")
    }

    fn visit_unit<E: de::Error>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while items.next_element_seed(Entry(self.0))?.is_some() {}
        Ok(())
    }
}

/// One entry: `{"token", "logprob", "bytes"}` or a bare number.
struct Entry<'a>(&'a mut Columns);

impl<'de> DeserializeSeed<'de> for Entry<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Entry<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a logprob: a number, null or an object with `logprob`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let columns = self.0;
        let (mut reading, mut text, mut bytes, mut id) = (Reading::Missing, false, false, None);
        while let Some(key) = map.next_key()? {
            match key {
                EntryKey::Token => text = map.next_value_seed(TokenText(&mut columns.scratch[0]))?,
                EntryKey::Bytes => bytes = map.next_value_seed(ByteList(&mut columns.scratch[1]))?,
                EntryKey::Logprob => reading = map.next_value()?,
                EntryKey::TokenId => id = map.next_value()?,
                EntryKey::Other => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        columns.entry(reading, text, bytes, id);
        Ok(())
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<(), E> {
        self.bare(de::value::F64Deserializer::<E>::new(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<(), E> {
        self.bare(de::value::I64Deserializer::<E>::new(value))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<(), E> {
        self.bare(de::value::U64Deserializer::<E>::new(value))
    }

    fn visit_unit<E: de::Error>(self) -> Result<(), E> {
        self.bare(de::value::UnitDeserializer::<E>::new())
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<(), E> {
        self.bare(de::value::StrDeserializer::<E>::new(value))
    }
}

impl Entry<'_> {
    fn bare<'de, D: Deserializer<'de>>(self, number: D) -> Result<(), D::Error> {
        let reading = Reading::deserialize(number)?;
        self.0.entry(reading, false, false, None);
        Ok(())
    }
}

/// Keys of one entry, told apart without allocating.
enum EntryKey {
    Token,
    Bytes,
    Logprob,
    TokenId,
    Other,
}

impl<'de> Deserialize<'de> for EntryKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_identifier(EntryKeyVisitor)
    }
}

/// Visits a key of an entry.
struct EntryKeyVisitor;

impl Visitor<'_> for EntryKeyVisitor {
    type Value = EntryKey;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: de::Error>(self, key: &str) -> Result<EntryKey, E> {
        Ok(match key {
            "token" => EntryKey::Token,
            "bytes" => EntryKey::Bytes,
            "logprob" => EntryKey::Logprob,
            "token_id" => EntryKey::TokenId,
            _ => EntryKey::Other,
        })
    }
}

/// A `tokens` list: texts, or ids where it holds integers.
#[derive(Default)]
struct TokenList {
    texts: Pieces,
    ids: Vec<u32>,
}

impl<'de> Deserialize<'de> for TokenList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TokenListVisitor)
    }
}

/// Visits a `tokens` list.
struct TokenListVisitor;

impl<'de> Visitor<'de> for TokenListVisitor {
    type Value = TokenList;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of token texts or a list of token ids")
    }

    fn visit_unit<E: de::Error>(self) -> Result<TokenList, E> {
        Ok(TokenList::default())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<TokenList, A::Error> {
        let mut list = TokenList::default();
        while let Some(token) = items.next_element()? {
            match token {
                ListedToken::Text(text) => list.texts.push(text.as_deref().map(str::as_bytes)),
                ListedToken::Id(Id(id)) => list.ids.push(id),
            }
        }
        if !list.ids.is_empty() && !list.texts.is_empty() {
            return Err(de::Error::custom("tokens mixes texts and ids"));
        }
        Ok(list)
    }
}

/// A token in a `tokens` list.
enum ListedToken {
    Text(Option<String>),
    Id(Id),
}

impl<'de> Deserialize<'de> for ListedToken {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ListedTokenVisitor)
    }
}

/// Visits a token of a `tokens` list.
struct ListedTokenVisitor;

impl Visitor<'_> for ListedTokenVisitor {
    type Value = ListedToken;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a token: its text or its id")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<ListedToken, E> {
        Ok(ListedToken::Text(Some(text.to_owned())))
    }

    fn visit_unit<E: de::Error>(self) -> Result<ListedToken, E> {
        Ok(ListedToken::Text(None))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<ListedToken, E> {
        Id::deserialize(de::value::U64Deserializer::new(value)).map(ListedToken::Id)
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<ListedToken, E> {
        Id::deserialize(de::value::I64Deserializer::new(value)).map(ListedToken::Id)
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<ListedToken, E> {
        Id::deserialize(de::value::F64Deserializer::new(value)).map(ListedToken::Id)
    }
}
