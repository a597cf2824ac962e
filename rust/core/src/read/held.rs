//! The bytes of a stream that are held while a record is cut out of them.
//!
//! Room is made once and not cleared again. What the bytes say is not looked at here.

use std::io::{self, Read};
use std::ops::Deref;

/// Bytes asked of the stream at once.
const BLOCK: usize = 1 << 18;

/// Bytes of a stream from some place on.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// The bytes, and room behind them.
    bytes: Vec<u8>,
    filled: usize,
}

impl Deref for Held {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.filled]
    }
}

impl Held {
    /// Reads at most a block behind what is held; how much came, 0 at the end of the stream.
    pub fn read(&mut self, stream: &mut dyn Read) -> io::Result<usize> {
        if self.bytes.len() < self.filled + BLOCK {
            self.bytes.resize((self.filled + BLOCK).max(self.bytes.len() * 2), 0);
        }
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

    /// Lets go of the first `count` bytes.
    pub fn forget(&mut self, count: usize) {
        self.bytes.copy_within(count..self.filled, 0);
        self.filled -= count;
    }

    /// Takes what is held from `start` on.
    pub fn take_from(&mut self, start: usize) -> Vec<u8> {
        let taken = self[start..].to_vec();
        self.filled = start;
        taken
    }
}
