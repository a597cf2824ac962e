//! Decides which records the core can read, and which an adapter of the caller must convert first.

use super::reader::{Report, decode_all};
use crate::error::{Error, Kind, Result};
use crate::format::is_recorders;
use crate::pool;
use crate::trace::{Prompt, Trace};
use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::value::RawValue;
use std::collections::HashMap;
use std::sync::Arc;

/// Returns for each record whether the core reads it completely, without a conversion.
///
/// All of these must hold:
/// - Something was sampled, and the record also contains what it was sampled after.
/// - No choice was ignored.
/// - In a list of messages the last message was sampled.
/// - No object has one of `keys`, also not in JSON that is written inside a string.
///
/// If the messages end with the user, the answer may be stored under a name that the core does not recognise.
///
/// ```
/// let answered = br#"{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "from"}]}"#;
/// # use tracegrad_core::read::needs_no_adapter;
/// let check = |keys: &[&str]| needs_no_adapter(vec![answered.as_slice().into(), b"{}".as_slice().into()], keys);
/// assert_eq!(check(&["from"])?, [true, false]);
/// assert_eq!(check(&["content"])?, [false, false]);
/// # Ok::<(), tracegrad_core::Error>(())
/// ```
///
/// # Errors
/// `Kind::Argument` if there are too many keys to search for.
pub fn needs_no_adapter<K: AsRef<[u8]>>(records: Vec<Arc<[u8]>>, keys: &[K]) -> Result<Vec<bool>> {
    let keys = AhoCorasick::builder().match_kind(MatchKind::LeftmostFirst).build(keys);
    let keys = keys.map_err(|error| Error::new(Kind::Argument, "TG-READ-003", error.to_string()))?;
    let has_key =
        |record: &[u8]| keys.find_iter(record).any(|name| is_key(&record[..name.start()], &record[name.end()..]));
    let is_plain = |record: Arc<[u8]>| {
        !has_key(&record)
            && decode_all(vec![record], "", 1.into(), None).is_ok_and(|(traces, report)| is_complete(&traces, &report))
    };
    Ok(pool::map(records, || (), |(), record| is_plain(record)))
}

/// Returns the indices of traces whose conversation continues after the last sampled message.
///
/// With `names`, only traces are returned whose record may contain an answer outside the messages, and traces without a
/// generation. An answer is a value under one of these names, or one that may be a response or a message. The names are
/// lower case without `_` and `-`.
///
/// ```
/// # use tracegrad_core::read::{Options, read_all, unanswered_traces};
/// let cut = br#"{"messages": [{"role": "assistant", "content": "4"}, {"role": "user", "content": "sure?"}], "id": "a"}"#;
/// let answered = br#"{"messages": [{"role": "assistant", "content": "4"}, {"role": "user", "content": "?"}], "Out_put": "5"}"#;
/// let both = [&cut[..], b"\n", &answered[..]].concat();
/// let (traces, _) = read_all(&both, "memory", Options::default())?;
/// let traces: Vec<_> = traces.into_iter().collect();
/// assert_eq!(unanswered_traces(&traces, None::<&[&str]>)?, [0, 1]);
/// assert_eq!(unanswered_traces(&traces, Some(&["output"]))?, [1]);
/// # Ok::<(), tracegrad_core::Error>(())
/// ```
///
/// # Errors
/// `Kind::Io` if a record cannot be read again.
pub fn unanswered_traces<N: AsRef<str>>(traces: &[Arc<Trace>], names: Option<&[N]>) -> Result<Vec<usize>> {
    let has_answer =
        |trace: &Trace| names.map_or(Ok(true), |names| trace.record().map(|record| may_answer(&record, names)));
    let is_empty = |trace: &Trace| names.is_some() && trace.generations.is_empty();
    let selects =
        |trace: &Trace| Ok(is_empty(trace) || !trace.generations.is_empty() && is_open(trace) && has_answer(trace)?);
    let indices = (0..traces.len()).map(|index| Ok(selects(&traces[index])?.then_some(index)));
    indices.filter_map(Result::transpose).collect()
}

/// Words that a response or a message contains, whatever its format.
const ANSWER_WORDS: [&str; 4] = ["choices", "content", "tool_calls", "blocks"];

/// Returns whether a record contains a possible answer outside its messages.
fn may_answer<N: AsRef<str>>(record: &[u8], names: &[N]) -> bool {
    let Ok(values) = serde_json::from_slice::<HashMap<String, &RawValue>>(record) else { return true };
    let has_name = |key: &str| {
        let bare_name: String = key.chars().filter(|letter| !matches!(letter, '_' | '-')).collect();
        names.iter().any(|name| bare_name.eq_ignore_ascii_case(name.as_ref()))
    };
    values.iter().any(|(key, value)| {
        let text = value.get();
        let is_candidate = text.starts_with(['{', '[', '"']) && key != "messages" && key != "tools";
        is_candidate && (has_name(key) || ANSWER_WORDS.iter().any(|word| text.contains(word)))
    })
}

/// Returns whether the decoded traces contain everything that was sampled. A recorder's own format marks its messages
/// itself.
fn is_complete(traces: &[Arc<Trace>], report: &Report) -> bool {
    let is_list = report.forms.keys().any(|form| form.name == "chat");
    let is_whole = |trace: &Trace| !(trace.generations.is_empty() || is_list && is_open(trace));
    report.unused_choices == 0 && traces.iter().any(|trace| is_whole(trace)) && !lacks_prompts(traces, report)
}

/// Returns whether responses were decoded without their prompts, and the record may store the requests under another
/// name.
fn lacks_prompts(traces: &[Arc<Trace>], report: &Report) -> bool {
    let has_no_prompt = |prompt: &Prompt| matches!(prompt, Prompt::Rendered | Prompt::Unknown);
    let mut first = traces.iter().filter_map(|trace| trace.generations.first());
    !report.forms.keys().any(is_recorders)
        && first.all(|first| first.context.is_empty() && has_no_prompt(&first.prompt))
}

/// Returns whether the last message of a conversation was not sampled.
fn is_open(trace: &Trace) -> bool {
    let sampled = |last: &u32| trace.generations.iter().rev().any(|generation| generation.message == *last);
    trace.conversation.last().is_some_and(|last| !sampled(last))
}

/// Returns whether the name between these bytes is a key: quoted (the quotes may be escaped) and followed by a colon.
fn is_key(before: &[u8], after: &[u8]) -> bool {
    let escapes = after.iter().take_while(|byte| **byte == b'\\').count();
    let rest = after[escapes..].strip_prefix(b"\"").map(<[u8]>::trim_ascii_start);
    before.ends_with(b"\"") && rest.is_some_and(|rest| rest.starts_with(b":"))
}
