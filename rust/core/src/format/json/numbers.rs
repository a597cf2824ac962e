//! Numbers as recorders write them: logprobs with their many ways of saying "none", token ids, byte lists.
//!
//! Typed serde visitors, so that a token costs no `serde_json::Value`. Called by `logprobs` and `object`.

use crate::trace::{Pieces, Tokens};
use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, SeqAccess, Unexpected, Visitor};
use std::fmt;

/// Largest token id: ids are int32 at the border.
pub const MAX_ID: u64 = i32::MAX as u64;

/// How every complaint about a token id begins; `diagnose` counts such records under their own reason.
pub const ID_COMPLAINT: &str = "token id ";

/// The value that servers write where they have none.
const SENTINEL: f64 = -9999.0;

/// One recorded logprob.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reading {
    /// A logprob in nats.
    Known(f32),
    /// null, NaN or -inf.
    Missing,
    /// Positive, or the sentinel -9999.0.
    Invalid,
}

impl Reading {
    /// The logprob of a probability; 0 has none.
    pub fn of_probability(value: f64) -> Self {
        if value < 0.0 { Self::Invalid } else { Self::of(value.ln()) }
    }

    /// What a number says.
    pub fn of(value: f64) -> Self {
        let short = value as f32;
        // llama.cpp and SGLang write the lowest float32 where the probability is 0.
        if value.is_nan() || short <= f32::MIN {
            Self::Missing
        } else if value > 0.0 || value == SENTINEL {
            Self::Invalid
        } else {
            Self::Known(short)
        }
    }
}

/// What the word for a number that JSON cannot say stands for.
pub fn spelled(word: &str) -> Option<f64> {
    match word {
        "NaN" | "nan" => Some(f64::NAN),
        "Infinity" | "inf" | "+inf" | "Inf" => Some(f64::INFINITY),
        "-Infinity" | "-inf" | "-Inf" => Some(f64::NEG_INFINITY),
        _ => None,
    }
}

impl Tokens {
    /// A reading as its number, NaN where there is none, which is counted.
    pub fn take(&mut self, reading: Reading) -> f32 {
        match reading {
            Reading::Known(value) => return value,
            Reading::Missing => self.missing += 1,
            Reading::Invalid => self.invalid += 1,
        }
        f32::NAN
    }
}

impl<'de> Deserialize<'de> for Reading {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ReadingVisitor)
    }
}

/// Visits one logprob.
struct ReadingVisitor;

impl Visitor<'_> for ReadingVisitor {
    type Value = Reading;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a logprob (a number or null)")
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Reading, E> {
        Ok(Reading::of(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Reading, E> {
        Ok(Reading::of(value as f64))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Reading, E> {
        Ok(Reading::of(value as f64))
    }

    fn visit_unit<E: de::Error>(self) -> Result<Reading, E> {
        Ok(Reading::Missing)
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Reading, E> {
        spelled(value).map(Reading::of).ok_or_else(|| E::invalid_type(Unexpected::Str(value), &self))
    }
}

/// One token id.
#[derive(Debug, Clone, Copy)]
pub struct Id(pub u32);

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(IdVisitor)
    }
}

/// Visits one token id.
struct IdVisitor;

impl Visitor<'_> for IdVisitor {
    type Value = Id;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a token id (an integer from 0 to 2147483647)")
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Id, E> {
        if value > MAX_ID {
            return Err(E::custom(format_args!("{ID_COMPLAINT}{value} is beyond 2147483647")));
        }
        Ok(Id(value as u32))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Id, E> {
        u64::try_from(value)
            .map_err(|_| E::custom(format_args!("{ID_COMPLAINT}{value} is negative")))
            .and_then(|value| self.visit_u64(value))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Id, E> {
        // Together's SDK types ids as floats.
        if value.fract() == 0.0 && (0.0..=MAX_ID as f64).contains(&value) {
            return Ok(Id(value as u32));
        }
        Err(E::custom(format_args!("{ID_COMPLAINT}{value} is not an integer from 0 to 2147483647")))
    }
}

/// A list of token ids.
#[derive(Debug, Default)]
pub struct Ids(pub Vec<u32>);

impl<'de> Deserialize<'de> for Ids {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(IdsVisitor)
    }
}

/// Visits a list of token ids.
struct IdsVisitor;

impl<'de> Visitor<'de> for IdsVisitor {
    type Value = Ids;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of token ids")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Ids, A::Error> {
        let mut ids = Vec::new();
        while let Some(Id(id)) = items.next_element()? {
            ids.push(id);
        }
        Ok(Ids(ids))
    }
}

/// A token's bytes, written into a buffer that is reused; false for `null`.
pub struct ByteList<'a>(pub &'a mut Vec<u8>);

impl<'de> DeserializeSeed<'de> for ByteList<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ByteList<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of bytes (integers from 0 to 255) or null")
    }

    fn visit_unit<E: de::Error>(self) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<bool, A::Error> {
        self.0.clear();
        while let Some(byte) = items.next_element::<u8>()? {
            self.0.push(byte);
        }
        Ok(true)
    }
}

/// A token's text as bytes, written into a buffer that is reused; false for `null` and for text that UTF-8 cannot say.
///
/// A lone surrogate escape (half of a character, cut by a recorder that counts UTF-16 units) makes a text unknown and
/// not wrong.
pub struct TokenText<'a>(pub &'a mut Vec<u8>);

impl<'de> DeserializeSeed<'de> for TokenText<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_option(self)
    }
}

impl<'de> Visitor<'de> for TokenText<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the text of a token (a string or null)")
    }

    fn visit_none<E: de::Error>(self) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_unit<E: de::Error>(self) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_bytes(self)
    }

    fn visit_bytes<E: de::Error>(self, value: &[u8]) -> Result<bool, E> {
        self.0.clear();
        self.0.extend_from_slice(value);
        Ok(std::str::from_utf8(value).is_ok())
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<bool, E> {
        self.visit_bytes(value.as_bytes())
    }
}

/// A list of byte lists or of texts, `null` where one is unknown.
pub enum PieceList {
    /// `[[72, 105], null]`
    Bytes,
    /// `["Hi", null]`
    Texts,
}

impl<'de> DeserializeSeed<'de> for PieceList {
    type Value = Option<Pieces>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Option<Pieces>, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for PieceList {
    type Value = Option<Pieces>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bytes => "a list of byte lists or null",
            Self::Texts => "a list of token texts or null",
        })
    }

    fn visit_unit<E: de::Error>(self) -> Result<Option<Pieces>, E> {
        Ok(None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Option<Pieces>, A::Error> {
        let (mut pieces, mut scratch) = (Pieces::default(), Vec::new());
        loop {
            let known = match self {
                Self::Bytes => items.next_element_seed(ByteList(&mut scratch))?,
                Self::Texts => items.next_element_seed(TokenText(&mut scratch))?,
            };
            match known {
                Some(known) => pieces.push(known.then_some(scratch.as_slice())),
                None => return Ok(Some(pieces)),
            }
        }
    }
}
