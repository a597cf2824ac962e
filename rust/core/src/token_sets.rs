//! Sets of token ids, one for each token, in few bytes: the ids from which a sampler drew the token.
//!
//! A set is the number of its ids, the smallest id, and the distance of each further id from the one before, less one;
//! all as LEB128 (seven bits a byte, low bits first). A token without a set is the number 0: one byte. The start of
//! every 64th set is stored too. Sets come from files, so every read is checked.

use crate::{Error, Kind, Result, cancel};
use std::hash::{BuildHasher, Hasher};

/// Number of sets from one stored start to the next.
pub const STRIDE: usize = 64;

/// Encoded sets.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct TokenSets {
    /// Start of set 0, 64, 128, ... in `data`, and the end of the last one.
    pub starts: Vec<i64>,
    /// All sets, concatenated.
    pub data: Vec<u8>,
}

/// Encodes the rows `values[offsets[t]..offsets[t + 1]]`. Ids of a row may be in any order; equal ids count once.
///
/// # Errors
/// Fails if offsets do not ascend from 0 to the number of values, or an id is negative.
pub fn encode(offsets: &[i64], values: &[i32]) -> Result<TokenSets> {
    let ascends = offsets.first() == Some(&0)
        && offsets.last() == i64::try_from(values.len()).ok().as_ref()
        && offsets.is_sorted();
    if !ascends {
        return Err(Error::new(
            Kind::Argument,
            "TG-ALIGN-507",
            "the offsets of sets do not ascend from 0 to their ids",
        )
        .why("Sets would be cut elsewhere")
        .fix("Pass the ends of the rows behind a 0"));
    }
    if let Some(id) = values.iter().find(|&&id| id < 0) {
        return Err(Error::new(Kind::Argument, "TG-ALIGN-508", format!("a set contains the id {id}"))
            .why("No vocabulary has it")
            .fix("Pass the ids from which the token was sampled"));
    }
    let mut sets = TokenSets { starts: vec![0], data: Vec::with_capacity(2 * values.len() + offsets.len()) };
    let mut sorted: Vec<u32> = Vec::new();
    for (at, row) in offsets.windows(2).enumerate() {
        cancel::check_every_16384(at);
        if at > 0 && at % STRIDE == 0 {
            sets.starts.push(sets.data.len() as i64);
        }
        sorted.clear();
        sorted.extend(values[row[0] as usize..row[1] as usize].iter().map(|&id| id as u32));
        sorted.sort_unstable();
        sorted.dedup();
        put(&mut sets.data, sorted.len() as u32);
        let mut least = 0;
        for &id in &sorted {
            put(&mut sets.data, id - least);
            least = id + 1;
        }
    }
    sets.starts.push(sets.data.len() as i64);
    Ok(sets)
}

fn put(data: &mut Vec<u8>, mut value: u32) {
    while value >= 0x80 {
        data.push(value as u8 | 0x80);
        value >>= 7;
    }
    data.push(value as u8);
}

/// Encoded sets of a number of tokens, from arrays that may be broken.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    starts: &'a [i64],
    data: &'a [u8],
    count: usize,
}

impl<'a> View<'a> {
    /// Creates a view of `count` sets. Only the number of starts is checked.
    ///
    /// # Errors
    /// Fails if there are not as many starts as the sets need.
    pub fn new(starts: &'a [i64], data: &'a [u8], count: usize) -> Result<Self> {
        let expected = count.div_ceil(STRIDE).max(1) + 1;
        if starts.len() == expected { Ok(Self { starts, data, count }) } else { Err(broken()) }
    }

    /// Reads every set, and checks that each start is where its set begins and that nothing follows the last one.
    ///
    /// # Errors
    /// Fails if the arrays are not what [`encode`] returns.
    pub fn check(self) -> Result<()> {
        let mut cursor = 0;
        for at in 0..self.count.max(1) {
            cancel::check_every_16384(at);
            if at % STRIDE == 0 && self.starts[at / STRIDE] != cursor as i64 {
                return Err(broken());
            }
            if at < self.count {
                self.each(&mut cursor, |_| {})?;
            }
        }
        let ends = [cursor, self.data.len()].map(|end| end as i64);
        if self.starts.last().is_some_and(|&last| ends == [last; 2]) { Ok(()) } else { Err(broken()) }
    }

    /// Returns the sets of some tokens: offsets and ids, each set ascending.
    ///
    /// # Errors
    /// Fails if a token does not exist, or its set is broken.
    pub fn decode(self, tokens: &[i64]) -> Result<(Vec<i64>, Vec<i32>)> {
        let (mut offsets, mut ids) = (Vec::with_capacity(tokens.len() + 1), Vec::new());
        offsets.push(0);
        self.visit(tokens, |cursor| {
            self.each(cursor, |id| ids.push(id))?;
            offsets.push(ids.len() as i64);
            Ok(())
        })?;
        Ok((offsets, ids))
    }

    /// Returns a number for each of some tokens: 0 without a set, and the same for equal sets.
    ///
    /// # Errors
    /// As for [`View::decode`].
    pub fn keys(self, tokens: &[i64]) -> Result<Vec<i64>> {
        let mut keys = Vec::with_capacity(tokens.len());
        self.visit(tokens, |cursor| {
            let start = *cursor;
            let count = self.each(cursor, |_| {})?;
            let mut hasher = foldhash::quality::FixedState::with_seed(0).build_hasher();
            hasher.write(self.data.get(start..*cursor).unwrap_or_default());
            keys.push(if count == 0 { 0 } else { (hasher.finish() | 1) as i64 });
            Ok(())
        })?;
        Ok(keys)
    }

    /// Calls `read` with the start of each token's set. After the set before, it goes on from there.
    fn visit(self, tokens: &[i64], mut read: impl FnMut(&mut usize) -> Result<()>) -> Result<()> {
        let (mut next, mut cursor) = (usize::MAX, 0);
        for (round, &token) in tokens.iter().enumerate() {
            cancel::check_every_16384(round);
            let token = usize::try_from(token).ok().filter(|&token| token < self.count).ok_or_else(|| {
                Error::new(Kind::Argument, "TG-ALIGN-509", format!("token {token} of {} sets", self.count))
                    .why("There is no such set")
                    .fix("Pass indices of the tokens of the same sequences")
            })?;
            if next > token || token - next >= STRIDE {
                next = token - token % STRIDE;
                cursor = usize::try_from(self.starts[token / STRIDE]).map_err(|_| broken())?;
            }
            while next < token {
                self.each(&mut cursor, |_| {})?;
                next += 1;
            }
            read(&mut cursor)?;
            next += 1;
        }
        Ok(())
    }

    /// Reads the set at `cursor`, and returns the number of its ids.
    fn each(self, cursor: &mut usize, mut read: impl FnMut(i32)) -> Result<u32> {
        let count = self.number(cursor)?;
        let mut least = 0_u32;
        for _ in 0..count {
            let id =
                self.number(cursor)?.checked_add(least).and_then(|id| i32::try_from(id).ok()).ok_or_else(broken)?;
            read(id);
            least = id as u32 + 1;
        }
        Ok(count)
    }

    fn number(self, cursor: &mut usize) -> Result<u32> {
        let mut value = 0_u32;
        for shift in (0..32).step_by(7) {
            let byte = *self.data.get(*cursor).ok_or_else(broken)?;
            *cursor += 1;
            let bits = u32::from(byte & 0x7F);
            value |= bits.checked_shl(shift).filter(|placed| placed >> shift == bits).ok_or_else(broken)?;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(broken())
    }
}

fn broken() -> Error {
    Error::new(Kind::Format, "TG-ALIGN-510", "the stored sets of token ids are not what tracegrad writes")
        .why("A token would be compared over other ids than it was sampled from")
        .fix("The files were changed; prepare the traces again")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn flat(rows: &[Vec<i32>]) -> (Vec<i64>, Vec<i32>) {
        let mut offsets = vec![0];
        let mut values = Vec::new();
        for row in rows {
            values.extend(row);
            offsets.push(values.len() as i64);
        }
        (offsets, values)
    }

    #[test]
    fn the_bytes_of_a_set_are_its_count_first_id_and_gaps() {
        let (offsets, values) = flat(&[vec![], vec![9, 5], vec![300, 299, 299, 0]]);
        let sets = encode(&offsets, &values).unwrap();
        // 299 = 0 + 1 + 298, and 298 = 0b10_0101010.
        assert_eq!(sets.data, [0, 2, 5, 3, 3, 0, 0b1010_1010, 0b10, 0]);
        assert_eq!(sets.starts, [0, 9]);
    }

    #[test]
    fn wrong_offsets_negative_ids_and_tokens_that_are_not_there_are_refused() {
        for (offsets, values) in [(vec![0, 2, 1], vec![5]), (vec![1], vec![5]), (vec![0], vec![5]), (vec![], vec![])] {
            assert_eq!(encode(&offsets, &values).unwrap_err().code, "TG-ALIGN-507");
        }
        assert_eq!(encode(&[0, 1], &[-1]).unwrap_err().code, "TG-ALIGN-508");
        let sets = encode(&[0, 1], &[7]).unwrap();
        let view = View::new(&sets.starts, &sets.data, 1).unwrap();
        for token in [-1, 1] {
            assert_eq!(view.decode(&[token]).unwrap_err().code, "TG-ALIGN-509");
        }
    }

    #[test]
    fn broken_bytes_are_refused() {
        // No count; a count without ids; a number beyond 32 bits; an id beyond 31 bits; a byte too many.
        for data in [&[][..], &[1], &[1, 0xFF, 0xFF, 0xFF, 0xFF, 0x7F], &[2, 0xFF, 0xFF, 0xFF, 0xFF, 7, 0], &[1, 5, 0]]
        {
            let starts = [0, data.len() as i64];
            assert_eq!(View::new(&starts, data, 1).unwrap().check().unwrap_err().code, "TG-ALIGN-510", "{data:?}");
        }
        assert!(View::new(&[0], &[], 0).is_err());
        for starts in [[1, 2], [-1, 2], [0, 9]] {
            let view = View::new(&starts, &[1, 5], 1).unwrap();
            assert!(view.check().is_err(), "{starts:?}");
        }
        assert!(View::new(&[-1, 2], &[1, 5], 1).unwrap().decode(&[0]).is_err());
    }

    proptest! {
        #[test]
        fn sets_come_back_in_any_order(
            rows in prop::collection::vec(prop::collection::vec(0..i32::MAX, 0..5), 1..200),
            picks in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
        ) {
            let (offsets, values) = flat(&rows);
            let sets = encode(&offsets, &values).unwrap();
            let view = View::new(&sets.starts, &sets.data, rows.len()).unwrap();
            view.check().unwrap();
            let tokens: Vec<i64> = picks.iter().map(|pick| pick.index(rows.len()) as i64).collect();
            let sorted = |token: &i64| {
                let mut row = rows[*token as usize].clone();
                row.sort_unstable();
                row.dedup();
                row
            };
            let expected: Vec<Vec<i32>> = tokens.iter().map(sorted).collect();
            prop_assert_eq!(view.decode(&tokens).unwrap(), flat(&expected));
            let keys = view.keys(&tokens).unwrap();
            for (a, key) in expected.iter().zip(&keys) {
                prop_assert_eq!(a.is_empty(), *key == 0);
                for (b, other) in expected.iter().zip(&keys) {
                    prop_assert_eq!(a == b, key == other);
                }
            }
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(data in prop::collection::vec(any::<u8>(), 0..40), start in -3_i64..50) {
            if let Ok(view) = View::new(&[start, data.len() as i64], &data, 3) {
                let _ = view.check();
                let _ = view.decode(&[2, 0, 1]);
                let _ = view.keys(&[0, 1, 2]);
            }
        }
    }
}
