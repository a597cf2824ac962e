//! Which records this room reads as they stand, and which a caller must look at first: producers' forms that it does not
//! know are made into records that it does.

use super::outcome::decode_all;
use super::report::Report;
use crate::error::{Error, Kind, Result};
use crate::threads;
use crate::trace::Trace;
use aho_corasick::{AhoCorasick, MatchKind};
use std::sync::Arc;

/// For each record whether it is read as it stands: something was sampled in it, of its choices none is left out, of a
/// list of messages the last one is what was sampled, and no object in it has one of `keys`, be it written as JSON within
/// a string.
///
/// What follows messages that end with the user may stand beside them, under a name that this room does not know.
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
            && decode_all(vec![record], "", 1, None).is_ok_and(|(traces, report)| stands(&traces, &report))
    };
    Ok(threads::map(records, || (), |(), record| is_plain(record)))
}

/// The traces whose conversation goes on behind what was sampled last, by their number: their records are looked at.
///
/// ```
/// # use tracegrad_core::read::{Options, open, read_all};
/// let said = br#"{"messages": [{"role": "assistant", "content": "4"}, {"role": "user", "content": "sure?"}]}"#;
/// let (traces, _) = read_all(said, "memory", Options::default())?;
/// assert_eq!(open(&traces), [0]);
/// # Ok::<(), tracegrad_core::Error>(())
/// ```
pub fn open(traces: &[Arc<Trace>]) -> Vec<usize> {
    (0..traces.len()).filter(|index| !traces[*index].generations.is_empty() && is_open(&traces[*index])).collect()
}

/// Whether what decoding a record gave is all that it says was sampled. A recorder's own form says so by itself.
fn stands(traces: &[Arc<Trace>], report: &Report) -> bool {
    let is_list = report.forms.keys().any(|form| form.name == "chat");
    let is_whole = |trace: &Trace| !trace.generations.is_empty() && !(is_list && is_open(trace));
    report.unused_choices == 0 && traces.iter().any(|trace| is_whole(trace))
}

/// Whether the last message of a conversation was not sampled.
fn is_open(trace: &Trace) -> bool {
    let sampled = |last: &u32| trace.generations.iter().rev().any(|generation| generation.message == *last);
    trace.conversation.last().is_some_and(|last| !sampled(last))
}

/// Whether a name between these bytes is a key: in quotes, which may be escaped, and followed by a colon.
fn is_key(before: &[u8], after: &[u8]) -> bool {
    let escapes = after.iter().take_while(|byte| **byte == b'\\').count();
    let rest = after[escapes..].strip_prefix(b"\"").map(<[u8]>::trim_ascii_start);
    before.ends_with(b"\"") && rest.is_some_and(|rest| rest.starts_with(b":"))
}
