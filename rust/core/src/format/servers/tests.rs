//! The golden records of every server, read and compared with what their maker put in.

use crate::drift::NAMES;
use crate::error::Location;
use crate::format::{Record, decode};
use crate::raw::Raw;
use crate::trace::{Pieces, Prompt, Stop};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/servers").join(name)
}

/// Names of the golden files and their records.
static RECORDS: LazyLock<Vec<(String, Vec<String>)>> = LazyLock::new(|| {
    let mut found: Vec<(String, Vec<String>)> = fs::read_dir(golden(""))
        .expect("the golden files")
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_suffix(".jsonl").map(str::to_owned))
        .map(|name| {
            let text = fs::read_to_string(golden(&format!("{name}.jsonl"))).expect("a file");
            (name, text.lines().map(str::to_owned).collect())
        })
        .collect();
    found.sort();
    found
});

fn read(record: &str) -> Result<Record, String> {
    let place = Location { file: Some("golden.jsonl".into()), line: Some(1), ..Location::default() };
    decode(record.as_bytes(), Raw::Held(b""[..].into()), &place, None).map_err(|rejection| rejection.error.to_string())
}

fn texts(pieces: Option<&Pieces>) -> Option<Vec<String>> {
    let pieces = pieces?;
    (0..pieces.len()).map(|at| pieces.get(at).map(|piece| String::from_utf8_lossy(piece).into_owned())).collect()
}

#[test]
fn a_choice_is_found_by_its_index_and_not_by_where_it_stands() {
    // A server answers in the order in which its samples ended: index 1 stands first.
    let choices =
        json!([{"index": 1, "text": "b", "finish_reason": "stop"}, {"index": 0, "text": "a", "finish_reason": "stop"}]);
    let response = json!({"object": "text_completion", "choices": choices});
    for (choice, expected) in [(None, "a"), (Some(0), "a"), (Some(1), "b")] {
        let record = json!({"request": {"prompt": "?"}, "response": response, "choice": choice});
        let record = read(&record.to_string()).expect("it is read");
        assert_eq!(record.trace.messages.last().expect("a message").value["content"], expected, "{choice:?}");
        assert_eq!(record.unused_choices, u32::from(choice.is_none()));
    }
}

/// What was read, under the keys of a truth file.
fn seen(record: &Record, key: &str) -> Value {
    let trace = &record.trace;
    let generation = trace.generations.last().expect("a generation");
    let tokens = &generation.tokens;
    match key {
        "form" => json!(record.form.name),
        "ids" => json!(tokens.ids),
        "logprobs" => json!(tokens.logprobs),
        "text" => json!(generation.text),
        "message" => trace.messages[generation.message as usize].value["content"].clone(),
        "finish_reason" => json!(generation.finish_reason),
        "prompt" => json!(generation.prompt.ids()),
        "prompt_text" => match &generation.prompt {
            Prompt::Text(text) => json!(text),
            other => json!(format!("{other:?}")),
        },
        "pieces" => json!(texts(tokens.bytes.as_ref().or(tokens.texts.as_ref()))),
        "notes" => json!(generation.notes.iter().map(|note| &NAMES[note.reason as usize][..3]).collect::<Vec<_>>()),
        "versions" => json!(generation.versions.iter().map(|s| json!([s.start, s.end, s.version])).collect::<Vec<_>>()),
        "version" => json!(generation.policy_version),
        "kind" => json!(["unknown", "raw", "processed"][generation.logprob_kind as usize]),
        "temperature" => json!(generation.temperature),
        "stop" => match &generation.stop {
            Stop::Unsaid => Value::Null,
            Stop::Id(id) => json!(id),
            Stop::Text(text) => json!(text),
        },
        "said" => trace.messages[generation.message as usize].value.clone(),
        "generations" => json!(trace.generations.len()),
        "roles" => json!(trace.messages.iter().map(|message| message.role().to_owned()).collect::<Vec<_>>()),
        "unused_choices" => json!(record.unused_choices),
        other => panic!("a truth about {other}"),
    }
}

#[test]
fn what_a_record_says_beside_its_tokens_is_read() {
    let chunks = |deltas: [Value; 2]| {
        let ends = [Value::Null, json!("stop")];
        let chunk = |(delta, end)| json!({"choices": [{"index": 0, "delta": delta, "finish_reason": end}]});
        let chunks: Vec<Value> = deltas.into_iter().zip(ends).map(chunk).collect();
        json!({"request": {"messages": [{"role": "user", "content": "?"}]}, "response": chunks})
    };
    let grown = |more: Value| json!([{"index": 0, "id": "c", "function": more}]);
    let span = |id: &str, parts: Value| {
        let said = json!([{"role": "assistant", "parts": parts}]).to_string();
        json!({"attributes": {"gen_ai.response.id": id, "gen_ai.output.messages": said}})
    };
    let call = json!({"type": "tool_call", "id": "c", "name": "f", "arguments": {"a": 1}});
    let called = json!([{"type": "function", "id": "c", "function": {"name": "f", "arguments": {"a": 1}}}]);
    let image = json!({"type": "image", "source": {"type": "url", "url": "u"}});
    let words = json!([{"type": "text", "content": "a"}]);
    let triplet = json!({"prompt": {"token_ids": [1], "raw_content": {"role": "user", "content": "?"}},
        "response": {"token_ids": [2]}});
    let seen = json!({"source": "agent", "message": "a", "observation": {"results": [{"content": "b"}, {}]}});
    let details = json!({"finish_reason": "length", "tokens": [{"id": 5, "text": " you", "logprob": -0.5}]});
    for (record, key, expected) in [
        (json!({"text": "a", "meta_info": {}}), "/version", json!(-1)),
        (
            json!({"request": {"prompt": [5, 6]}, "response": {"outputs": [{"token_ids": [7]}]}}),
            "/prompt",
            json!([5, 6]),
        ),
        (
            json!({"request": {"inputs": "Hi", "parameters": {"return_full_text": true}},
                "response": {"generated_text": "Hi you", "details": details}}),
            "/text",
            json!(" you"),
        ),
        (
            chunks([
                json!({"function_call": {"name": "f", "arguments": "{"}}),
                json!({"function_call": {"arguments": "}"}}),
            ]),
            "/said/function_call",
            json!({"name": "f", "arguments": "{}"}),
        ),
        (
            // Arguments that are no text do not grow: the last are all.
            chunks([
                json!({"tool_calls": grown(json!({"name": "f", "arguments": {"a": 1}}))}),
                json!({"tool_calls": grown(json!({"arguments": {"b": 2}}))}),
            ]),
            "/said/tool_calls/0/function/arguments",
            json!({"b": 2}),
        ),
        (json!({"triplets": [triplet]}), "/roles", json!(["user", "assistant"])),
        (json!({"schema_version": "ATIF-v1.8", "steps": [seen]}), "/roles", json!(["assistant", "user"])),
        (
            json!({"role": "assistant", "stop_reason": "end_turn", "content": [{"type": "text", "text": "a"}, image]}),
            "/said/content",
            json!([{"type": "text", "text": "a"}, image]),
        ),
        (json!({"spans": [span("x", json!([call]))]}), "/said/tool_calls", called),
        (json!({"spans": [span("x", words.clone()), span("x", words)]}), "/generations", json!(1)),
    ] {
        let found = read(&record.to_string()).unwrap_or_else(|error| panic!("{record}: {error}"));
        let first = key.split('/').nth(1).expect("a key");
        let told = json!({first: self::seen(&found, first)});
        assert_eq!(told.pointer(key), Some(&expected), "{record}");
    }
    let place = Location::default();
    let other = json!({"choices": [{"message": {"content": "a"}}]}).to_string();
    let refused =
        decode(other.as_bytes(), Raw::Held(b""[..].into()), &place, Some("sglang")).expect_err("another form");
    assert!(refused.error.to_string().contains("not the response of sglang"), "{}", refused.error);
}

/// Whether two values are equal, numbers as float32.
fn same(ours: &Value, theirs: &Value) -> bool {
    match (ours, theirs) {
        (Value::Array(ours), Value::Array(theirs)) => {
            ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(ours, theirs)| same(ours, theirs))
        }
        (Value::Number(ours), Value::Number(theirs)) => {
            let float = |number: &serde_json::Number| number.as_f64().unwrap_or(f64::NAN) as f32;
            let (ours, theirs) = (float(ours), float(theirs));
            (ours - theirs).abs() <= 2e-7 * theirs.abs()
        }
        (ours, theirs) => ours == theirs,
    }
}

#[test]
fn every_golden_record_reads_as_its_maker_filled_it_in() {
    let mut wrong = Vec::new();
    for (name, records) in RECORDS.iter() {
        let text = fs::read_to_string(golden(&format!("{name}.truth.json"))).expect("its truth");
        let truths: Vec<Value> = serde_json::from_str(&text).expect("JSON");
        assert_eq!(records.len(), truths.len(), "{name}");
        for (at, (record, truth)) in records.iter().zip(&truths).enumerate() {
            let found = match read(record) {
                Ok(found) => found,
                Err(error) => {
                    wrong.push(format!("{name}[{at}]: {error}"));
                    continue;
                }
            };
            let mut truth = truth.as_object().expect("an object").clone();
            truth.entry("notes").or_insert_with(|| json!([]));
            for (key, theirs) in truth {
                let ours = seen(&found, &key);
                if !same(&ours, &theirs) {
                    wrong.push(format!("{name}[{at}] {key}: read {ours}, true is {theirs}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    assert!(RECORDS.len() >= 15);
}

#[test]
fn routed_experts_and_sampling_masks_are_kept_beside_the_tokens() {
    let (_, records) = RECORDS.iter().find(|(name, _)| name == "vllm_generate_types").expect("a golden file");
    let record = read(&records[0]).expect("reads");
    let [experts, mask] = &record.trace.generations[0].extras[..] else { panic!("two extras") };
    // Four rows of two layers by two experts, numbered 0 to 15 by the maker.
    assert_eq!((experts.shape.as_slice(), experts.ends.as_slice()), (&[2, 2][..], &[4, 8, 12, 16][..]));
    assert_eq!(experts.values, (0..16).collect::<Vec<_>>());
    assert_eq!((mask.ends.as_slice(), mask.values.as_slice()), (&[2, 3, 6][..], &[13347, 9, 1052, 0, 4, 8][..]));
}
