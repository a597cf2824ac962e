//! Reads a file that grows by complete zstd frames, each with a group of records. A frame is returned when its last
//! byte is there.
//!
//! The size of a frame is limited by the size in its header, and that size by the caller.

use super::reader::decode_pieces;
use super::source::{in_file, unreadable};
use super::split::Piece;
use crate::cancel;
use crate::error::{Error, Kind, RecordPlace, Result};
use crate::trace::Trace;
use memchr::memchr_iter;
use std::fs::{File, metadata};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};
use zstd::zstd_safe::get_frame_content_size;

/// Size of the read buffer in bytes.
const BLOCK: usize = 1 << 18;
/// If fewer bytes are buffered, the buffer is refilled before the next frame. A frame that is buffered completely is
/// decompressed in one call.
const FEW: usize = BLOCK / 4;
/// Number of bytes of the largest frame header.
const HEADER: usize = 18;
/// Largest number of bytes that is reserved because of the size in a frame header.
const ROOM: usize = 8 << 20;
/// File name in errors for records that have no line in a file.
const NAME: &str = "<records>";

/// Reader of the frames of one file, from a byte offset on.
pub struct Frames {
    file: File,
    name: String,
    /// Limit for the decompressed bytes of one frame.
    max_bytes: usize,
    start: u64,
    /// Buffer of the file. The bytes of the next frame are those from `at` to `filled`.
    block: Vec<u8>,
    at: usize,
    filled: usize,
    /// Whether the last frame was not read to its end, so that `block` must be read again.
    must_reread: bool,
    decoder: Decoder<'static>,
}

/// Contents of one frame.
#[derive(Debug)]
pub struct Frame {
    /// Records that are valid traces. Others are skipped.
    pub traces: Vec<Arc<Trace>>,
    /// Compressed size of the frame in the file, in bytes.
    pub length: u64,
}

impl Frames {
    /// Opens a file to read the frames from byte `start` on, each of at most `max_bytes` decompressed bytes.
    ///
    /// # Errors
    /// `Kind::Io` if the file cannot be read or is not a regular file.
    pub fn open(path: &Path, start: u64, max_bytes: usize) -> Result<Self> {
        let name = path.to_string_lossy().into_owned();
        let fail = |error: &_| unreadable(&name, error);
        // Opening a pipe without a writer would block.
        if !metadata(path).map_err(|error| fail(&error))?.is_file() {
            return Err(Error::new(Kind::Io, "TG-READ-001", "it is not a file")
                .why("Groups are read from files that only grow")
                .fix("Take it out of the folder")
                .at(&in_file(&name)));
        }
        let file = File::open(path).map_err(|error| fail(&error))?;
        let mut decoder = Decoder::new().map_err(|error| fail(&error))?;
        let window = usize::BITS - max_bytes.saturating_sub(1).leading_zeros();
        decoder.set_parameter(DParameter::WindowLogMax(window.clamp(10, 31))).map_err(|error| fail(&error))?;
        Ok(Self { file, name, max_bytes, start, block: vec![0; BLOCK], at: 0, filled: 0, must_reread: true, decoder })
    }

    /// Returns the next frame, or `None` if it is not complete yet.
    ///
    /// # Errors
    /// `Kind::Io` if the bytes are not a valid frame.
    pub fn next_frame(&mut self) -> Result<Option<Frame>> {
        if self.must_reread {
            self.file.seek(SeekFrom::Start(self.start)).map_err(|error| unreadable(&self.name, &error))?;
            self.decoder.reinit().map_err(|error| unreadable(&self.name, &error))?;
            (self.at, self.filled) = (0, 0);
        }
        self.must_reread = true;
        let Some((text, length)) = self.text()? else { return Ok(None) };
        self.must_reread = false;
        self.start += length;
        Ok(Some(Frame { traces: traces(&text), length }))
    }

    /// Returns the decompressed bytes of the next frame and its compressed length.
    fn text(&mut self) -> Result<Option<(Vec<u8>, u64)>> {
        if self.filled - self.at < FEW {
            self.fill()?;
        }
        let head = &self.block[self.at..self.filled];
        let content_size = match get_frame_content_size(head) {
            Ok(Some(content_size)) if content_size <= self.max_bytes as u64 => content_size as usize,
            Ok(Some(content_size)) => return Err(self.changed(&format!("it claims {content_size} bytes"))),
            Ok(None) => return Err(self.changed("it does not say how long it is")),
            Err(_) if head.len() < HEADER => return Ok(None),
            Err(_) => return Err(self.changed("it is no zstd")),
        };
        let (mut text, mut length) = (Vec::with_capacity(content_size.min(ROOM)), 0);
        loop {
            cancel::check();
            if text.len() == text.capacity() {
                text.reserve_exact((content_size - text.len()).clamp(1, text.len().max(BLOCK)));
            }
            let (text_end, at) = (text.len(), self.at);
            let mut input = InBuffer::around(&self.block[..self.filled]);
            input.set_pos(at);
            let mut output = OutBuffer::around_pos(&mut text, text_end);
            let remaining = self.decoder.run(&mut input, &mut output);
            self.at = input.pos();
            length += (self.at - at) as u64;
            let remaining = remaining.map_err(|error| self.changed(&error.to_string()))?;
            if text.len() > content_size {
                return Err(self.changed(&format!("it holds more than the {content_size} bytes that it claims")));
            }
            if remaining == 0 {
                return Ok(Some((text, length)));
            }
            if self.at == self.filled && text.len() < text.capacity() && self.fill()? == 0 {
                return Ok(None);
            }
        }
    }

    /// Moves the buffered bytes to the front and fills the rest of the buffer from the file. Returns the number of
    /// bytes read.
    fn fill(&mut self) -> Result<usize> {
        self.block.copy_within(self.at..self.filled, 0);
        (self.at, self.filled) = (0, self.filled - self.at);
        let before = self.filled;
        while self.filled < BLOCK {
            match self.file.read(&mut self.block[self.filled..]) {
                Ok(0) => break,
                Ok(count) => self.filled += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => cancel::check_now(),
                Err(error) => return Err(unreadable(&self.name, &error)),
            }
        }
        Ok(self.filled - before)
    }

    fn changed(&self, reason: &str) -> Error {
        let what = format!("the frame at byte {} is not what was written ({reason})", self.start);
        Error::new(Kind::Io, "TG-READ-002", what)
            .why("What follows it cannot be found")
            .fix("Copy the file again")
            .at(&in_file(&self.name))
    }
}

/// Decodes the records of a frame and skips those that are not valid traces.
fn traces(text: &[u8]) -> Vec<Arc<Trace>> {
    let mut start = 0;
    let lines = memchr_iter(b'\n', text).chain([text.len()]).map(|end| {
        let line = &text[start..end];
        start = end + 1;
        line
    });
    let records = (1..).map(RecordPlace::from).zip(lines.filter(|line| !line.is_empty()));
    let pieces = records.map(|(at, bytes)| Piece::own(at, bytes.into())).collect();
    let outcomes = decode_pieces(pieces, &Arc::from(NAME), usize::MAX, None);
    outcomes.into_iter().filter_map(|outcome| outcome.decoded.ok()).map(|record| Arc::new(record.trace)).collect()
}
