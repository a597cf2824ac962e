//! Decoded records: traces, and rejections with their bytes.

use super::held::Bytes;
use super::report::Report;
use super::split::Piece;
use crate::caught;
use crate::error::{At, Error, Kind, Location, Result};
use crate::format::{Decoded, Reason, Record, Rejection, decode, reject};
use crate::raw::Raw;
use crate::threads;
use crate::trace::Trace;
use std::sync::Arc;

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
    threads::map(pieces, || (), |(), piece| Outcome::of(piece, file, limit, format))
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
                    threads::apart(move || decode_one(&bytes, raw, &place, format))
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
