//! Names the differences between the record and the rendered text: prompts, sampled bodies and dates.
//!
//! Recorded ids take precedence over the render, which only supplies sources. Each difference gets the most specific
//! reason that fits: a doubled BOS, an injected system prompt or date, an expanded image, or simply another prompt. A
//! date is searched for in the recorded prompt, so that the prompt can be rendered as on that day.

use super::branch::{common_prefix, common_suffix};
use super::prompt::Text;
use super::types;
use crate::findings::Reason;
use crate::json_number;
use crate::tokenizer::Tokenizer;
use jiff::civil::Date;
use jiff::fmt::strtime::BrokenDownTime;
use serde_json::Value;

/// The sources of the recorded ids, and the difference from the render, if there is one.
#[derive(Debug)]
pub struct Comparison {
    /// The recorded ids with their sources.
    pub text: Text,
    /// Reason, number of tokens concerned, and a description.
    pub difference: Option<(Reason, usize, String)>,
}

/// Compares `ids`, as the server reported them, with `rendered`. `has_system` is true if the context starts with a
/// system or developer message.
pub fn compare(ids: &[u32], rendered: Text, has_system: bool, tokenizer: &Tokenizer) -> Comparison {
    if rendered.ids == ids {
        return Comparison { text: rendered, difference: None };
    }
    if let Some(compared) = beginning(ids, &rendered, tokenizer).or_else(|| expanded(ids, &rendered, tokenizer)) {
        return compared;
    }
    let first = common_prefix(&rendered.ids, ids);
    let last = common_suffix(&rendered.ids[first..], &ids[first..]);
    let theirs = ids.len() - first - last;
    let ours = rendered.ids.len() - first - last;
    let mut sources = rendered.sources[..first].to_vec();
    sources.resize(first + theirs, types::PROMPT);
    sources.extend_from_slice(&rendered.sources[rendered.sources.len() - last..]);
    let before_content = rendered.sources[..first].iter().all(|&source| source == types::TEMPLATE);
    let injected = !has_system && before_content && last > 0 && (ours == 0 || theirs == 0);
    let difference = if injected {
        let who = if theirs == 0 { "the template writes" } else { "the record has" };
        let detail = format!("{who} {} tokens before the first message, a default system prompt", ours.max(theirs));
        (Reason::SystemDefaultInjected, ours.max(theirs), detail)
    } else {
        let (recorded, template) = (ids.len(), rendered.ids.len());
        let detail =
            format!("the record has {recorded} prompt ids, the template gives {template}; they part at {first}");
        (Reason::PromptMismatch, theirs.max(ours), detail)
    };
    Comparison { text: Text::new(ids.to_vec(), sources), difference: Some(difference) }
}

/// Recognizes one special token more or less at the beginning, with everything else equal: BOS is doubled or missing.
fn beginning(ids: &[u32], rendered: &Text, tokenizer: &Tokenizer) -> Option<Comparison> {
    let special = |id: Option<&u32>| id.is_some_and(|&id| tokenizer.is_special(id));
    if ids.get(1..) == Some(&rendered.ids) && special(ids.first()) {
        let mut sources = vec![types::TEMPLATE];
        sources.extend_from_slice(&rendered.sources);
        let twice = if ids.get(1) == ids.first() { "twice" } else { "that the template does not write" };
        let detail = format!("the record's prompt begins with the special token {} {twice}", ids[0]);
        let text = Text::new(ids.to_vec(), sources);
        return Some(Comparison { text, difference: Some((Reason::BosDuplicate, 1, detail)) });
    }
    if rendered.ids.get(1..) == Some(ids) && special(rendered.ids.first()) {
        let detail = format!("the template begins with the special token {}, the record does not", rendered.ids[0]);
        return Some(Comparison { text: rendered.tail(1), difference: Some((Reason::BosDuplicate, 1, detail)) });
    }
    None
}

/// Recognizes repeated placeholders of images, with everything else equal.
fn expanded(ids: &[u32], rendered: &Text, tokenizer: &Tokenizer) -> Option<Comparison> {
    let mut sources = Vec::with_capacity(ids.len());
    let mut at = 0;
    for (index, id) in ids.iter().enumerate() {
        if rendered.ids.get(at) == Some(id) {
            sources.push(rendered.sources[at]);
            at += 1;
        } else if index > 0 && ids[index - 1] == *id && tokenizer.is_added(*id) {
            sources.push(types::PROMPT);
        } else {
            return None;
        }
    }
    let pads = ids.len() - rendered.ids.len().min(ids.len());
    let text = Text::new(ids.to_vec(), sources);
    let detail = format!("{pads} placeholder tokens more than the template writes: an image was expanded");
    (at == rendered.ids.len())
        .then_some(Comparison { text, difference: Some((Reason::MultimodalExpansion, pads, detail)) })
}

/// The names of a difference, and whether the turn may stay in one history with the turns after it.
#[derive(Debug, PartialEq, Eq)]
pub struct Difference {
    pub reasons: &'static [Reason],
    /// False if something was dropped.
    pub same_history: bool,
}

const fn same(reasons: &'static [Reason]) -> Difference {
    Difference { reasons, same_history: true }
}

/// Names the difference between the sampled bytes `spelled` (`plain`: without special tokens) and the `body` that the
/// template writes for the message `produced`.
pub fn difference(spelled: &[u8], plain: &[u8], body: &str, produced: &Value) -> Difference {
    let text = String::from_utf8_lossy(spelled);
    let calls = produced.get("tool_calls").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let has_thought = |text: &str| text.contains("</think>");
    if has_thought(&text) && !has_thought(body) {
        return Difference { reasons: &[Reason::ThinkStripped], same_history: false };
    }
    if std::str::from_utf8(spelled).is_err() && shown(&text).trim() == shown(body).trim() {
        return same(&[Reason::LossyText]);
    }
    if text.trim() == body.trim() {
        return same(&[Reason::WhitespaceTrimmed]);
    }
    if has_thought(body) && !has_thought(&text) {
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

/// Returns the length in bytes of the empty thought that a template writes before an answer without reasoning; 0 if
/// there is none.
pub fn inserted_thought(body: &str, produced: &Value) -> usize {
    let content = produced.get("content").and_then(Value::as_str).unwrap_or_default();
    let answer =
        body.trim_start().strip_prefix("<think>").and_then(|answer| answer.trim_start().strip_prefix("</think>"));
    match answer {
        Some(answer) if !is_split(produced) && !content.contains("</think>") => body.len() - answer.trim_start().len(),
        _ => 0,
    }
}

/// Returns true if the server moved the reasoning out of the content.
fn is_split(produced: &Value) -> bool {
    let has_text = |key: &str| produced.get(key).and_then(Value::as_str).is_some_and(|has_text| !has_text.is_empty());
    has_text("reasoning_content") || has_text("reasoning") || has_text("thinking") || rewritten(produced)
}

/// Returns true if the content is the server's own rewriting of the sampled text.
fn rewritten(produced: &Value) -> bool {
    produced.get("content").and_then(Value::as_str).is_some_and(|text| text.starts_with("<reasoning>"))
}

/// Returns true if the text before the arguments of a call differs. Returns `None` if the arguments are not found in
/// both texts.
fn header_changed(text: &str, body: &str, calls: &[Value]) -> Option<bool> {
    let mut changed = false;
    let (mut left, mut right) = (text, body);
    for call in calls {
        let arguments = call.get("function").unwrap_or(call).get("arguments")?;
        let arguments: Value = match arguments {
            Value::String(text) => serde_json::from_str(text).ok()?,
            other => json_number::rounded(other),
        };
        let (before, after) = around(left, &arguments)?;
        let (before_other, after_other) = around(right, &arguments)?;
        changed |= before != before_other;
        (left, right) = (after, after_other);
    }
    Some(changed)
}

/// Returns the text before and after the first JSON text in `text` that equals `value`, even if it was encoded twice.
fn around<'t>(text: &'t str, value: &Value) -> Option<(&'t str, &'t str)> {
    for (at, _) in text.match_indices(['{', '"']) {
        let mut stream = serde_json::Deserializer::from_str(&text[at..]).into_iter::<Value>();
        let Some(Ok(parsed)) = stream.next() else { continue };
        let inner = parsed.as_str().and_then(|inner| serde_json::from_str::<Value>(inner).ok());
        if parsed == *value || inner.as_ref() == Some(value) {
            return Some((&text[..at], &text[at + stream.byte_offset()..]));
        }
    }
    None
}

/// Removes U+FFFD from a text. Servers drop an incomplete character or write U+FFFD for it.
fn shown(text: &str) -> String {
    text.replace('\u{FFFD}', "")
}

fn squeezed(text: &str) -> String {
    text.split_whitespace().collect()
}

/// The date formats that templates print.
const FORMS: [&str; 5] = ["%d %b %Y", "%Y-%m-%d", "%d %B %Y", "%B %d, %Y", "%b %d, %Y"];

/// Returns the first date in `text`, in the form `2025-03-07`.
pub fn find(text: &str) -> Option<String> {
    let starts = text.char_indices().filter(|(at, c)| {
        c.is_ascii_alphanumeric() && !text[..*at].chars().next_back().is_some_and(|c| c.is_ascii_alphanumeric())
    });
    for (at, _) in starts {
        for form in FORMS {
            let Ok((parts, _)) = BrokenDownTime::parse_prefix(form, &text.as_bytes()[at..]) else { continue };
            let Ok(date) = parts.to_date() else { continue };
            let date: Date = date;
            return Some(date.to_string());
        }
    }
    None
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
        let result = named("<call>f{\"a\":1}</call>", "<call>f{\"a\": 1}</call>", &produced);
        assert_eq!(result, same(&[Reason::ToolCallReformatted]));
        let reordered = " to=f<c>commentary json<m>\"{\\\"a\\\": 1}\"";
        let result = named("<c>commentary to=f json<m>{\"a\":1}", reordered, &produced);
        assert_eq!(result, same(&[Reason::ToolCallReformatted, Reason::ToolCallHeaderChanged]));
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

#[cfg(test)]
mod dates_tests {
    use super::*;

    #[test]
    fn the_forms_of_the_templates_are_found() {
        assert_eq!(find("Today Date: 26 Jul 2024\n\n").as_deref(), Some("2024-07-26"));
        assert_eq!(find("Current date: 2025-06-28\n").as_deref(), Some("2025-06-28"));
        assert_eq!(find("The date is July 4, 2025.").as_deref(), Some("2025-07-04"));
        assert_eq!(find("no date, 12 of them"), None);
    }
}
