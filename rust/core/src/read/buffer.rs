//! The read buffer of a stream, from which records are cut without a copy.
//!
//! A block is used again once no record shares it; it grows to one long record at most and is not zeroed again. The bytes
//! are not interpreted.

use std::io::{self, Read};
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Bytes asked of the stream at once.
pub(super) const BLOCK: usize = 1 << 18;

/// Room that is doubled while it is too small, and kept for the next record.
const COMMON: usize = 1 << 23;

/// The bytes of a record as it was cut.
#[derive(Clone)]
pub(super) enum Bytes {
    /// Shared with whoever made them.
    Own(Arc<[u8]>),
    /// A part of a block.
    Part(Arc<Vec<u8>>, Range<usize>),
    /// Nobody else's.
    Cut(Vec<u8>),
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Own(bytes) => bytes,
            Self::Part(block, range) => &block[range.clone()],
            Self::Cut(bytes) => bytes,
        }
    }
}

impl Bytes {
    /// Without the block that they are a part of.
    pub fn own(&self) -> Arc<[u8]> {
        if let Self::Own(bytes) = self { Arc::clone(bytes) } else { (&**self).into() }
    }
}

/// Bytes of a stream from some place on.
#[derive(Debug)]
pub(super) struct Held {
    /// The bytes, and room behind them.
    block: Arc<Vec<u8>>,
    filled: usize,
    /// The block before, which records may still share.
    spare: Arc<Vec<u8>>,
    /// As many bytes as are ever held, but for a few blocks.
    most: usize,
}

impl Deref for Held {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.block[..self.filled]
    }
}

impl Held {
    pub fn new(most: usize) -> Self {
        Self { block: Arc::default(), filled: 0, spare: Arc::default(), most }
    }

    #[cfg(test)]
    pub fn room(&self) -> usize {
        self.block.capacity()
    }

    /// Some of the bytes, which stay as they are while anybody has them.
    pub fn share(&self, range: Range<usize>) -> Bytes {
        Bytes::Part(Arc::clone(&self.block), range)
    }

    /// Reads at most a block behind what is held; how much came, 0 at the end of the stream.
    pub fn read(&mut self, stream: &mut dyn Read) -> io::Result<usize> {
        self.make_room();
        // Records share no block that was not forgotten, so that this copies nothing.
        let block = Arc::make_mut(&mut self.block);
        let end = block.len().min(self.filled + BLOCK);
        loop {
            match stream.read(&mut block[self.filled..end]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
                Ok(count) => {
                    self.filled += count;
                    return Ok(count);
                }
            }
        }
    }

    /// Makes room for a block, where there is none for half of one.
    ///
    /// Doubling would hold a long record twice while it moves, so room for the longest is reserved at once: pages that
    /// nothing was written to take no memory.
    fn make_room(&mut self) {
        let wanted = self.filled + BLOCK;
        if self.block.len() >= self.filled + BLOCK / 2 {
            return;
        }
        let block = Arc::make_mut(&mut self.block);
        if wanted <= COMMON {
            block.resize(wanted.max(block.len() * 2).min(COMMON), 0);
            return;
        }
        if wanted > block.capacity() {
            let most = self.most.saturating_add(2 * BLOCK).max(wanted);
            // Where so much cannot be had, room grows as a vector's does.
            let _ = block.try_reserve_exact(most - block.len());
        }
        block.resize(wanted, 0);
    }

    /// Lets go of the first `count` bytes, and of room that only a long record needed.
    pub fn forget(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        let rest = count..self.filled;
        self.filled -= count;
        if self.block.capacity() > 2 * COMMON && self.filled <= COMMON {
            self.block = Arc::new(self.block[rest].to_vec());
        } else if let Some(block) = Arc::get_mut(&mut self.block) {
            block.copy_within(rest, 0);
        } else {
            if Arc::get_mut(&mut self.spare).is_none() {
                self.spare = Arc::default();
            }
            let spare = Arc::make_mut(&mut self.spare);
            if spare.len() < self.block.len() {
                *spare = vec![0; self.block.len()];
            }
            spare[..self.filled].copy_from_slice(&self.block[rest]);
            std::mem::swap(&mut self.block, &mut self.spare);
        }
    }

    /// Takes the bytes from `start` to `end`, without a copy where no record shares their block; those before are let go
    /// of, those behind stay.
    pub fn take(&mut self, start: usize, end: usize) -> Vec<u8> {
        let behind = self[end..].to_vec();
        self.filled = behind.len();
        match Arc::try_unwrap(std::mem::replace(&mut self.block, Arc::new(behind))) {
            Ok(mut taken) => {
                taken.truncate(end);
                taken.drain(..start);
                taken
            }
            Err(block) => block[start..end].to_vec(),
        }
    }
}
