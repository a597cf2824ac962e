//! Where bytes come from: a file or standard input, decompressed by what the bytes are and not by the suffix.

use crate::error::{Error, Kind, Location, Result};
use flate2::read::MultiGzDecoder;
use std::fs::File;
use std::io::{self, BufReader, Chain, Cursor, Read};
use std::path::Path;
use std::sync::Arc;

/// A byte stream with the name it has in errors.
pub(super) struct Source {
    pub name: Arc<str>,
    pub bytes: Box<dyn Read + Send>,
    /// It never waits for a writer: a file on disk.
    pub ready: bool,
}

const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// Largest zstd window: `zstd --long=31`.
const ZSTD_WINDOW_LOG: u32 = 31;

/// First bytes of a Parquet file.
const PARQUET: &[u8] = b"PAR1";

/// Bytes read from the file at once.
const BLOCK: usize = 1 << 18;

impl Source {
    /// Opens a file, or standard input for `-`.
    pub fn open(path: &Path) -> Result<Self> {
        if path == Path::new("-") {
            return Self::new(Box::new(io::stdin()), "<stdin>");
        }
        let name = path.to_string_lossy();
        let fail = |error: &io::Error| unreadable(&name, error);
        let file = File::open(path).map_err(|error| fail(&error))?;
        let metadata = file.metadata().map_err(|error| fail(&error))?;
        if metadata.is_dir() {
            return Err(Error::new(Kind::Io, "it is a directory")
                .why("Traces are read from one file")
                .cure("Name a file in it")
                .at(&in_file(&name)));
        }
        Ok(Self { ready: metadata.is_file(), ..Self::new(Box::new(file), &name)? })
    }

    /// Decompresses a byte stream where its first bytes say so.
    pub fn new(mut bytes: Box<dyn Read + Send>, name: &str) -> Result<Self> {
        let mut magic = Vec::with_capacity(4);
        bytes.by_ref().take(4).read_to_end(&mut magic).map_err(|error| unreadable(name, &error))?;
        if magic == PARQUET {
            return Err(Error::new(Kind::Io, "it is a Parquet file")
                .why("Its columns are read through pyarrow, not as lines of JSON")
                .cure("pip install 'tracegrad[arrow]', then tracegrad.tables.ParquetStream(path) or the command line")
                .at(&in_file(name)));
        }
        let is_gzip = magic.starts_with(GZIP);
        let is_zstd = magic.starts_with(ZSTD) || is_skippable(&magic);
        let whole: Chain<_, _> = Cursor::new(magic).chain(bytes);
        let whole = BufReader::with_capacity(BLOCK, whole);
        let bytes: Box<dyn Read + Send> = if is_gzip {
            Box::new(MultiGzDecoder::new(whole))
        } else if is_zstd {
            Box::new(unzstd(whole).map_err(|error| unreadable(name, &error))?)
        } else {
            Box::new(whole)
        };
        Ok(Self { name: name.into(), bytes, ready: false })
    }
}

fn unzstd<R: io::BufRead>(bytes: R) -> io::Result<zstd::Decoder<'static, R>> {
    let mut decoder = zstd::Decoder::with_buffer(bytes)?;
    decoder.window_log_max(ZSTD_WINDOW_LOG)?;
    Ok(decoder)
}

/// A zstd stream may begin with a skippable frame, as pzstd writes it.
fn is_skippable(magic: &[u8]) -> bool {
    matches!(magic, [0x50..=0x5f, 0x2a, 0x4d, 0x18])
}

fn unreadable(name: &str, error: &io::Error) -> Error {
    let cure = match error.kind() {
        io::ErrorKind::NotFound => "Check the path",
        io::ErrorKind::PermissionDenied => "Check the permissions of the file",
        _ => "Check the disk, then try again",
    };
    Error::new(Kind::Io, format!("cannot be read: {error}"))
        .why("There are no traces without it")
        .cure(cure)
        .at(&in_file(name))
}

fn in_file(name: &str) -> Location {
    Location { file: Some(name.into()), ..Location::default() }
}
