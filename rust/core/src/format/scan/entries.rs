//! Token lists: `{"content": [{"token", "logprob", "bytes", "top_logprobs"}, ...]}` and bare lists.
//!
//! One pass, no allocation per token; `top_logprobs` is checked and stepped over.

use super::super::logprobs::{Columns, Logprobs};
use super::super::numbers::{Id, Reading};
use super::cursor::{Cursor, unescaped};

impl Cursor<'_> {
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
        let mut more = !self.closes(b']');
        while more {
            if self.peek() == b'{' {
                self.entry(columns)?;
            } else {
                let reading = self.reading()?;
                columns.entry(reading, false, false, None);
            }
            more = self.continues(b']')?;
        }
        self.close();
        Some(())
    }

    fn entry(&mut self, columns: &mut Columns) -> Option<()> {
        let (mut reading, mut text, mut bytes, mut id) = (Reading::Missing, false, false, None);
        self.open(b'{')?;
        let mut more = !self.closes(b'}');
        while more {
            let (key, escaped) = self.quoted()?;
            self.colon()?;
            match key.as_bytes() {
                _ if escaped => return None,
                b"token" => text = self.token_text(&mut columns.scratch[0])?,
                b"logprob" => reading = self.reading()?,
                b"bytes" => bytes = self.byte_list(&mut columns.scratch[1])?,
                b"token_id" if self.null().is_some() => id = None,
                b"token_id" => id = Some(Id(self.id()?)),
                _ => self.skip()?,
            }
            more = self.continues(b'}')?;
        }
        self.close();
        columns.entry(reading, text, bytes, id);
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
        let (text, escaped) = self.quoted()?;
        scratch.clear();
        if escaped {
            scratch.extend_from_slice(unescaped(text)?.as_bytes());
        } else {
            scratch.extend_from_slice(text.as_bytes());
        }
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
