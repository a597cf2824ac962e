//! What was found out about a tokenizer, kept on disk, so that the next load of the same files reads it and builds nothing.
//!
//! A file is named by the hash of all that decides what stands in it: tokenizer.json, what stood beside it, and the code
//! that read them. It begins with a hash of that name and of the rest; one that is missing, cut, changed or another's is made
//! anew, and one that cannot be written is left out. Called by `load` and `encoder`.

use super::config::TokenizerConfig;
use super::pieces::Pieces;
use super::rebuilt::Rebuilt;
use crate::files;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use tokenizers::AddedToken;

/// The sources of this room and the versions of its libraries; `build.rs` makes it.
const CODE: &str = env!("TOKENIZER_CODE");
/// Files in the folder: the ones that were written last.
const FILES: usize = 32;
/// Bytes of a hash.
const HASH: usize = blake3::OUT_LEN;

/// What only the encoders know of a tokenizer, and which of them is to be used.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Facts {
    /// The document without its entries and merges.
    pub document: Value,
    /// Added tokens by their ids, in order.
    pub listed: Vec<(u32, AddedToken)>,
    pub prefix: Vec<u32>,
    pub eos_ids: Vec<u32>,
    pub stop_id: Option<u32>,
    /// Whether the fast encoder agreed with the reference.
    pub fast: bool,
    pub reason: String,
    pub probes: usize,
    /// Of what text transformers 5 would make other ids.
    pub rebuilt: Option<Rebuilt>,
    /// Whether texts may be cut at added tokens.
    pub cuts: bool,
    /// Whether pieces of a text have the ids alone that they have in their place.
    pub apart: bool,
}

/// Where the facts about one tokenizer are kept.
#[derive(Debug)]
pub(super) struct Place {
    path: PathBuf,
    key: blake3::Hash,
}

impl Place {
    /// The place for these bytes, `None` where the configuration cannot be written down.
    pub fn of(folder: &Path, json: &[u8], config: &TokenizerConfig) -> Option<Self> {
        let beside =
            TokenizerConfig { name: String::new(), chat_template: None, tool_template: None, ..config.clone() };
        let beside = serde_json::to_vec(&beside).ok()?;
        let mut hasher = blake3::Hasher::new();
        for part in [CODE.as_bytes(), json, &beside] {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        let key = hasher.finalize();
        Some(Self { path: folder.join(format!("{}.tokenizer", key.to_hex())), key })
    }

    /// The hash at the head of the file.
    fn hash(&self, rest: &[u8]) -> blake3::Hash {
        blake3::keyed_hash(self.key.as_bytes(), rest)
    }

    /// What is kept here.
    pub fn read(&self) -> Option<(Facts, Pieces)> {
        let kept = fs::read(&self.path).ok()?;
        let (hash, rest) = kept.split_first_chunk::<HASH>()?;
        if self.hash(rest) != *hash {
            return None;
        }
        let mut rest = Parts(rest);
        let mut facts: Facts = serde_json::from_slice(rest.next()?).ok()?;
        facts.reason.push_str(", as an earlier load found");
        let bytes = rest.next()?.to_vec();
        let pieces = Pieces::from_parts(bytes, &[rest.numbers()?, rest.numbers()?, rest.numbers()?])?;
        Some((facts, pieces))
    }

    /// Keeps this here, if that can be done.
    pub fn write(&self, facts: &Facts, pieces: &Pieces) {
        let Ok(facts) = serde_json::to_vec(facts) else { return };
        let (bytes, numbers) = pieces.parts();
        let [ranges, ids, shared] = numbers.map(|part| part.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>());
        let mut kept = vec![0; HASH];
        for part in [&facts, bytes, &ranges, &ids, &shared] {
            kept.extend_from_slice(&(part.len() as u64).to_le_bytes());
            kept.extend_from_slice(part);
        }
        let hash = self.hash(&kept[HASH..]);
        kept[..HASH].copy_from_slice(hash.as_bytes());
        let Some(folder) = self.path.parent() else { return };
        // Another process may write the same: each has a name of its own until the file is whole.
        let unfinished = self.path.with_extension(format!("{}.tmp", std::process::id()));
        let written = fs::create_dir_all(folder).and_then(|()| files::create(&unfinished)?.write_all(&kept));
        if written.and_then(|()| fs::rename(&unfinished, &self.path)).is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        forget_oldest(folder);
    }
}

/// Removes all files of the folder but those that were written last.
fn forget_oldest(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let is_ours = |path: &PathBuf| path.extension().is_some_and(|end| end == "tokenizer" || end == "tmp");
    let written =
        |path: &PathBuf| fs::metadata(path).and_then(|file| file.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).filter(is_ours).collect();
    files.sort_by_cached_key(written);
    for path in files.iter().rev().skip(FILES) {
        let _ = fs::remove_file(path);
    }
}

/// Parts of a file, each with its length in bytes before it.
struct Parts<'a>(&'a [u8]);

impl<'a> Parts<'a> {
    fn next(&mut self) -> Option<&'a [u8]> {
        let (length, rest) = self.0.split_first_chunk()?;
        let (part, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        self.0 = rest;
        Some(part)
    }

    fn numbers(&mut self) -> Option<Vec<u32>> {
        let (numbers, rest) = self.next()?.as_chunks::<4>();
        rest.is_empty().then(|| numbers.iter().map(|number| u32::from_le_bytes(*number)).collect())
    }
}
