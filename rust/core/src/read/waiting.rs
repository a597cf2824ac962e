//! Pipes and terminals, which may let a reader wait for ever: the wait ends where the work must stop.

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

/// A stream that looks whether the work must stop when a signal has ended a wait.
pub(super) struct Waiting<R>(pub R);

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
