//! Numbers as recorders write them: logprobs with their many ways of saying "none", token ids, texts of tokens.
//!
//! Types for serde, which readers of other forms use in structs of their own; what is refused says what was expected.

use crate::trace::Tokens;
use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Unexpected, Visitor};
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

/// Numbers that JSON cannot say, as Python's `json` writes them: bare, without quotes.
pub const BARE: [&str; 3] = ["NaN", "Infinity", "-Infinity"];

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
    #[inline]
    pub fn take(&mut self, reading: Reading) -> f32 {
        match reading {
            Reading::Known(value) => return value,
            Reading::Missing => self.missing += 1,
            Reading::Invalid => self.invalid += 1,
        }
        f32::NAN
    }
}

/// What stands where a number is expected: any JSON value, of a list or an object only that it is one.
#[derive(Debug)]
pub enum Scalar {
    Null,
    Bool(bool),
    Negative(i64),
    Integer(u64),
    Real(f64),
    Text(String),
    List,
    Object,
}

impl Scalar {
    /// Its value as float64, where it is a number.
    pub fn number(&self) -> Option<f64> {
        match *self {
            Self::Negative(value) => Some(value as f64),
            Self::Integer(value) => Some(value as f64),
            Self::Real(value) => Some(value),
            _ => None,
        }
    }

    /// serde's error for a value of another type than `wanted`.
    pub fn refused<E: de::Error>(&self, wanted: &str) -> E {
        let unexpected = match self {
            Self::Null => Unexpected::Unit,
            Self::Bool(flag) => Unexpected::Bool(*flag),
            Self::Negative(value) => Unexpected::Signed(*value),
            Self::Integer(value) => Unexpected::Unsigned(*value),
            Self::Real(value) => Unexpected::Float(*value),
            Self::Text(text) => Unexpected::Str(text),
            Self::List => Unexpected::Seq,
            Self::Object => Unexpected::Map,
        };
        E::invalid_type(unexpected, &wanted)
    }
}

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ScalarVisitor)
    }
}

struct ScalarVisitor;

impl<'de> Visitor<'de> for ScalarVisitor {
    type Value = Scalar;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Scalar, E> {
        Ok(Scalar::Null)
    }

    fn visit_bool<E>(self, flag: bool) -> Result<Scalar, E> {
        Ok(Scalar::Bool(flag))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Scalar, E> {
        Ok(u64::try_from(value).map_or(Scalar::Negative(value), Scalar::Integer))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Scalar, E> {
        Ok(Scalar::Integer(value))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Scalar, E> {
        Ok(Scalar::Real(value))
    }

    fn visit_str<E>(self, text: &str) -> Result<Scalar, E> {
        Ok(Scalar::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Scalar, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Scalar::List)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Scalar, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Scalar::Object)
    }
}

impl<'de> Deserialize<'de> for Reading {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Scalar::deserialize(deserializer)?;
        let number = match &value {
            Scalar::Null => return Ok(Self::Missing),
            Scalar::Text(word) => spelled(word),
            number => number.number(),
        };
        number.map(Self::of).ok_or_else(|| value.refused("a logprob (a number or null)"))
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Id(pub u32);

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let refused = |what: fmt::Arguments<'_>| Err(de::Error::custom(format_args!("{ID_COMPLAINT}{what}")));
        match Scalar::deserialize(deserializer)? {
            Scalar::Integer(value) if value <= MAX_ID => Ok(Self(value as u32)),
            // Together's SDK types ids as floats.
            Scalar::Real(value) if value.fract() == 0.0 && (0.0..=MAX_ID as f64).contains(&value) => {
                Ok(Self(value as u32))
            }
            Scalar::Integer(value) => refused(format_args!("{value} is beyond {MAX_ID}")),
            Scalar::Negative(value) => refused(format_args!("{value} is negative")),
            Scalar::Real(value) => refused(format_args!("{value} is not an integer from 0 to {MAX_ID}")),
            other => Err(other.refused("a token id (an integer from 0 to 2147483647)")),
        }
    }
}

impl Id {
    pub fn plain(ids: Vec<Self>) -> Vec<u32> {
        ids.into_iter().map(|Self(id)| id).collect()
    }
}

/// A token's text as bytes; `None` for `null` and for text that UTF-8 cannot say.
///
/// A lone surrogate escape (half of a character, cut by a recorder that counts UTF-16 units) makes a text unknown and
/// not wrong.
#[derive(Debug, Default)]
pub struct TokenText(pub Option<Vec<u8>>);

impl<'de> Deserialize<'de> for TokenText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self(Option::<Known>::deserialize(deserializer)?.and_then(|Known(text)| text)))
    }
}

/// A text that is there, `None` where UTF-8 cannot say it.
struct Known(Option<Vec<u8>>);

impl<'de> Deserialize<'de> for Known {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_bytes(TokenTextVisitor)
    }
}

struct TokenTextVisitor;

impl Visitor<'_> for TokenTextVisitor {
    type Value = Known;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the text of a token (a string or null)")
    }

    fn visit_bytes<E>(self, value: &[u8]) -> Result<Known, E> {
        Ok(Known(std::str::from_utf8(value).is_ok().then(|| value.to_owned())))
    }

    fn visit_str<E>(self, value: &str) -> Result<Known, E> {
        Ok(Known(Some(value.as_bytes().to_owned())))
    }
}
