//! The golden records of every server, read and compared with what their maker put in; and the same records broken.

use crate::drift::NAMES;
use crate::error::Location;
use crate::format::{Record, decode, diagnose};
use crate::raw::Raw;
use crate::trace::{Generation, LogprobKind, Pieces, Prompt, Stop, Trace};
use proptest::prelude::*;
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
        "logprobs" => {
            json!(tokens.logprobs.as_ref().map(|values| values.iter().copied().map(number).collect::<Vec<_>>()))
        }
        "text" => json!(generation.text),
        "message" => trace.messages[generation.message as usize].value["content"].clone(),
        "finish_reason" => json!(generation.finish_reason),
        "prompt" => json!(generation.prompt.ids()),
        "prompt_text" => match &generation.prompt {
            Prompt::Text(text) => json!(text),
            other => json!(format!("{other:?}")),
        },
        "pieces" => json!(texts(tokens.bytes.as_ref().or(tokens.texts.as_ref()))),
        "notes" => {
            json!(generation.notes.iter().map(|note| &NAMES[note.reason as usize][..3]).collect::<Vec<_>>())
        }
        "versions" => json!(generation.versions.iter().map(|s| json!([s.start, s.end, s.version])).collect::<Vec<_>>()),
        "version" => json!(generation.policy_version),
        "kind" => json!(match generation.logprob_kind {
            LogprobKind::Unknown => "unknown",
            LogprobKind::Raw => "raw",
            LogprobKind::Processed => "processed",
        }),
        "temperature" => {
            json!(generation.temperature.map(|value| format!("{value}").parse::<f64>().expect("a number")))
        }
        "stop" => match &generation.stop {
            Stop::Unsaid => Value::Null,
            Stop::Id(id) => json!(id),
            Stop::Text(text) => json!(text),
        },
        "roles" => json!(trace.messages.iter().map(|message| message.role().to_owned()).collect::<Vec<_>>()),
        "unused_choices" => json!(record.unused_choices),
        other => panic!("a truth about {other}"),
    }
}

/// A float32 with the digits that tell it apart; null for NaN.
fn number(value: f32) -> Value {
    if value.is_nan() { Value::Null } else { json!(f64::from(value)) }
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

/// What is done to a value of a record.
#[derive(Debug, Clone)]
enum Blow {
    Drop,
    Put(Value),
    Halve,
    Double,
}

fn blow() -> impl Strategy<Value = Blow> {
    let values = [
        json!(null),
        json!(true),
        json!(-1),
        json!(1e300),
        json!(u64::MAX),
        json!(0.5),
        json!(""),
        json!("token_id:7"),
        json!([]),
        json!({}),
        json!([null]),
        json!([[1, 2]]),
        json!("NaN"),
        json!({"type": "x"}),
        json!("data: {"),
    ];
    prop_oneof![
        Just(Blow::Drop),
        prop::sample::select(values.to_vec()).prop_map(Blow::Put),
        Just(Blow::Halve),
        Just(Blow::Double),
    ]
}

/// Strikes the value number `at`, counted in depth.
fn strike(value: &mut Value, at: &mut usize, blow: &Blow) {
    if *at == 0 {
        match (blow, &mut *value) {
            (Blow::Put(new), value) => *value = new.clone(),
            (Blow::Halve, Value::Array(items)) => items.truncate(items.len() / 2),
            (Blow::Halve, Value::String(text)) => {
                *text = text.chars().take(text.chars().count() / 2).collect();
            }
            (Blow::Double, Value::Array(items)) => items.extend(items.clone()),
            (Blow::Double, Value::String(text)) => *text = text.repeat(2),
            (Blow::Double, Value::Number(number)) => *value = json!(number.as_f64().unwrap_or(0.0) * -2e30),
            (_, value) => *value = Value::Null,
        }
    }
    let before = *at;
    *at = at.wrapping_sub(1);
    if before == 0 {
        return;
    }
    match value {
        Value::Array(items) => {
            for item in items {
                strike(item, at, blow);
            }
        }
        Value::Object(fields) => {
            let doomed = fields.keys().next().cloned().filter(|_| *at == 0 && matches!(blow, Blow::Drop));
            if let Some(key) = doomed {
                fields.remove(&key);
                *at = usize::MAX;
                return;
            }
            for item in fields.values_mut() {
                strike(item, at, blow);
            }
        }
        _ => {}
    }
}

fn sound(trace: &Trace) {
    for generation in &trace.generations {
        let pool = trace.messages.len() as u32;
        assert!(generation.message < pool && generation.context.iter().all(|index| *index < pool));
        columns(generation);
    }
}

fn columns(generation: &Generation) {
    let tokens = &generation.tokens;
    for pieces in [&tokens.bytes, &tokens.texts].into_iter().flatten() {
        assert_eq!(
            (pieces.ends.len(), pieces.ends.last().copied()),
            (pieces.known.len(), Some(pieces.data.len() as u32))
        );
    }
    let unknown = tokens.logprobs.iter().flatten().filter(|value| value.is_nan()).count() as u32;
    assert!(tokens.logprobs.is_none() || unknown == tokens.missing + tokens.invalid);
    assert!(tokens.logprobs.iter().flatten().all(|value| value.is_nan() || *value <= 0.0 && value.is_finite()));
    for extra in &generation.extras {
        assert_eq!(extra.ends.last().copied().unwrap_or(0) as usize, extra.values.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_broken_record_is_a_located_error_or_a_sound_trace(
        pick in any::<prop::sample::Index>(),
        blows in prop::collection::vec((any::<prop::sample::Index>(), blow()), 1..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let all: Vec<&String> = RECORDS.iter().flat_map(|(_, records)| records).collect();
        let record = diagnose::text(pick.get(&all).as_bytes()).expect("UTF-8");
        let mut value: Value = serde_json::from_str(&record).expect("JSON");
        for (place, blow) in &blows {
            let mut at = place.index(400);
            strike(&mut value, &mut at, blow);
        }
        let mut text = value.to_string();
        if let Some(cut) = cut {
            let at = (0..=cut.index(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
            text.truncate(at);
        }
        match read(&text) {
            Ok(record) => sound(&record.trace),
            Err(error) => prop_assert!(error.starts_with("golden.jsonl:1"), "{}", error),
        }
    }
}
