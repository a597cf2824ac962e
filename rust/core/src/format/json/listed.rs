//! The columns of a token list while it is being read, and texts that are names of ids.
//!
//! Both readers fill them, `logprobs` and the scanner, and so do those of servers' own lists. Nothing here parses JSON.

use super::numbers::{ID_COMPLAINT, MAX_ID, Reading};
use crate::trace::{Pieces, Tokens};

/// Prefix of vLLM's placeholder texts (`return_tokens_as_token_ids`).
const PLACEHOLDER: &str = "token_id:";

/// Entries for which room is made at once.
const RESERVED: usize = 512;

/// Columns of a token list while it is being read.
#[derive(Default)]
pub struct Columns {
    values: Vec<f32>,
    /// How many numbers are missing or invalid; its columns stay empty.
    counted: Tokens,
    pub texts: Pieces,
    pub bytes: Pieces,
    pub ids: Vec<u32>,
    /// Entries that named no id; an id column with holes is none.
    without_id: usize,
    /// The ids that the texts name, as long as each names one: then no text is kept.
    names: Option<Vec<u32>>,
}

/// What an entry says of its token's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Text {
    Unknown,
    /// It stands at the end of the column.
    Spelled,
    /// `token_id:N`, written as vLLM does.
    Names(u32),
}

/// Where the pieces of an entry begin.
#[derive(Debug, Clone, Copy)]
pub struct Opened {
    text: usize,
    bytes: usize,
}

impl Columns {
    /// Columns for a reader that tells texts from names.
    pub fn naming() -> Self {
        Self { names: Some(Vec::new()), ..Self::default() }
    }

    /// Whether all texts so far were names.
    pub fn takes_names(&self) -> bool {
        self.names.is_some()
    }

    /// Begins an entry whose pieces are written to the columns.
    pub fn open(&self) -> Opened {
        Opened { text: self.texts.data.len(), bytes: self.bytes.data.len() }
    }

    pub fn clear_text(&mut self, opened: Opened) {
        self.texts.data.truncate(opened.text);
    }

    pub fn clear_bytes(&mut self, opened: Opened) {
        self.bytes.data.truncate(opened.bytes);
    }

    /// Ends an entry whose pieces stand in the columns.
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

    /// Writes the names before the last text, which is none.
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
        let value = self.counted.take(reading);
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

    /// Room for `count` more entries, as a guess; bounded, as a wrong one must not cost more than it saves.
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

    /// Takes the numbers of a list beside `tokens`, and its texts and bytes if its entries were objects that had them.
    pub fn take_values(&mut self, mut list: Self) {
        list.spell();
        (self.values, self.counted) = (list.values, list.counted);
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
        self.names.iter_mut().for_each(Vec::shrink_to_fit);
        for pieces in [&mut self.texts, &mut self.bytes] {
            pieces.data.shrink_to_fit();
            pieces.ends.shrink_to_fit();
            pieces.known.shrink_to_fit();
        }
    }

    /// The tokens; a column of ids with holes is none.
    pub fn into_tokens(mut self) -> Tokens {
        if memchr::memmem::find(&self.bytes.data, PLACEHOLDER.as_bytes()).is_some() {
            self.spell();
        }
        self.fit();
        let names = self.names.filter(|names| !names.is_empty());
        Tokens {
            ids: (self.without_id == 0 && !self.ids.is_empty()).then_some(self.ids).or(names),
            bytes: Some(self.bytes).filter(any_known),
            texts: Some(self.texts).filter(any_known),
            logprobs: (!self.values.is_empty()).then_some(self.values),
            ..self.counted
        }
    }

    /// The tokens, with ids for texts that name them; `None` where there are none.
    fn finish(self) -> Result<Option<Tokens>, String> {
        if self.values.len().max(self.texts.len()).max(self.ids.len()) == 0 {
            return Ok(None);
        }
        let mut tokens = self.into_tokens();
        take_placeholders(&mut tokens)?;
        Ok(Some(tokens))
    }
}

/// The token lists of one `logprobs` value: as many as it has forms.
#[derive(Default)]
pub struct Lists {
    pub content: Columns,
    pub refusal: Columns,
    /// Lists side by side: `tokens`, `token_logprobs`.
    pub flat: Columns,
}

impl Lists {
    /// The tokens of the first list that has any.
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

/// Turns texts that are all `token_id:N` into ids; a model may write those words, so all or none.
pub fn take_placeholders(tokens: &mut Tokens) -> Result<(), String> {
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
