//! Files that are made: never through a link, and never in place of what is no regular file.
//!
//! A stranger's archive can bring a link under a name that is written to.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::Path;

/// Makes an empty file, in place of a regular file of this name.
///
/// # Errors
///
/// If the name is a link, a folder, a pipe, a socket or a device, or if the system refuses.
pub fn create(path: &Path) -> io::Result<File> {
    if is_regular(path)? {
        fs::remove_file(path)?; // another name of the same file keeps what it holds
    }
    File::create_new(path)
}

/// Whether a regular file has this name; false where nothing has it.
///
/// # Errors
///
/// If it is a link, a folder, a pipe, a socket or a device.
pub fn is_regular(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(there) if there.is_file() => Ok(true),
        Ok(there) => {
            let what = if there.is_symlink() { "a symbolic link" } else { "not a regular file" };
            Err(io::Error::new(
                ErrorKind::AlreadyExists,
                format!("it is {what}, which is neither followed nor replaced"),
            ))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}
