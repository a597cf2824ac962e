//! Reads of pipes and terminals, which may block for ever: the wait ends when the caller stops the work.

use crate::stop;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::Builder;

/// Opens a file. A pipe without a writer is waited for, by a thread that is left to wait where the work stops.
pub(super) fn open(path: &Path) -> io::Result<File> {
    let waits = fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir());
    if !waits {
        return File::open(path);
    }
    let ((opened, found), path) = (channel(), path.to_owned());
    Builder::new().spawn(move || opened.send(File::open(path)))?;
    loop {
        match found.recv_timeout(stop::PAUSE) {
            Ok(file) => return file,
            Err(RecvTimeoutError::Timeout) => stop::check_now(),
            Err(RecvTimeoutError::Disconnected) => return Err(ErrorKind::Interrupted.into()),
        }
    }
}

/// Standard input, nothing of which is held back in a buffer.
#[cfg(unix)]
pub(super) fn stdin() -> io::Result<File> {
    use std::os::fd::AsFd;
    Ok(io::stdin().as_fd().try_clone_to_owned()?.into())
}

#[cfg(not(unix))]
pub(super) fn stdin() -> io::Result<io::Stdin> {
    Ok(io::stdin())
}

/// A stream that looks now and then whether the work must stop while it waits.
pub(super) struct Waiting<R>(pub R);

#[cfg(unix)]
impl<R: Read + std::os::fd::AsFd> Read for Waiting<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            // A signal ends no read that has not begun yet, and none of this thread where another has taken it.
            if has_come(&self.0)? {
                match self.0.read(buffer) {
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    other => return other,
                }
            }
            stop::check_now();
        }
    }
}

/// Waits for bytes or their end, at most as long as the caller is not asked; whether there are any.
#[cfg(unix)]
fn has_come(stream: &impl std::os::fd::AsFd) -> io::Result<bool> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let pause = Timespec { tv_sec: 0, tv_nsec: stop::PAUSE.subsec_nanos().into() };
    match poll(&mut [PollFd::new(stream, PollFlags::IN)], Some(&pause)) {
        Ok(count) => Ok(count > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(not(unix))]
impl<R: Read> Read for Waiting<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.0.read(buffer) {
                Err(error) if error.kind() == ErrorKind::Interrupted => stop::check_now(),
                other => return other,
            }
        }
    }
}
