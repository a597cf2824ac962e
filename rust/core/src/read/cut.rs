//! Records given out as they were cut, so that a caller may change them before they are decoded.
//!
//! What is bad is settled by the reader's policy, with the bytes of the file. What is changed is the caller's affair.

use super::held::Bytes;
use super::outcome::{Outcome, decoded};
use super::reader::Reader;
use super::split::Piece;
use crate::error::{At, Result};
use crate::format::{Reason, reject};
use crate::trace::Trace;
use std::sync::Arc;

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
