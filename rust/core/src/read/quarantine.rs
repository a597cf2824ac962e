//! Files with bad records: one contains their bytes, the other the place and the reason of each.

use super::source::in_file;
use crate::error::{Error, Kind, RecordPlace, Result};
use crate::files;
use crate::format::Rejection;
use serde_json::json;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// The two files. They are created when the first bad record is written.
pub(super) struct Quarantine {
    raw_path: PathBuf,
    list_path: PathBuf,
    files: Option<[BufWriter<File>; 2]>,
    offset: u64,
    /// Entry of the last record in the list, written when its length is final.
    pending: Option<Pending>,
}

/// Entry of a record that may receive further bytes.
struct Pending {
    entry: serde_json::Value,
    length: u64,
}

impl Quarantine {
    /// Creates a quarantine at `PATH.quarantine.raw` and `PATH.quarantine.jsonl`.
    pub fn new(path: &Path) -> Self {
        let with_suffix = |suffix: &str| {
            let mut name = path.as_os_str().to_owned();
            name.push(suffix);
            PathBuf::from(name)
        };
        let (raw_path, list_path) = (with_suffix(".quarantine.raw"), with_suffix(".quarantine.jsonl"));
        Self { raw_path, list_path, files: None, offset: 0, pending: None }
    }

    pub fn put(&mut self, bytes: &[u8], at: RecordPlace, file: &str, rejection: &Rejection) -> Result<()> {
        self.close_record()?;
        self.pending = Some(Pending {
            entry: json!({
                "file": file,
                "line": at.line,
                "record": at.record,
                "trace": rejection.error.location.trace,
                "reason": rejection.reason.name(),
                "error": rejection.error.to_string(),
                "offset": self.offset,
            }),
            length: 0,
        });
        self.append(bytes)
    }

    /// Appends further bytes of the last record.
    pub fn append(&mut self, bytes: &[u8]) -> Result<()> {
        if let Some(pending) = &mut self.pending {
            pending.length += bytes.len() as u64;
        }
        self.offset += bytes.len() as u64;
        self.with_files(|[raw, _]| raw.write_all(bytes))
    }

    /// Ends the last record and flushes both files.
    pub fn finish(&mut self) -> Result<()> {
        self.close_record()?;
        if self.files.is_none() {
            return Ok(());
        }
        self.with_files(|files| files.iter_mut().try_for_each(Write::flush))
    }

    fn close_record(&mut self) -> Result<()> {
        let Some(Pending { mut entry, length }) = self.pending.take() else { return Ok(()) };
        entry["length"] = length.into();
        self.offset += 1;
        self.with_files(|[raw, list]| {
            raw.write_all(b"\n")?;
            writeln!(list, "{entry}")
        })
    }

    fn with_files(&mut self, write: impl FnOnce(&mut [BufWriter<File>; 2]) -> io::Result<()>) -> Result<()> {
        let result = match &mut self.files {
            Some(files) => write(files),
            None => files::create(&self.raw_path)
                .and_then(|raw| Ok([BufWriter::new(raw), BufWriter::new(files::create(&self.list_path)?)]))
                .and_then(|files| write(self.files.insert(files))),
        };
        result.map_err(|error| {
            Error::new(Kind::Io, "TG-READ-004", format!("the quarantine cannot be written: {error}"))
                .why("Bad records would be lost")
                .fix("Free space there, remove what has its name, or name another place with quarantine=")
                .at(&in_file(&self.raw_path.to_string_lossy()))
        })
    }
}

impl Drop for Quarantine {
    /// Completes the last entry if a reader is dropped early.
    fn drop(&mut self) {
        let _ = self.finish();
    }
}
