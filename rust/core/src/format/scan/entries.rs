//! Token lists: `{"content": [{"token", "logprob", "bytes", "top_logprobs"}, ...]}` and bare lists.
//!
//! One pass, no allocation per token; `top_logprobs` is checked and stepped over. A producer writes all entries of a list
//! alike, so what stands between the values of one is expected in the next, byte for byte.

use super::super::logprobs::{Columns, Logprobs};
use super::super::numbers::{Id, Reading};
use super::cursor::Cursor;

/// The value of a key of an entry.
#[derive(Debug, Clone, Copy)]
enum Field {
    Token,
    Logprob,
    Bytes,
    TokenId,
    Other,
}

/// How the entry before was written: what stood before each value, and behind the last.
#[derive(Debug, Default)]
struct Habit<'a> {
    fields: Vec<(&'a [u8], Field)>,
    end: &'a [u8],
}

/// What has been read of an entry, beside what is in the scratch buffers.
#[derive(Debug, Clone, Copy)]
struct Read {
    reading: Reading,
    text: bool,
    bytes: bool,
    id: Option<Id>,
}

impl Default for Read {
    fn default() -> Self {
        Self { reading: Reading::Missing, text: false, bytes: false, id: None }
    }
}

/// Keys of an entry whose places are kept; one with more is read key by key.
const FIELDS: usize = 8;

impl<'a> Cursor<'a> {
    /// A `logprobs` value of the chat completions API, or a bare list of entries.
    pub fn known_logprobs(&mut self) -> Option<Logprobs> {
        match self.peek() {
            b'n' => return self.word(b"null").map(|()| Logprobs(None)),
            b'[' => {
                let mut columns = Columns::default();
                self.entries(&mut columns)?;
                return finished(columns);
            }
            _ => {}
        }
        let (mut content, mut refusal) = (Columns::default(), Columns::default());
        self.open(b'{')?;
        let mut more = true;
        while more {
            let key = self.key()?;
            match key.as_ref() {
                "content" => self.entries(&mut content)?,
                "refusal" => self.entries(&mut refusal)?,
                _ => return None,
            }
            more = self.continues(b'}')?;
        }
        self.close();
        let found = finished(content)?;
        if found.0.is_some() { Some(found) } else { finished(refusal) }
    }

    /// A list of entries, or null.
    fn entries(&mut self, columns: &mut Columns) -> Option<()> {
        *columns = Columns::default();
        if self.peek() == b'n' {
            return self.word(b"null");
        }
        self.open(b'[')?;
        let mut habit = Habit::default();
        let mut more = !self.closes(b']');
        while more {
            let start = self.place();
            let read = if let Some(read) = self.as_before(&habit, columns) {
                read
            } else {
                self.rewind(start);
                self.entry(&mut habit, columns)?
            };
            columns.entry(read.reading, read.text, read.bytes, read.id);
            if columns.len() == 1 {
                columns.reserve(self.rest().len() / self.since(start)?.len().max(1));
            }
            more = self.continues(b']')?;
        }
        self.close();
        Some(())
    }

    /// An entry that is written like the one before.
    #[inline]
    fn as_before(&mut self, habit: &Habit<'a>, columns: &mut Columns) -> Option<Read> {
        if habit.fields.is_empty() {
            return None;
        }
        let mut read = Read::default();
        for &(before, field) in &habit.fields {
            self.word(before)?;
            self.field(field, &mut read, columns)?;
        }
        self.word(habit.end)?;
        Some(read)
    }

    /// An entry, key by key: an object or a number.
    fn entry(&mut self, habit: &mut Habit<'a>, columns: &mut Columns) -> Option<Read> {
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
                _ => Field::Other,
            };
            if habit.fields.len() <= FIELDS {
                habit.fields.push((self.since(start)?.as_bytes(), field));
            }
            self.field(field, &mut read, columns)?;
            start = self.place();
            more = self.continues(b'}')?;
        }
        self.close();
        habit.end = self.since(start)?.as_bytes();
        if habit.fields.len() > FIELDS {
            habit.fields.clear();
        }
        Some(read)
    }

    /// The value of a key.
    #[inline]
    fn field(&mut self, field: Field, read: &mut Read, columns: &mut Columns) -> Option<()> {
        match field {
            Field::Token => read.text = self.token_text(&mut columns.scratch[0])?,
            Field::Logprob => read.reading = self.reading()?,
            Field::Bytes => read.bytes = self.byte_list(&mut columns.scratch[1])?,
            Field::TokenId if self.null().is_some() => read.id = None,
            Field::TokenId => read.id = Some(Id(self.id()?)),
            Field::Other => self.skip()?,
        }
        Some(())
    }

    #[inline]
    fn reading(&mut self) -> Option<Reading> {
        if self.peek() == b'n' {
            return self.word(b"null").map(|()| Reading::Missing);
        }
        self.single().map(Reading::of)
    }

    #[inline]
    fn token_text(&mut self, scratch: &mut Vec<u8>) -> Option<bool> {
        if self.peek() == b'n' {
            return self.word(b"null").map(|()| false);
        }
        let text = self.unquoted()?;
        scratch.clear();
        scratch.extend_from_slice(text.as_bytes());
        Some(true)
    }

    #[inline]
    fn byte_list(&mut self, scratch: &mut Vec<u8>) -> Option<bool> {
        if self.peek() == b'n' {
            return self.word(b"null").map(|()| false);
        }
        scratch.clear();
        self.open(b'[')?;
        let mut more = !self.closes(b']');
        while more {
            scratch.push(self.byte()?);
            more = self.continues(b']')?;
        }
        self.close();
        Some(true)
    }
}

/// The tokens of the columns; gives up where they are refused, so that the generic parser says why.
fn finished(columns: Columns) -> Option<Logprobs> {
    columns.finish::<serde_json::Error>().ok().map(Logprobs)
}
