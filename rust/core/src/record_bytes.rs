//! The bytes of a record: held in memory, or left in the file they came from and read again when they are asked for.
//!
//! What is read again is checked by its length and a hash: a file that changed meanwhile is an error, never other bytes.
//! `read` makes these, a `Trace` holds one.

use crate::error::{Error, Kind, Result};
use foldhash::fast::RandomState;
use std::borrow::Cow;
use std::fs::File;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Files that are kept open for their records, in the whole process; others are opened for each record anew.
const MOST_OPEN: usize = 64;

static OPEN: AtomicUsize = AtomicUsize::new(0);

/// The bytes of a record.
#[derive(Debug, Clone)]
pub enum Raw {
    /// In memory.
    Held(Arc<[u8]>),
    /// In a file.
    Left(Left),
}

/// Bytes in a file, and what tells that they are still the same.
#[derive(Debug, Clone)]
pub struct Left {
    spot: Spot,
    length: usize,
    hash: u64,
}

/// A place in a file.
#[derive(Debug, Clone)]
pub struct Spot {
    /// The file.
    pub origin: Arc<Origin>,
    /// Bytes before the place.
    pub start: u64,
}

/// A file on disk that records were read from.
#[derive(Debug)]
pub struct Origin {
    path: PathBuf,
    kept: Option<Kept>,
    hashing: RandomState,
}

/// A file that stays open, so that it is read again even where its name is gone.
#[derive(Debug)]
struct Kept(Arc<File>);

impl Default for Raw {
    fn default() -> Self {
        Self::Held(Arc::default())
    }
}

impl Raw {
    /// The bytes as they stand at a place of a file, of which nothing is kept but their length and hash.
    pub(crate) fn left(bytes: &[u8], spot: Spot) -> Self {
        let hash = spot.origin.hash(bytes);
        Self::Left(Left { spot, length: bytes.len(), hash })
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Held(bytes) => bytes.len(),
            Self::Left(left) => left.length,
        }
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes.
    ///
    /// # Errors
    /// `Kind::Io` where they cannot be read again, or are others.
    pub fn bytes(&self) -> Result<Cow<'_, [u8]>> {
        match self {
            Self::Held(bytes) => Ok(Cow::Borrowed(bytes)),
            Self::Left(left) => left.read().map(Cow::Owned),
        }
    }

    /// Some of the bytes, which are not compared with those that were read at first: the caller knows them by a digest.
    pub(crate) fn part(&self, start: usize, length: usize) -> Option<Cow<'_, [u8]>> {
        let end = start.checked_add(length).filter(|&end| end <= self.len())?;
        match self {
            Self::Held(bytes) => Some(Cow::Borrowed(&bytes[start..end])),
            Self::Left(left) => {
                let mut bytes = vec![0; length];
                left.spot.origin.read(left.spot.start + start as u64, &mut bytes).ok()?;
                Some(Cow::Owned(bytes))
            }
        }
    }
}

impl Left {
    fn read(&self) -> Result<Vec<u8>> {
        let origin = &self.spot.origin;
        let mut bytes = vec![0; self.length];
        let problem = match origin.read(self.spot.start, &mut bytes) {
            Ok(()) if origin.hash(&bytes) == self.hash => return Ok(bytes),
            Ok(()) => "its file holds other bytes there than when it was read".to_owned(),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                "its file is shorter than when it was read".to_owned()
            }
            Err(error) => format!("its file cannot be read again: {error}"),
        };
        Err(Error::new(Kind::Io, format!("the record is not there any more: {problem}"))
            .why("The bytes of records are left in an uncompressed file, and read again when they are asked for")
            .cure("Read the file again, and let it be while its traces are in use, or read it compressed, as it is then kept"))
    }
}

impl Origin {
    /// A file that was opened by `path`.
    pub(crate) fn new(path: &Path, file: &Arc<File>) -> io::Result<Self> {
        Ok(Self { path: std::path::absolute(path)?, kept: Kept::new(file), hashing: RandomState::default() })
    }

    fn hash(&self, bytes: &[u8]) -> u64 {
        let mut hasher = self.hashing.build_hasher();
        hasher.write(bytes);
        hasher.finish()
    }

    fn read(&self, start: u64, bytes: &mut [u8]) -> io::Result<()> {
        #[cfg(unix)]
        if let Some(Kept(file)) = &self.kept {
            return std::os::unix::fs::FileExt::read_exact_at(&**file, bytes, start);
        }
        // A pipe of that name would be waited for.
        if !std::fs::metadata(&self.path)?.is_file() {
            return Err(io::Error::other("it is no file any more"));
        }
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(bytes)
    }
}

impl Kept {
    /// The file where it may stay open: few are, and elsewhere than on Unix reads would move the place of others.
    fn new(file: &Arc<File>) -> Option<Self> {
        let more = |open| (open < MOST_OPEN).then_some(open + 1);
        let room = cfg!(unix) && OPEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok();
        room.then(|| Self(Arc::clone(file)))
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        OPEN.fetch_sub(1, Ordering::Relaxed);
    }
}
