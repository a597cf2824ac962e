//! The read buffer of a stream. Records are cut from it without a copy.
//!
//! A block is used again when no record shares it. It grows to the size of one long record at most, and it is not
//! zeroed again.

use std::io::{self, Read};
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Largest number of bytes that one read requests from the stream.
pub(super) const BLOCK: usize = 1 << 18;

/// Up to this size in bytes the buffer doubles, and its capacity is kept for the next record.
const COMMON: usize = 1 << 23;

/// Bytes of a record.
#[derive(Clone)]
pub(super) enum Bytes {
    /// Bytes shared through their own reference count.
    Own(Arc<[u8]>),
    /// A range of a shared block.
    Part(Arc<Vec<u8>>, Range<usize>),
    /// Bytes without another owner.
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
    /// Returns the bytes in an allocation of their own, without the block that they are a part of.
    pub fn own(&self) -> Arc<[u8]> {
        if let Self::Own(bytes) = self { Arc::clone(bytes) } else { (&**self).into() }
    }
}

/// Buffered bytes of a stream.
#[derive(Debug)]
pub(super) struct ReadBuffer {
    /// The bytes, followed by unused capacity.
    block: Arc<Vec<u8>>,
    filled: usize,
    /// The previous block, which records may still share.
    spare: Arc<Vec<u8>>,
    /// Largest number of bytes to buffer, apart from a few blocks.
    most: usize,
}

impl Deref for ReadBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.block[..self.filled]
    }
}

impl ReadBuffer {
    pub fn new(most: usize) -> Self {
        Self { block: Arc::default(), filled: 0, spare: Arc::default(), most }
    }

    #[cfg(test)]
    pub fn room(&self) -> usize {
        self.block.capacity()
    }

    /// Returns a range of the bytes. They stay unchanged as long as somebody refers to them.
    pub fn share(&self, range: Range<usize>) -> Bytes {
        Bytes::Part(Arc::clone(&self.block), range)
    }

    /// Reads at most one block from the stream and appends it. Returns the number of bytes read, 0 at the end of the
    /// stream.
    pub fn read(&mut self, stream: &mut dyn Read) -> io::Result<usize> {
        self.make_room();
        // No record shares a block that was not passed to `drop_front`, so `make_mut` copies nothing.
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

    /// Grows the buffer by a block if less than half a block is free.
    ///
    /// Doubling would keep a long record in memory twice while it is copied. So the capacity for the longest record is
    /// reserved at once: pages that were never written use no memory.
    fn make_room(&mut self) {
        let required = self.filled + BLOCK;
        if self.block.len() >= self.filled + BLOCK / 2 {
            return;
        }
        let block = Arc::make_mut(&mut self.block);
        if required <= COMMON {
            block.resize(required.max(block.len() * 2).min(COMMON), 0);
            return;
        }
        if required > block.capacity() {
            let capacity = self.most.saturating_add(2 * BLOCK).max(required);
            // If the reservation fails, the capacity grows as a vector's does.
            let _ = block.try_reserve_exact(capacity - block.len());
        }
        block.resize(required, 0);
    }

    /// Drops the first `count` bytes, and the capacity that only a long record needed.
    pub fn drop_front(&mut self, count: usize) {
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

    /// Removes the bytes up to `end` and returns those from `start` on. It copies nothing unless a record shares the
    /// block.
    pub fn take(&mut self, start: usize, end: usize) -> Vec<u8> {
        let behind = self[end..].to_vec();
        self.filled = behind.len();
        match Arc::try_unwrap(std::mem::replace(&mut self.block, Arc::new(behind))) {
            Ok(mut bytes) => {
                bytes.truncate(end);
                bytes.drain(..start);
                bytes
            }
            Err(block) => block[start..end].to_vec(),
        }
    }
}
