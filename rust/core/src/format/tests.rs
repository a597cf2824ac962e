mod broken;
mod calls;

use super::*;
use crate::record_bytes::Raw;
use crate::trace::{LogprobKind, Pieces, Prompt, Stop, Tokens};
use serde_json::json;

fn read(record: &[u8]) -> Decoded<Trace> {
    let place = Location { file: Some("runs.jsonl".into()), line: Some(7), ..Location::default() };
    decode(record, Raw::Memory(record.into()), &place, None).map(|record| record.trace)
}

fn read_json(record: &Value) -> Decoded<Trace> {
    read(record.to_string().as_bytes())
}

/// Returns the tokens of an assistant message with this `logprobs` value.
fn tokens_of(logprobs: &str) -> Decoded<Tokens> {
    let record = format!(
        r#"{{"messages": [{{"role": "user", "content": "?"}},
            {{"role": "assistant", "content": "Hi!", "logprobs": {logprobs}}}]}}"#
    );
    read(record.as_bytes()).map(|mut trace| trace.generations.remove(0).tokens)
}

fn pieces(pieces: &Pieces) -> Vec<Option<Vec<u8>>> {
    (0..pieces.len()).map(|index| pieces.get(index).map(<[u8]>::to_vec)).collect()
}

fn assert_refused<T: std::fmt::Debug>(result: Decoded<T>, reason: Reason, what: &str) {
    let Rejection { reason: found, error } = result.expect_err("the record is bad");
    assert!(found == reason && error.to_string().contains(what), "{found:?}, {error}");
}

#[test]
fn entries_give_texts_bytes_and_logprobs() {
    let all = |pieces: &[&[u8]]| Some(pieces.iter().map(|piece| Some(piece.to_vec())).collect::<Vec<_>>());
    let cases: [(&str, _, _, &[f32]); 4] = [
        (
            r#"{"content": [{"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": []},
                {"token": "\\xf0\\x9f", "logprob": -0.25, "bytes": [240, 159]}], "refusal": null}"#,
            all(&[b"Hi", br"\xf0\x9f"]),
            all(&[b"Hi", &[240, 159]]),
            &[-0.5, -0.25],
        ),
        // A refusal's list is read if content is null.
        (
            r#"{"content": null, "refusal": [{"token": "I", "logprob": -0.5, "bytes": [73]}]}"#,
            all(&[b"I"]),
            all(&[b"I"]),
            &[-0.5],
        ),
        // A token that is only a part of a character keeps its empty text and its bytes.
        (
            r#"[{"token": "", "logprob": -1, "bytes": []}, {"token": "é", "logprob": -1, "bytes": [195, 169]}]"#,
            all(&[b"", "é".as_bytes()]),
            all(&[b"", "é".as_bytes()]),
            &[-1.0, -1.0],
        ),
        // A text with half a surrogate pair is unknown, so the bytes are used.
        (r#"[{"token": "\ud83d", "logprob": -1, "bytes": [240, 159]}]"#, None, all(&[&[240, 159]]), &[-1.0]),
    ];
    for (form, texts, bytes, logprobs) in cases {
        let tokens = tokens_of(form).unwrap();
        assert_eq!((tokens.logprobs.as_deref(), &tokens.ids), (Some(logprobs), &None), "{form}");
        assert_eq!((tokens.texts.as_ref().map(pieces), tokens.bytes.as_ref().map(pieces)), (texts, bytes), "{form}");
    }
}

#[test]
fn every_text_free_form_gives_the_same_logprobs() {
    for form in [
        r#"{"content": [{"logprob": -0.5}, {"logprob": -1}]}"#,
        r#"[{"logprob": -0.5}, {"logprob": -1}]"#,
        "[-0.5, -1]",
        r#"{"values": [-0.5, -1.0]}"#,
        r#"{"logprobs": [-0.5, -1.0]}"#,
    ] {
        let tokens = tokens_of(form).unwrap();
        assert_eq!(tokens.logprobs, Some(vec![-0.5, -1.0]), "{form}");
        assert!(tokens.texts.is_none() && tokens.bytes.is_none() && tokens.ids.is_none(), "{form}");
    }
}

#[test]
fn flat_forms_pair_tokens_with_numbers() {
    for form in [
        r#"{"tokens": ["Hi", "!"], "logprobs": [-0.5, null]}"#,
        r#"{"tokens": ["Hi", "!"], "token_logprobs": [-0.5, null], "text_offset": [0, 2], "top_logprobs": null}"#,
    ] {
        let tokens = tokens_of(form).unwrap();
        assert_eq!(pieces(&tokens.texts.unwrap()), [Some(b"Hi".to_vec()), Some(b"!".to_vec())]);
        assert_eq!((tokens.logprobs.unwrap()[0], tokens.missing), (-0.5, 1));
    }
    assert_eq!(tokens_of(r#"{"tokens": [5, 6], "logprobs": [-0.5, -0.5]}"#).unwrap().ids, Some(vec![5, 6]));
}

#[test]
fn placeholders_become_ids_only_if_all_are() {
    let all = tokens_of(
        r#"{"content": [{"token": "token_id:9707", "logprob": -0.5, "bytes": [72]},
            {"token": "token_id:151645", "logprob": -0.5, "bytes": []},
            {"token": "token_id:7", "logprob": -9999.0, "bytes": [116,111,107,101,110,95,105,100,58,55]}]}"#,
    )
    .unwrap();
    assert_eq!(all.ids, Some(vec![9707, 151_645, 7]));
    assert!(all.texts.is_none());
    // The last bytes are those of the placeholder's text, so they are not the token's.
    assert_eq!(pieces(&all.bytes.unwrap()), [Some(b"H".to_vec()), Some(vec![]), None]);
    let written = tokens_of(r#"{"tokens": ["token_id:5", " said"], "logprobs": [-1, -1]}"#).unwrap();
    assert_eq!(written.ids, None);
    assert_eq!(pieces(&written.texts.unwrap())[0], Some(b"token_id:5".to_vec()));
}

#[test]
fn impossible_logprobs_are_nan_and_counted() {
    let tokens =
        tokens_of(r#"[null, NaN, -Infinity, "NaN", "-inf", -1e300, 0.3, 1e-9, -9999.0, Infinity, 0.0, -0.0, -9999.5]"#)
            .unwrap();
    let values = tokens.logprobs.unwrap();
    assert_eq!((tokens.missing, tokens.invalid), (6, 4));
    assert!(values[..10].iter().all(|value| value.is_nan()));
    assert_eq!(values[10..], [0.0, -0.0, -9999.5]);
}

#[test]
fn wrong_types_name_the_path() {
    let entry = tokens_of(r#"{"content": [{"token": "a", "logprob": "-0.5"}]}"#);
    assert_refused(entry, Reason::WrongType, "runs.jsonl:7: messages[1].logprobs.content[0].logprob");
    for (record, what) in [
        (json!({"id": "a17", "messages": "hello"}), "runs.jsonl:7 trace 'a17': `messages` is a string, not a list."),
        (json!({"messages": [1]}), "messages[0]"),
        (json!({"messages": [{"content": "x"}]}), "no `role`"),
        (json!({"messages": [{"role": "user", "content": 5}]}), "`content` is a number"),
        (json!({"messages": [{"role": "user"}], "reward": "good"}), "`reward` is a string"),
        (json!({"messages": [{"role": "user"}], "reward": " 0.5"}), "--map.reward reward, which takes numbers as text"),
        (json!({"messages": [{"role": "user"}], "rewards": {"a": []}}), "rewards: `a` is a list"),
        (json!({"messages": [{"role": "user"}], "tools": "x"}), "`tools` is a string"),
        (json!({"messages": [{"role": "assistant", "token_ids": "x"}]}), "token_ids: invalid type: string"),
        (json!({"messages": [{"role": "assistant", "logprobs": true}]}), "logprobs: invalid type: boolean"),
    ] {
        assert_refused(read_json(&record), Reason::WrongType, what);
    }
}

#[test]
fn ids_that_no_vocabulary_has_are_refused() {
    for bad in ["-1", "1.5", "2147483648", "1e30", "99999999999999999999999"] {
        let record = format!(r#"{{"messages": [{{"role": "assistant", "content": "x", "token_ids": [1, {bad}]}}]}}"#);
        assert_refused(read(record.as_bytes()), Reason::IdOutOfRange, "messages[0].token_ids[1]: token id");
    }
    assert_refused(tokens_of(r#"{"tokens": ["token_id:4294967296"]}"#), Reason::IdOutOfRange, "");
}

#[test]
fn ids_beside_content_make_one_column_and_contradictions_are_refused() {
    let entry = |token: &str| json!({"token": token, "logprob": -1.0, "bytes": null});
    let message = |ids: Value| {
        json!({"messages": [{"role": "assistant", "content": "x", "token_ids": ids,
            "logprobs": {"content": [entry("token_id:5"), entry("token_id:6")]}}]})
    };
    assert_eq!(read_json(&message(json!([5, 6]))).unwrap().generations[0].tokens.ids, Some(vec![5, 6]));
    let longer = read_json(&message(json!([5, 6, 7]))).unwrap();
    assert_eq!(longer.generations[0].tokens.ids, Some(vec![5, 6, 7]));
    assert_eq!(longer.generations[0].tokens.logprobs.as_ref().unwrap().len(), 2);
    assert_refused(read_json(&message(json!([5, 9]))), Reason::Contradiction, "");
}

#[test]
fn what_is_no_record_says_what_it_is() {
    let cases: [(&[u8], Reason, &str); 8] = [
        (b"{\"id\": \"a\", \"messages\": [", Reason::NotJson, "trace 'a': not JSON: the record ends too early"),
        (b"hello", Reason::NotJson, "not JSON"),
        (b"{\"messages\": [{\"role\": \"\xff\"}]}", Reason::NotUtf8, "invalid UTF-8 at byte 24"),
        (b"\xff\xfe{\x00", Reason::NotUtf8, "UTF-16"),
        (br#"{"messages": [{"role": "user", "content": "\ud83d"}]}"#, Reason::LoneSurrogate, "lone surrogate"),
        (b"[1, 2]", Reason::UnknownForm, "the record is a list"),
        (b"{\"prompt\": 1, \"text\": 2}", Reason::UnknownForm, "the keys prompt, text"),
        (b"{\"format\": \"tracegrad/2\", \"messages\": []}", Reason::UnknownForm, "tracegrad/2"),
    ];
    for (bytes, reason, what) in cases {
        assert_refused(read(bytes), reason, what);
    }
}

#[test]
fn deep_nesting_is_refused_and_not_a_stack_overflow() {
    let deep = format!(r#"{{"messages": {}"#, "[".repeat(1_000_000));
    assert_refused(read(deep.as_bytes()), Reason::TooDeep, "");
    // The limit also applies to values that no reader uses, in every form: 126 levels in a record are read, 127 are
    // not.
    let around = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    let chat = r#""messages": [{"role": "user"}]"#;
    let row = r#""prompt_ids": [1], "completion_ids": [2]"#;
    for known in [chat, row] {
        for key in ["metadata", "x"] {
            let record = |depth: usize| format!(r#"{{"id": "a", {known}, "{key}": {}}}"#, around(depth));
            assert!(read(record(126).as_bytes()).is_ok());
            for depth in [127, 128, 100_000] {
                let what = "runs.jsonl:7 trace 'a': JSON nested deeper than 128 levels at byte";
                assert_refused(read(record(depth).as_bytes()), Reason::TooDeep, what);
            }
            let raw = Raw::Memory(b""[..].into());
            let named = decode(record(100_000).as_bytes(), raw, &Location::default(), Some("trl"));
            assert_refused(named, Reason::TooDeep, "");
        }
    }
    // Brackets in strings are not nesting.
    let text = format!(r#"{{{chat}, "x": "{}\\\"{}"}}"#, "[".repeat(500), "{".repeat(500));
    assert!(read(text.as_bytes()).is_ok());
}

#[test]
fn numbers_that_float32_cannot_hold_are_refused_wherever_they_come_from() {
    let chat = |fields: &str| format!(r#"{{"messages": [{{"role": "user", "content": "?"}}], {fields}}}"#);
    let said = |fields: &str| format!(r#"{{"messages": [{{"role": "assistant", "content": "4", {fields}}}]}}"#);
    let trl = |fields: &str| format!(r#"{{"prompt_ids": [1], "completion_ids": [2], "logprobs": [-0.5], {fields}}}"#);
    // The largest float32 is 3.4028235e38; half a step beyond it, 3.4028236e38, float32 has only infinity.
    assert_eq!(read(chat(r#""reward": 3.4028235e38"#).as_bytes()).unwrap().reward, Some(f32::MAX));
    let bad = [
        chat(r#""reward": 3.4028236e38"#),
        chat(r#""reward": -1e39"#),
        chat(r#""reward": "Infinity""#),
        chat(r#""rewards": {"accuracy": 1e308, "format": 1e308}"#),
        said(r#""reward": 1e39"#),
        said(r#""generation": {"temperature": 1e39}"#),
        trl(r#""accuracy_reward": 1e308, "format_reward": 1e308"#),
        // Finite one by one, and not as their sum.
        trl(r#""reward": [3e38, 3e38]"#),
    ];
    for record in bad {
        let rejection = read(record.as_bytes()).expect_err(&record);
        assert!(rejection.error.to_string().contains(": runs.jsonl:7"), "{rejection:?}");
        assert_refused::<()>(Err(rejection), Reason::WrongType, "not a finite float32");
    }
}

#[test]
fn the_last_of_duplicate_keys_counts() {
    let trace = read(br#"{"reward": 1, "messages": [], "messages": [{"role": "user"}], "reward": 0.5}"#).unwrap();
    assert_eq!((trace.reward, trace.messages.len()), (Some(0.5), 1));
}

#[test]
fn a_native_trace_carries_everything_it_says() {
    let record = json!({
        "format": "tracegrad/1", "id": "a", "group": 3, "reward": true, "rewards": {"format": 0.5, "none": null},
        "model": "m", "policy_version": 7, "logprob_kind": "processed", "temperature": 0.7, "top_p": 0.9,
        "tools": [{"type": "function"}], "template_kwargs": {"enable_thinking": false},
        "messages": [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "Hi", "reward": 0.25, "generation": {
                "prompt_token_ids": [1, 2], "token_ids": [3, 4], "tokens": ["Hi", ""], "bytes": [[72, 105], null],
                "logprobs": [-0.5, null], "finish_reason": "stop", "stop_reason": 4, "temperature": 1,
                "policy_version": 8, "logprob_kind": "raw", "cumulative_logprob": -0.5}}]});
    let trace = read_json(&record).unwrap();
    assert_eq!((trace.group.as_deref(), trace.reward), (Some("3"), Some(1.0)));
    assert_eq!(trace.rewards[0], ("format".to_owned(), 0.5));
    assert!(trace.rewards[1].1.is_nan());
    assert_eq!(trace.messages[1].value, json!({"role": "assistant", "content": "Hi", "reward": 0.25}));
    assert_eq!((trace.messages[1].reward, trace.conversation.as_slice()), (Some(0.25), &[0, 1][..]));
    let generation = &trace.generations[0];
    assert_eq!((generation.message, generation.context.as_slice()), (1, &[0][..]));
    assert_eq!((generation.prompt.ids(), generation.tokens.ids.as_deref()), (Some(&[1, 2][..]), Some(&[3, 4][..])));
    assert_eq!(pieces(generation.tokens.bytes.as_ref().unwrap()), [Some(b"Hi".to_vec()), None]);
    assert_eq!((generation.temperature, generation.top_p, generation.policy_version), (Some(1.0), Some(0.9), 8));
    assert_eq!((generation.logprob_kind, &generation.stop), (LogprobKind::Raw, &Stop::Id(4)));
    assert_eq!(generation.cumulative_logprob, Some(-0.5));
    assert!(trace.template_kwargs.contains_key("enable_thinking"));
}

#[test]
fn a_native_trace_may_hold_a_rewritten_history() {
    let generation = |context: Value, call: u32| json!({"token_ids": [1], "context": context, "call": call});
    let record = json!({"format": "tracegrad/1", "messages": [
            {"role": "user", "content": "summary"},
            {"role": "assistant", "content": "end", "generation": generation(json!([0]), 1)}],
        "extra_messages": [
            {"role": "user", "content": "start"},
            {"role": "assistant", "content": "middle", "generation": generation(json!([2]), 0)}]});
    let trace = read_json(&record).unwrap();
    assert_eq!(trace.conversation, [0, 1]);
    let calls: Vec<_> = trace.generations.iter().map(|call| (call.message, call.context.clone())).collect();
    assert_eq!(calls, [(3, vec![2]), (1, vec![0])]);
    let mut broken = record.clone();
    broken["messages"][1]["generation"]["context"] = json!([4]);
    assert_refused(read_json(&broken), Reason::WrongType, "there are 4 messages");
    broken = record;
    broken["extra_messages"][1]["generation"] = json!({"call": 0});
    assert_refused(read_json(&broken), Reason::Incomplete, "names no `context`");
}

#[test]
fn every_assistant_message_is_a_generation_unless_it_says_not() {
    let trace = read_json(&json!({"messages": [
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b", "sampled": false},
        {"role": "assistant", "content": "c", "trainable": false},
        {"role": "assistant", "content": "d", "weight": 0},
        {"role": "assistant", "content": "e", "weight": 1}]}))
    .unwrap();
    let said: Vec<_> = trace.generations.iter().map(|generation| generation.message).collect();
    assert_eq!(said, [1, 5]);
    assert!(trace.generations[0].tokens.is_empty());
    assert_eq!(trace.id, "runs.jsonl:7");
}

#[test]
fn choices_and_responses_may_stand_in_a_message_list() {
    let choice = json!({"index": 0, "finish_reason": "length", "message": {"content": "a", "refusal": null, "tool_calls": []},
        "logprobs": null, "token_ids": [5]});
    let response = json!({"object": "chat.completion", "prompt_token_ids": [1, 2, 3], "choices": [choice.clone(), choice.clone()]});
    let record = json!({"messages": [{"role": "user", "content": "?"}, choice, response]}).to_string();
    let decoded = decode(record.as_bytes(), Raw::Memory(b""[..].into()), &Location::default(), None).unwrap();
    let trace = decoded.trace;
    assert_eq!(decoded.unused_choices, 1);
    assert_eq!(trace.messages[1].value, json!({"content": "a", "role": "assistant"}));
    assert_eq!(trace.generations[0].finish_reason.as_deref(), Some("length"));
    assert_eq!(trace.generations[1].prompt.ids(), Some(&[1, 2, 3][..]));
    assert_eq!(trace.generations[1].context, [0, 1]);
}
