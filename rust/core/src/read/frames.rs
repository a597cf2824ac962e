//! A file that grows by whole groups of records, each a zstd frame: it is there to its last byte, or not there yet.
//!
//! What a frame holds is bounded by what it says of itself, and that by the caller.

use super::reader::decoded;
use super::source::{in_file, unreadable};
use super::split::Piece;
use crate::cancel;
use crate::error::{At, Error, Kind, Result};
use crate::trace::Trace;
use memchr::memchr_iter;
use std::fs::{File, metadata};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};
use zstd::zstd_safe::get_frame_content_size;

/// Bytes of the file that are held.
const BLOCK: usize = 1 << 18;
/// With fewer of them the next frame is not begun: one that is held whole is decompressed in one go.
const FEW: usize = BLOCK / 4;
/// Bytes after which a frame has said what it is.
const HEADER: usize = 18;
/// Room that is made for a frame by its own word alone.
const ROOM: usize = 8 << 20;
/// What records are called that have no line in a file.
const NAME: &str = "<records>";

/// The frames of one file, from some place on.
pub struct Frames {
    file: File,
    name: String,
    /// Bytes that a frame may hold.
    most: usize,
    start: u64,
    /// Bytes of the file, those of the next frame from `at` to `filled`.
    block: Vec<u8>,
    at: usize,
    filled: usize,
    /// Whether `block` was used by a frame that was not read to its end.
    torn: bool,
    decoder: Decoder<'static>,
}

/// What one frame holds.
#[derive(Debug)]
pub struct Frame {
    /// Its records; those that are no traces are left out.
    pub traces: Vec<Arc<Trace>>,
    /// Bytes that it takes in its file.
    pub length: u64,
}

impl Frames {
    /// The frames from byte `start` on, each of at most `most` bytes of records.
    ///
    /// # Errors
    /// `Kind::Io` where the file cannot be read, or is none.
    pub fn open(path: &Path, start: u64, most: usize) -> Result<Self> {
        let name = path.to_string_lossy().into_owned();
        let fail = |error: &_| unreadable(&name, error);
        // A pipe without a writer would be waited for.
        if !metadata(path).map_err(|error| fail(&error))?.is_file() {
            return Err(Error::new(Kind::Io, "it is no file")
                .why("Groups are read from files that only grow")
                .cure("Take it out of the folder")
                .at(&in_file(&name)));
        }
        let file = File::open(path).map_err(|error| fail(&error))?;
        let mut decoder = Decoder::new().map_err(|error| fail(&error))?;
        let window = usize::BITS - most.saturating_sub(1).leading_zeros();
        decoder.set_parameter(DParameter::WindowLogMax(window.clamp(10, 31))).map_err(|error| fail(&error))?;
        Ok(Self { file, name, most, start, block: vec![0; BLOCK], at: 0, filled: 0, torn: true, decoder })
    }

    /// The next frame; `None` where it is not whole yet.
    ///
    /// # Errors
    /// `Kind::Io` where it is not what was written.
    pub fn next_frame(&mut self) -> Result<Option<Frame>> {
        if self.torn {
            self.file.seek(SeekFrom::Start(self.start)).map_err(|error| unreadable(&self.name, &error))?;
            self.decoder.reinit().map_err(|error| unreadable(&self.name, &error))?;
            (self.at, self.filled) = (0, 0);
        }
        self.torn = true;
        let Some((text, length)) = self.text()? else { return Ok(None) };
        self.torn = false;
        self.start += length;
        Ok(Some(Frame { traces: traces(&text), length }))
    }

    /// What the next frame holds, and its length.
    fn text(&mut self) -> Result<Option<(Vec<u8>, u64)>> {
        if self.filled - self.at < FEW {
            self.fill()?;
        }
        let head = &self.block[self.at..self.filled];
        let claimed = match get_frame_content_size(head) {
            Ok(Some(claimed)) if claimed <= self.most as u64 => claimed as usize,
            Ok(Some(claimed)) => return Err(self.changed(&format!("it claims {claimed} bytes"))),
            Ok(None) => return Err(self.changed("it does not say how long it is")),
            Err(_) if head.len() < HEADER => return Ok(None),
            Err(_) => return Err(self.changed("it is no zstd")),
        };
        let (mut text, mut length) = (Vec::with_capacity(claimed.min(ROOM)), 0);
        loop {
            cancel::check();
            if text.len() == text.capacity() {
                text.reserve_exact((claimed - text.len()).clamp(1, text.len().max(BLOCK)));
            }
            let (behind, at) = (text.len(), self.at);
            let mut input = InBuffer::around(&self.block[..self.filled]);
            input.set_pos(at);
            let mut output = OutBuffer::around_pos(&mut text, behind);
            let left = self.decoder.run(&mut input, &mut output);
            self.at = input.pos();
            length += (self.at - at) as u64;
            let left = left.map_err(|error| self.changed(&error.to_string()))?;
            if text.len() > claimed {
                return Err(self.changed(&format!("it holds more than the {claimed} bytes that it claims")));
            }
            if left == 0 {
                return Ok(Some((text, length)));
            }
            if self.at == self.filled && text.len() < text.capacity() && self.fill()? == 0 {
                return Ok(None);
            }
        }
    }

    /// Moves what is held to the front, and reads as much behind it as there is and has room; how much came.
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

    fn changed(&self, why: &str) -> Error {
        let what = format!("the frame at byte {} is not what was written ({why})", self.start);
        Error::new(Kind::Io, what)
            .why("What follows it cannot be found")
            .cure("Copy the file again")
            .at(&in_file(&self.name))
    }
}

/// The records that are traces. One that is none (half a character, say) stays on the disk.
fn traces(text: &[u8]) -> Vec<Arc<Trace>> {
    let mut start = 0;
    let lines = memchr_iter(b'\n', text).chain([text.len()]).map(|end| {
        let line = &text[start..end];
        start = end + 1;
        line
    });
    let records = (1..).map(At::from).zip(lines.filter(|line| !line.is_empty()));
    let pieces = records.map(|(at, bytes)| Piece::own(at, bytes.into())).collect();
    let outcomes = decoded(pieces, &Arc::from(NAME), usize::MAX, None);
    outcomes.into_iter().filter_map(|outcome| outcome.decoded.ok()).map(|record| Arc::new(record.trace)).collect()
}
