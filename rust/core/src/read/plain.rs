//! Which records this room reads as they stand, and which a caller must look at first: producers' forms that it does not
//! know are made into records that it does.

use super::outcome::decode_all;
use crate::error::{Error, Kind, Result};
use crate::threads;
use aho_corasick::{AhoCorasick, MatchKind};
use std::sync::Arc;

/// For each record whether it is read as it stands: something was sampled in it, of its choices none is left out, and no
/// object in it has one of `keys`, be it written as JSON within a string.
///
/// ```
/// let answered = br#"{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "from"}]}"#;
/// let plain = |keys: &[&str]| tracegrad_core::read::plain(vec![answered.as_slice().into(), b"{}".as_slice().into()], keys);
/// assert_eq!(plain(&["from"])?, [true, false]);
/// assert_eq!(plain(&["content"])?, [false, false]);
/// # Ok::<(), tracegrad_core::Error>(())
/// ```
///
/// # Errors
/// Where the keys are too many to be searched for.
pub fn plain<K: AsRef<[u8]>>(records: Vec<Arc<[u8]>>, keys: &[K]) -> Result<Vec<bool>> {
    let keys = AhoCorasick::builder().match_kind(MatchKind::LeftmostFirst).build(keys);
    let keys = keys.map_err(|error| Error::new(Kind::Argument, error.to_string()))?;
    let has_key =
        |record: &[u8]| keys.find_iter(record).any(|found| is_key(&record[..found.start()], &record[found.end()..]));
    let is_plain = |record: Arc<[u8]>| {
        !has_key(&record)
            && decode_all(vec![record], "", 1, None).is_ok_and(|(traces, report)| {
                report.unused_choices == 0 && traces.iter().any(|trace| !trace.generations.is_empty())
            })
    };
    Ok(threads::map(records, || (), |(), record| is_plain(record)))
}

/// Whether a name between these bytes is a key: in quotes, which may be escaped, and followed by a colon.
fn is_key(before: &[u8], after: &[u8]) -> bool {
    let escapes = after.iter().take_while(|byte| **byte == b'\\').count();
    let rest = after[escapes..].strip_prefix(b"\"").map(<[u8]>::trim_ascii_start);
    before.ends_with(b"\"") && rest.is_some_and(|rest| rest.starts_with(b":"))
}
