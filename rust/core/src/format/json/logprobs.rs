//! Every accepted form of a `logprobs` value becomes `Tokens`.
//!
//! `{"content": [{token, logprob, bytes}]}`, the same under `refusal`, a bare list of such entries or of numbers,
//! `{"tokens", "logprobs"}`, `{"values"}`, the legacy `{"tokens", "token_logprobs"}`, and `token_id:N` in place of text.
//! Nothing here looks at the message beside them.

use super::listed::Columns;
use super::numbers::{ByteList, Id, Ids, Reading, TokenText};
use crate::trace::{Pieces, Tokens};
use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// The tokens of a `logprobs` value; `None` where it says that there are none.
#[derive(Debug, Default)]
pub struct Logprobs(pub Option<Tokens>);

impl<'de> Deserialize<'de> for Logprobs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(LogprobsVisitor)
    }
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
