//! Splits a byte stream into records. Four layouts are supported: one record per line, the elements of one JSON array,
//! pretty-printed objects one after another, and streams of server-sent events among the lines.
//!
//! At most one record and one block are in memory at a time. Inside a record only strings and brackets are parsed.
//!
//! An event stream is one record. It starts with a line that is a field of an event. It ends with `data: [DONE]`,
//! before a line that is an object or starts another stream, or at the end of the file. It becomes the record
//! `{"response": "<text of the stream>"}`, which is one line of JSON and contains the complete text.

use super::buffer::{BLOCK, Bytes, ReadBuffer};
use crate::cancel;
use crate::error::RecordPlace;
use crate::format::{Reason, Rejection, reject};
use crate::record_bytes::{FilePosition, SourceFile};
use std::io::{self, Read};
use std::sync::Arc;

pub(super) enum Piece {
    /// A record, and the place of its bytes on disk.
    Record { at: RecordPlace, bytes: Bytes, spot: Option<FilePosition> },
    /// A part of a record that is longer than the limit. `continued` is set for all parts but the first.
    Overlong { at: RecordPlace, bytes: Vec<u8>, continued: bool },
    /// The point at which the stream broke. No piece follows.
    Broken { at: RecordPlace, bytes: Vec<u8>, problem: Rejection },
}

impl Piece {
    /// Returns a record that exists only in memory.
    pub fn own(at: RecordPlace, bytes: Arc<[u8]>) -> Self {
        Self::Record { at, bytes: Bytes::Own(bytes), spot: None }
    }

    pub fn len(&self) -> usize {
        match self {
            Self::Record { bytes, .. } => bytes.len(),
            Self::Overlong { bytes, .. } | Self::Broken { bytes, .. } => bytes.len(),
        }
    }
}

const BOM: &[u8] = &[0xef, 0xbb, 0xbf];

#[allow(clippy::struct_excessive_bools, reason = "each says something of the bytes that the others do not")]
pub(super) struct Splitter {
    stream: Box<dyn Read + Send>,
    /// The file, if the stream returns its bytes unchanged.
    origin: Option<Arc<SourceFile>>,
    buffer: ReadBuffer,
    /// Number of bytes of the stream before the buffer.
    before: u64,
    /// Offset in the buffer at which the current record starts.
    start: usize,
    /// Offset in the buffer up to which the current record was scanned.
    scanned: usize,
    nesting: Nesting,
    layout: Layout,
    /// Offset in the buffer at which the current line starts (layout `Lines` only).
    line_start: usize,
    /// Whether the beginning of the current line was dropped, as part of a record that is too long.
    line_cut: bool,
    /// Whether the current record is an event stream.
    in_stream: bool,
    /// Number of blanks since the last line break, while the layout is unknown. `None` before the first byte was read.
    blanks: Option<usize>,
    /// Line on which the current record starts.
    line: u64,
    /// Line of the offset `scanned`.
    line_now: u64,
    /// Number of array elements read so far.
    count: u64,
    limit: usize,
    /// Whether the current record has exceeded the limit.
    overlong: bool,
    at_end: bool,
    failure: Option<io::Error>,
    saw_bytes: bool,
}

impl Splitter {
    /// Creates a splitter for records of at most `limit` bytes. `origin` is the file, if the stream returns its bytes
    /// unchanged.
    pub fn new(stream: Box<dyn Read + Send>, origin: Option<Arc<SourceFile>>, limit: usize) -> Self {
        Self {
            stream,
            origin,
            buffer: ReadBuffer::new(limit),
            before: 0,
            start: 0,
            scanned: 0,
            nesting: Nesting::default(),
            layout: Layout::Unknown,
            line_start: 0,
            line_cut: false,
            in_stream: false,
            blanks: None,
            line: 1,
            line_now: 1,
            count: 0,
            limit,
            overlong: false,
            at_end: false,
            failure: None,
            saw_bytes: false,
        }
    }

    pub fn saw_bytes(&self) -> bool {
        self.saw_bytes
    }

    #[cfg(test)]
    pub fn held(&self) -> usize {
        self.buffer.room()
    }

    /// Returns the next record, or `None` at the end.
    pub fn next_piece(&mut self) -> Option<Piece> {
        loop {
            if self.layout == Layout::Unknown {
                if !self.find_layout() {
                    return self.last();
                }
                if self.blanks.is_some_and(|blanks| blanks > self.limit) {
                    return Some(self.cut_overlong(self.start));
                }
            }
            if let Some(end) = self.find_end() {
                if let Some(piece) = self.cut(end) {
                    return Some(piece);
                }
                continue;
            }
            if let Some(problem) = self.misplaced() {
                return Some(self.broken(problem));
            }
            if let Some(end) = self.overlong_end() {
                return Some(self.cut_overlong(end));
            }
            if !self.read_block() {
                return self.last();
            }
        }
    }

    /// Reads a block. Returns false at the end of the stream.
    fn read_block(&mut self) -> bool {
        if self.at_end {
            return false;
        }
        cancel::check();
        self.buffer.drop_front(self.start);
        self.before += self.start as u64;
        self.scanned -= self.start;
        self.line_start = self.line_start.saturating_sub(self.start);
        self.start = 0;
        let count = self.buffer.read(&mut self.stream).unwrap_or_else(|error| {
            self.failure = Some(error);
            0
        });
        self.at_end = count == 0;
        self.saw_bytes |= count > 0;
        !self.at_end
    }

    /// Detects the layout from the first byte that is not blank. Returns false at the end of the stream.
    ///
    /// Blanks before that byte are dropped. A line with more blanks than a record may have bytes is a record that is
    /// too long.
    fn find_layout(&mut self) -> bool {
        loop {
            let Some(blanks) = self.blanks else {
                if self.buffer.len() < BOM.len() && self.read_block() {
                    continue;
                }
                self.start = if self.buffer.starts_with(BOM) { BOM.len() } else { 0 };
                (self.scanned, self.blanks) = (self.start, Some(0));
                continue;
            };
            let rest = &self.buffer[self.start..];
            let length = rest.iter().position(|byte| !byte.is_ascii_whitespace()).unwrap_or(rest.len());
            let limit_end = passes(&rest[..length], blanks, self.limit);
            let (overlong, skipped) = (limit_end.is_some(), &rest[..limit_end.unwrap_or(length)]);
            self.line_now += count_lines(skipped);
            let line_break = memchr::memrchr(b'\n', skipped);
            self.blanks = Some(line_break.map_or(blanks + skipped.len(), |at| skipped.len() - at - 1));
            self.start += skipped.len();
            self.scanned = self.start;
            // The layout depends on two bytes.
            if !overlong && self.buffer.len() - self.start < 2 && self.read_block() {
                continue;
            }
            if !overlong && self.start == self.buffer.len() {
                return false;
            }
            self.layout = if overlong { Layout::Lines } else { Layout::of(&self.buffer[self.start..]) };
            self.start += usize::from(matches!(self.layout, Layout::Array { .. }));
            (self.line, self.scanned, self.line_start) = (self.line_now, self.start, self.start);
            return true;
        }
    }

    /// Returns the end of the record that starts at `start`, if it is in the buffer.
    fn find_end(&mut self) -> Option<usize> {
        if self.layout == Layout::Lines {
            return self.find_line_end();
        }
        if self.nesting.depth == 0 && self.start == self.scanned && !self.overlong {
            self.skip_between();
        }
        while self.scanned < self.buffer.len() && !self.blocked() {
            let byte = self.buffer[self.scanned];
            if self.nesting.ends_before(byte) && (self.scanned > self.start || self.overlong) {
                return Some(self.scanned);
            }
            self.scanned += 1;
            self.line_now += u64::from(byte == b'\n');
            if self.nesting.ends_with(byte) {
                return Some(self.scanned);
            }
        }
        None
    }

    /// Returns the end of the current line, or of the event stream that it belongs to.
    fn find_line_end(&mut self) -> Option<usize> {
        loop {
            let step_to_break = memchr::memchr(b'\n', &self.buffer[self.scanned..]);
            self.scanned = step_to_break.map_or(self.buffer.len(), |step| self.scanned + step);
            let end = step_to_break.map(|_| self.scanned)?;
            let line = &self.buffer[self.line_start.min(end)..end];
            // A line without its beginning cannot be classified.
            let complete = !std::mem::take(&mut self.line_cut);
            if !(self.in_stream || complete && is_field(line)) {
                return Some(end);
            }
            if complete && self.in_stream && begins_another(line) && self.line_start > self.start {
                // The line break before this line ends the record, and is counted when the record is cut.
                self.line_now -= 1;
                return Some(self.line_start - 1);
            }
            self.in_stream = true;
            if complete && is_done(line) {
                return Some(end);
            }
            (self.scanned, self.line_start) = (end + 1, end + 1);
            self.line_now += 1;
        }
    }

    /// Returns whether the bytes at `start` cannot start a record.
    fn blocked(&self) -> bool {
        let Layout::Array { comma_due, closed } = self.layout else { return false };
        !self.overlong
            && self.start == self.scanned
            && self.start < self.buffer.len()
            && (comma_due || closed || self.buffer[self.start] == b',')
    }

    /// Skips whitespace, commas and the closing bracket between records.
    fn skip_between(&mut self) {
        while let Some(&byte) = self.buffer.get(self.scanned) {
            match (&mut self.layout, byte) {
                (_, b' ' | b'\t' | b'\r' | b'\n') => self.line_now += u64::from(byte == b'\n'),
                (Layout::Array { comma_due, closed: false }, b',') if *comma_due => *comma_due = false,
                (Layout::Array { closed, .. }, b']') if !*closed => *closed = true,
                _ => break,
            }
            self.scanned += 1;
        }
        self.start = self.scanned;
        self.line = self.line_now;
    }

    fn misplaced(&self) -> Option<Rejection> {
        let closed = matches!(self.layout, Layout::Array { closed: true, .. });
        let problem =
            if closed { "text after the end of the JSON array" } else { "a JSON array with a misplaced comma" };
        self.blocked().then(|| {
            reject(Reason::NotJson, "TG-READ-012", format!("not JSON: {problem}"))
                .why("The start of the next record is unknown")
                .fix("Write one array, or one record a line")
        })
    }

    /// Cuts the record that ends at `end`. Returns `None` for a blank line.
    fn cut(&mut self, end: usize) -> Option<Piece> {
        let (at, begin) = (self.at(), self.start);
        self.start = end;
        if self.layout == Layout::Lines {
            self.start = (end + 1).min(self.buffer.len());
            self.scanned = self.start;
            self.line_start = self.start;
            self.line_now += 1;
            self.line = self.line_now;
        } else if let Layout::Array { comma_due, .. } = &mut self.layout {
            *comma_due = true;
            self.count += 1;
        }
        self.nesting = Nesting::default();
        let in_stream = std::mem::take(&mut self.in_stream);
        let mut bytes = &self.buffer[begin..end];
        if self.layout == Layout::Lines {
            bytes = without_comma(bytes.strip_suffix(b"\r").unwrap_or(bytes));
        }
        if std::mem::take(&mut self.overlong) {
            return Some(Piece::Overlong { at, bytes: bytes.to_vec(), continued: true });
        }
        if bytes.len() > self.limit {
            return Some(Piece::Overlong { at, bytes: bytes.to_vec(), continued: false });
        }
        if bytes.trim_ascii().is_empty() {
            return None;
        }
        if in_stream {
            return Some(Piece::own(at, record(bytes)));
        }
        let start = self.before + begin as u64;
        let spot = self.origin.as_ref().map(|origin| FilePosition { origin: Arc::clone(origin), start });
        Some(Piece::Record { at, bytes: self.buffer.share(begin..begin + bytes.len()), spot })
    }

    /// Returns the place at which the current record starts.
    fn at(&self) -> RecordPlace {
        let in_array = matches!(self.layout, Layout::Array { .. });
        RecordPlace { line: self.line, record: in_array.then_some(self.count + 1) }
    }

    /// Returns the end of the bytes to drop now, if the current record is too long.
    fn overlong_end(&self) -> Option<usize> {
        if self.scanned - self.start <= self.limit && !(self.overlong && self.scanned > self.start) {
            return None;
        }
        // A line of an event stream is classified as one piece, together with the line break before it, unless it is
        // long.
        let line = &self.buffer[self.line_start.min(self.scanned)..];
        let begins = !self.overlong && self.line_start == self.start && is_field(line);
        if self.layout == Layout::Lines && (self.in_stream || begins) && !self.line_cut && line.len() < BLOCK {
            return self.line_start.checked_sub(1).filter(|&end| end > self.start);
        }
        Some(self.scanned)
    }

    /// Drops the bytes of a record that is too long, up to `end`.
    fn cut_overlong(&mut self, end: usize) -> Piece {
        let continued = std::mem::replace(&mut self.overlong, true);
        if end == self.scanned && self.layout == Layout::Lines {
            let begins = !continued && self.line_start == self.start && end > self.start;
            self.in_stream |= begins && is_field(&self.buffer[self.start..]);
            self.line_cut = true;
        }
        let bytes = self.buffer.take(self.start, end);
        self.before += end as u64;
        self.scanned -= end;
        self.line_start = self.line_start.saturating_sub(end);
        self.start = 0;
        Piece::Overlong { at: self.at(), bytes, continued }
    }

    /// Returns the rest of the stream as the last piece.
    fn last(&mut self) -> Option<Piece> {
        if let Some(error) = self.failure.take() {
            let window = error.to_string().contains("too much memory");
            let problem = reject(Reason::Stream, "TG-READ-013", format!("the stream broke: {error}"))
                .why("What follows this line is lost; the lines before it were read")
                .fix(if window {
                    "Its later zstd frames have a larger window: decompress it first, zstd -dc --long=31"
                } else {
                    "Copy the file again; if it is still being written, wait"
                });
            return Some(self.broken(problem));
        }
        let rest = self.buffer.len() - self.start;
        let unclosed = matches!(self.layout, Layout::Array { closed: false, .. });
        if unclosed && !self.overlong {
            let problem = reject(Reason::Stream, "TG-READ-014", "the JSON array is not closed")
                .why("The file is incomplete; the records before this one were read")
                .fix("Copy the file again, or write one record a line");
            let broken = self.broken(problem);
            self.layout = Layout::Lines;
            return Some(broken);
        }
        if rest == 0 || self.layout == Layout::Unknown {
            return None;
        }
        let first = self.layout == Layout::Lines && !self.overlong;
        self.in_stream |= first && is_field(&self.buffer[self.start..]);
        let piece = self.cut(self.buffer.len());
        self.start = self.buffer.len();
        piece
    }

    fn broken(&mut self, problem: Rejection) -> Piece {
        let bytes = self.buffer.take(self.start, self.buffer.len());
        (self.start, self.scanned, self.line_start) = (0, 0, 0);
        Piece::Broken { at: self.at(), bytes, problem }
    }
}

/// Prefixes of the lines of an event stream.
const FIELDS: [&[u8]; 5] = [b"data:", b"event:", b"id:", b"retry:", b":"];

/// Events that occur only at the beginning of a stream.
const FIRST: [&[u8]; 2] = [b"event: message_start", b"event: response.created"];

/// Returns whether a line is a field of an event.
pub(super) fn is_field(line: &[u8]) -> bool {
    FIELDS.iter().any(|field| line.starts_with(field))
}

/// Returns whether a line marks the end of the stream.
pub(super) fn is_done(line: &[u8]) -> bool {
    line.strip_prefix(b"data:").is_some_and(|data| data.trim_ascii() == b"[DONE]")
}

/// Returns whether a line does not belong to the event stream before it.
pub(super) fn begins_another(line: &[u8]) -> bool {
    line.starts_with(b"{") || FIRST.contains(&line.trim_ascii_end())
}

/// Wraps the text of an event stream in a record. Bytes that are not UTF-8 are returned unchanged, so that they are
/// rejected later.
pub(super) fn record(stream: &[u8]) -> Arc<[u8]> {
    let Ok(text) = std::str::from_utf8(stream) else { return stream.into() };
    format!("{{\"response\":{}}}", serde_json::Value::from(text)).into_bytes().into()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// Not determined yet.
    Unknown,
    /// One record per line.
    Lines,
    /// Elements of one array. `comma_due`: a comma must come next. `closed`: the array has ended.
    Array { comma_due: bool, closed: bool },
    /// Objects that span several lines, one after another.
    Objects,
}

/// State of a scan through one JSON value.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Nesting {
    pub depth: u32,
    in_string: bool,
    escaped: bool,
}

impl Layout {
    /// Returns the layout of records that start with `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        match bytes {
            [b'[', ..] => Self::Array { comma_due: false, closed: false },
            [b'{', b'\n' | b'\r', ..] => Self::Objects,
            _ => Self::Lines,
        }
    }
}

impl Nesting {
    /// Returns whether a value without brackets ends before this byte.
    pub fn ends_before(self, byte: u8) -> bool {
        self.depth == 0 && !self.in_string && matches!(byte, b',' | b']' | b' ' | b'\t' | b'\r' | b'\n')
    }

    /// Consumes one byte. Returns whether it closes a value in brackets.
    pub fn ends_with(&mut self, byte: u8) -> bool {
        if self.in_string {
            let escaped = std::mem::take(&mut self.escaped);
            match byte {
                b'"' if !escaped => self.in_string = false,
                b'\\' => self.escaped = !escaped,
                _ => {}
            }
            return false;
        }
        match byte {
            b'"' => self.in_string = true,
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                return self.depth == 0;
            }
            _ => {}
        }
        false
    }
}

/// Removes a comma after the object of a line. Such lines come from an array without its brackets.
pub(super) fn without_comma(line: &[u8]) -> &[u8] {
    match line.trim_ascii_end().strip_suffix(b",").map(<[u8]>::trim_ascii_end) {
        Some(record) if record.ends_with(b"}") => record,
        _ => line,
    }
}

/// Returns how many of the blanks make their line longer than `limit`, or `None`. `before` is the number of blanks
/// already on the line.
pub(super) fn passes(blanks: &[u8], before: usize, limit: usize) -> Option<usize> {
    if before.saturating_add(blanks.len()) <= limit {
        return None;
    }
    let mut count = before;
    blanks
        .iter()
        .position(|&byte| {
            count = if byte == b'\n' { 0 } else { count + 1 };
            count > limit
        })
        .map(|at| at + 1)
}

pub(super) fn count_lines(bytes: &[u8]) -> u64 {
    memchr::memchr_iter(b'\n', bytes).count() as u64
}
