//! Reads token lists: `{"content": [{"token", "logprob", "bytes", "top_logprobs"}, ...]}` and bare lists.
//!
//! It takes one pass and allocates nothing per token. `top_logprobs` is validated; it is read if it has ids (`token_id`,
//! or texts `token_id:N`) and skipped otherwise. A producer formats all entries of a list alike. So the scanner expects between the values of an entry the same bytes as in the entry
//! before.

use super::cursor::{Cursor, Place, eight_digits, leading_digits, word_at};
use crate::format::token_list::{Columns, EntryStart, Lists, Reading, Text, listed_logprob, number_from_word};
use crate::trace::Tokens;

/// The meaning of a key of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    Token,
    Logprob,
    Bytes,
    TokenId,
    Top,
    Other,
}

/// Layout of the previous entry: the bytes before each value, and those after the last.
#[derive(Debug, Default)]
struct EntryLayout<'a> {
    fields: Vec<(Expected<'a>, Field)>,
    end: Expected<'a>,
}

/// Bytes that are expected next. The first ones are compared eight at a time.
#[derive(Debug, Default)]
struct Expected<'a> {
    text: &'a [u8],
    words: [u64; WORDS],
    masks: [u64; WORDS],
}

/// Number of 8-byte words that cover the bytes before a value, such as `, "top_logprobs": `.
const WORDS: usize = 3;

impl<'a> Expected<'a> {
    fn new(text: &'a [u8]) -> Self {
        let (mut words, mut masks) = ([0; WORDS], [0; WORDS]);
        for (at, &byte) in text.iter().take(8 * WORDS).enumerate() {
            words[at / 8] |= u64::from(byte) << (8 * (at % 8));
            masks[at / 8] |= 0xFF << (8 * (at % 8));
        }
        Self { text, words, masks }
    }

    /// Returns whether the expected bytes are next.
    #[inline]
    fn comes(&self, cursor: &Cursor<'_>) -> bool {
        let Some(first) = cursor.ahead::<{ 8 * WORDS }>() else { return cursor.rest().starts_with(self.text) };
        let (words, _) = first.as_chunks::<8>();
        let expected = self.words.iter().zip(&self.masks);
        let other = words
            .iter()
            .zip(expected)
            .fold(0, |other, (actual, (word, mask))| other | ((u64::from_le_bytes(*actual) ^ word) & mask));
        other == 0 && (self.text.len() <= 8 * WORDS || cursor.rest().starts_with(self.text))
    }
}

/// Values read from an entry. Its texts and bytes are written to the columns directly.
#[derive(Debug, Clone, Copy)]
struct Read {
    reading: Reading,
    text: Text,
    bytes: bool,
    id: Option<u32>,
}

impl Read {
    /// Returns whether the id of the entry was read.
    fn has_id(self) -> bool {
        self.id.is_some() || matches!(self.text, Text::Names(_))
    }
}

impl Default for Read {
    fn default() -> Self {
        Self { reading: Reading::Missing, text: Text::Unknown, bytes: false, id: None }
    }
}

/// Largest number of keys whose layout is recorded. An entry with more is read key by key.
const FIELDS: usize = 8;

impl<'a> Cursor<'a> {
    pub fn logprobs(&mut self) -> Option<Option<Tokens>> {
        let mut lists = Lists::default();
        match self.peek() {
            b'n' => self.word(b"null")?,
            b'[' => self.entries(&mut lists.content)?,
            _ => self.lists(&mut lists)?,
        }
        // `fallback` reads refused lists again and reports the error.
        lists.finish().ok()
    }

    fn lists(&mut self, lists: &mut Lists) -> Option<()> {
        let (mut has_known_key, mut has_unknown_key) = (false, false);
        self.members(|cursor, key| {
            match key.as_ref() {
                "content" => cursor.entries(&mut lists.content)?,
                "refusal" => cursor.entries(&mut lists.refusal)?,
                "logprobs" | "token_logprobs" | "values" => {
                    let mut values = Columns::default();
                    cursor.entries(&mut values)?;
                    lists.flat.take_values(values);
                }
                "tokens" => lists.flat.texts = cursor.unless_null(Self::texts)?.unwrap_or_default(),
                "token_ids" => lists.flat.ids = cursor.unless_null(Self::ids)?.unwrap_or_default(),
                _ => {
                    has_unknown_key = true;
                    return cursor.skip();
                }
            }
            has_known_key = true;
            Some(())
        })?;
        (has_known_key || !has_unknown_key).then_some(())
    }

    /// Reads a list of entries, or null.
    fn entries(&mut self, columns: &mut Columns) -> Option<()> {
        *columns = Columns::naming();
        if self.peek() == b'n' {
            return self.word(b"null");
        }
        let mut habit = EntryLayout::default();
        self.open(b'[')?;
        let mut more = !self.closes(b']');
        while more {
            let (start, opened) = (self.place(), columns.open());
            let read = if let Some(read) = self.as_before(&habit, opened, columns) {
                read
            } else {
                self.rewind(start);
                columns.clear_text(opened);
                columns.clear_bytes(opened);
                columns.clear_top(opened);
                self.entry(&mut habit, opened, columns)?
            };
            columns.close(read.reading, read.text, read.bytes, read.id);
            if columns.len() == 1 {
                columns.reserve(self.rest().len() / self.since(start)?.len().max(1));
            }
            more = self.continues(b']')?;
        }
        self.close();
        Some(())
    }

    /// Reads an entry that has the same layout as the one before.
    #[inline]
    fn as_before(&mut self, habit: &EntryLayout<'a>, opened: EntryStart, columns: &mut Columns) -> Option<Read> {
        if habit.fields.is_empty() {
            return None;
        }
        let start = self.place();
        let mut read = Read::default();
        for (before, field) in &habit.fields {
            let values_end = self.place();
            self.expect(before)?;
            if *field == Field::Other || *field == Field::Top && !read.has_id() {
                self.alternatives(start, values_end, habit)?;
            } else if *field == Field::Top {
                if self.word(b"[]").is_none() && self.again(start, values_end).is_none() {
                    self.top(opened, columns)?;
                }
            } else {
                self.field(*field, &mut read, opened, columns)?;
            }
        }
        self.expect(&habit.end)?;
        Some(read)
    }

    #[inline]
    fn expect(&mut self, expected: &Expected<'_>) -> Option<()> {
        expected.comes(self).then(|| self.advance(expected.text.len()))
    }

    /// Reads an entry key by key: an object or a number. In most lists only the first entry is read this way.
    #[cold]
    fn entry(&mut self, habit: &mut EntryLayout<'a>, opened: EntryStart, columns: &mut Columns) -> Option<Read> {
        let mut read = Read::default();
        habit.fields.clear();
        if self.peek() != b'{' {
            read.reading = self.reading()?;
            return Some(read);
        }
        let mut start = self.place();
        self.open(b'{')?;
        let mut more = !self.closes(b'}');
        while more {
            let (key, escaped) = self.quoted()?;
            self.colon()?;
            let field = match key.as_bytes() {
                _ if escaped => return None,
                b"token" => Field::Token,
                b"logprob" => Field::Logprob,
                b"bytes" => Field::Bytes,
                b"token_id" => Field::TokenId,
                b"top_logprobs" => Field::Top,
                _ => Field::Other,
            };
            if habit.fields.len() <= FIELDS {
                habit.fields.push((Expected::new(self.since(start)?.as_bytes()), field));
            }
            self.field(field, &mut read, opened, columns)?;
            start = self.place();
            more = self.continues(b'}')?;
        }
        self.close();
        habit.end = Expected::new(self.since(start)?.as_bytes());
        if habit.fields.len() > FIELDS {
            habit.fields.clear();
        }
        Some(read)
    }

    /// Reads the value of a key. If a key occurs twice, the last value counts.
    #[inline(always)]
    fn field(&mut self, field: Field, read: &mut Read, opened: EntryStart, columns: &mut Columns) -> Option<()> {
        match field {
            Field::Token => {
                columns.clear_text(opened);
                read.text = self.token_text(columns)?;
            }
            Field::Logprob => read.reading = self.reading()?,
            Field::Bytes => {
                columns.clear_bytes(opened);
                read.bytes = self.byte_list(&mut columns.bytes.data)?;
            }
            Field::TokenId if self.word(b"null").is_some() => read.id = None,
            Field::TokenId => read.id = Some(self.id()?),
            Field::Top if read.has_id() => {
                columns.clear_top(opened);
                self.top(opened, columns)?;
            }
            Field::Top | Field::Other => self.skip()?,
        }
        Some(())
    }

    /// Reads the most probable ids of an entry. A list of fewer than two, or with an item that has no id or no logprob,
    /// is skipped.
    #[inline(never)]
    fn top(&mut self, opened: EntryStart, columns: &mut Columns) -> Option<()> {
        if self.peek() != b'[' {
            return self.skip();
        }
        let mut is_known = true;
        self.list(|cursor| {
            let (mut id, mut logprob) = (None, None);
            if cursor.peek() != b'{' {
                is_known = false;
                return cursor.skip();
            }
            cursor.members(|cursor, key| {
                match key.as_ref() {
                    "token" if cursor.rest().starts_with(b"\"token_id:") => id = Some(cursor.name()?),
                    "token_id" if cursor.peek() != b'n' => id = Some(cursor.id()?),
                    "logprob" => logprob = cursor.listed()?,
                    _ => cursor.skip()?,
                }
                Some(())
            })?;
            match (id, logprob) {
                (Some(id), Some(logprob)) => columns.list(id, logprob),
                _ => is_known = false,
            }
            Some(())
        })?;
        if !is_known || columns.listed(opened) < 2 {
            columns.clear_top(opened);
        }
        Some(())
    }

    /// Reads the logprob of one of the most probable ids; the inner value is `None` if it is unknown.
    fn listed(&mut self) -> Option<Option<f32>> {
        if let Some(value) = self.short_decimal() {
            return Some(listed_logprob(value));
        }
        if self.peek() == b'n' {
            return self.word(b"null").map(|()| None);
        }
        self.float32_value().or_else(|| self.bare().and_then(number_from_word)).map(listed_logprob)
    }

    #[inline(always)]
    fn reading(&mut self) -> Option<Reading> {
        if let Some(value) = self.short_decimal() {
            return Some(Reading::of(value));
        }
        if self.peek() == b'n' {
            return self.word(b"null").map(|()| Reading::Missing);
        }
        self.float32_value().or_else(|| self.bare().and_then(number_from_word)).map(Reading::of)
    }

    #[inline(always)]
    fn token_text(&mut self, columns: &mut Columns) -> Option<Text> {
        if let Some(id) = columns.takes_names().then(|| self.name()).flatten() {
            return Some(Text::Names(id));
        }
        if self.peek() == b'n' {
            return self.word(b"null").map(|()| Text::Unknown);
        }
        self.spelled(&mut columns.texts.data).map(|()| Text::Spelled)
    }

    /// Appends the text of a string.
    #[inline]
    pub fn spelled(&mut self, to: &mut Vec<u8>) -> Option<()> {
        let text = self.unquoted()?;
        to.extend_from_slice(text.as_bytes());
        Some(())
    }

    /// Reads the id of a text `"token_id:N"`, as vLLM writes it.
    #[inline]
    fn name(&mut self) -> Option<u32> {
        const BEFORE: &[u8; 10] = b"\"token_id:";
        let next = self.ahead::<18>()?;
        let word = word_at(next.strip_prefix(BEFORE)?, 0)?;
        let length = leading_digits(word);
        let zero_first = length > 1 && word as u8 == b'0';
        if !(1..8).contains(&length) || zero_first || (word >> (8 * length)) as u8 != b'"' {
            return None;
        }
        self.advance(BEFORE.len() + length + 1);
        Some(eight_digits(word << (64 - 8 * length)) as u32)
    }

    /// Reads a token's bytes, or null. Returns whether they are known.
    #[inline(always)]
    pub fn byte_list(&mut self, bytes: &mut Vec<u8>) -> Option<bool> {
        if self.ahead() == Some(b"null") {
            self.advance(4);
            return Some(false);
        }
        self.known_bytes(bytes).map(|()| true)
    }

    fn known_bytes(&mut self, bytes: &mut Vec<u8>) -> Option<()> {
        self.open(b'[')?;
        let mut more = !self.closes(b']');
        while more {
            bytes.push(self.byte()?);
            more = self.continues(b']')?;
        }
        self.close();
        Some(())
    }

    /// Skips the value of a key that is not read. `start` is the beginning of the entry, `values_end` the end of its values
    /// so far.
    ///
    /// Most often the value lists the same token again, or others in the same layout.
    #[inline]
    fn alternatives(&mut self, start: Place, values_end: Place, habit: &EntryLayout<'a>) -> Option<()> {
        let value = self.place();
        if self.word(b"[]").is_some() {
            return Some(());
        }
        if self.again(start, values_end).or_else(|| self.others(habit)).is_some() {
            return Some(());
        }
        self.rewind(value);
        self.skip()
    }

    /// Skips a list of one object that repeats the values so far.
    #[inline]
    fn again(&mut self, start: Place, values_end: Place) -> Option<()> {
        let values = self.between(start, values_end).filter(|values| !values.is_empty())?.as_bytes();
        let rest = self.rest().strip_prefix(b"[")?.strip_prefix(values)?;
        rest.starts_with(b"}]").then(|| self.advance(values.len() + 3))
    }

    /// Skips a list of objects that have the layout of the entry, up to the current key.
    fn others(&mut self, habit: &EntryLayout<'a>) -> Option<()> {
        self.list(|cursor| {
            for (before, field) in &habit.fields {
                if !matches!(field, Field::Other | Field::Top) {
                    cursor.expect(before)?;
                    cursor.skip()?;
                }
            }
            cursor.word(b"}")
        })
    }
}
