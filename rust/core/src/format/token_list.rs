//! Token lists of recorders: their columns, token ids, texts that are names of ids, and logprobs with their many
//! notations for "none".
//!
//! All readers fill these columns: `fallback`, `fast_scan` and the readers of servers' own lists. The number types
//! implement serde's traits and are used in the structs of other forms. Their errors contain the expected type.

use crate::trace::{Pieces, Tokens, TopLogprobs};
use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Unexpected, Visitor};
use std::fmt;

/// Prefix of vLLM's placeholder texts (`return_tokens_as_token_ids`).
const PLACEHOLDER: &str = "token_id:";

/// Largest number of entries for which capacity is reserved at once.
const RESERVED: usize = 512;

/// Columns of a token list during reading.
#[derive(Default)]
pub struct Columns {
    values: Vec<f32>,
    /// Counts of missing and invalid numbers. The columns of this value stay empty.
    counts: Tokens,
    pub texts: Pieces,
    pub bytes: Pieces,
    pub ids: Vec<u32>,
    /// Number of entries without an id. An id column with holes is dropped.
    without_id: usize,
    /// The ids that the texts name (`token_id:N`), as long as every text is such a name. Meanwhile no text is stored.
    names: Option<Vec<u32>>,
    /// The most probable ids of the entries, if any entry lists some.
    top: Option<Box<TopLogprobs>>,
}

/// Text of an entry's token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Text {
    Unknown,
    /// The text is at the end of the text column.
    Spelled,
    /// The text `token_id:N`, as vLLM writes it.
    Names(u32),
}

/// Offsets at which the text and the bytes of an entry start.
#[derive(Debug, Clone, Copy)]
pub struct EntryStart {
    text: usize,
    bytes: usize,
    top: usize,
}

impl Columns {
    /// Creates columns for a reader that recognises texts that are names of ids.
    pub fn naming() -> Self {
        Self { names: Some(Vec::new()), ..Self::default() }
    }

    /// Returns whether all texts so far were names of ids.
    pub fn takes_names(&self) -> bool {
        self.names.is_some()
    }

    /// Starts an entry whose text and bytes are appended to the columns directly.
    pub fn open(&self) -> EntryStart {
        let top = self.top.as_ref().map_or(0, |top| top.ids.len());
        EntryStart { text: self.texts.data.len(), bytes: self.bytes.data.len(), top }
    }

    pub fn clear_text(&mut self, opened: EntryStart) {
        self.texts.data.truncate(opened.text);
    }

    pub fn clear_bytes(&mut self, opened: EntryStart) {
        self.bytes.data.truncate(opened.bytes);
    }

    /// Removes the most probable ids of an entry that is read again, or whose list is not understood.
    pub fn clear_top(&mut self, opened: EntryStart) {
        if let Some(top) = &mut self.top {
            top.ids.truncate(opened.top);
            top.logprobs.truncate(opened.top);
        }
    }

    /// Appends one of the most probable ids of the entry that is being read.
    pub fn list(&mut self, id: u32, logprob: f32) {
        let top = self.top.get_or_insert_default();
        top.ids.push(id);
        top.logprobs.push(logprob);
    }

    /// Returns the number of ids that the entry being read lists.
    pub fn listed(&self, opened: EntryStart) -> usize {
        self.top.as_ref().map_or(0, |top| top.ids.len() - opened.top)
    }

    /// Ends an entry whose text and bytes are in the columns.
    #[inline]
    pub fn close(&mut self, reading: Reading, text: Text, bytes: bool, id: Option<u32>) {
        self.number(reading, id);
        self.bytes.close(bytes);
        if let (Text::Names(id), Some(names)) = (text, &mut self.names) {
            return names.push(id);
        }
        self.spell();
        self.texts.close(text == Text::Spelled);
    }

    /// Writes out the names as texts. They come before the last text, which is not a name.
    fn spell(&mut self) {
        let Some(names) = self.names.take() else { return };
        let last = std::mem::take(&mut self.texts.data);
        for id in names {
            self.texts.push(Some(format!("{PLACEHOLDER}{id}").as_bytes()));
        }
        self.texts.data.extend_from_slice(&last);
    }

    #[inline]
    fn number(&mut self, reading: Reading, id: Option<u32>) {
        if let Some(top) = &mut self.top {
            top.ends.resize(self.values.len(), top.ends.last().copied().unwrap_or(0));
            top.ends.push(top.ids.len() as u32);
        }
        let value = self.counts.take(reading);
        self.values.push(value);
        match id {
            Some(id) => self.ids.push(id),
            None => self.without_id += 1,
        }
    }

    pub fn push(&mut self, id: Option<u32>, reading: Reading, text: Option<&[u8]>, bytes: Option<&[u8]>) {
        self.number(reading, id);
        self.texts.push(text);
        self.bytes.push(bytes);
    }

    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Reserves capacity for `count` more entries. The number is an estimate, so the capacity is bounded.
    pub fn reserve(&mut self, count: usize) {
        let count = count.min(RESERVED);
        self.values.reserve(count);
        let texts = match &mut self.names {
            Some(names) if !names.is_empty() => {
                names.reserve(count);
                None
            }
            _ => Some(&mut self.texts),
        };
        for pieces in texts.into_iter().chain([&mut self.bytes]) {
            pieces.data.reserve(8 * count);
            pieces.ends.reserve(count);
            pieces.known.reserve(count);
        }
        if self.without_id == 0 {
            self.ids.reserve(count);
        }
    }

    /// Takes the numbers of a list next to `tokens`. Takes its texts and bytes too if its entries contain any.
    pub fn take_values(&mut self, mut list: Self) {
        list.spell();
        (self.values, self.counts, self.top) = (list.values, list.counts, list.top);
        if any_known(&list.texts) {
            self.texts = list.texts;
        }
        if any_known(&list.bytes) {
            self.bytes = list.bytes;
        }
    }

    /// Releases capacity that was reserved for entries that did not exist.
    fn fit(&mut self) {
        if self.values.capacity() / 2 < self.values.len() {
            return;
        }
        self.values.shrink_to_fit();
        self.ids.shrink_to_fit();
        self.names.iter_mut().for_each(Vec::shrink_to_fit);
        for pieces in [&mut self.texts, &mut self.bytes] {
            pieces.data.shrink_to_fit();
            pieces.ends.shrink_to_fit();
            pieces.known.shrink_to_fit();
        }
    }

    /// Returns the tokens. A column of ids with holes is dropped.
    pub fn into_tokens(mut self) -> Tokens {
        if memchr::memmem::find(&self.bytes.data, PLACEHOLDER.as_bytes()).is_some() {
            self.spell();
        }
        self.fit();
        let names = self.names.filter(|names| !names.is_empty());
        if let Some(top) = &mut self.top {
            top.ends.resize(self.values.len(), top.ends.last().copied().unwrap_or(0));
        }
        Tokens {
            top: self.top.filter(|top| !top.ids.is_empty()),
            ids: (self.without_id == 0 && !self.ids.is_empty()).then_some(self.ids).or(names),
            bytes: Some(self.bytes).filter(any_known),
            texts: Some(self.texts).filter(any_known),
            logprobs: (!self.values.is_empty()).then_some(self.values),
            ..self.counts
        }
    }

    /// Returns the tokens, with ids for texts that are names of ids; `None` if there are no tokens.
    fn finish(self) -> Result<Option<Tokens>, String> {
        if self.values.len().max(self.texts.len()).max(self.ids.len()) == 0 {
            return Ok(None);
        }
        let mut tokens = self.into_tokens();
        take_placeholders(&mut tokens)?;
        if tokens.ids.is_none() {
            tokens.top = None; // texts such as `token_id:5` that a model wrote
        }
        Ok(Some(tokens))
    }
}

/// The token lists of one `logprobs` value, one for each of its forms.
#[derive(Default)]
pub struct Lists {
    pub content: Columns,
    pub refusal: Columns,
    /// Parallel lists: `tokens`, `token_logprobs`.
    pub flat: Columns,
}

impl Lists {
    /// Returns the tokens of the first list that has any.
    pub fn finish(self) -> Result<Option<Tokens>, String> {
        for columns in [self.content, self.refusal, self.flat] {
            if let Some(tokens) = columns.finish()? {
                return Ok(Some(tokens));
            }
        }
        Ok(None)
    }
}

fn any_known(pieces: &Pieces) -> bool {
    pieces.known.contains(&true)
}

/// Replaces texts by ids if all of them are `token_id:N`. A model may write such a text itself, so one other text
/// prevents it.
pub fn take_placeholders(tokens: &mut Tokens) -> Result<(), String> {
    let Some(texts) = &tokens.texts else { return Ok(()) };
    let mut ids = Vec::new();
    for index in 0..texts.len() {
        match texts.get(index).and_then(placeholder) {
            Some(id) => ids.push(id),
            None => return Ok(()),
        }
    }
    if let Some(invalid) = ids.iter().find(|id| **id > MAX_ID) {
        return Err(format!("{ID_COMPLAINT}{invalid} is beyond {MAX_ID}"));
    }
    if let Some(bytes) = &tokens.bytes {
        tokens.bytes = Some(without_echo(bytes, texts)).filter(any_known);
    }
    tokens.texts = None;
    tokens.ids.get_or_insert_with(|| ids.into_iter().map(|id| id as u32).collect());
    Ok(())
}

/// Returns the logprob of one of the most probable ids: -inf if the id could not be sampled, `None` if it is unknown.
pub fn listed_logprob(value: f64) -> Option<f32> {
    if value.is_nan() || value > 1e-3 {
        None
    } else if value == SENTINEL || value as f32 <= f32::MIN {
        Some(f32::NEG_INFINITY)
    } else {
        Some(value as f32)
    }
}

pub fn placeholder(text: &[u8]) -> Option<u64> {
    let digits = text.strip_prefix(PLACEHOLDER.as_bytes())?;
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    Some(std::str::from_utf8(digits).ok()?.parse().unwrap_or(u64::MAX))
}

/// Drops bytes that equal the placeholder's text. vLLM writes them for a step without an entry, and they do not
/// describe the token.
fn without_echo(bytes: &Pieces, texts: &Pieces) -> Pieces {
    let mut result = Pieces::default();
    for index in 0..bytes.len() {
        result.push(bytes.get(index).filter(|piece| texts.get(index) != Some(piece)));
    }
    result
}

/// Largest token id. Python receives ids as int32.
pub const MAX_ID: u64 = i32::MAX as u64;

/// Prefix of every error about a token id. `diagnose` counts such records under a separate reason.
pub const ID_COMPLAINT: &str = "token id ";

/// The value that servers write for a missing logprob.
const SENTINEL: f64 = -9999.0;

/// One recorded logprob.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reading {
    /// A logprob in nats.
    Value(f32),
    /// null, NaN or -inf.
    Missing,
    /// Positive, or the sentinel -9999.0.
    Invalid,
}

impl Reading {
    pub fn of(value: f64) -> Self {
        let short = value as f32;
        // llama.cpp and SGLang write the lowest float32 for a probability of 0.
        if value.is_nan() || short <= f32::MIN {
            Self::Missing
        } else if value > 0.0 || value == SENTINEL {
            Self::Invalid
        } else {
            Self::Value(short)
        }
    }
}

/// Numbers that JSON cannot represent. Python's `json` module writes them without quotes.
pub const BARE: [&str; 3] = ["NaN", "Infinity", "-Infinity"];

/// Returns the number for a word such as `NaN`.
pub fn number_from_word(word: &str) -> Option<f64> {
    match word {
        "NaN" | "nan" => Some(f64::NAN),
        "Infinity" | "inf" | "+inf" | "Inf" => Some(f64::INFINITY),
        "-Infinity" | "-inf" | "-Inf" => Some(f64::NEG_INFINITY),
        _ => None,
    }
}

impl Tokens {
    /// Returns the number of a reading. A missing or invalid one is counted and becomes NaN.
    #[inline]
    pub fn take(&mut self, reading: Reading) -> f32 {
        match reading {
            Reading::Value(value) => return value,
            Reading::Missing => self.missing += 1,
            Reading::Invalid => self.invalid += 1,
        }
        f32::NAN
    }
}

/// Any JSON value at a place where a number is expected. The contents of lists and objects are not kept.
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
    /// Returns the value as float64 if it is a number.
    pub fn number(&self) -> Option<f64> {
        match *self {
            Self::Negative(value) => Some(value as f64),
            Self::Integer(value) => Some(value as f64),
            Self::Real(value) => Some(value),
            _ => None,
        }
    }

    /// Returns serde's error for a value of another type than `wanted`.
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
            Scalar::Text(word) => number_from_word(word),
            number => number.number(),
        };
        number.map(Self::of).ok_or_else(|| value.refused("a logprob (a number or null)"))
    }
}

/// The logprob of one of the ids that a server lists at a step.
#[derive(Debug, Clone, Copy)]
pub struct ListedLogprob {
    /// The logprob, if the id was sampled.
    pub sampled: Reading,
    /// The logprob as one of the most probable ids, as by [`listed_logprob`].
    pub listed: Option<f32>,
}

impl<'de> Deserialize<'de> for ListedLogprob {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Scalar::deserialize(deserializer)?;
        let number = match &value {
            Scalar::Null => return Ok(Self { sampled: Reading::Missing, listed: None }),
            Scalar::Text(word) => number_from_word(word),
            number => number.number(),
        };
        let number = number.ok_or_else(|| value.refused("a logprob (a number or null)"))?;
        Ok(Self { sampled: Reading::of(number), listed: listed_logprob(number) })
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Id(pub u32);

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let error = |what: fmt::Arguments<'_>| Err(de::Error::custom(format_args!("{ID_COMPLAINT}{what}")));
        match Scalar::deserialize(deserializer)? {
            Scalar::Integer(value) if value <= MAX_ID => Ok(Self(value as u32)),
            // Together's SDK writes ids as floats.
            Scalar::Real(value) if value.fract() == 0.0 && (0.0..=MAX_ID as f64).contains(&value) => {
                Ok(Self(value as u32))
            }
            Scalar::Integer(value) => error(format_args!("{value} is beyond {MAX_ID}")),
            Scalar::Negative(value) => error(format_args!("{value} is negative")),
            Scalar::Real(value) => error(format_args!("{value} is not an integer from 0 to {MAX_ID}")),
            other => Err(other.refused("a token id (an integer from 0 to 2147483647)")),
        }
    }
}

impl Id {
    pub fn plain(ids: Vec<Self>) -> Vec<u32> {
        ids.into_iter().map(|Self(id)| id).collect()
    }
}

/// A token's text as bytes; `None` for `null` and for text that UTF-8 cannot represent.
///
/// A lone surrogate escape is half of a character, cut by a recorder that counts UTF-16 units. Such a text is unknown;
/// the record is still valid.
#[derive(Debug, Default)]
pub struct TokenText(pub Option<Vec<u8>>);

impl<'de> Deserialize<'de> for TokenText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self(Option::<Known>::deserialize(deserializer)?.and_then(|Known(text)| text)))
    }
}

/// A text other than null; `None` if UTF-8 cannot represent it.
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
