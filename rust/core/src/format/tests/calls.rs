//! Tests of call logs and single responses.

use super::*;

/// Returns a call whose response has this content and these ids.
fn call(messages: &Value, content: &str, ids: &[u32]) -> Value {
    json!({"request": {"model": "m", "messages": messages}, "response": {"choices": [{"index": 0, "finish_reason": "stop",
        "message": {"role": "assistant", "content": content, "tool_calls": [], "reasoning_content": null},
        "token_ids": ids}]}})
}

#[test]
fn a_call_log_becomes_a_pool_and_paths() {
    let few_shot = json!({"role": "assistant", "content": "shot"});
    let user = |text: &str| json!({"role": "user", "content": text});
    let said = json!({"role": "assistant", "content": "one", "refusal": null, "annotations": null});
    let calls = json!([
        call(&json!([user("a"), few_shot, user("b")]), "one", &[1]),
        call(&json!([user("a"), few_shot, user("b"), said, user("c")]), "two", &[2]),
        call(&json!([user("summary"), said, user("c")]), "three", &[3]),
        call(&json!([user("a"), few_shot, user("b"), {"role": "assistant", "content": "ONE"}]), "four", &[4])
    ]);
    let trace = read_json(&json!({"id": "x", "calls": calls})).unwrap();
    let texts: Vec<_> = trace.messages.iter().map(|message| message.value["content"].as_str().unwrap()).collect();
    assert_eq!(texts, ["a", "shot", "b", "one", "c", "two", "summary", "three", "ONE", "four"]);
    let paths: Vec<_> = trace.generations.iter().map(|call| (call.context.clone(), call.message)).collect();
    assert_eq!(paths, [(vec![0, 1, 2], 3), (vec![0, 1, 2, 3, 4], 5), (vec![6, 3, 4], 7), (vec![0, 1, 2, 8], 9)]);
    assert_eq!(trace.conversation, [0, 1, 2, 8, 9]);
    assert_eq!((trace.model.as_deref(), trace.generations[0].temperature), (Some("m"), Some(1.0)));
}

#[test]
fn a_refusal_is_what_was_said_where_there_is_no_other_content() {
    let said = |content: Value, calls: Value| {
        let message = json!({"role": "assistant", "content": content, "refusal": "I can't", "tool_calls": calls});
        let response = json!({"choices": [{"message": message, "token_ids": [1]}]});
        let trace = read_json(&json!({"request": {"messages": []}, "response": response})).unwrap();
        trace.messages.last().unwrap().value["content"].clone()
    };
    assert_eq!(said(Value::Null, json!([])), "I can't");
    assert_eq!(said(Value::Null, Value::Null), "I can't");
    assert_eq!(said(json!("Well."), Value::Null), "Well.");
    let call = json!([{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]);
    assert_eq!(said(Value::Null, call), Value::Null);
}

#[test]
fn the_same_words_said_twice_are_two_generations() {
    let (ask, ok) = (json!({"role": "user", "content": "go on"}), json!({"role": "assistant", "content": "ok"}));
    let calls = json!([
        call(&json!([ask]), "ok", &[1]),
        call(&json!([ask, ok, ask]), "ok", &[2]),
        call(&json!([ask, ok, ask, ok, ask]), "ok", &[3])
    ]);
    let trace = read_json(&json!({"calls": calls})).unwrap();
    let paths: Vec<_> = trace.generations.iter().map(|call| (call.context.clone(), call.message)).collect();
    assert_eq!(paths, [(vec![0], 1), (vec![0, 1, 0], 2), (vec![0, 1, 0, 2, 0], 3)]);
}

#[test]
fn tool_calls_match_by_name_id_and_arguments() {
    let said = |arguments: Value, id: &str| {
        json!({"role": "assistant", "content": null, "tool_calls": [
            {"id": id, "type": "function", "index": 0, "function": {"name": "f", "arguments": arguments}}]})
    };
    let first = json!({"request": {"messages": [{"role": "user", "content": "?"}]},
        "response": {"choices": [{"message": said(json!(r#"{"a": 1}"#), "c0"), "token_ids": [1]}]}});
    for (again, same) in [
        (said(json!({"a": 1}), "c0"), true),
        (said(json!(r#"{"a":1}"#), "c0"), true),
        (said(json!({"a": 2}), "c0"), false),
        (said(json!({"a": 1}), "c1"), false),
    ] {
        let second = call(&json!([{"role": "user", "content": "?"}, again]), "done", &[2]);
        let trace = read_json(&json!({"calls": [first, second]})).unwrap();
        assert_eq!(trace.generations[1].context == [0, 1], same, "{again}");
    }
}

#[test]
fn a_request_says_how_it_was_sampled() {
    let mut log = json!({"temperature": 0.5, "policy_version": "12", "logprob_kind": "raw",
        "calls": [call(&json!([{"role": "user", "content": "?"}]), "a", &[1])]});
    let first = |log: &Value| read_json(log).unwrap().generations.remove(0);
    assert_eq!(first(&log).temperature, Some(0.5));
    assert_eq!((first(&log).policy_version, first(&log).logprob_kind), (12, LogprobKind::Raw));
    log["calls"][0]["request"]["temperature"] = json!(0.8);
    log["calls"][0]["request"]["tools"] = json!([{"type": "function"}]);
    log["calls"][0]["request"]["extra_body"] = json!({"chat_template_kwargs": {"enable_thinking": false}});
    assert_eq!(first(&log).temperature, Some(0.8));
    let trace = read_json(&log).unwrap();
    assert!(trace.tools.is_some() && trace.template_kwargs.contains_key("enable_thinking"));
}

#[test]
fn requests_that_differ_in_tools_need_recorded_prompts() {
    let mut log = json!({"calls": [call(&json!([{"role": "user", "content": "?"}]), "a", &[1]),
        call(&json!([{"role": "user", "content": "?"}]), "b", &[1])]});
    log["calls"][1]["request"]["tools"] = json!([{"type": "function"}]);
    assert_refused(read_json(&log), Reason::Contradiction, "");
    for index in 0..2 {
        log["calls"][index]["response"]["prompt_token_ids"] = json!([1, 2]);
    }
    assert!(read_json(&log).is_ok());
}

#[test]
fn a_bare_response_without_prompt_ids_has_an_unknown_prompt() {
    let mut response = call(&json!([]), "a", &[5])["response"].clone();
    assert_eq!(read_json(&response).unwrap().generations[0].prompt, Prompt::Unknown);
    response["prompt_token_ids"] = json!([1, 2]);
    let trace = read_json(&response).unwrap();
    assert_eq!(trace.generations[0].prompt.ids(), Some(&[1, 2][..]));
    assert!(trace.generations[0].context.is_empty());
}

#[test]
fn failed_calls_and_lone_chunks_are_refused() {
    let request = json!({"messages": [{"role": "user", "content": "?"}]});
    for (response, what) in [
        (json!(null), "no `response`"),
        (json!({"error": {"message": "overloaded"}}), "no `choices`"),
        (json!({"choices": []}), "the response has 0 choices"),
        (json!([{"choices": []}]), "a stream of 1 chunks"),
        (json!({"choices": [{"delta": {"content": "a"}}]}), "streamed"),
    ] {
        let rejection = read_json(&json!({"calls": [{"request": request, "response": response}]})).expect_err(what);
        let text = rejection.error.to_string();
        assert!(text.contains("calls[0]") && text.contains(what) && text.contains("turn 0"), "{text}");
    }
}

#[test]
fn a_named_choice_is_the_one_used() {
    let mut log = json!({"request": {"messages": [{"role": "user", "content": "?"}]}, "choice": 1, "response": {"choices": [
        {"index": 0, "message": {"content": "a"}}, {"index": 1, "message": {"content": "b"}}]}});
    assert_eq!(read_json(&log).unwrap().messages[1].value["content"], "b");
    log["choice"] = json!(2);
    assert_refused(read_json(&log), Reason::Incomplete, "");
}

#[test]
fn the_record_keeps_its_bytes() {
    let record =
        br#"{"messages" : [ {"role":"user", "content": "?", "zz": NaN} ], "unknown": [1.50, "\u00e9"], "reward": NaN}"#;
    let trace = read(record).unwrap();
    assert_eq!(&*trace.record().expect("it is held"), record);
    assert_eq!(trace.reward, None);
}

#[test]
fn keys_of_an_application_do_not_change_the_form() {
    let trace = read_json(&json!({"calls": 2, "response": "4", "choices": ["3", "4"], "policy_version": -1,
        "messages": [{"role": "user", "content": "?", "choices": ["3", "4"], "message": 5}]}))
    .unwrap();
    assert_eq!(trace.messages[0].value, json!({"role": "user", "content": "?"}));
    let both = json!({"messages": [{"role": "user"}], "response": {"choices": []}});
    assert_refused(read_json(&both), Reason::UnknownForm, "both `messages` and `response`");
    assert_refused(read_json(&json!({"calls": 2})), Reason::WrongType, "`calls` is a number, not a list");
}

#[test]
fn a_megabyte_of_tiny_turns_is_refused_before_its_contexts_fill_the_memory() {
    let turns = vec![r#"{"role":"assistant"}"#; 50_000].join(",");
    assert_refused(read(format!(r#"{{"messages":[{turns}]}}"#).as_bytes()), Reason::TooLong, "hold more than");
}
