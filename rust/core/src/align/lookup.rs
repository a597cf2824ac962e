//! Direct-mapped cache from the bytes of a token to its id, in front of the tokenizer's own table.
//!
//! Holds strings of at most sixteen bytes; two with the same hash evict each other. Each worker of `align` has one.

use crate::tokenizer::Tokenizer;

/// Slots, a power of two.
const PLACES: usize = 1 << 13;
/// Bytes of the longest string that is cached.
const LONGEST: usize = 16;

#[derive(Debug, Default)]
pub struct Lookup {
    /// Empty until the first lookup.
    places: Vec<Place>,
}

/// A cached string as two words with its length, and its id. An empty slot has length 0.
#[derive(Debug, Clone, Copy, Default)]
struct Place {
    low: u64,
    high: u64,
    length: u32,
    id: u32,
}

impl Lookup {
    /// As [`Tokenizer::id_of_bytes`], for bytes that stand at `start..end` of `data`.
    #[inline]
    pub fn id(&mut self, data: &[u8], (start, end): (usize, usize), tokenizer: &Tokenizer) -> Option<u32> {
        let length = end - start;
        if length == 0 || length > LONGEST {
            return tokenizer.id_of_bytes(&data[start..end]);
        }
        if self.places.is_empty() {
            self.places = vec![Place::default(); PLACES];
        }
        let (low, high) = words(data, start, length);
        let place = &mut self.places[place_of(low, high, length)];
        if (place.low, place.high, place.length) == (low, high, length as u32) {
            return Some(place.id);
        }
        let id = tokenizer.id_of_bytes(&data[start..end])?;
        *place = Place { low, high, length: length as u32, id };
        Some(id)
    }
}

/// The bytes as two little-endian words, padded with zeros.
#[inline]
fn words(data: &[u8], start: usize, length: usize) -> (u64, u64) {
    let bytes = if let Some(bytes) = data[start..].first_chunk::<LONGEST>() {
        *bytes
    } else {
        let mut bytes = [0; LONGEST];
        bytes[..length].copy_from_slice(&data[start..start + length]);
        bytes
    };
    let all = u128::from_le_bytes(bytes) & (u128::MAX >> (8 * (LONGEST - length)));
    (all as u64, (all >> 64) as u64)
}

#[inline]
fn place_of(low: u64, high: u64, length: usize) -> usize {
    let mixed = (low ^ high.rotate_left(23) ^ length as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed >> (64 - PLACES.trailing_zeros())) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::example;

    #[test]
    fn bytes_have_the_id_that_the_tokenizer_gives() {
        let (tokenizer, mut lookup) = (example(), Lookup::default());
        for _ in 0..2 {
            for bytes in (0..tokenizer.vocab_size()).filter_map(|id| tokenizer.token_bytes(id)) {
                // Alone, before others, and the beginning of it: zeros may stand in the bytes and behind them.
                let data = [bytes, b"\0and what stands behind"].concat();
                for end in [bytes.len(), bytes.len() + 1, bytes.len() / 2] {
                    let expected = tokenizer.id_of_bytes(&data[..end]);
                    assert_eq!(lookup.id(&data, (0, end), &tokenizer), expected);
                    assert_eq!(lookup.id(&data[..end], (0, end), &tokenizer), expected);
                }
            }
        }
    }
}
