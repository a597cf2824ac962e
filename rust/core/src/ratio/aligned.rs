//! Buffers aligned to a cache line, so that no SIMD load or store crosses two lines.

use std::ops::{Deref, DerefMut};

use super::real::Real;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Numbers, the first of them at the start of a cache line.
#[derive(Debug, Default)]
pub(super) struct Aligned<F> {
    space: Vec<F>,
    start: usize,
    len: usize,
}

impl<F: Real> Aligned<F> {
    /// Sets the length to `len`; the values are unspecified.
    pub fn resize(&mut self, len: usize) {
        if self.start + len > self.space.len() {
            self.space = vec![F::ZERO; len + LINE];
            self.start = self.space.as_ptr().align_offset(LINE).min(LINE);
        }
        self.len = len;
    }
}

impl<F> Deref for Aligned<F> {
    type Target = [F];
    #[inline(always)]
    fn deref(&self) -> &[F] {
        &self.space[self.start..self.start + self.len]
    }
}

impl<F> DerefMut for Aligned<F> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [F] {
        &mut self.space[self.start..self.start + self.len]
    }
}

impl<'a, F> IntoIterator for &'a Aligned<F> {
    type Item = &'a F;
    type IntoIter = std::slice::Iter<'a, F>;
    #[inline(always)]
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}
