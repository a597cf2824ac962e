//! The bytes of a record: in memory, or read again from their file on demand.
//!
//! Bytes that are read again are verified by their length and a hash, so a file that has changed is an error. `read`
//! creates these values, and a `Trace` contains one.

use crate::error::{Error, Kind, Result};
use foldhash::fast::RandomState;
use std::borrow::Cow;
use std::fs::File;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Largest number of files that the process keeps open for their records. Other files are opened again for each record.
const MOST_OPEN: usize = 64;

static OPEN: AtomicUsize = AtomicUsize::new(0);

/// The bytes of a record.
#[derive(Debug, Clone)]
pub enum Raw {
    /// In memory.
    Memory(Arc<[u8]>),
    /// In a file.
    File(FileRange),
}

/// A range of a file, with the hash of its bytes.
#[derive(Debug, Clone)]
pub struct FileRange {
    spot: FilePosition,
    length: usize,
    hash: u64,
}

/// A position in a file.
#[derive(Debug, Clone)]
pub struct FilePosition {
    /// The file.
    pub origin: Arc<SourceFile>,
    /// Byte offset of the position.
    pub start: u64,
}

/// A file on disk that contains records.
#[derive(Debug)]
pub struct SourceFile {
    path: PathBuf,
    kept: Option<OpenFile>,
    hashing: RandomState,
}

/// A file that stays open, so that it can be read even after it was renamed or deleted.
#[derive(Debug)]
struct OpenFile(Arc<File>);

impl Default for Raw {
    fn default() -> Self {
        Self::Memory(Arc::default())
    }
}

impl Raw {
    /// Refers to bytes in a file. Only their length and hash are kept in memory.
    pub(crate) fn left(bytes: &[u8], spot: FilePosition) -> Self {
        let hash = spot.origin.hash(bytes);
        Self::File(FileRange { spot, length: bytes.len(), hash })
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Memory(bytes) => bytes.len(),
            Self::File(left) => left.length,
        }
    }

    /// Returns whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes.
    ///
    /// # Errors
    /// `Kind::Io` if they cannot be read again, or have changed.
    pub fn bytes(&self) -> Result<Cow<'_, [u8]>> {
        match self {
            Self::Memory(bytes) => Ok(Cow::Borrowed(bytes)),
            Self::File(left) => left.read().map(Cow::Owned),
        }
    }

    /// Returns some of the bytes without verification. The caller verifies them with a digest.
    pub(crate) fn part(&self, start: usize, length: usize) -> Option<Cow<'_, [u8]>> {
        let end = start.checked_add(length).filter(|&end| end <= self.len())?;
        match self {
            Self::Memory(bytes) => Some(Cow::Borrowed(&bytes[start..end])),
            Self::File(left) => {
                let mut bytes = vec![0; length];
                left.spot.origin.read(left.spot.start + start as u64, &mut bytes).ok()?;
                Some(Cow::Owned(bytes))
            }
        }
    }
}

impl FileRange {
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
        Err(Error::new(Kind::Io, "TG-CORE-002", format!("the record is not there any more: {problem}"))
            .why("The bytes of records stay in an uncompressed file, and are read again when they are needed")
            .fix("Read the file again, and let it be while its traces are in use, or read it compressed, as it is then kept"))
    }
}

impl SourceFile {
    /// Creates the origin for a file that was opened from `path`.
    pub(crate) fn new(path: &Path, file: &Arc<File>) -> io::Result<Self> {
        Ok(Self { path: std::path::absolute(path)?, kept: OpenFile::new(file), hashing: RandomState::default() })
    }

    fn hash(&self, bytes: &[u8]) -> u64 {
        let mut hasher = self.hashing.build_hasher();
        hasher.write(bytes);
        hasher.finish()
    }

    fn read(&self, start: u64, bytes: &mut [u8]) -> io::Result<()> {
        #[cfg(unix)]
        if let Some(OpenFile(file)) = &self.kept {
            return std::os::unix::fs::FileExt::read_exact_at(&**file, bytes, start);
        }
        // Opening a pipe of that name would block.
        if !std::fs::metadata(&self.path)?.is_file() {
            return Err(io::Error::other("it is no file any more"));
        }
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(bytes)
    }
}

impl OpenFile {
    /// Keeps the file open if the limit allows it. Outside Unix a read would move the position of other readers.
    fn new(file: &Arc<File>) -> Option<Self> {
        let next_count = |open| (open < MOST_OPEN).then_some(open + 1);
        let has_capacity = cfg!(unix) && OPEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next_count).is_ok();
        has_capacity.then(|| Self(Arc::clone(file)))
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        OPEN.fetch_sub(1, Ordering::Relaxed);
    }
}
