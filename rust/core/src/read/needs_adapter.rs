//! Tells which records are read as they stand, and which a caller must look at first: producers' forms that are not known
//! here are made into records that are.

use super::reader::{Report, decode_all};
use crate::error::{Error, Kind, Result};
use crate::format::is_recorders;
use crate::pool;
use crate::trace::{Prompt, Trace};
use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::value::RawValue;
use std::collections::HashMap;
use std::sync::Arc;

/// For each record whether it is read as it stands: something was sampled in it, after something that it says too; of its
/// choices none is left out; of a list of messages the last one is what was sampled; and no object in it has one of `keys`,
/// be it written as JSON within a string.
///
/// What follows messages that end with the user may stand beside them, under a name that is not known here.
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
            && decode_all(vec![record], "", 1.into(), None).is_ok_and(|(traces, report)| stands(&traces, &report))
    };
    Ok(pool::map(records, || (), |(), record| is_plain(record)))
}

/// The traces whose conversation goes on behind what was sampled last, by their number.
///
/// With `names`, those alone beside whose messages an answer may stand: something under one of these names, which are
/// lower case without `_` and `-`, or what may be a response or a message; and those in which nothing was sampled. Their
/// records are to be looked at.
///
/// ```
/// # use tracegrad_core::read::{Options, open, read_all};
/// let cut = br#"{"messages": [{"role": "assistant", "content": "4"}, {"role": "user", "content": "sure?"}], "id": "a"}"#;
/// let answered = br#"{"messages": [{"role": "assistant", "content": "4"}, {"role": "user", "content": "?"}], "Out_put": "5"}"#;
/// let both = [&cut[..], b"\n", &answered[..]].concat();
/// let (traces, _) = read_all(&both, "memory", Options::default())?;
/// let traces: Vec<_> = traces.into_iter().collect();
/// assert_eq!((open(&traces, None::<&[&str]>)?, open(&traces, Some(&["output"]))?), (vec![0, 1], vec![1]));
/// # Ok::<(), tracegrad_core::Error>(())
/// ```
///
/// # Errors
/// Where a record cannot be read again.
pub fn open<N: AsRef<str>>(traces: &[Arc<Trace>], names: Option<&[N]>) -> Result<Vec<usize>> {
    let asked = |trace: &Trace| names.map_or(Ok(true), |names| trace.record().map(|record| may_answer(&record, names)));
    let empty = |trace: &Trace| names.is_some() && trace.generations.is_empty();
    let odd = |trace: &Trace| Ok(empty(trace) || !trace.generations.is_empty() && is_open(trace) && asked(trace)?);
    let found = (0..traces.len()).map(|index| Ok(odd(&traces[index])?.then_some(index)));
    found.filter_map(Result::transpose).collect()
}

/// What a response or a message has in it, however it is called and written.
const SAID: [&str; 4] = ["choices", "content", "tool_calls", "blocks"];

/// Whether beside the messages of a record something stands that may be an answer.
fn may_answer<N: AsRef<str>>(record: &[u8], names: &[N]) -> bool {
    let Ok(values) = serde_json::from_slice::<HashMap<String, &RawValue>>(record) else { return true };
    let named = |key: &str| {
        let plain: String = key.chars().filter(|letter| !matches!(letter, '_' | '-')).collect();
        names.iter().any(|name| plain.eq_ignore_ascii_case(name.as_ref()))
    };
    values.iter().any(|(key, value)| {
        let text = value.get();
        let holds = text.starts_with(['{', '[', '"']) && key != "messages" && key != "tools";
        holds && (named(key) || SAID.iter().any(|word| text.contains(word)))
    })
}

/// Whether what decoding a record gave is all that it says was sampled. A recorder's own form says so by itself.
fn stands(traces: &[Arc<Trace>], report: &Report) -> bool {
    let is_list = report.forms.keys().any(|form| form.name == "chat");
    let is_whole = |trace: &Trace| !(trace.generations.is_empty() || is_list && is_open(trace));
    report.unused_choices == 0 && traces.iter().any(|trace| is_whole(trace)) && !alone(traces, report)
}

/// Whether responses stand there of which nothing says what they were sampled after: their requests may stand beside them,
/// under another name.
fn alone(traces: &[Arc<Trace>], report: &Report) -> bool {
    let nothing = |prompt: &Prompt| matches!(prompt, Prompt::Rendered | Prompt::Unknown);
    let mut first = traces.iter().filter_map(|trace| trace.generations.first());
    !report.forms.keys().any(is_recorders) && first.all(|first| first.context.is_empty() && nothing(&first.prompt))
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
