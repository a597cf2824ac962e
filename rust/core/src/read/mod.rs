//! Streams of records: JSONL, a JSON array or pretty-printed objects; plain, gzip or zstd; a file or standard input.
//!
//! Memory is bounded by a chunk of records, which are parsed in parallel and given back in order, and by the longest record:
//! a longer one is never held whole. What a record means is decided in `format`.

mod cut;
mod events;
mod frames;
mod held;
mod plain;
mod quarantine;
mod report;
mod source;
mod split;
#[cfg(test)]
mod tests;
mod waiting;
mod write;

use crate::caught;
use crate::error::{Error, Kind, Location, Result};
use crate::format::{Decoded, Reason, Record, Rejection, decode, reject};
use crate::threads;
use crate::trace::Trace;
pub use cut::{Cut, Made};
pub use frames::{Frame, Frames};
pub use plain::plain;
use quarantine::Quarantine;
pub use report::Report;
use source::Source;
use split::{Piece, Splitter};
use std::collections::VecDeque;
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
pub use write::Writer;

/// What to do with a bad record.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum OnError {
    /// End with its error.
    #[default]
    Raise,
    /// Leave it out and count it.
    Skip,
    /// Leave it out, count it, and write it aside: its bytes to `PATH.quarantine.raw`, where and why to
    /// `PATH.quarantine.jsonl`.
    Quarantine(PathBuf),
}

/// How to read.
#[derive(Debug, Clone)]
pub struct Options {
    /// What to do with a bad record.
    pub on_error: OnError,
    /// Stop after so many traces.
    pub limit: Option<u64>,
    /// Longest record in bytes; a longer one is bad. Default 1 GiB.
    pub max_record_bytes: usize,
    /// Bytes of records parsed at once. Default 8 MiB.
    pub chunk_bytes: usize,
    /// The form of every record, by its name; `None` tells each by its structure.
    pub format: Option<&'static str>,
}

impl Default for Options {
    fn default() -> Self {
        Self { on_error: OnError::Raise, limit: None, max_record_bytes: 1 << 30, chunk_bytes: 8 << 20, format: None }
    }
}

/// Bytes of the first chunk: small, so that the first traces come soon.
const FIRST_CHUNK_BYTES: usize = 64 << 10;

/// Records parsed at once, at most.
const CHUNK_RECORDS: usize = 1 << 14;

/// Bytes of a record whose decoding takes some tenths of a second: no parser looks meanwhile whether it must stop.
const LONG: usize = 8 << 20;

/// One record after decoding, with what the policy for bad ones needs.
struct Outcome {
    line: u64,
    bytes: Bytes,
    decoded: Decoded<Record>,
    /// Further bytes of a record that was too long to hold.
    continued: bool,
}

/// The bytes of a record: those of its trace, or those of a bad one as they were cut.
enum Bytes {
    Shared(Arc<[u8]>),
    Cut(Vec<u8>),
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Shared(bytes) => bytes,
            Self::Cut(bytes) => bytes,
        }
    }
}

/// Decodes records that are in memory already; an error names `name` and the record's number, from `first`.
pub fn decode_all(
    records: Vec<Arc<[u8]>>,
    name: &str,
    first: u64,
    format: Option<&'static str>,
) -> Result<(Vec<Arc<Trace>>, Report)> {
    let file: Arc<str> = name.into();
    let pieces: Vec<_> = (first..).zip(records).map(|(line, bytes)| Piece::Record { line, bytes }).collect();
    let outcomes = decoded(pieces, &file, usize::MAX, format);
    let (mut traces, mut report) = (Vec::with_capacity(outcomes.len()), Report::default());
    for outcome in outcomes {
        let record = outcome.decoded.map_err(|rejection| rejection.error)?;
        report.count(&record);
        report.bytes += outcome.bytes.len() as u64;
        traces.push(Arc::new(record.trace));
    }
    Ok((traces, report))
}

/// Reads all traces of a file that is in memory, in any layout and compression; an error names `name` as the file.
///
/// ```
/// use tracegrad_core::read::{Options, read_all};
/// let (traces, report) = read_all(br#"[{"messages": [{"role": "user", "content": "2+2?"}]}]"#, "memory", Options::default())?;
/// assert_eq!((traces.len(), report.bad), (1, 0));
/// # Ok::<(), tracegrad_core::Error>(())
/// ```
pub fn read_all(bytes: &[u8], name: &str, options: Options) -> Result<(Vec<Arc<Trace>>, Report)> {
    let mut reader = Reader::from_reader(io::Cursor::new(bytes.to_vec()), name, options)?;
    let traces = reader.by_ref().map(|trace| trace.map(Arc::new)).collect::<Result<_>>()?;
    Ok((traces, reader.report))
}

/// Decodes pieces in their order, on all threads.
fn decoded(pieces: Vec<Piece>, file: &Arc<str>, limit: usize, format: Option<&'static str>) -> Vec<Outcome> {
    threads::map(pieces, || (), |(), piece| Outcome::of(piece, file, limit, format))
}

impl Outcome {
    fn of(piece: Piece, file: &Arc<str>, limit: usize, format: Option<&'static str>) -> Self {
        let place = |line| Location { file: Some(Arc::clone(file)), line: Some(line), ..Location::default() };
        let (line, bytes, continued, problem) = match piece {
            Piece::Record { line, bytes } => {
                let decoded = if bytes.len() < LONG {
                    decode_one(&bytes, &place(line), format)
                } else {
                    let (bytes, place) = (Arc::clone(&bytes), place(line));
                    threads::apart(move || decode_one(&bytes, &place, format))
                };
                return Self { line, bytes: Bytes::Shared(bytes), decoded, continued: false };
            }
            Piece::Overlong { line, bytes, continued } => (line, bytes, continued, too_long(limit)),
            Piece::Broken { line, bytes, problem } => (line, bytes, false, problem),
        };
        Self { line, bytes: Bytes::Cut(bytes), decoded: Err(problem.at(&place(line))), continued }
    }
}

/// Decodes a record; a fault of the code that does is a reason like others.
fn decode_one(bytes: &Arc<[u8]>, place: &Location, format: Option<&str>) -> Decoded<Record> {
    let work = || Ok(decode(bytes, place, format));
    let fault = |error: Error| Err(Rejection { reason: Reason::Fault, error: error.at(place) });
    caught(Kind::Fault, "reading a record", work).unwrap_or_else(fault)
}

fn too_long(limit: usize) -> Rejection {
    reject(Reason::TooLong, format!("a record of more than {limit} bytes"))
        .why("It would have to be held in memory several times over")
        .cure("Split it, or raise max_record_bytes")
}

/// An iterator over the traces of a stream.
///
/// ```
/// use tracegrad_core::read::{Options, Reader};
/// let line = br#"{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}], "reward": 1}"#;
/// let traces: Vec<_> = Reader::from_reader(&line[..], "memory", Options::default())?.collect::<Result<_, _>>()?;
/// assert_eq!(traces[0].reward, Some(1.0));
/// # Ok::<(), tracegrad_core::Error>(())
/// ```
pub struct Reader {
    file: Arc<str>,
    options: Options,
    /// Bytes of the longest record.
    limit: usize,
    /// Bytes taken from the file so far.
    taken: Arc<AtomicU64>,
    splitter: Splitter,
    waiting: VecDeque<Outcome>,
    /// Records that were cut while those before them were decoded.
    ahead: Option<Vec<Piece>>,
    /// Whether the source never waits, so that reading ahead holds nothing up.
    ready: bool,
    next_chunk: usize,
    quarantine: Option<Quarantine>,
    report: Report,
    /// Nothing more comes from the splitter.
    exhausted: bool,
    ended: bool,
}

impl Reader {
    /// Opens a file, or standard input for `-`.
    pub fn open(path: &Path, options: Options) -> Result<Self> {
        Self::open_as(path, None, options)
    }

    /// Opens a file that has another name in errors, such as the address that a pipe brings the bytes of.
    pub fn open_as(path: &Path, name: Option<&str>, options: Options) -> Result<Self> {
        let source = Source::open(path, options.max_record_bytes, name)?;
        Ok(Self::over(source, options))
    }

    /// Reads from any byte stream; `name` stands for the file in errors.
    pub fn from_reader(bytes: impl io::Read + Send + 'static, name: &str, options: Options) -> Result<Self> {
        Ok(Self::over(Source::new(Box::new(bytes), name, options.max_record_bytes)?, options))
    }

    fn over(source: Source, options: Options) -> Self {
        let quarantine = match &options.on_error {
            OnError::Quarantine(path) => Some(Quarantine::new(path)),
            OnError::Raise | OnError::Skip => None,
        };
        Self {
            file: source.name,
            ready: source.ready,
            ahead: None,
            limit: source.limit,
            taken: source.taken,
            splitter: Splitter::new(source.bytes, source.limit),
            next_chunk: FIRST_CHUNK_BYTES.min(options.chunk_bytes),
            options,
            waiting: VecDeque::new(),
            quarantine,
            report: Report::default(),
            exhausted: false,
            ended: false,
        }
    }

    /// Counts of what has been given back so far.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Bytes of the file that were taken so far, before decompression: more than what was given back.
    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Takes at most `count` traces. Fewer mean that the stream has ended.
    pub fn batch(&mut self, count: usize) -> Result<Vec<Arc<Trace>>> {
        self.by_ref().take(count).map(|trace| trace.map(Arc::new)).collect()
    }

    /// Reads and parses the next chunk; on several threads the one behind it is cut meanwhile.
    fn fill(&mut self) {
        let pieces = self.ahead.take().unwrap_or_else(|| self.cut());
        let bytes = pieces.iter().map(Piece::len).sum::<usize>();
        self.report.bytes += bytes as u64;
        let (file, limit, format) = (Arc::clone(&self.file), self.limit, self.options.format);
        let decode = || decoded(pieces, &file, limit, format);
        // Beside a long record not another one is held.
        let ahead = self.ready && !self.exhausted && bytes / 2 < self.options.chunk_bytes;
        let outcomes = if ahead && threads::count() > 1 {
            let (outcomes, next) = threads::join(decode, || self.cut());
            self.ahead = Some(next);
            outcomes
        } else {
            decode()
        };
        self.waiting.extend(outcomes);
    }

    /// Cuts the next chunk into records.
    fn cut(&mut self) -> Vec<Piece> {
        let (mut pieces, mut bytes) = (Vec::new(), 0);
        while bytes < self.next_chunk && pieces.len() < CHUNK_RECORDS && !self.exhausted {
            match self.splitter.next_piece() {
                Some(piece) => {
                    self.exhausted = matches!(piece, Piece::Broken { .. });
                    bytes += piece.len();
                    pieces.push(piece);
                }
                None => self.exhausted = true,
            }
        }
        // One thread gains nothing by larger chunks, and small ones stay in its cache.
        let factor = if threads::count() == 1 { 1 } else { 4 };
        self.next_chunk = (self.next_chunk * factor).min(self.options.chunk_bytes).max(1);
        pieces
    }

    /// Applies the policy to a bad record.
    fn settle(&mut self, bytes: &[u8], line: u64, continued: bool, rejection: Rejection) -> Result<()> {
        if continued {
            return self.quarantine.as_mut().map_or(Ok(()), |aside| aside.go_on(bytes));
        }
        self.report.count_bad(rejection.reason, &rejection.error);
        match &mut self.quarantine {
            Some(aside) => aside.put(bytes, line, &self.file, &rejection),
            None if self.options.on_error == OnError::Skip => Ok(()),
            None => Err(rejection.error),
        }
    }

    /// Closes the stream: an empty one is an error under every policy.
    fn finish(&mut self) -> Result<()> {
        self.ended = true;
        if let Some(aside) = &mut self.quarantine {
            aside.finish()?;
        }
        if self.report.records > 0 {
            return Ok(());
        }
        let found = if self.splitter.saw_bytes() { "there is no record in it" } else { "it is empty" };
        Err(Error::new(Kind::Io, found)
            .why("There are no traces to read")
            .cure("Check the path, and that whatever wrote it has finished")
            .at(&Location { file: Some(Arc::clone(&self.file)), ..Location::default() }))
    }

    fn limit_reached(&self) -> bool {
        self.options.limit.is_some_and(|limit| self.report.traces >= limit)
    }

    fn advance(&mut self) -> Result<Option<Trace>> {
        loop {
            if self.limit_reached() {
                self.ended = true;
                return self.quarantine.as_mut().map_or(Ok(()), Quarantine::finish).map(|()| None);
            }
            let Some(outcome) = self.waiting.pop_front() else {
                if self.exhausted && self.ahead.is_none() {
                    return self.finish().map(|()| None);
                }
                self.fill();
                continue;
            };
            match outcome.decoded {
                Ok(record) => {
                    self.report.count(&record);
                    return Ok(Some(record.trace));
                }
                Err(rejection) => self.settle(&outcome.bytes, outcome.line, outcome.continued, rejection)?,
            }
        }
    }
}

impl Iterator for Reader {
    type Item = Result<Trace>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = self.advance();
        self.ended |= next.is_err();
        next.transpose()
    }
}
