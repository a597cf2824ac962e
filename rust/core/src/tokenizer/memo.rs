//! Cache of encoded texts: prompts of a group and the turns of a trace repeat one another.
//!
//! The key is the whole text; the size is bounded in bytes, and shards keep threads from waiting for one another. Called by
//! `encoder`.

use crate::generations::Generations;
use crate::threads::soon;
use foldhash::fast::RandomState;
use std::hash::BuildHasher;
use std::sync::Mutex;

/// Parts with a lock each.
const SHARDS: usize = 64;
/// Bytes of one generation of one part; two generations are kept.
const GENERATION_BYTES: usize = 1 << 19;
/// Longest text that is remembered.
const LONGEST: usize = 64 << 10;
/// What an entry takes beside its text and ids.
const ENTRY_BYTES: usize = 64;

/// Texts with their ids; 64 MiB at most.
#[derive(Debug)]
pub(super) struct Memo<S = RandomState> {
    state: S,
    shards: Box<[Mutex<Generations<Entry>>]>,
}

#[derive(Debug)]
struct Entry {
    text: Box<[u8]>,
    ids: Box<[u32]>,
}

impl<S: BuildHasher + Default> Memo<S> {
    pub fn new() -> Self {
        let shard = |_| Mutex::new(Generations::new(GENERATION_BYTES));
        Self { state: S::default(), shards: (0..SHARDS).map(shard).collect() }
    }

    /// Appends the ids of `text` to `ids`; those that are not known are made by `encode`, which appends them too.
    pub fn encode<E>(
        &self,
        text: &str,
        ids: &mut Vec<u32>,
        encode: impl FnOnce(&mut Vec<u32>) -> Result<(), E>,
    ) -> Result<(), E> {
        if text.len() > LONGEST {
            return encode(ids);
        }
        let hash = self.state.hash_one(text.as_bytes());
        let shard = &self.shards[(hash >> 32) as usize % SHARDS];
        let fits = |entry: &Entry| *entry.text == *text.as_bytes();
        let known = soon(shard).and_then(|mut shard| shard.read(hash, fits, |e| ids.extend_from_slice(&e.ids)));
        if known.is_some() {
            return Ok(());
        }
        let from = ids.len();
        encode(ids)?;
        let entry = Entry { text: text.as_bytes().into(), ids: ids[from..].into() };
        let bytes = ENTRY_BYTES + entry.text.len() + 4 * entry.ids.len();
        if let Some(mut shard) = soon(shard) {
            shard.put(hash, bytes, entry);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;
    use std::hash::{BuildHasherDefault, Hasher};

    /// Gives every text the same hash.
    #[derive(Default)]
    struct Same;

    impl Hasher for Same {
        fn write(&mut self, _: &[u8]) {}

        fn finish(&self) -> u64 {
            7
        }
    }

    fn lengths<S: BuildHasher + Default>(memo: &Memo<S>, text: &str, made: &mut u32) -> Vec<u32> {
        let mut ids = vec![9];
        let result: Result<(), Infallible> = memo.encode(text, &mut ids, |ids| {
            *made += 1;
            ids.push(text.len() as u32);
            Ok(())
        });
        result.unwrap();
        ids
    }

    #[test]
    fn a_text_is_encoded_once() {
        let (memo, mut made) = (Memo::<RandomState>::new(), 0);
        for _ in 0..3 {
            assert_eq!(lengths(&memo, "abc", &mut made), [9, 3]);
            assert_eq!(lengths(&memo, "abcd", &mut made), [9, 4]);
        }
        assert_eq!(made, 2);
    }

    #[test]
    fn texts_of_one_hash_have_their_own_ids() {
        let (memo, mut made) = (Memo::<BuildHasherDefault<Same>>::new(), 0);
        for _ in 0..2 {
            for text in ["", "a", "ab", "abc"] {
                assert_eq!(lengths(&memo, text, &mut made), [9, text.len() as u32]);
            }
        }
        // Equal lengths, and one the beginning of the other.
        let mut ids = Vec::new();
        let other: Result<(), Infallible> = memo.encode("xyz", &mut ids, |ids| {
            ids.push(77);
            Ok(())
        });
        other.unwrap();
        assert_eq!((ids, made), (vec![77], 4));
    }

    #[test]
    fn what_fails_or_panics_is_not_remembered_and_holds_no_lock() {
        let memo = Memo::<BuildHasherDefault<Same>>::new();
        let failed = memo.encode("a", &mut Vec::new(), |ids| {
            ids.push(1);
            Err("no")
        });
        assert_eq!(failed, Err("no"));
        let caught =
            crate::caught(crate::Kind::Tokenizer, "a test", || memo.encode("a", &mut Vec::new(), |_| panic!("inside")));
        assert!(caught.is_err());
        assert_eq!(lengths(&memo, "a", &mut 0), [9, 1]);
    }

    #[test]
    fn a_text_that_is_too_long_is_not_held() {
        let (memo, mut made) = (Memo::<RandomState>::new(), 0);
        for (bytes, times) in [(LONGEST, 1), (LONGEST + 1, 3)] {
            (0..2).for_each(|_| drop(lengths(&memo, &"x".repeat(bytes), &mut made)));
            assert_eq!(made, times);
        }
    }

    #[test]
    fn what_is_remembered_has_bounds_and_what_is_used_stays() {
        let (memo, mut made) = (Memo::<RandomState>::new(), 0);
        let kept = "kept".repeat(10);
        let text = |n: usize| format!("{n:020000}");
        for n in 0..6000 {
            lengths(&memo, &text(n), &mut made);
            lengths(&memo, &kept, &mut made);
        }
        assert_eq!(made, 6001);
        let held: usize = memo.shards.iter().map(|shard| shard.lock().unwrap()).map(|shard| shard.len()).sum();
        assert!(held * 20_000 <= 2 * SHARDS * GENERATION_BYTES);
        assert!(held > 1500);
    }
}
