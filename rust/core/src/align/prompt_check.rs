//! Checks that a prompt shows its messages: the text of each message, tool call and tool result.
//!
//! The check needs no knowledge of templates and servers. Each message is searched for once, in the first prompt that
//! contains it. If a render reports which bytes belong to which message, nothing is searched. Otherwise texts are
//! compared without white space. Reasoning, media and values that are not strings may be missing.

use super::prompt::Scaffold;
use super::resolve::{decode_all, is_special};
use super::trace::TraceAligner;
use crate::findings::Reason;
use crate::json_number;
use crate::server::Server;
use crate::template::{Field, Rendered, Span};
use crate::trace::{Generation, Message, value_of};
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::cell::OnceCell;
use std::sync::Arc;

/// Maximum number of findings per trace.
const MOST: usize = 8;
/// Texts that end reasoning inside a message. Each ends in one of two bytes.
const CLOSERS: [&str; 7] =
    ["</think>", "</thinking>", "</thought>", "</reasoning>", "[/THINK]", "</seed:think>", "<|END_THINKING|>"];

/// One string of a message that its prompt must contain.
struct ExpectedString<'a> {
    what: &'static str,
    text: Cow<'a, str>,
    field: Field,
}

impl TraceAligner<'_, '_> {
    /// Reports the messages of a generation's context that its prompt lacks. The prompt is `ids` if recorded, else the
    /// rendered one.
    pub fn check_shown(
        &mut self,
        turn: usize,
        generation: &Generation,
        rendered: Option<&Rendered>,
        ids: Option<&[u32]>,
    ) {
        let (shown, tokenizer, trace) = (&self.shown, self.tokenizer, self.trace);
        let server = self.scaffold.server_of(generation);
        let new = |(_, index): &(usize, &u32)| !shown.get(**index as usize).copied().unwrap_or(true);
        let positions: Vec<(usize, u32)> =
            generation.context.iter().enumerate().filter(new).map(|(at, index)| (at, *index)).collect();
        let Some(&(first, _)) = positions.first() else { return };
        let as_rendered = rendered.filter(|_| ids.is_none());
        if as_rendered.is_some_and(|rendered| end_in(&rendered.spans, &positions, &trace.messages)) {
            return positions.iter().for_each(|&(_, index)| self.shown[index as usize] = true);
        }
        let mut covered = vec![0_usize; generation.context.len() - first];
        // Schemas of tools at the front contain names of tools too.
        let (mut schemas, mut earlier, mut only_schemas) = (0, 0, true);
        for span in as_rendered.iter().flat_map(|rendered| &rendered.spans) {
            only_schemas &= span.field == Field::ToolSchema;
            schemas = if only_schemas { span.end } else { schemas };
            match (span.message as usize).checked_sub(first) {
                None => earlier = span.end,
                Some(at) if span.field == Field::Content => {
                    if let Some(bytes) = covered.get_mut(at) {
                        *bytes += span.end - span.start;
                    }
                }
                _ => {}
            }
        }
        let region = as_rendered.map_or("", |rendered| &rendered.text[earlier.max(schemas)..]);
        let prompt = OnceCell::new();
        let text_of = || match ids {
            // The placeholder of an image occurs once for each feature in the prompt, and once in the message.
            Some(ids) => {
                let mut ids = ids.to_vec();
                ids.dedup_by(|id, before| id == before && is_special(*id, tokenizer));
                squeezed(&String::from_utf8_lossy(&decode_all(&ids, tokenizer)))
            }
            None => squeezed(rendered.map_or("", |rendered| &rendered.text[schemas..])),
        };
        let mut missing = Vec::new();
        for (at, index) in positions {
            self.shown[index as usize] = true;
            let message = &trace.messages[index as usize];
            let expected = strings(message, server);
            for field in [Field::Content, Field::ToolCall] {
                let strings_of_field = || expected.iter().filter(|expected| expected.field == field);
                let is_there = if field == Field::Content {
                    covered[at - first] >= strings_of_field().map(|expected| expected.text.trim().len()).sum()
                } else {
                    strings_of_field()
                        .all(|expected| memchr::memmem::find(region.as_bytes(), expected.text.as_bytes()).is_some())
                };
                if is_there {
                    continue;
                }
                let prompt = prompt.get_or_init(text_of);
                if let Some(expected) = strings_of_field().find(|expected| !shows(prompt, expected)) {
                    missing.push((index, expected.what, message));
                }
            }
        }
        for (index, what, message) in missing {
            let dropped = || self.scaffold.drops_beside_calls();
            let is_text_of_call = what == TEXT && message.get("tool_calls").is_some_and(|calls| !calls.is_null());
            if self.unshown == MOST || is_text_of_call && message.role() == "assistant" && dropped() {
                continue;
            }
            self.unshown += 1;
            let detail = format!("{what} of message {index} ({}) is not in the prompt", role_of(message));
            self.report(Reason::MessageNotInPrompt, turn, -1, 0, detail);
        }
    }
}

/// Returns true if the last spans of a render are the complete texts of these messages (positions and indices), so
/// that nothing has to be searched. Returns false if a quick check cannot show it.
fn end_in(spans: &[Span], positions: &[(usize, u32)], messages: &[Message]) -> bool {
    let mut spans = spans.iter().rev().peekable();
    positions.iter().rev().all(|&(at, index)| {
        let mut bytes = 0;
        while let Some(span) = spans.next_if(|span| span.message as usize == at) {
            bytes += if span.field == Field::Content { span.end - span.start } else { 0 };
        }
        is_text_of(&messages[index as usize], bytes)
    })
}

/// Returns true if a message has no tool calls and its content is a text of at most this many bytes.
fn is_text_of(message: &Message, bytes: usize) -> bool {
    let Value::Object(fields) = &message.value else { return false };
    let calls = value_of(fields, "tool_calls").and_then(Value::as_array).is_some_and(|calls| !calls.is_empty());
    match value_of(fields, "content") {
        _ if calls => false,
        Some(Value::String(text)) => {
            let answer = || if message.role() == "assistant" { behind_reasoning(text) } else { text };
            text.len() <= bytes || text.trim().len() <= bytes || answer().trim().len() <= bytes
        }
        content => content.is_none_or(Value::is_null),
    }
}

const TEXT: &str = "the text";
const NAME: &str = "the name of a tool call";
const ARGUMENT: &str = "an argument of a tool call";

/// Returns the role as a finding prints it.
fn role_of(message: &Message) -> String {
    let role = message.role();
    if role.is_empty() { "no role".to_owned() } else { role.chars().take(40).collect() }
}

/// Returns the strings of a message that its prompt must contain, as this server writes it.
fn strings(message: &Message, server: Server) -> Vec<ExpectedString<'_>> {
    let Value::Object(fields) = &message.value else { return Vec::new() };
    let mut expected = Vec::new();
    let is_assistant = message.role() == "assistant";
    let mut text = |text| {
        let text = if is_assistant { behind_reasoning(text) } else { text };
        expected.push(ExpectedString { what: TEXT, text: Cow::Borrowed(text), field: Field::Content });
    };
    match value_of(fields, "content") {
        Some(Value::String(content)) => text(content),
        Some(Value::Array(parts)) => {
            for part in parts {
                let is_text = part
                    .get("type")
                    .is_none_or(|kind| matches!(kind.as_str(), Some("text" | "input_text" | "output_text")));
                match (part.as_str(), part.get("text").and_then(Value::as_str)) {
                    (Some(part), _) => text(part),
                    (None, Some(part)) if is_text => text(part),
                    _ => {}
                }
            }
        }
        _ => {}
    }
    for call in value_of(fields, "tool_calls").and_then(Value::as_array).into_iter().flatten() {
        let function = call.get("function").unwrap_or(call);
        if let Some(name) = function.get("name").and_then(Value::as_str) {
            expected.push(ExpectedString { what: NAME, text: Cow::Borrowed(name), field: Field::ToolCall });
        }
        // A prompt cannot show arguments that its server does not pass on.
        let empties = server.empties_arguments();
        let counts = |value: &Value| !empties || value.is_object();
        match function.get("arguments") {
            Some(Value::String(text)) => match json_number::parse(text) {
                Ok(value) if counts(&value) => owned_leaves(&value, &mut expected),
                Err(_) if !empties => {
                    expected.push(ExpectedString { what: ARGUMENT, text: Cow::Borrowed(text), field: Field::ToolCall });
                }
                _ => {}
            },
            Some(value) if counts(value) => owned_leaves(value, &mut expected),
            _ => {}
        }
    }
    expected
}

/// Returns the text after the last end of reasoning.
fn behind_reasoning(text: &str) -> &str {
    let mut end = text.len();
    while let Some(at) = memchr::memrchr2(b'>', b']', &text.as_bytes()[..end]) {
        if CLOSERS.iter().any(|closer| text[..=at].ends_with(closer)) {
            return &text[at + 1..];
        }
        end = at;
    }
    text
}

/// Appends the strings and numbers inside a value.
fn owned_leaves(value: &Value, expected: &mut Vec<ExpectedString<'_>>) {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        Value::Array(items) => return items.iter().for_each(|item| owned_leaves(item, expected)),
        Value::Object(map) => match json_number::text_in(map) {
            Some(digits) => digits.to_owned(),
            None => return map.values().for_each(|item| owned_leaves(item, expected)),
        },
        Value::Null | Value::Bool(_) => return,
    };
    expected.push(ExpectedString { what: ARGUMENT, text: Cow::Owned(text), field: Field::ToolCall });
}

/// Returns true if a prompt without white space contains a string, either directly or as JSON writes it.
fn shows(prompt: &str, expected: &ExpectedString<'_>) -> bool {
    let contains = |text: &str| memchr::memmem::find(prompt.as_bytes(), squeezed(text).as_bytes()).is_some();
    if contains(&expected.text) {
        return true;
    }
    let quoted = |text: &str| json!(text).to_string().trim_matches('"').to_owned();
    let escaped_once = quoted(&expected.text);
    let ascii: String = escaped_once.chars().map(escaped).collect();
    if contains(&escaped_once) || contains(&ascii) || contains(&quoted(&escaped_once)) {
        return true;
    }
    if expected.field == Field::ToolCall && expected.text.parse::<f64>().is_ok() {
        // A float may be written in another form.
        return true;
    }
    // Normalizers may write characters in another form. The characters with a single form (ASCII) must still match.
    let plain = plain(&expected.text);
    plain != squeezed(&expected.text) && (plain.is_empty() || plain_holds(prompt, &plain))
}

fn plain_holds(prompt: &str, text: &str) -> bool {
    memchr::memmem::find(plain(prompt).as_bytes(), text.as_bytes()).is_some()
}

/// Writes a character as `json.dumps` does with `ensure_ascii`.
fn escaped(c: char) -> String {
    if c.is_ascii() {
        return c.to_string();
    }
    c.encode_utf16(&mut [0; 2]).iter().fold(String::new(), |text, unit| text + &format!("\\u{unit:04x}"))
}

fn squeezed(text: &str) -> String {
    text.split_whitespace().collect()
}

/// Returns the ASCII characters that are not white space.
fn plain(text: &str) -> String {
    text.chars().filter(|c| c.is_ascii() && !c.is_ascii_whitespace()).collect()
}

impl Scaffold<'_> {
    /// Returns true if the template drops the text of an assistant's message that has tool calls.
    fn drops_beside_calls(&self) -> bool {
        *self.drops.get_or_init(|| {
            const BODY: &str = "tracegrad probes the calls";
            let function = json!({"name": "probe", "arguments": {"word": "a"}});
            let calls = json!([{"id": "abcdefghi", "type": "function", "function": function}]);
            let messages = [
                json!({"role": "user", "content": "hello"}),
                json!({"role": "assistant", "content": BODY, "tool_calls": calls}),
                json!({"role": "tool", "content": "1", "name": "probe", "tool_call_id": "abcdefghi"}),
            ];
            let parameters = json!({"type": "object", "properties": {"word": {"type": "string"}}});
            let tool = json!({"name": "probe", "description": "Probes", "parameters": parameters});
            let tools = Arc::new(json!([{"type": "function", "function": tool}]));
            let drops = |tools: Option<&Arc<Value>>| {
                let template = self.tokenizer.template_for(tools).ok()?;
                let text = template.render_text(&messages.each_ref(), tools, true, &Map::new()).ok()?;
                Some(!text.contains(BODY))
            };
            drops(Some(&tools)).or_else(|| drops(None)).unwrap_or(false)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holds(prompt: &str, text: &str, field: Field) -> bool {
        shows(&squeezed(prompt), &ExpectedString { what: TEXT, text: Cow::Borrowed(text), field })
    }

    #[test]
    fn a_text_is_found_without_white_space_and_as_json_writes_it() {
        assert!(holds("<u> What  is\n2+2? <e>", " What is 2+2?\n", Field::Content));
        assert!(!holds("<u> What is 3+2? <e>", "What is 2+2?", Field::Content));
        // json.dumps('a "b"\né😊'), with and without ensure_ascii, and encoded twice.
        let text = "a \"b\"\né😊";
        assert!(holds(r#"{"x": "a \"b\"\né😊"}"#, text, Field::ToolCall));
        assert!(holds(r#"{"x": "a \"b\"\n\u00e9\ud83d\ude0a"}"#, text, Field::ToolCall));
        assert!(holds(r#"{"x": "{\"y\": \"a \\\"b\\\"\\né😊\"}"}"#, text, Field::ToolCall));
        // Another form of the same letter, as a normalizer writes it.
        assert!(holds("<u>caf\u{e9} now", "cafe\u{301} now".trim_start_matches("cafe\u{301}"), Field::Content));
        assert!(holds("<u>x\u{e4} now", "x\u{308}a now".trim_start_matches("x\u{308}a"), Field::Content));
        assert!(!holds("<u>é", "é!", Field::Content));
    }

    #[test]
    fn reasoning_may_be_missing_from_the_prompt() {
        assert_eq!(behind_reasoning("<think>a</think>b"), "b");
        assert_eq!(behind_reasoning("[THINK]a[/THINK]b</think>c"), "c");
        assert_eq!(behind_reasoning("plain"), "plain");
        assert_eq!(behind_reasoning("é</thought>a > b [1]"), "a > b [1]");
        for closer in CLOSERS {
            assert_eq!(behind_reasoning(&format!("a{closer}b")), "b");
        }
    }

    #[test]
    fn messages_whose_complete_texts_end_a_render_need_no_search() {
        let message = |value: Value| Message::new(value, None);
        let answer = "<think>a</think>\n\nfour";
        let messages = [
            message(json!({"role": "user", "content": " 2+2? "})),
            message(json!({"role": "assistant", "content": answer, "tool_calls": null})),
            message(json!({"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f"}}]})),
            message(json!({"role": "user", "content": [{"type": "text", "text": "a"}]})),
        ];
        let span = |message: u32, size: usize, field: Field| Span { start: 0, end: size, message, field };
        let content_span = |message: u32, size: usize| span(message, size, Field::Content);
        let ends_in = |spans: &[Span], positions: &[(usize, u32)]| end_in(spans, positions, &messages);
        assert!(ends_in(&[content_span(0, 9), content_span(1, 4), content_span(2, 4)], &[(1, 0), (2, 1)]));
        assert!(!ends_in(&[content_span(0, 9), content_span(1, 3), content_span(2, 4)], &[(1, 0), (2, 1)]));
        assert!(!ends_in(&[content_span(0, 9), content_span(1, 4), content_span(2, 3)], &[(1, 0), (2, 1)]));
        assert!(ends_in(&[content_span(0, 2), span(0, 9, Field::Reasoning), content_span(0, 2)], &[(0, 0)]));
        // Text before a later message, or content that is not only text, is searched for.
        assert!(!ends_in(&[content_span(2, 4), content_span(1, 4)], &[(1, 0), (2, 1)]));
        assert!(!ends_in(&[content_span(0, 9)], &[(0, 2)]) && !ends_in(&[content_span(0, 9)], &[(0, 3)]));
    }
}
