//! Writes traces to a file: the original bytes of each record, one per line, compressed by the suffix. The file is
//! complete or absent.

use super::source::in_file;
use crate::error::{Error, Kind, Result};
use crate::files;
use crate::trace::Trace;
use flate2::Compression;
use flate2::write::GzEncoder;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// The default level of zstd.
const ZSTD_LEVEL: i32 = 3;

const BLOCK: usize = 1 << 18;

/// Writer of records. It writes to a temporary file next to `path` and renames it when all records are written.
///
/// A writer that is dropped before `finish` leaves no file.
pub struct Writer {
    path: PathBuf,
    temporary: Option<PathBuf>,
    sink: Option<Sink>,
}

/// The encoder for the suffix of the path.
enum Sink {
    Plain(BufWriter<File>),
    Gzip(GzEncoder<BufWriter<File>>),
    Zstd(zstd::Encoder<'static, BufWriter<File>>),
}

impl Writer {
    /// Opens a file for writing. The suffixes `.gz` and `.zst` compress.
    pub fn create(path: &Path) -> Result<Self> {
        Self::open(path).map_err(|error| unwritable(path, &error))
    }

    fn open(path: &Path) -> io::Result<Self> {
        let special = fs::metadata(path).is_ok_and(|metadata| !metadata.is_file());
        let (temporary, file) = if special {
            (None, File::options().write(true).open(path)?) // A pipe or a device is written directly.
        } else {
            files::is_regular(path)?;
            let temporary = temporary_beside(path);
            let file = files::create(&temporary)?;
            (Some(temporary), file)
        };
        let mut writer = Self { path: path.to_owned(), temporary, sink: None };
        writer.sink = Some(Sink::new(file, &writer.path)?);
        Ok(writer)
    }

    /// Writes one trace: the bytes of its record, with line breaks between tokens replaced by spaces, and a line break.
    pub fn write(&mut self, trace: &Trace) -> Result<()> {
        let Some(sink) = &mut self.sink else { return Ok(()) };
        let record = trace.record()?;
        write_record(sink.stream(), &record).map_err(|error| unwritable(&self.path, &error))
    }

    /// Closes the file and renames it to its final name.
    pub fn finish(mut self) -> Result<()> {
        let path = self.path.clone();
        self.close().map_err(|error| unwritable(&path, &error))
    }

    fn close(&mut self) -> io::Result<()> {
        let Some(sink) = self.sink.take() else { return Ok(()) };
        let file = sink.finish()?;
        if let Some(temporary) = &self.temporary {
            file.sync_all()?;
            files::is_regular(&self.path)?;
            fs::rename(temporary, &self.path)?;
            self.temporary = None;
        }
        Ok(())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.sink = None;
        if let Some(temporary) = self.temporary.take() {
            let _ = fs::remove_file(temporary);
        }
    }
}

impl Sink {
    fn new(file: File, path: &Path) -> io::Result<Self> {
        let file = BufWriter::with_capacity(BLOCK, file);
        Ok(match path.extension().and_then(|suffix| suffix.to_str()) {
            Some("gz") => Self::Gzip(GzEncoder::new(file, Compression::default())),
            Some("zst") => Self::Zstd(zstd::Encoder::new(file, ZSTD_LEVEL)?),
            _ => Self::Plain(file),
        })
    }

    fn stream(&mut self) -> &mut dyn Write {
        match self {
            Self::Plain(file) => file,
            Self::Gzip(encoder) => encoder,
            Self::Zstd(encoder) => encoder,
        }
    }

    fn finish(self) -> io::Result<File> {
        let file = match self {
            Self::Plain(file) => file,
            Self::Gzip(encoder) => encoder.finish()?,
            Self::Zstd(encoder) => encoder.finish()?,
        };
        file.into_inner().map_err(io::IntoInnerError::into_error)
    }
}

/// Writes one record on one line. JSON strings contain no raw line breaks, so line breaks are between tokens and may
/// become spaces.
fn write_record(stream: &mut dyn Write, record: &[u8]) -> io::Result<()> {
    for (index, part) in record.split(|byte| matches!(byte, b'\n' | b'\r')).enumerate() {
        if index > 0 {
            stream.write_all(b" ")?;
        }
        stream.write_all(part)?;
    }
    stream.write_all(b"\n")
}

fn temporary_beside(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}.tmp", std::process::id()));
    path.with_file_name(name)
}

fn unwritable(path: &Path, error: &io::Error) -> Error {
    let cure = match error.kind() {
        io::ErrorKind::AlreadyExists => "Remove it, or give another path",
        io::ErrorKind::NotFound => "Make the directory first",
        io::ErrorKind::PermissionDenied => "Check the permissions of the directory",
        io::ErrorKind::StorageFull | io::ErrorKind::FileTooLarge | io::ErrorKind::QuotaExceeded => {
            "Free space, or write to another disk"
        }
        _ => "Check the disk, then try again",
    };
    Error::new(Kind::Io, "TG-READ-015", format!("cannot be written: {error}"))
        .why("No partial file is left, and the previous file is unchanged")
        .fix(cure)
        .at(&in_file(&path.to_string_lossy()))
}
