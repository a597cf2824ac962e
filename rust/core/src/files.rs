//! Creates files safely: never through a link, and never in place of something that is not a regular file.
//!
//! An untrusted archive may contain a link with the name of an output file.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::Path;

/// Creates an empty file. It replaces a regular file of this name.
///
/// # Errors
///
/// If the name is a link, a folder, a pipe, a socket or a device, or if the system refuses.
pub fn create(path: &Path) -> io::Result<File> {
    if is_regular(path)? {
        fs::remove_file(path)?; // If the file has another hard link, its contents are kept.
    }
    File::create_new(path)
}

/// Returns whether a regular file has this name; false if the name does not exist.
///
/// # Errors
///
/// If it is a link, a folder, a pipe, a socket or a device.
pub fn is_regular(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_file() => Ok(true),
        Ok(metadata) => {
            let kind = if metadata.is_symlink() { "a symbolic link" } else { "not a regular file" };
            Err(io::Error::new(
                ErrorKind::AlreadyExists,
                format!("it is {kind}, which is neither followed nor replaced"),
            ))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}
