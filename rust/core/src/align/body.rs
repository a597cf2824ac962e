//! What the difference between a sampled body and the template's form of it is called.

use crate::drift::Reason;
use crate::exact;
use serde_json::Value;

/// Names of a difference, and whether the turn may still stand in one history with what follows.
#[derive(Debug, PartialEq, Eq)]
pub struct Difference {
    pub reasons: &'static [Reason],
    /// False where something was dropped.
    pub same_history: bool,
}

const fn same(reasons: &'static [Reason]) -> Difference {
    Difference { reasons, same_history: true }
}

/// Names the difference between what was `spelled` (`plain`: without special tokens) and the `body` that the template
/// writes for the message `produced`.
pub fn difference(spelled: &[u8], plain: &[u8], body: &str, produced: &Value) -> Difference {
    let text = String::from_utf8_lossy(spelled);
    let calls = produced.get("tool_calls").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let thought = |text: &str| text.contains("</think>");
    if thought(&text) && !thought(body) {
        return Difference { reasons: &[Reason::ThinkStripped], same_history: false };
    }
    if std::str::from_utf8(spelled).is_err() && shown(&text).trim() == shown(body).trim() {
        return same(&[Reason::LossyText]);
    }
    if text.trim() == body.trim() {
        return same(&[Reason::WhitespaceTrimmed]);
    }
    if thought(body) && !thought(&text) {
        return same(&[Reason::ThinkInserted]);
    }
    if plain == body.as_bytes() {
        return same(&[Reason::SpecialStripped]);
    }
    let split = is_split(produced);
    if !calls.is_empty() {
        let header = header_changed(&text, body, calls);
        return same(match (header, split && rewritten(produced)) {
            (Some(true), true) => {
                &[Reason::ToolCallReformatted, Reason::ToolCallHeaderChanged, Reason::ReasoningFieldSplit]
            }
            (Some(true), false) => &[Reason::ToolCallReformatted, Reason::ToolCallHeaderChanged],
            (_, true) => &[Reason::ToolCallReformatted, Reason::ReasoningFieldSplit],
            (_, false) => &[Reason::ToolCallReformatted],
        });
    }
    if split && squeezed(&text) == squeezed(body) {
        return same(&[Reason::ReasoningFieldSplit]);
    }
    let reasons: &[Reason] = if split { &[Reason::ReasoningFieldSplit] } else { &[Reason::HistoryRewritten] };
    Difference { reasons, same_history: false }
}

/// How many bytes the empty thought has that a template writes before an answer without reasoning; 0 without one.
pub fn inserted_thought(body: &str, produced: &Value) -> usize {
    let content = produced.get("content").and_then(Value::as_str).unwrap_or_default();
    let rest = body.trim_start().strip_prefix("<think>").and_then(|rest| rest.trim_start().strip_prefix("</think>"));
    match rest {
        Some(rest) if !is_split(produced) && !content.contains("</think>") => body.len() - rest.trim_start().len(),
        _ => 0,
    }
}

/// Whether the server took the reasoning out of the content.
fn is_split(produced: &Value) -> bool {
    let text = |key: &str| produced.get(key).and_then(Value::as_str).is_some_and(|text| !text.is_empty());
    text("reasoning_content") || text("reasoning") || text("thinking") || rewritten(produced)
}

/// Whether the content is a server's own rewriting of what was sampled.
fn rewritten(produced: &Value) -> bool {
    produced.get("content").and_then(Value::as_str).is_some_and(|text| text.starts_with("<reasoning>"))
}

/// Whether the text before the arguments of a call differs; `None` where the arguments are not found in both.
fn header_changed(text: &str, body: &str, calls: &[Value]) -> Option<bool> {
    let mut changed = false;
    let (mut left, mut right) = (text, body);
    for call in calls {
        let arguments = call.get("function").unwrap_or(call).get("arguments")?;
        let arguments: Value = match arguments {
            Value::String(text) => serde_json::from_str(text).ok()?,
            other => exact::rounded(other),
        };
        let (before, after) = around(left, &arguments)?;
        let (other, rest) = around(right, &arguments)?;
        changed |= before != other;
        (left, right) = (after, rest);
    }
    Some(changed)
}

/// What stands before and after the first JSON text in `text` that says `value`, also where it was encoded twice.
fn around<'t>(text: &'t str, value: &Value) -> Option<(&'t str, &'t str)> {
    for (at, _) in text.match_indices(['{', '"']) {
        let mut stream = serde_json::Deserializer::from_str(&text[at..]).into_iter::<Value>();
        let Some(Ok(found)) = stream.next() else { continue };
        let inner = found.as_str().and_then(|inner| serde_json::from_str::<Value>(inner).ok());
        if found == *value || inner.as_ref() == Some(value) {
            return Some((&text[..at], &text[at + stream.byte_offset()..]));
        }
    }
    None
}

/// What a text shows of its characters: servers leave a part of one out, or write U+FFFD for it.
fn shown(text: &str) -> String {
    text.replace('\u{FFFD}', "")
}

fn squeezed(text: &str) -> String {
    text.split_whitespace().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn named(spelled: &str, body: &str, produced: &Value) -> Difference {
        difference(spelled.as_bytes(), spelled.as_bytes(), body, produced)
    }

    #[test]
    fn reformatted_arguments_and_a_header_in_another_order_go_on() {
        let produced = json!({"tool_calls": [{"function": {"name": "f", "arguments": "{\"a\":1}"}}]});
        let found = named("<call>f{\"a\":1}</call>", "<call>f{\"a\": 1}</call>", &produced);
        assert_eq!(found, same(&[Reason::ToolCallReformatted]));
        let turned = " to=f<c>commentary json<m>\"{\\\"a\\\": 1}\"";
        let found = named("<c>commentary to=f json<m>{\"a\":1}", turned, &produced);
        assert_eq!(found, same(&[Reason::ToolCallReformatted, Reason::ToolCallHeaderChanged]));
    }

    #[test]
    fn a_part_of_a_character_is_shown_as_a_mark_or_not_at_all() {
        let produced = json!({"content": "ab"});
        for body in ["ab", "ab\u{FFFD}", " ab\u{FFFD}\u{FFFD}"] {
            assert_eq!(difference(b"ab\xE3\x81", b"ab\xE3\x81", body, &produced), same(&[Reason::LossyText]));
        }
        assert!(!difference(b"ab\xE3\x81", b"ab\xE3\x81", "a", &produced).same_history);
    }

    #[test]
    fn a_dropped_thought_is_another_history_and_an_empty_one_is_scaffold() {
        let message = json!({"content": "a"});
        assert!(!named("<think>x</think>a", "a", &message).same_history);
        assert_eq!(named("a", "<think>\n\n</think>\n\na", &message), same(&[Reason::ThinkInserted]));
        assert_eq!(inserted_thought("<think></think>a", &message), 15);
        assert_eq!(inserted_thought("<think></think>a", &json!({"content": "<think></think>a"})), 0); // it was sampled
    }
}
