//! Caches of a tokenizer: encoded texts in memory, and facts about the tokenizer on disk.
//!
//! Prompts of a group and the turns of a trace share text. The key of an encoded text is the complete text. The cache
//! size is bounded in bytes. Shards reduce lock contention between threads.
//!
//! The next load of the same files reads the facts from disk and builds nothing. The name of a cache file is the hash
//! of everything that determines its content: tokenizer.json, the files next to it, and the code that read them. The
//! file starts with a hash of that name and of its content. A file that is missing, truncated, changed or made for
//! other input is created again. A file that cannot be written is skipped.

use super::config::TokenizerConfig;
use super::transformers::ClassMismatch;
use super::vocab_bytes::Pieces;
use crate::cache::TwoTableCache;
use crate::files;
use crate::pool::try_lock_briefly;
use foldhash::fast::RandomState;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs;
use std::hash::BuildHasher;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::SystemTime;
use tokenizers::AddedToken;

/// Number of shards, each with its own lock.
const SHARDS: usize = 64;
/// Bytes of one generation of one shard. Each shard has two generations.
const GENERATION_BYTES: usize = 1 << 19;
/// Length in bytes of the longest text that is cached.
const LONGEST: usize = 64 << 10;
/// Bytes of an entry in addition to its text and ids.
const ENTRY_BYTES: usize = 64;

/// Texts with their ids; 64 MiB at most.
#[derive(Debug)]
pub(super) struct Memo<S = RandomState> {
    state: S,
    shards: Box<[Mutex<TwoTableCache<Entry>>]>,
}

#[derive(Debug)]
struct Entry {
    text: Box<[u8]>,
    ids: Box<[u32]>,
}

impl<S: BuildHasher + Default> Memo<S> {
    pub fn new() -> Self {
        let shard = |_| Mutex::new(TwoTableCache::new(GENERATION_BYTES));
        Self { state: S::default(), shards: (0..SHARDS).map(shard).collect() }
    }

    /// Appends the ids of `text` to `ids`. If they are not cached, `encode` appends them.
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
        let has_text = |entry: &Entry| *entry.text == *text.as_bytes();
        let cached =
            try_lock_briefly(shard).and_then(|mut shard| shard.read(hash, has_text, |e| ids.extend_from_slice(&e.ids)));
        if cached.is_some() {
            return Ok(());
        }
        let from = ids.len();
        encode(ids)?;
        let entry = Entry { text: text.as_bytes().into(), ids: ids[from..].into() };
        let bytes = ENTRY_BYTES + entry.text.len() + 4 * entry.ids.len();
        if let Some(mut shard) = try_lock_briefly(shard) {
            shard.put(hash, bytes, entry);
        }
        Ok(())
    }
}

/// Hash of the sources of this folder and the versions of its libraries; `build.rs` computes it.
const CODE: &str = env!("TOKENIZER_CODE");
/// Number of files that stay in the folder: the most recently written ones.
const FILES: usize = 32;
/// Bytes of a hash.
const HASH: usize = blake3::OUT_LEN;

/// Facts about a tokenizer that only the encoders can determine, and the choice of the encoder.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Facts {
    /// The document without its entries and merges.
    pub document: Value,
    /// Added tokens by their ids, in order.
    pub listed: Vec<(u32, AddedToken)>,
    pub prefix: Vec<u32>,
    pub eos_ids: Vec<u32>,
    pub stop_id: Option<u32>,
    /// True if the fast encoder agreed with the reference.
    pub fast: bool,
    pub reason: String,
    pub probes: usize,
    /// The text for which transformers 5 would produce other ids.
    pub rebuilt: Option<ClassMismatch>,
    /// True if texts may be split at added tokens.
    pub cuts: bool,
    /// True if pieces of a text have the same ids separately as in their context.
    pub apart: bool,
}

/// The location of the facts about one tokenizer.
#[derive(Debug)]
pub(super) struct Place {
    path: PathBuf,
    key: blake3::Hash,
}

impl Place {
    /// Returns the location for these bytes, or `None` if the configuration cannot be serialized.
    pub fn of(folder: &Path, json: &[u8], config: &TokenizerConfig) -> Option<Self> {
        let settings =
            TokenizerConfig { name: String::new(), chat_template: None, tool_template: None, ..config.clone() };
        let settings = serde_json::to_vec(&settings).ok()?;
        let mut hasher = blake3::Hasher::new();
        for part in [CODE.as_bytes(), json, &settings] {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        let key = hasher.finalize();
        Some(Self { path: folder.join(format!("{}.tokenizer", key.to_hex())), key })
    }

    /// Computes the hash at the head of the file.
    fn hash(&self, rest: &[u8]) -> blake3::Hash {
        blake3::keyed_hash(self.key.as_bytes(), rest)
    }

    /// Reads the facts stored here.
    pub fn read(&self) -> Option<(Facts, Pieces)> {
        let file = fs::read(&self.path).ok()?;
        let (hash, content) = file.split_first_chunk::<HASH>()?;
        if self.hash(content) != *hash {
            return None;
        }
        let mut content = Parts(content);
        let mut facts: Facts = serde_json::from_slice(content.next()?).ok()?;
        facts.reason.push_str(", as an earlier load found");
        let bytes = content.next()?.to_vec();
        let pieces = Pieces::from_parts(bytes, &[content.numbers()?, content.numbers()?, content.numbers()?])?;
        Some((facts, pieces))
    }

    /// Stores the facts here, if possible.
    pub fn write(&self, facts: &Facts, pieces: &Pieces) {
        let Ok(facts) = serde_json::to_vec(facts) else { return };
        let (bytes, numbers) = pieces.parts();
        let [ranges, ids, shared] = numbers.map(|part| part.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>());
        let mut file = vec![0; HASH];
        for part in [&facts, bytes, &ranges, &ids, &shared] {
            file.extend_from_slice(&(part.len() as u64).to_le_bytes());
            file.extend_from_slice(part);
        }
        let hash = self.hash(&file[HASH..]);
        file[..HASH].copy_from_slice(hash.as_bytes());
        let Some(folder) = self.path.parent() else { return };
        // Another process may write the same file. Each uses its own name until the file is complete.
        let unfinished = self.path.with_extension(format!("{}.tmp", std::process::id()));
        let result = fs::create_dir_all(folder).and_then(|()| files::create(&unfinished)?.write_all(&file));
        if result.and_then(|()| fs::rename(&unfinished, &self.path)).is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        forget_oldest(folder);
    }
}

/// Removes all files of the folder except the most recently written ones.
fn forget_oldest(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let is_ours = |path: &PathBuf| path.extension().is_some_and(|end| end == "tokenizer" || end == "tmp");
    let modified_at =
        |path: &PathBuf| fs::metadata(path).and_then(|file| file.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).filter(is_ours).collect();
    files.sort_by_cached_key(modified_at);
    for path in files.iter().rev().skip(FILES) {
        let _ = fs::remove_file(path);
    }
}

/// Parts of a file, each preceded by its length in bytes.
struct Parts<'a>(&'a [u8]);

impl<'a> Parts<'a> {
    fn next(&mut self) -> Option<&'a [u8]> {
        let (length, remaining) = self.0.split_first_chunk()?;
        let (part, remaining) = remaining.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        self.0 = remaining;
        Some(part)
    }

    fn numbers(&mut self) -> Option<Vec<u32>> {
        let (numbers, remainder) = self.next()?.as_chunks::<4>();
        remainder.is_empty().then(|| numbers.iter().map(|number| u32::from_le_bytes(*number)).collect())
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
        // Texts of equal length, and texts that start with each other.
        let mut ids = Vec::new();
        let other: Result<(), Infallible> = memo.encode("xyz", &mut ids, |ids| {
            ids.push(77);
            Ok(())
        });
        other.unwrap();
        assert_eq!((ids, made), (vec![77], 4));
    }

    #[test]
    fn failures_and_panics_are_not_cached_and_leave_no_lock() {
        let memo = Memo::<BuildHasherDefault<Same>>::new();
        let failed = memo.encode("a", &mut Vec::new(), |ids| {
            ids.push(1);
            Err("no")
        });
        assert_eq!(failed, Err("no"));
        let caught = crate::catch_panic(crate::Kind::Tokenizer, "a test", || {
            memo.encode("a", &mut Vec::new(), |_| panic!("inside"))
        });
        assert!(caught.is_err());
        assert_eq!(lengths(&memo, "a", &mut 0), [9, 1]);
    }

    #[test]
    fn a_text_that_is_too_long_is_not_cached() {
        let (memo, mut made) = (Memo::<RandomState>::new(), 0);
        for (bytes, times) in [(LONGEST, 1), (LONGEST + 1, 3)] {
            (0..2).for_each(|_| drop(lengths(&memo, &"x".repeat(bytes), &mut made)));
            assert_eq!(made, times);
        }
    }

    #[test]
    fn the_cache_is_bounded_and_keeps_used_texts() {
        let (memo, mut made) = (Memo::<RandomState>::new(), 0);
        let used_text = "kept".repeat(10);
        let text = |n: usize| format!("{n:020000}");
        for n in 0..6000 {
            lengths(&memo, &text(n), &mut made);
            lengths(&memo, &used_text, &mut made);
        }
        assert_eq!(made, 6001);
        let entries: usize = memo.shards.iter().map(|shard| shard.lock().unwrap()).map(|shard| shard.len()).sum();
        assert!(entries * 20_000 <= 2 * SHARDS * GENERATION_BYTES);
        assert!(entries > 1500);
    }
}
