//! Reads a stream chunk by chunk: gives its traces, or its records before they are decoded, and counts what was bad.
//!
//! What is bad is settled by the reader's policy, with the bytes of the file. What a caller changes in a record before it
//! is decoded is the caller's affair.

use super::buffer::Bytes;
use super::quarantine::Quarantine;
use super::source::{Source, in_file};
use super::split::{Piece, Splitter};
use crate::error::{At, Error, Kind, Location, Result};
use crate::format::{Decoded, Form, Reason, Record, Rejection, decode, reject};
use crate::record_bytes::{Raw, Spot};
use crate::trace::Trace;
use crate::{caught, pool};
use std::collections::{BTreeMap, VecDeque};
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
        let outcomes = if ahead && pool::count() > 1 {
            let (outcomes, next) = pool::join(decode, || self.cut());
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
        let factor = if pool::count() == 1 { 1 } else { 4 };
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

/// A record of the file, not yet decoded.
#[derive(Debug, Clone)]
pub struct Cut {
    /// Where it begins.
    pub at: At,
    /// Its bytes.
    pub bytes: Arc<[u8]>,
}

/// What a caller made of a record.
#[derive(Debug, Clone)]
pub enum Made {
    /// The bytes to decode in its place.
    Record(Arc<[u8]>),
    /// Nothing: what was found, why it matters, what to do.
    Refused([String; 3]),
}

impl Reader {
    /// Takes at most `count` records that are not decoded yet, of about `most` bytes together. None: the stream has ended.
    ///
    /// For use before `batch`, which cuts ahead of what it gives back.
    pub fn records(&mut self, count: usize, most: usize) -> Result<Vec<Cut>> {
        self.spots.clear();
        let (mut records, mut held) = (Vec::new(), 0);
        while records.len() < count && held < most && !self.exhausted && !self.limit_reached() {
            let Some(piece) = self.splitter.next_piece() else {
                self.exhausted = true;
                break;
            };
            held += piece.len();
            self.report.bytes += piece.len() as u64;
            if let Piece::Record { at, bytes, spot } = piece {
                self.spots.push(spot);
                records.push(Cut { at, bytes: bytes.own() });
                continue;
            }
            self.exhausted = matches!(piece, Piece::Broken { .. });
            let outcome = Outcome::of(piece, &self.file, self.limit, None);
            if let Err(rejection) = outcome.decoded {
                self.settle(&outcome.bytes, outcome.at, outcome.continued, rejection)?;
            }
        }
        Ok(records)
    }

    /// Takes at most `count` traces; it ends also before a bad record whose form the caller may know: `settle_refused` or `decode` goes on.
    pub fn batch_asking(&mut self, count: usize) -> Result<(Vec<Arc<Trace>>, Option<Cut>)> {
        self.asking = true;
        let traces = self.batch(count)?;
        let refused = self.refused.as_ref();
        Ok((traces, refused.map(|(at, bytes, _)| Cut { at: *at, bytes: bytes.clone().own() })))
    }

    /// Settles the record that `batch_asking` ended before, which its caller does not know either.
    pub fn settle_refused(&mut self) -> Result<()> {
        let Some((at, bytes, rejection)) = self.refused.take() else { return Ok(()) };
        let settled = self.settle(&bytes, at, false, rejection);
        self.ended |= settled.is_err();
        settled
    }

    /// Takes records back that `records` gave first, all of them and unchanged, to be read before all others.
    pub fn put_back(&mut self, records: Vec<Cut>) {
        self.report.bytes -= records.iter().map(|cut| cut.bytes.len() as u64).sum::<u64>();
        let spots = self.spots.drain(..).chain(std::iter::repeat(None));
        let pieces = records.into_iter().zip(spots);
        let pieces = pieces.map(|(Cut { at, bytes }, spot)| Piece::Record { at, bytes: Bytes::Own(bytes), spot });
        self.ahead = Some(pieces.collect());
    }

    /// Decodes records in place of those they were made of, and settles what is bad.
    pub fn decode(&mut self, made: Vec<(Cut, Made)>) -> Result<Vec<Arc<Trace>>> {
        self.refused = None;
        let (mut pieces, mut origins) = (Vec::new(), Vec::new());
        for (cut, made) in made {
            match made {
                Made::Record(bytes) => pieces.push(Piece::own(cut.at, bytes)),
                Made::Refused([what, why, cure]) => {
                    let problem = reject(Reason::WrongType, what).why(why).cure(cure);
                    pieces.push(Piece::Broken { at: cut.at, bytes: Vec::new(), problem });
                }
            }
            origins.push(cut.bytes);
        }
        let outcomes = decoded(pieces, &self.file, self.limit, self.options.format);
        let mut traces = Vec::with_capacity(outcomes.len());
        for (outcome, origin) in outcomes.into_iter().zip(origins) {
            if self.limit_reached() {
                break;
            }
            match outcome.decoded {
                Ok(record) => {
                    self.report.count(&record);
                    traces.push(Arc::new(record.trace));
                }
                Err(rejection) => self.settle(&origin, outcome.at, false, rejection)?,
            }
        }
        Ok(traces)
    }
}

/// Bytes of a record whose decoding takes some tenths of a second: no parser looks meanwhile whether it must stop.
const LONG: usize = 8 << 20;

/// One record after decoding, with what the policy for bad ones needs.
pub(super) struct Outcome {
    pub at: At,
    /// Those of a bad record.
    pub bytes: Bytes,
    pub decoded: Decoded<Record>,
    /// Further bytes of a record that was too long to hold.
    pub continued: bool,
}

/// Decodes records that are in memory already; an error names `name` and the record's place, from `first` on.
pub fn decode_all(
    records: Vec<Arc<[u8]>>,
    name: &str,
    first: At,
    format: Option<&'static str>,
) -> Result<(Vec<Arc<Trace>>, Report)> {
    let file: Arc<str> = name.into();
    let places = std::iter::successors(Some(first), |at| Some(at.next()));
    let pieces = places.zip(records).map(|(at, bytes)| Piece::own(at, bytes)).collect();
    let outcomes = decoded(pieces, &file, usize::MAX, format);
    let (mut traces, mut report) = (Vec::with_capacity(outcomes.len()), Report::default());
    for outcome in outcomes {
        let record = outcome.decoded.map_err(|rejection| rejection.error)?;
        report.count(&record);
        report.bytes += record.trace.raw.len() as u64;
        traces.push(Arc::new(record.trace));
    }
    Ok((traces, report))
}

/// Decodes pieces in their order, on all threads.
pub(super) fn decoded(pieces: Vec<Piece>, file: &Arc<str>, limit: usize, format: Option<&'static str>) -> Vec<Outcome> {
    pool::map(pieces, || (), |(), piece| Outcome::of(piece, file, limit, format))
}

impl Outcome {
    pub fn of(piece: Piece, file: &Arc<str>, limit: usize, format: Option<&'static str>) -> Self {
        let (at, bytes, continued, problem) = match piece {
            Piece::Record { at, bytes, spot } => {
                let raw = spot.map_or_else(|| Raw::Held(bytes.own()), |spot| Raw::left(&bytes, spot));
                let decoded = if bytes.len() < LONG {
                    decode_one(&bytes, raw, &at.in_file(file), format)
                } else {
                    let (bytes, place) = (bytes.clone(), at.in_file(file));
                    pool::apart(move || decode_one(&bytes, raw, &place, format))
                };
                let bytes = if decoded.is_ok() { Bytes::Cut(Vec::new()) } else { bytes };
                return Self { at, bytes, decoded, continued: false };
            }
            Piece::Overlong { at, bytes, continued } => (at, bytes, continued, too_long(limit)),
            Piece::Broken { at, bytes, problem } => (at, bytes, false, problem),
        };
        Self { at, bytes: Bytes::Cut(bytes), decoded: Err(problem.at(&at.in_file(file))), continued }
    }
}

/// Decodes a record; a fault of the code that does is a reason like others.
fn decode_one(bytes: &[u8], raw: Raw, place: &Location, format: Option<&str>) -> Decoded<Record> {
    let work = || Ok(decode(bytes, raw, place, format));
    let fault = |error: Error| Err(Rejection { reason: Reason::Fault, error: error.at(place) });
    caught(Kind::Fault, "reading a record", work).unwrap_or_else(fault)
}

fn too_long(limit: usize) -> Rejection {
    reject(Reason::TooLong, format!("a record of more than {limit} bytes"))
        .why("It would have to be held in memory several times over")
        .cure("Split it, or raise max_record_bytes")
}

/// What a reader has seen so far.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Records, good and bad.
    pub records: u64,
    /// Good ones.
    pub traces: u64,
    /// Good ones by form.
    pub forms: BTreeMap<Form, u64>,
    /// Bad ones.
    pub bad: u64,
    /// Bad ones by reason.
    pub reasons: BTreeMap<Reason, u64>,
    /// The first few errors, in order.
    pub first_errors: Vec<Error>,
    /// Sampling calls in the good ones.
    pub generations: u64,
    /// Sampled tokens that they list.
    pub tokens: u64,
    /// Logprobs that were null, NaN or -inf.
    pub missing_logprobs: u64,
    /// Logprobs that were positive or -9999.0.
    pub invalid_logprobs: u64,
    /// Choices that were not used because the record names none and the first was taken.
    pub unused_choices: u64,
    /// Bytes of records, after decompression.
    pub bytes: u64,
}

const FIRST_ERRORS: usize = 5;

impl Report {
    pub(super) fn count(&mut self, record: &Record) {
        self.records += 1;
        self.traces += 1;
        *self.forms.entry(record.form).or_default() += 1;
        self.unused_choices += u64::from(record.unused_choices);
        for generation in &record.trace.generations {
            self.generations += 1;
            self.tokens += generation.tokens.len() as u64;
            self.missing_logprobs += u64::from(generation.tokens.missing);
            self.invalid_logprobs += u64::from(generation.tokens.invalid);
        }
    }

    pub(super) fn count_bad(&mut self, reason: Reason, error: &Error) {
        self.records += 1;
        self.bad += 1;
        *self.reasons.entry(reason).or_default() += 1;
        if self.first_errors.len() < FIRST_ERRORS {
            self.first_errors.push(error.clone());
        }
    }
}
