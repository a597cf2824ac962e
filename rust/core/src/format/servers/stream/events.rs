//! Splits a stream into events, each the JSON of one chunk, and drops repeated ones.

use super::super::interface::{Decoded, Outline, Reason, Rejection, Shape, note, reject};
use super::chunks::incomplete;
use crate::findings;
use crate::format::json::diagnose;
use crate::trace::Note;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

/// Returns whether a text is an event stream: its first line that is not blank is a field of an event, or a chunk.
pub(in crate::format) fn is_events(text: &str) -> bool {
    let first = text.trim_start_matches('\u{FEFF}').lines().find(|line| !line.trim().is_empty());
    first.is_some_and(|line| FIELDS.iter().any(|field| line.starts_with(field)) || line.starts_with('{'))
}

/// Prefixes of the lines of an event stream.
const FIELDS: [&str; 5] = ["data:", "event:", "id:", "retry:", ":"];

const DONE: &str = "[DONE]";

/// Reads the chunks of a list or a text. Also returns notes about problems.
pub(super) fn read(raw: &RawValue) -> Decoded<(Vec<String>, Vec<Note>)> {
    let mut notes = Vec::new();
    let events = match Shape::of(raw) {
        Shape::List => listed(raw, &mut notes)?,
        Shape::Text => of_text(&text_of(raw)?, &mut notes)?,
        _ => return Err(not_a_stream("it is neither a list of chunks nor the text of events")),
    };
    if events.is_empty() {
        return Err(not_a_stream("it has no chunk"));
    }
    Ok((events, notes))
}

fn text_of(raw: &RawValue) -> Decoded<String> {
    serde_json::from_str(raw.get()).map_err(|_| not_a_stream("its text is not a string of whole characters"))
}

/// Returns the elements of a list: chunks, or lines of a stream.
fn listed(raw: &RawValue, notes: &mut Vec<Note>) -> Decoded<Vec<String>> {
    let items: Vec<&RawValue> = serde_json::from_str(raw.get()).map_err(|_| not_a_stream("it is no list"))?;
    if items.iter().all(|item| Shape::of(item) == Shape::Text) {
        let lines = items.into_iter().map(text_of).collect::<Decoded<Vec<_>>>()?;
        return of_text(&lines.join("\n"), notes);
    }
    let chunks: Vec<_> = items.iter().filter(|item| Shape::of(item) != Shape::Null).collect();
    match chunks.iter().position(|item| Shape::of(item) != Shape::Object) {
        Some(at) => Err(not_a_stream(&format!("its element {at} is not an object"))),
        None => Ok(chunks.into_iter().map(|item| item.get().to_owned()).collect()),
    }
}

/// Returns the events of a text: `data:` lines, or one chunk per line.
fn of_text(text: &str, notes: &mut Vec<Note>) -> Decoded<Vec<String>> {
    let (mut events, mut pending) = (Vec::new(), String::new());
    for line in text.trim_start_matches('\u{FEFF}').lines() {
        let line = line.trim_end_matches('\r');
        let data = line.strip_prefix("data:").map(|data| data.strip_prefix(' ').unwrap_or(data));
        match data.or(Some(line).filter(|line| line.starts_with('{'))) {
            Some(data) if data.trim() == DONE => {}
            Some(data) if pending.is_empty() => match whole(data) {
                Some(event) => events.push(event),
                None => pending.push_str(data),
            },
            Some(data) => {
                pending.push('\n');
                pending.push_str(data);
            }
            None if line.trim().is_empty() => settle(&mut pending, &mut events)?,
            None if FIELDS.iter().any(|field| line.starts_with(field)) => {}
            None => {
                let start: String = line.chars().take(20).collect();
                return Err(not_a_stream(&format!("a line begins with {start:?}")));
            }
        }
    }
    if settle(&mut pending, &mut events).is_err() {
        notes.push(incomplete("the stream breaks off within a chunk"));
    }
    Ok(events)
}

/// Adds the event whose lines are complete.
fn settle(pending: &mut String, events: &mut Vec<String>) -> Decoded<()> {
    let data = std::mem::take(pending);
    if data.trim().is_empty() {
        return Ok(());
    }
    let event = whole(&data).ok_or_else(|| not_a_stream(&format!("chunk {} is not a JSON object", events.len())))?;
    events.push(event);
    Ok(())
}

/// Returns `data` if it is a JSON object, with quotes added around bare NaN.
fn whole(data: &str) -> Option<String> {
    let text = diagnose::text(data.trim().as_bytes()).ok()?;
    let is_object = text.starts_with('{') && serde_json::from_str::<IgnoredAny>(&text).is_ok();
    is_object.then(|| text.into_owned())
}

/// Drops repetitions by a recorder or a retry: every chunk twice, the whole stream twice, or earlier attempts.
pub(super) fn without_repeats(events: Vec<String>, notes: &mut Vec<Note>) -> Vec<String> {
    let half = events.len() / 2;
    let even = events.len() >= 4 && events.len().is_multiple_of(2);
    let dropped = |count: usize, what: &str| {
        note(findings::Reason::DuplicateGeneration, count, format!("{what}: {count} chunks are dropped"))
    };
    if even && events.chunks_exact(2).all(|pair| pair[0] == pair[1]) {
        notes.push(dropped(half, "every chunk was recorded twice"));
        return events.into_iter().step_by(2).collect();
    }
    if even && events[..half] == events[half..] {
        notes.push(dropped(half, "the stream was recorded twice"));
        return events.into_iter().take(half).collect();
    }
    let start = last_attempt(&events);
    if start > 0 {
        notes.push(dropped(start, "an earlier attempt stands before the stream"));
    }
    events.into_iter().skip(start).collect()
}

/// Returns the index at which the last attempt starts: a chunk with a new id that starts a message, after several
/// chunks of another id.
fn last_attempt(events: &[String]) -> usize {
    let (mut start, mut current, mut of_current) = (0, None, 0);
    for (at, event) in events.iter().enumerate() {
        let Some((id, begins)) = identity(event) else { continue };
        if current.as_deref().is_some_and(|current| current != id) && begins && of_current > 1 {
            (start, of_current) = (at, 0);
        }
        of_current = if current.as_deref() == Some(&*id) { of_current + 1 } else { 1 };
        current = Some(id);
    }
    start
}

/// Returns the id of a chunk, and whether its delta starts a message.
fn identity(event: &str) -> Option<(String, bool)> {
    let chunk = Outline::parse(event).ok()?;
    let id = chunk.text("id").ok()??;
    let choice = chunk.first_of("choices")?;
    let begins = choice.object("delta").ok()?.is_some_and(|delta| delta.has("role"));
    (!id.is_empty()).then_some((id, begins))
}

pub(super) fn not_a_stream(what: &str) -> Rejection {
    reject(Reason::WrongType, "TG-FORMAT-056", format!("not a stream: {what}"))
        .why("The answer of the policy cannot be assembled")
        .fix("Record the chunks as they came, or the assembled response")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(text: &str) -> (Vec<String>, Vec<Note>) {
        let raw = RawValue::from_string(serde_json::Value::from(text).to_string()).expect("JSON");
        let (events, mut notes) = read(&raw).expect("a stream");
        (without_repeats(events, &mut notes), notes)
    }

    #[test]
    fn comments_fields_crlf_and_split_data_are_read() {
        let text = ": hello\r\nevent: x\r\ndata: {\"a\":\r\ndata: 1}\r\n\r\ndata:{\"b\": NaN}\r\ndata: [DONE]\r\n";
        assert_eq!(events(text).0, ["{\"a\":\n1}", "{\"b\": \"NaN\"}"]);
    }

    #[test]
    fn a_stream_that_breaks_off_is_read_as_far_as_it_goes() {
        let (found, notes) = events("data: {\"a\": 1}\n\ndata: {\"b\":");
        assert_eq!(found, ["{\"a\": 1}"]);
        assert_eq!(notes[0].reason, findings::Reason::StreamIncomplete);
    }

    #[test]
    fn repeats_are_dropped_and_chunks_that_happen_to_be_equal_are_not() {
        let line = |name: &str| format!("data: {{\"n\": \"{name}\"}}\n");
        let read = |names: &[&str]| events(&names.iter().map(|name| line(name)).collect::<String>());
        let (found, notes) = read(&["a", "a", "b", "b"]);
        assert_eq!((found.len(), notes[0].reason), (2, findings::Reason::DuplicateGeneration));
        assert_eq!(read(&["a", "b", "a", "b"]).0.len(), 2);
        let (found, notes) = read(&["a", "b", "b", "c"]);
        assert!(found.len() == 4 && notes.is_empty());
    }
}
