//! The read buffer of a stream, from which records are cut.
//!
//! Its memory is allocated once and grows to one long record at most; it is not zeroed again. The bytes are not interpreted.

use std::io::{self, Read};
use std::ops::Deref;

/// Bytes asked of the stream at once.
pub(super) const BLOCK: usize = 1 << 18;

/// Room that is doubled while it is too small, and kept for the next record.
const COMMON: usize = 1 << 23;

/// Bytes of a stream from some place on.
#[derive(Debug)]
pub(super) struct Held {
    /// The bytes, and room behind them.
    bytes: Vec<u8>,
    filled: usize,
    /// As many bytes as are ever held, but for a few blocks.
    most: usize,
}

impl Deref for Held {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.filled]
    }
}

impl Held {
    /// Room for records of at most `most` bytes.
    pub fn new(most: usize) -> Self {
        Self { bytes: Vec::new(), filled: 0, most }
    }

    /// Bytes for which there is room.
    #[cfg(test)]
    pub fn room(&self) -> usize {
        self.bytes.capacity()
    }

    /// Reads at most a block behind what is held; how much came, 0 at the end of the stream.
    pub fn read(&mut self, stream: &mut dyn Read) -> io::Result<usize> {
        self.make_room();
        loop {
            match stream.read(&mut self.bytes[self.filled..self.filled + BLOCK]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
                Ok(count) => {
                    self.filled += count;
                    return Ok(count);
                }
            }
        }
    }

    /// Makes room for a block.
    ///
    /// Doubling would hold a long record twice while it moves, so room for the longest is reserved at once: pages that
    /// nothing was written to take no memory.
    fn make_room(&mut self) {
        let wanted = self.filled + BLOCK;
        if self.bytes.len() >= wanted {
            return;
        }
        if wanted <= COMMON {
            self.bytes.resize(wanted.max(self.bytes.len() * 2).min(COMMON), 0);
            return;
        }
        if wanted > self.bytes.capacity() {
            let most = self.most.saturating_add(2 * BLOCK).max(wanted);
            // Where so much cannot be had, room grows as a vector's does.
            let _ = self.bytes.try_reserve_exact(most - self.bytes.len());
        }
        self.bytes.resize(wanted, 0);
    }

    /// Lets go of the first `count` bytes, and of room that only a long record needed.
    pub fn forget(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        if self.bytes.capacity() > 2 * COMMON && self.filled - count <= COMMON {
            self.take(0, count);
            return;
        }
        self.bytes.copy_within(count..self.filled, 0);
        self.filled -= count;
    }

    /// Takes the bytes from `start` to `end` without a copy; those before are let go of, those behind stay.
    pub fn take(&mut self, start: usize, end: usize) -> Vec<u8> {
        let behind = self[end..].to_vec();
        self.filled = behind.len();
        let mut taken = std::mem::replace(&mut self.bytes, behind);
        taken.truncate(end);
        taken.drain(..start);
        taken
    }
}
