//! Reads the golden records of every server, and compares the result with the values that their generator wrote.

use crate::error::Location;
use crate::findings::NAMES;
use crate::format::{Record, decode};
use crate::record_bytes::Raw;
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
    decode(record.as_bytes(), Raw::Memory(b""[..].into()), &place, None)
        .map_err(|rejection| rejection.error.to_string())
}

fn texts(pieces: Option<&Pieces>) -> Option<Vec<String>> {
    let pieces = pieces?;
    (0..pieces.len()).map(|at| pieces.get(at).map(|piece| String::from_utf8_lossy(piece).into_owned())).collect()
}

#[test]
fn a_choice_is_found_by_its_index_and_not_by_where_it_stands() {
    // A server lists its samples in the order in which they ended: index 1 comes first.
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

#[test]
fn logprobs_behind_the_last_token_are_counted_in_their_note_alone() {
    let output = json!({"index": 0, "text": "ab", "token_ids": [5, 6], "logprobs": [-0.5, null, null, 1.5]});
    let record = json!({"prompt_token_ids": [1], "outputs": [output]});
    let record = read(&record.to_string()).expect("it is read");
    let [generation] = &record.trace.generations[..] else { panic!("one generation") };
    let (tokens, [note]) = (&generation.tokens, &generation.notes[..]) else { panic!("one note") };
    assert_eq!(tokens.logprobs.as_ref().map(|logprobs| (logprobs.len(), logprobs[0])), Some((2, -0.5)));
    assert_eq!((tokens.missing, tokens.invalid, note.count), (1, 0, 2));
}

/// Returns the decoded values under the keys of a truth file.
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
            Stop::Unknown => Value::Null,
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
    for line in include_str!("../../../../../tests/golden/beside.jsonl").lines() {
        let row: Value = serde_json::from_str(line).expect("JSON");
        let found = read(&row["record"].to_string()).expect("it is read");
        let key = row["key"].as_str().expect("a pointer");
        let first = key.split('/').nth(1).expect("a key");
        assert_eq!(json!({first: seen(&found, first)}).pointer(key), Some(&row["expected"]), "{line}");
    }
    let place = Location::default();
    let other = json!({"choices": [{"message": {"content": "a"}}]}).to_string();
    let refused =
        decode(other.as_bytes(), Raw::Memory(b""[..].into()), &place, Some("sglang")).expect_err("another form");
    assert!(refused.error.to_string().contains("not the response of sglang"), "{}", refused.error);
}

/// Returns whether two values are equal. Numbers are compared as float32.
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
    // Four rows of two layers by two experts. The generator numbered them from 0 to 15.
    assert_eq!((experts.shape.as_slice(), experts.ends.as_slice()), (&[2, 2][..], &[4, 8, 12, 16][..]));
    assert_eq!(experts.values, (0..16).collect::<Vec<_>>());
    assert_eq!((mask.ends.as_slice(), mask.values.as_slice()), (&[2, 3, 6][..], &[13347, 9, 1052, 0, 4, 8][..]));
}
