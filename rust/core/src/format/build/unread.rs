//! Rejects messages whose text, tool calls or tool results are in fields that no chat template reads.
//!
//! Without this check, such a message would be an empty one, and the policy would learn to answer nothing. Names of
//! fields and kinds of parts are compared in lower case and without `_`, `-` and `.`.

use crate::format::fields::{Fields, get, present};
use crate::format::rejection::{Decoded, Reason, Rejection, reject};
use crate::media::object_as_text;
use serde_json::{Map, Value};

/// Names of fields that contain the text of a message in some producer's form.
const TEXT: &str = "text texts value values body message msg utterance answer response output outputs completion result \
    results items parts blocks contents contentparts contentblocks contentitems segments chunks elements \
    data input prompt question reply statement markdown html plaintext rawtext speech line lines payload \
    generatedtext say displaytext textcontent contenttext fragments children transcript raw";
/// Fields of a message that contain no text of it: labels, and what templates or other checks read.
const LABELS: &str = "role name content toolcalls functioncall refusal object status state sender author agent channel \
    language lang locale source speaker recipient recipients to from user owner phase index order weight \
    tags title summary tools responseformat group description";
/// Parts of the names of other such fields.
const LABEL_WORDS: &str = "reason think thought meta extra kwargs provider time date created error usage logprob token image \
    video audio attachment annotation citation cache version reward";
/// Ends of the names of other such fields.
const LABEL_ENDS: &str = "id ids type name role model";
/// Fields of a tool call that name the tool.
const CALL_NAMES: &str = "name tool toolname function functionname action toolid";
/// Fields of a tool call with its arguments.
const CALL_ARGUMENTS: &str = "arguments args input inputs parameters params inputparameters toolinput actioninput kwargs toolargs \
    inputargs";
/// Kinds of parts that are calls or results.
const CALL_PARTS: &str = "tooluse toolcall functioncall toolinvocation customtoolcall toolresult functionresult \
    functioncalloutput toolcallresult toolresponse functionresponse";
/// Fields of a message with the results of its calls.
const RESULTS: &str = "toolresults toolresponses toolcallresults tooloutputs functionresults";
/// Largest nesting depth that is searched.
const DEEPEST: usize = 6;

/// Checks that nothing of a message would be lost.
pub fn check(fields: &Fields) -> Decoded<()> {
    if let Some(kind) = call_part(fields) {
        return Err(reject(Reason::UnknownForm, "TG-FORMAT-093", format!("its content has a part of kind {kind:?}"))
            .why("Chat templates read only the text of a content, so the call or its result would be lost")
            .fix("Write calls as `tool_calls`, and each result as a message of the role `tool`"));
    }
    if let Some(kind) = parts_of(fields).find_map(object_as_text) {
        let what = format!("its content has a part of kind {kind:?} whose text is an object");
        return Err(reject(Reason::UnknownForm, "TG-FORMAT-095", what)
            .why("Chat templates read a text as a string, so it would be lost or printed as an object")
            .fix("Write the text of the part as a string"));
    }
    let is_result_list = |key: &str, value: &Value| {
        value.is_array() && is_filled(value) && has(RESULTS, &normal(key))
            || key == "tool_calls" && get(fields, "content").is_some_and(is_filled) && has_result(value)
    };
    if let Some((key, _)) = fields.iter().find(|(key, value)| is_result_list(key, value)) {
        return Err(reject(Reason::UnknownForm, "TG-FORMAT-096", format!("it has results of tools under `{key}`"))
            .why("Chat templates read a result only as a message of the role `tool`")
            .fix("Write each result as a message of the role `tool`, after the message with its call"));
    }
    let has_calls = present(fields, "tool_calls").or(present(fields, "function_call")).is_some_and(is_filled);
    let foreign_calls = || fields.iter().find(|(key, value)| is_call_list(key, value));
    if let Some((key, _)) = foreign_calls().filter(|_| !has_calls) {
        return Err(reject(Reason::UnknownForm, "TG-FORMAT-094", format!("it has tool calls under `{key}`"))
            .why("Chat templates read only `tool_calls`, so an answer would be trained as if no tool had been used")
            .fix("Write calls as `tool_calls`, and each result as a message of the role `tool`"));
    }
    if ["content", "refusal"].iter().any(|key| get(fields, key).is_some_and(is_filled)) {
        return Ok(());
    }
    let lacks_content = present(fields, "content").is_none();
    match fields.iter().find(|(key, value)| holds_text_of_message(key, value, has_calls, lacks_content)) {
        None => Ok(()),
        Some((key, _)) => Err(no_content(key)),
    }
}

/// Creates the rejection of a message without content that has text under another key.
pub fn no_content(key: &str) -> Rejection {
    reject(Reason::UnknownForm, "TG-FORMAT-092", format!("it has no content; its text may be in `{key}`"))
        .why("The message would be read as an empty one")
        .fix("Write the text as `content`")
}

/// Returns the name of a field or kind for comparison.
fn normal(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).map(|letter| letter.to_ascii_lowercase()).collect()
}

/// Returns whether a list of names has a name.
fn has(names: &str, name: &str) -> bool {
    names.split_ascii_whitespace().any(|each| each == name)
}

/// Returns whether a value is neither null nor empty.
fn is_filled(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        _ => true,
    }
}

/// Returns whether a call contains its result. The text next to it may have been sampled before or after it.
fn has_result(calls: &Value) -> bool {
    let mut calls = calls.as_array().into_iter().flatten().filter_map(Value::as_object);
    calls.any(|call| ["result", "output"].iter().any(|key| present(call, key).is_some()))
}

/// Returns the parts of a content that is a list.
fn parts_of(fields: &Fields) -> impl Iterator<Item = &Value> {
    get(fields, "content").and_then(Value::as_array).into_iter().flatten()
}

/// Returns the kind of the first part of a content that is a tool call or a result.
fn call_part(fields: &Fields) -> Option<String> {
    let is_call = |kind: &str| has(CALL_PARTS, &normal(kind));
    parts_of(fields).filter_map(Value::as_object).find_map(|part| {
        let kind = part.get("type").and_then(Value::as_str);
        let names = kind.map_or_else(|| part.keys().map(String::as_str).collect(), |kind| vec![kind]);
        names.into_iter().find(|name| is_call(name)).map(str::to_owned)
    })
}

/// Returns whether a field of a message is a list of tool calls.
fn is_call_list(key: &str, value: &Value) -> bool {
    let is_label = || matches!(key, "content" | "tool_calls" | "function_call") || is_label(&normal(key), true);
    value.as_array().is_some_and(|items| items.iter().any(is_call)) && !is_label()
}

/// Returns whether an object has the name of a tool and its arguments.
fn is_call(value: &Value) -> bool {
    let Some(fields) = value.as_object() else { return false };
    let inner = ["function", "toolInvocation"].iter().find_map(|key| fields.get(*key)?.as_object());
    let has_both = |fields: &Map<String, Value>| {
        let has_name = fields.iter().any(|(key, value)| value.is_string() && has(CALL_NAMES, &normal(key)));
        has_name && fields.iter().any(|(key, value)| has(CALL_ARGUMENTS, &normal(key)) && !is_schema(value))
    };
    has_both(fields) || inner.is_some_and(has_both)
}

/// Returns whether the parameters of a tool are their description and not values.
fn is_schema(value: &Value) -> bool {
    value.as_object().is_some_and(|fields| fields.contains_key("properties"))
}

/// Returns whether a field cannot contain text of the message. `calls` is whether calls are searched instead of text.
fn is_label(name: &str, calls: bool) -> bool {
    let is_named = has(LABELS, name) || LABEL_ENDS.split_ascii_whitespace().any(|end| name.ends_with(end));
    !calls && is_named || LABEL_WORDS.split_ascii_whitespace().any(|word| name.contains(word))
}

fn holds_text_of_message(key: &str, value: &Value, has_calls: bool, lacks_content: bool) -> bool {
    if value.is_null() || value.is_number() || value.is_boolean() {
        return false;
    }
    let name = normal(key);
    let is_text = has(TEXT, &name);
    if !is_text && (has_calls || is_label(&name, false)) {
        return false;
    }
    let is_string_alone = lacks_content && value.is_string();
    holds_text(value, is_text || is_string_alone, DEEPEST)
}

/// Returns whether a value contains text: several words, or any if `is_text`.
fn holds_text(value: &Value, is_text: bool, deepest: usize) -> bool {
    match value {
        Value::String(text) => {
            let words = text.split_whitespace().filter(|word| word.chars().any(char::is_alphabetic)).count();
            // Some languages have no spaces between words.
            words > 1
                || text.chars().any(|sign| !sign.is_ascii() && sign.is_alphabetic())
                || is_text && !text.trim().is_empty()
        }
        Value::Array(items) if deepest > 0 => items.iter().any(|item| holds_text(item, is_text, deepest - 1)),
        Value::Object(fields) if deepest > 0 => fields.iter().any(|(key, value)| {
            let name = normal(key);
            (name == "content" || has(TEXT, &name)) && holds_text(value, true, deepest - 1)
        }),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::check;
    use serde_json::{Value, json};

    fn code(message: &Value) -> String {
        let fields = message.as_object().cloned().unwrap_or_default();
        check(&fields).map_or_else(|rejection| rejection.error.to_string(), |()| String::new())
    }

    #[test]
    fn text_in_another_field_is_named_and_labels_are_not_text() {
        let lost = [
            json!({"role": "user", "items": [{"content_type": "text", "text": "hi"}]}),
            json!({"role": "user", "content": "", "parts": [{"type": "text", "text": "hi"}]}),
            json!({"role": "assistant", "content": null, "text": "4"}),
            json!({"role": "user", "wording": "four"}),
            json!({"role": "assistant", "content": null, "wording": "it"}),
            json!({"role": "assistant", "content": "", "wording": "it is four"}),
            json!({"role": "assistant", "content": "", "wording": "四个"}),
            json!({"role": "assistant", "tool_calls": [{"id": "a"}], "value": "wait"}),
        ];
        for (message, field) in
            lost.iter().zip(["items", "parts", "text", "wording", "wording", "wording", "wording", "value"])
        {
            assert!(code(message).contains(&format!("may be in `{field}`")), "{message}");
        }
        let empty = [
            json!({"role": "assistant", "content": null, "tool_calls": [{"id": "a"}], "note": "a b"}),
            json!({"role": "assistant", "content": null}),
            json!({"role": "assistant", "content": "", "wording": "it"}),
            json!({"role": "assistant", "content": "", "reasoning_content": "let me see", "model": "a b"}),
            json!({"role": "assistant", "content": null, "refusal": "I will not", "wording": "a b"}),
            json!({"role": "assistant", "content": "4", "parts": [{"type": "text", "text": "4"}]}),
            json!({"role": "assistant", "content": null, "parts": [], "agent": "planner", "created_at": "2026-01-01 a b"}),
        ];
        for message in &empty {
            assert_eq!(code(message), "", "{message}");
        }
    }

    #[test]
    fn calls_that_no_template_reads_are_named() {
        let lost = [
            json!({"role": "assistant", "content": "5", "toolsCalled": [{"name": "add", "inputParameters": {"a": 1}}]}),
            json!({"role": "assistant", "content": "5", "used": [{"function": {"name": "add", "arguments": "{}"}}]}),
            json!({"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "tool_result", "id": "a"}]}),
            json!({"role": "assistant", "content": [{"toolUse": {"name": "add"}}]}),
            json!({"role": "assistant", "content": "5", "tool_calls": [{"id": "a"}], "tool_results": ["4"]}),
            json!({"role": "assistant", "content": "5", "tool_calls": [{"id": "a", "result": "4"}]}),
            json!({"role": "assistant", "content": [{"type": "text", "text": {"value": "4"}}]}),
        ];
        for (message, name) in lost.iter().zip([
            "`toolsCalled`",
            "`used`",
            "\"tool_result\"",
            "\"toolUse\"",
            "`tool_results`",
            "`tool_calls`",
            "kind \"text\"",
        ]) {
            assert!(code(message).contains(name), "{message}");
        }
        let others = [
            json!({"role": "assistant", "content": "5", "tool_calls": [{"id": "a"}], "used": [{"name": "a", "args": {}}]}),
            json!({"role": "system", "content": "5", "tools": [{"name": "a", "parameters": {"properties": {}}}]}),
            json!({"role": "assistant", "content": "5", "extra": [{"name": "a", "args": {}}]}),
            json!({"role": "assistant", "content": [{"type": "text", "text": "a"}]}),
            json!({"role": "assistant", "content": [{"type": "hint", "hint": "x"}]}), // `align` holds what follows it
            json!({"role": "user", "content": ["a", {"text": "b"}, {"image": "x"}, {"type": "image_url"}]}),
        ];
        for message in &others {
            assert_eq!(code(message), "", "{message}");
        }
    }
}
