//! Reads a stream of records chunk by chunk, decodes them into traces and counts the bad ones.
//!
//! A bad record is handled by the reader's policy (`OnError`), always with the original bytes of the file. A caller may
//! replace the bytes of a record before it is decoded.

use super::buffer::Bytes;
use super::quarantine::Quarantine;
use super::source::{Source, in_file};
use super::split::{Piece, Splitter};
use crate::error::{Error, Kind, Location, RecordPlace, Result};
use crate::format::{Decoded, Form, Reason, Record, Rejection, decode, reject};
use crate::record_bytes::{FilePosition, Raw};
use crate::trace::Trace;
use crate::{catch_panic, pool};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Policy for bad records.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum OnError {
    /// Stop with the record's error.
    #[default]
    Raise,
    /// Skip the record and count it.
    Skip,
    /// Skip the record, count it, and save it. Its bytes go to `PATH.quarantine.raw`; its place and the reason go to
    /// `PATH.quarantine.jsonl`.
    Quarantine(PathBuf),
}

/// Options of a reader.
#[derive(Debug, Clone)]
pub struct Options {
    /// Policy for bad records.
    pub on_error: OnError,
    /// Stop after this many traces. `None` means no limit.
    pub limit: Option<u64>,
    /// Longest record in bytes; a longer one is bad. Default 1 GiB.
    pub max_record_bytes: usize,
    /// Bytes of records that are parsed in one chunk. Default 8 MiB.
    pub chunk_bytes: usize,
    /// Name of the form that every record has. `None` detects the form of each record from its structure.
    pub format: Option<&'static str>,
}

impl Default for Options {
    fn default() -> Self {
        Self { on_error: OnError::Raise, limit: None, max_record_bytes: 1 << 30, chunk_bytes: 8 << 20, format: None }
    }
}

/// Bytes of the first chunk. It is small, so that the first traces arrive early.
const FIRST_CHUNK_BYTES: usize = 64 << 10;

const CHUNK_RECORDS: usize = 1 << 14;

/// Reads all traces of a file in memory, in any layout and compression. Errors report `name` as the file.
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
    /// Bytes read from the file so far, before decompression.
    pub(super) bytes_read: Arc<AtomicU64>,
    pub(super) splitter: Splitter,
    pub(super) waiting: VecDeque<Outcome>,
    /// Next chunk of records, split while the current one is decoded.
    pub(super) ahead: Option<Vec<Piece>>,
    /// Places on disk of the records that the last call of `raw_records` returned.
    pub(super) positions: Vec<Option<FilePosition>>,
    /// Whether reads from the source never block, so that reading ahead delays nothing.
    pub(super) ready: bool,
    pub(super) next_chunk: usize,
    pub(super) quarantine: Option<Quarantine>,
    pub(super) report: Report,
    /// Whether `batch_until_unknown` stops at bad records that the caller may be able to convert.
    pub(super) stops_at_unknown: bool,
    /// The bad record at which `batch_until_unknown` stopped.
    pub(super) unknown_record: Option<(RecordPlace, Bytes, Rejection)>,
    /// Whether the splitter has no more records.
    pub(super) exhausted: bool,
    pub(super) ended: bool,
}

impl Reader {
    /// Opens a file. The path `-` means standard input.
    pub fn open(path: &Path, options: Options) -> Result<Self> {
        Self::open_as(path, None, options)
    }

    /// Opens a file and reports `name` instead of the path in errors. Use it for a pipe that carries the bytes of a
    /// URL.
    pub fn open_as(path: &Path, name: Option<&str>, options: Options) -> Result<Self> {
        let source = Source::open(path, options.max_record_bytes, name)?;
        Ok(Self::over(source, options))
    }

    /// Reads from any byte stream. Errors report `name` as the file.
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
            positions: Vec::new(),
            limit: source.limit,
            bytes_read: source.taken,
            splitter: Splitter::new(source.bytes, source.origin, source.limit),
            next_chunk: FIRST_CHUNK_BYTES.min(options.chunk_bytes),
            options,
            waiting: VecDeque::new(),
            quarantine,
            report: Report::default(),
            stops_at_unknown: false,
            unknown_record: None,
            exhausted: false,
            ended: false,
        }
    }

    /// Returns the counts of the records returned so far.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Returns the number of bytes read from the file, before decompression. Reading ahead makes it larger than the
    /// bytes of the records returned.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Reads at most `count` traces. Fewer than `count` means that the stream has ended.
    pub fn batch(&mut self, count: usize) -> Result<Vec<Arc<Trace>>> {
        self.by_ref().take(count).map(|trace| trace.map(Arc::new)).collect()
    }

    /// Decodes the next chunk. With several threads the chunk after it is split at the same time.
    fn fill(&mut self) {
        let pieces = self.ahead.take().unwrap_or_else(|| self.cut());
        let bytes = pieces.iter().map(Piece::len).sum::<usize>();
        self.report.bytes += bytes as u64;
        let (file, limit, format) = (Arc::clone(&self.file), self.limit, self.options.format);
        let decode = || decode_pieces(pieces, &file, limit, format);
        // A long record is not decoded while the next chunk is read: that would keep two of them in memory.
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
        // A single thread gains nothing from larger chunks, and small ones stay in its cache.
        let factor = if pool::count() == 1 { 1 } else { 4 };
        self.next_chunk = (self.next_chunk * factor).min(self.options.chunk_bytes).max(1);
        pieces
    }

    /// Applies the error policy to a bad record.
    pub(super) fn handle_bad_record(
        &mut self,
        bytes: &[u8],
        at: RecordPlace,
        continued: bool,
        rejection: Rejection,
    ) -> Result<()> {
        if continued {
            return self.quarantine.as_mut().map_or(Ok(()), |quarantine| quarantine.append(bytes));
        }
        self.report.count_bad(rejection.reason, &rejection.error);
        match &mut self.quarantine {
            Some(quarantine) => quarantine.put(bytes, at, &self.file, &rejection),
            None if self.options.on_error == OnError::Skip => Ok(()),
            None => Err(rejection.error),
        }
    }

    /// Closes the stream. An empty stream is an error under every policy.
    fn finish(&mut self) -> Result<()> {
        self.ended = true;
        if let Some(quarantine) = &mut self.quarantine {
            quarantine.finish()?;
        }
        if self.report.records > 0 {
            return Ok(());
        }
        let problem = if self.splitter.saw_bytes() { "there is no record in it" } else { "it is empty" };
        Err(Error::new(Kind::Io, "TG-READ-005", problem)
            .why("No traces can be read")
            .fix("Check the path, and that whatever wrote it has finished")
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
                Err(rejection)
                    if self.stops_at_unknown && rejection.reason.is_maybe_convertible() && !outcome.continued =>
                {
                    self.unknown_record = Some((outcome.at, outcome.bytes, rejection));
                    return Ok(None);
                }
                Err(rejection) => self.handle_bad_record(&outcome.bytes, outcome.at, outcome.continued, rejection)?,
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

/// A record of the file before decoding.
#[derive(Debug, Clone)]
pub struct RawRecord {
    /// Place of its first byte.
    pub at: RecordPlace,
    /// Bytes of the record.
    pub bytes: Arc<[u8]>,
}

/// Result of a caller's conversion of a record.
#[derive(Debug, Clone)]
pub enum Converted {
    /// The bytes to decode instead.
    Record(Arc<[u8]>),
    /// A record that could not be converted: the problem, why it matters, and the fix.
    Refused([String; 3]),
}

impl Reader {
    /// Reads at most `count` records without decoding them, of about `max_bytes` bytes together. An empty list means that
    /// the stream has ended.
    ///
    /// Call it before `batch`, because `batch` reads records ahead of those that it returns.
    pub fn raw_records(&mut self, count: usize, max_bytes: usize) -> Result<Vec<RawRecord>> {
        self.positions.clear();
        let (mut records, mut byte_count) = (Vec::new(), 0);
        while records.len() < count && byte_count < max_bytes && !self.exhausted && !self.limit_reached() {
            let Some(piece) = self.splitter.next_piece() else {
                self.exhausted = true;
                break;
            };
            byte_count += piece.len();
            self.report.bytes += piece.len() as u64;
            if let Piece::Record { at, bytes, spot } = piece {
                self.positions.push(spot);
                records.push(RawRecord { at, bytes: bytes.own() });
                continue;
            }
            self.exhausted = matches!(piece, Piece::Broken { .. });
            let outcome = Outcome::of(piece, &self.file, self.limit, None);
            if let Err(rejection) = outcome.decoded {
                self.handle_bad_record(&outcome.bytes, outcome.at, outcome.continued, rejection)?;
            }
        }
        Ok(records)
    }

    /// Reads at most `count` traces, and stops early at a bad record that the caller may be able to convert.
    ///
    /// The caller continues with `reject_unknown` or `decode`.
    pub fn batch_until_unknown(&mut self, count: usize) -> Result<(Vec<Arc<Trace>>, Option<RawRecord>)> {
        self.stops_at_unknown = true;
        let traces = self.batch(count)?;
        let refused = self.unknown_record.as_ref();
        Ok((traces, refused.map(|(at, bytes, _)| RawRecord { at: *at, bytes: bytes.clone().own() })))
    }

    /// Applies the error policy to the record at which `batch_until_unknown` stopped, if the caller cannot convert it either.
    pub fn reject_unknown(&mut self) -> Result<()> {
        let Some((at, bytes, rejection)) = self.unknown_record.take() else { return Ok(()) };
        let result = self.handle_bad_record(&bytes, at, false, rejection);
        self.ended |= result.is_err();
        result
    }

    /// Takes back the records of the first call of `raw_records`, so that they are read first. They must be complete and
    /// unchanged.
    pub fn unread(&mut self, records: Vec<RawRecord>) {
        self.report.bytes -= records.iter().map(|cut| cut.bytes.len() as u64).sum::<u64>();
        let spots = self.positions.drain(..).chain(std::iter::repeat(None));
        let pieces = records.into_iter().zip(spots);
        let pieces = pieces.map(|(RawRecord { at, bytes }, spot)| Piece::Record { at, bytes: Bytes::Own(bytes), spot });
        self.ahead = Some(pieces.collect());
    }

    /// Decodes converted records and applies the error policy to the bad ones.
    pub fn decode(&mut self, conversions: Vec<(RawRecord, Converted)>) -> Result<Vec<Arc<Trace>>> {
        self.unknown_record = None;
        let (mut pieces, mut origins) = (Vec::new(), Vec::new());
        for (cut, conversion) in conversions {
            match conversion {
                Converted::Record(bytes) => pieces.push(Piece::own(cut.at, bytes)),
                Converted::Refused([what, why, cure]) => {
                    let problem = reject(Reason::WrongType, "TG-READ-006", what).why(why).fix(cure);
                    pieces.push(Piece::Broken { at: cut.at, bytes: Vec::new(), problem });
                }
            }
            origins.push(cut.bytes);
        }
        let outcomes = decode_pieces(pieces, &self.file, self.limit, self.options.format);
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
                Err(rejection) => self.handle_bad_record(&origin, outcome.at, false, rejection)?,
            }
        }
        Ok(traces)
    }
}

/// Records of this many bytes take tenths of a second to decode. No parser checks for cancellation during that time.
const LONG: usize = 8 << 20;

/// One record after decoding, with the data that the policy for bad records needs.
pub(super) struct Outcome {
    pub at: RecordPlace,
    /// Bytes of a bad record; empty for a good one.
    pub bytes: Bytes,
    pub decoded: Decoded<Record>,
    /// Whether these are further bytes of a record that was too long to keep in memory.
    pub continued: bool,
}

/// Decodes records that are in memory already. Errors report `name` and the record's place, counted from `first`.
pub fn decode_all(
    records: Vec<Arc<[u8]>>,
    name: &str,
    first: RecordPlace,
    format: Option<&'static str>,
) -> Result<(Vec<Arc<Trace>>, Report)> {
    let file: Arc<str> = name.into();
    let places = std::iter::successors(Some(first), |at| Some(at.next()));
    let pieces = places.zip(records).map(|(at, bytes)| Piece::own(at, bytes)).collect();
    let outcomes = decode_pieces(pieces, &file, usize::MAX, format);
    let (mut traces, mut report) = (Vec::with_capacity(outcomes.len()), Report::default());
    for outcome in outcomes {
        let record = outcome.decoded.map_err(|rejection| rejection.error)?;
        report.count(&record);
        report.bytes += record.trace.raw.len() as u64;
        traces.push(Arc::new(record.trace));
    }
    Ok((traces, report))
}

/// Decodes pieces on all threads and returns the results in order.
pub(super) fn decode_pieces(
    pieces: Vec<Piece>,
    file: &Arc<str>,
    limit: usize,
    format: Option<&'static str>,
) -> Vec<Outcome> {
    pool::map(pieces, || (), |(), piece| Outcome::of(piece, file, limit, format))
}

impl Outcome {
    pub fn of(piece: Piece, file: &Arc<str>, limit: usize, format: Option<&'static str>) -> Self {
        let (at, bytes, continued, problem) = match piece {
            Piece::Record { at, bytes, spot } => {
                let raw = spot.map_or_else(|| Raw::Memory(bytes.own()), |spot| Raw::left(&bytes, spot));
                let decoded = if bytes.len() < LONG {
                    decode_one(&bytes, raw, &at.in_file(file), format)
                } else {
                    let (bytes, place) = (bytes.clone(), at.in_file(file));
                    pool::run_abandonable(move || decode_one(&bytes, raw, &place, format))
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

/// Decodes one record. A panic in the decoder is reported as a bad record.
fn decode_one(bytes: &[u8], raw: Raw, place: &Location, format: Option<&str>) -> Decoded<Record> {
    let work = || Ok(decode(bytes, raw, place, format));
    let fault = |error: Error| Err(Rejection { reason: Reason::Fault, error: error.at(place) });
    catch_panic(Kind::Fault, "reading a record", work).unwrap_or_else(fault)
}

fn too_long(limit: usize) -> Rejection {
    reject(Reason::TooLong, "TG-READ-007", format!("a record of more than {limit} bytes"))
        .why("It would be in memory several times")
        .fix("Split it, or raise max_record_bytes")
}

/// Counts of a reader.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Number of records, good and bad.
    pub records: u64,
    /// Number of good records.
    pub traces: u64,
    /// Number of good records by form.
    pub forms: BTreeMap<Form, u64>,
    /// Number of bad records.
    pub bad: u64,
    /// Number of bad records by reason.
    pub reasons: BTreeMap<Reason, u64>,
    /// The first few errors, in order.
    pub first_errors: Vec<Error>,
    /// Number of generations (sampling calls) in the good records.
    pub generations: u64,
    /// Number of sampled tokens in these generations.
    pub tokens: u64,
    /// Number of logprobs that were null, NaN or -inf.
    pub missing_logprobs: u64,
    /// Number of logprobs that were positive or -9999.0.
    pub invalid_logprobs: u64,
    /// Number of choices that were ignored: the record names none as chosen, so the first was used.
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
