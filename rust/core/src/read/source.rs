//! Opens a file or standard input and decompresses it. The compression is detected from the bytes, not from the suffix.
//!
//! A read from a pipe or a terminal may block forever. It ends when the caller cancels the work.

use crate::cancel;
use crate::error::{Error, Kind, Location, Result};
use crate::record_bytes::SourceFile;
use flate2::read::MultiGzDecoder;
use std::fs::{self, File, FileType};
use std::io::{self, BufReader, Chain, Cursor, ErrorKind, IsTerminal, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::Builder;

/// A byte stream and the name that errors report for it.
pub(super) struct Source {
    pub name: Arc<str>,
    pub bytes: Box<dyn Read + Send>,
    /// Whether a read never waits for a writer. This is true for a file on disk.
    pub ready: bool,
    /// Longest record in bytes: the limit, less the memory that decompression needs beyond the common window.
    pub limit: usize,
    /// The file from which records can be read again, if there is one.
    pub origin: Option<Arc<SourceFile>>,
    /// Whether the stream returns the bytes of the file unchanged, without decompression.
    is_uncompressed: bool,
    /// Number of bytes read so far, before decompression.
    pub taken: Arc<AtomicU64>,
}

/// A reader that counts the bytes read from a stream.
struct Counted<R>(R, Arc<AtomicU64>);

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.0.read(buffer)?;
        self.1.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// A zstd window of this size, 32 MiB, is always allowed.
const COMMON_WINDOW_LOG: u32 = 25;

/// The largest window that zstd has: `zstd --long=31`.
const MOST_WINDOW_LOG: u32 = 31;

/// Number of bytes of a zstd frame that contain the window size.
const HEADER: usize = 18;

const PARQUET: &[u8] = b"PAR1";

/// Records of a smaller file are kept in memory, because keeping a file open is not worth it.
const FEW: u64 = 1 << 16;

const BLOCK: usize = 1 << 18;

impl Source {
    /// Opens a file. The path `-` means standard input.
    ///
    /// `limit` is the number of bytes of the longest record. `name` replaces the path in errors.
    pub fn open(path: &Path, limit: usize, name: Option<&str>) -> Result<Self> {
        if path == Path::new("-") {
            let stdin = stdin().map_err(|error| unreadable("<stdin>", &error))?;
            return Self::new(Box::new(Interruptible(stdin)), "<stdin>", limit);
        }
        let name = name.map_or_else(|| path.to_string_lossy(), Into::into);
        let fail = |error: &io::Error| unreadable(&name, error);
        let file = open(path).map_err(|error| fail(&error))?;
        let metadata = file.metadata().map_err(|error| fail(&error))?;
        if let Some(what) = non_file_kind(metadata.file_type(), &file) {
            return Err(Error::new(Kind::Io, "TG-READ-008", format!("it is a {what}"))
                .why("Traces are read from one file, or from a pipe")
                .fix(if metadata.is_dir() { "Name a file in it" } else { "Name a file" })
                .at(&in_file(&name)));
        }
        let file = Arc::new(file);
        let mut source = Self::new(Box::new(Interruptible(Arc::clone(&file))), &name, limit)?;
        source.ready = metadata.is_file();
        if source.ready && source.is_uncompressed && metadata.len() >= FEW {
            source.origin = Some(Arc::new(SourceFile::new(path, &file).map_err(|error| fail(&error))?));
        }
        Ok(source)
    }

    /// Wraps a byte stream, and decompresses it if its first bytes are those of gzip or zstd.
    pub fn new(bytes: Box<dyn Read + Send>, name: &str, limit: usize) -> Result<Self> {
        let taken = Arc::new(AtomicU64::new(0));
        let mut bytes: Box<dyn Read + Send> = Box::new(Counted(bytes, Arc::clone(&taken)));
        let mut magic = Vec::with_capacity(HEADER);
        bytes.by_ref().take(4).read_to_end(&mut magic).map_err(|error| unreadable(name, &error))?;
        if magic == PARQUET {
            return Err(Error::new(Kind::Io, "TG-READ-009", "it is a Parquet file")
                .why("Its columns are read through pyarrow, not as lines of JSON")
                .fix("pip install 'tracegrad[arrow]', then name the file instead of a stream of it")
                .at(&in_file(name)));
        }
        let is_gzip = magic.starts_with(GZIP);
        let is_zstd = magic.starts_with(ZSTD) || is_skippable(&magic);
        if is_zstd {
            let more = (HEADER - magic.len()) as u64;
            bytes.by_ref().take(more).read_to_end(&mut magic).map_err(|error| unreadable(name, &error))?;
        }
        let stands = !is_gzip && !is_zstd;
        let window_log = window_log(&magic).max(COMMON_WINDOW_LOG);
        let stream: Chain<_, _> = Cursor::new(magic).chain(bytes);
        // Decoders read a few bytes at a time and need a buffer. Uncompressed bytes are read in blocks.
        let buffered = |stream| BufReader::with_capacity(BLOCK, stream);
        let mut source = Self {
            name: name.into(),
            bytes: Box::new(io::empty()),
            ready: false,
            limit,
            origin: None,
            is_uncompressed: stands,
            taken,
        };
        source.bytes = if is_gzip {
            Box::new(MultiGzDecoder::new(buffered(stream)))
        } else if is_zstd {
            source.limit = record_limit(window_log, limit).map_err(|error| error.at(&in_file(name)))?;
            Box::new(unzstd(buffered(stream), window_log).map_err(|error| unreadable(name, &error))?)
        } else {
            Box::new(stream)
        };
        Ok(source)
    }
}

/// Returns the kind of a path that cannot contain records: a device or a directory.
fn non_file_kind(kind: FileType, file: &File) -> Option<&'static str> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_block_device() || kind.is_char_device() && !file.is_terminal() {
            return Some("device");
        }
    }
    kind.is_dir().then_some("directory")
}

/// Creates a decoder for frames with windows of at most 2^`window_log` bytes. zstd rejects larger ones.
fn unzstd<R: io::BufRead>(bytes: R, window_log: u32) -> io::Result<zstd::Decoder<'static, R>> {
    let mut decoder = zstd::Decoder::with_buffer(bytes)?;
    decoder.window_log_max(window_log)?;
    Ok(decoder)
}

/// Returns the longest record that fits next to the window, so that both together stay within the limit of a record.
fn record_limit(window_log: u32, limit: usize) -> Result<usize> {
    let (window, common) = (1_usize << window_log.min(MOST_WINDOW_LOG), 1_usize << COMMON_WINDOW_LOG);
    if window == common {
        return Ok(limit);
    }
    limit.checked_sub(window - common).filter(|_| window_log <= MOST_WINDOW_LOG).ok_or_else(|| {
        Error::new(Kind::Io, "TG-READ-010", format!("zstd needs a window of 2^{window_log} bytes for it"))
            .why(format!("It would be in memory, which is limited by max_record_bytes, {limit}"))
            .fix("Raise max_record_bytes to as much, or decompress it first: zstd -dc --long=31")
    })
}

/// Returns log2 of the window size of a zstd frame (RFC 8878, 3.1.1.1), rounded up, or 0 if the frame does not contain
/// it.
fn window_log(frame: &[u8]) -> u32 {
    let Some((&descriptor, rest)) = frame.strip_prefix(ZSTD).and_then(<[u8]>::split_first) else { return 0 };
    let single_segment = descriptor & 0x20 != 0;
    if !single_segment {
        // Any eighths in the mantissa exceed the power, so round up.
        let Some(window) = rest.first() else { return 0 };
        return 10 + u32::from(window >> 3) + u32::from(window & 7 != 0);
    }
    // The window is as large as the content. The content's size follows the id of the dictionary.
    let id = [0, 1, 2, 4][usize::from(descriptor & 3)];
    let size = 1 << (descriptor >> 6);
    let bytes = rest.get(id..id + size).unwrap_or_default();
    let content = bytes.iter().rev().fold(0_u64, |sum, &byte| sum << 8 | u64::from(byte));
    64 - content.saturating_add(if size == 2 { 256 } else { 0 }).saturating_sub(1).leading_zeros()
}

/// Returns whether a stream starts with a skippable zstd frame, as pzstd writes it.
fn is_skippable(magic: &[u8]) -> bool {
    matches!(magic, [0x50..=0x5f, 0x2a, 0x4d, 0x18])
}

pub(super) fn unreadable(name: &str, error: &io::Error) -> Error {
    let cure = match error.kind() {
        ErrorKind::NotFound => "Check the path",
        ErrorKind::PermissionDenied => "Check the permissions of the file",
        _ => "Check the disk, then try again",
    };
    Error::new(Kind::Io, "TG-READ-011", format!("cannot be read: {error}"))
        .why("No traces can be read without it")
        .fix(cure)
        .at(&in_file(name))
}

pub(super) fn in_file(name: &str) -> Location {
    Location { file: Some(name.into()), ..Location::default() }
}

/// Opens a file. A pipe without a writer blocks, so a thread waits for it; the thread is abandoned if the work is
/// cancelled.
pub(super) fn open(path: &Path) -> io::Result<File> {
    let waits = fs::metadata(path).is_ok_and(|metadata| !metadata.is_file() && !metadata.is_dir());
    if !waits {
        return File::open(path);
    }
    let ((sender, receiver), path) = (channel(), path.to_owned());
    Builder::new().spawn(move || sender.send(File::open(path)))?;
    loop {
        match receiver.recv_timeout(cancel::PAUSE) {
            Ok(file) => return file,
            Err(RecvTimeoutError::Timeout) => cancel::check_now(),
            Err(RecvTimeoutError::Disconnected) => return Err(ErrorKind::Interrupted.into()),
        }
    }
}

/// Returns standard input without a buffer that could keep bytes back.
#[cfg(unix)]
pub(super) fn stdin() -> io::Result<File> {
    use std::os::fd::AsFd;
    Ok(io::stdin().as_fd().try_clone_to_owned()?.into())
}

#[cfg(not(unix))]
pub(super) fn stdin() -> io::Result<io::Stdin> {
    Ok(io::stdin())
}

/// A stream that checks for cancellation while it waits.
pub(super) struct Interruptible<R>(pub R);

#[cfg(unix)]
impl<R: Read + std::os::fd::AsFd> Read for Interruptible<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            // A signal does not interrupt a read that has not started, and another thread may receive it. So poll before
            // each read.
            if has_come(&self.0)? {
                match self.0.read(buffer) {
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    other => return other,
                }
            }
            cancel::check_now();
        }
    }
}

/// Waits for bytes or the end of the stream, for at most `cancel::PAUSE`. Returns whether one of them has arrived.
#[cfg(unix)]
fn has_come(stream: &impl std::os::fd::AsFd) -> io::Result<bool> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let pause = Timespec { tv_sec: 0, tv_nsec: cancel::PAUSE.subsec_nanos().into() };
    match poll(&mut [PollFd::new(stream, PollFlags::IN)], Some(&pause)) {
        Ok(count) => Ok(count > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(not(unix))]
impl<R: Read> Read for Interruptible<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.0.read(buffer) {
                Err(error) if error.kind() == ErrorKind::Interrupted => cancel::check_now(),
                other => return other,
            }
        }
    }
}
