//! The traces of a stream, chunk by chunk, and what becomes of bad records.

use super::held::Bytes;
use super::outcome::{Outcome, decoded};
use super::quarantine::Quarantine;
use super::report::Report;
use super::source::{Source, in_file};
use super::split::{Piece, Splitter};
use crate::error::{At, Error, Kind, Result};
use crate::format::Rejection;
use crate::raw::Spot;
use crate::threads;
use crate::trace::Trace;
use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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

const CHUNK_RECORDS: usize = 1 << 14;

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

/// An iterator over the traces of a stream.
///
/// ```
/// use tracegrad_core::read::{Options, Reader};
/// let line = br#"{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}], "reward": 1}"#;
/// let traces: Vec<_> = Reader::from_reader(&line[..], "memory", Options::default())?.collect::<Result<_, _>>()?;
/// assert_eq!(traces[0].reward, Some(1.0));
/// # Ok::<(), tracegrad_core::Error>(())
/// ```
#[allow(clippy::struct_excessive_bools, reason = "each says something that the others do not")]
pub struct Reader {
    pub(super) file: Arc<str>,
    pub(super) options: Options,
    pub(super) limit: usize,
    /// Bytes taken from the file so far.
    pub(super) taken: Arc<AtomicU64>,
    pub(super) splitter: Splitter,
    pub(super) waiting: VecDeque<Outcome>,
    /// Records that were cut while those before them were decoded.
    pub(super) ahead: Option<Vec<Piece>>,
    /// Where the records stand on disk that `records` gave last.
    pub(super) spots: Vec<Option<Spot>>,
    /// Whether the source never waits, so that reading ahead holds nothing up.
    pub(super) ready: bool,
    pub(super) next_chunk: usize,
    pub(super) quarantine: Option<Quarantine>,
    pub(super) report: Report,
    /// Bad records whose form the caller may know are given to it before they are settled.
    pub(super) asking: bool,
    /// The one that was given last.
    pub(super) refused: Option<(At, Bytes, Rejection)>,
    /// Nothing more comes from the splitter.
    pub(super) exhausted: bool,
    pub(super) ended: bool,
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
            spots: Vec::new(),
            limit: source.limit,
            taken: source.taken,
            splitter: Splitter::new(source.bytes, source.origin, source.limit),
            next_chunk: FIRST_CHUNK_BYTES.min(options.chunk_bytes),
            options,
            waiting: VecDeque::new(),
            quarantine,
            report: Report::default(),
            asking: false,
            refused: None,
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
    pub(super) fn settle(&mut self, bytes: &[u8], at: At, continued: bool, rejection: Rejection) -> Result<()> {
        if continued {
            return self.quarantine.as_mut().map_or(Ok(()), |aside| aside.go_on(bytes));
        }
        self.report.count_bad(rejection.reason, &rejection.error);
        match &mut self.quarantine {
            Some(aside) => aside.put(bytes, at, &self.file, &rejection),
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
            .at(&in_file(&self.file)))
    }

    pub(super) fn limit_reached(&self) -> bool {
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
                Err(rejection) if self.asking && rejection.reason.may_be_known() && !outcome.continued => {
                    self.refused = Some((outcome.at, outcome.bytes, rejection));
                    return Ok(None);
                }
                Err(rejection) => self.settle(&outcome.bytes, outcome.at, outcome.continued, rejection)?,
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
