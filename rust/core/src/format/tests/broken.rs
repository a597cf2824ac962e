//! Damages the golden records of servers and recorders: the result must be a located error or a valid trace, never a
//! panic.

use super::*;
use crate::trace::Generation;
use proptest::prelude::*;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;
use std::time::{Duration, Instant};
use trajectories::DUMPS;

static GOLDENS: LazyLock<Vec<Value>> = LazyLock::new(|| {
    let folders = ["dumps", "servers"]
        .map(|name| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name))
        .map(|folder| fs::read_dir(folder).expect("the golden files"));
    let mut paths: Vec<_> = folders.into_iter().flatten().map(|entry| entry.expect("a file").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|suffix| suffix == "jsonl"));
    paths.sort();
    let text = paths.iter().map(|path| fs::read_to_string(path).expect("a text")).collect::<String>();
    let parsed = |line: &str| serde_json::from_str(&diagnose::text(line.as_bytes()).expect("UTF-8")).expect("JSON");
    text.lines().map(parsed).collect()
});

fn decoded(record: &[u8], wanted: Option<&str>) -> Decoded<Record> {
    let place = Location { file: Some("runs.jsonl".into()), line: Some(7), ..Location::default() };
    decode(record, Raw::Memory(record.into()), &place, wanted)
}

fn check(record: &[u8], wanted: Option<&str>) {
    match decoded(record, wanted) {
        Ok(record) => assert_sound(&record),
        Err(rejection) => {
            let said = rejection.error.to_string();
            assert!(said.contains(": runs.jsonl:7") && !rejection.error.fix.is_empty(), "{said}");
        }
    }
}

/// Checks that indices are in range, and that columns built by a reader have matching lengths.
fn assert_sound(Record { trace, form, .. }: &Record) {
    let is_dump = DUMPS.iter().any(|dump| dump.form == *form);
    let messages = trace.messages.len() as u32;
    assert!(trace.conversation.iter().all(|&index| index < messages));
    for (turn, generation) in trace.generations.iter().enumerate() {
        assert!(generation.message < messages && generation.context.iter().all(|&index| index < messages));
        if let Prompt::Follows { turn: earlier, .. } = generation.prompt {
            assert!((earlier as usize) < turn && trace.generations[earlier as usize].tokens.ids.is_some());
        }
        let count = generation.tokens.len() as u32;
        // A server's own spans are kept as recorded.
        let spans = generation.versions.iter().filter(|_| is_dump);
        assert!(spans.clone().all(|span| span.start < span.end && span.end <= count));
        assert_sound_columns(generation);
    }
}

fn assert_sound_columns(generation: &Generation) {
    let tokens = &generation.tokens;
    for Pieces { data, ends, known } in [&tokens.bytes, &tokens.texts].into_iter().flatten() {
        assert_eq!((ends.len(), ends.last().copied()), (known.len(), Some(data.len() as u32)));
    }
    let logprobs = || tokens.logprobs.iter().flatten();
    assert_eq!(logprobs().filter(|value| value.is_nan()).count() as u32, tokens.missing + tokens.invalid);
    assert!(logprobs().all(|value| value.is_nan() || *value <= 0.0 && value.is_finite()));
    for extra in &generation.extras {
        assert!(extra.ends.is_sorted());
        assert_eq!(extra.ends.last().copied().unwrap_or(0) as usize, extra.values.len());
    }
}

/// Returns a random place inside a value. Lists of numbers are entered like other values.
fn mutate(value: &mut Value, steer: &mut impl Iterator<Item = u32>, put: &Value) {
    let mut next = || steer.next().unwrap_or(0) as usize;
    let (at, act) = (next(), next());
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            let key = fields.keys().nth(at % fields.len()).cloned().unwrap_or_default();
            match act % 8 {
                0 => drop(fields.remove(&key)),
                1 => drop(fields.insert(key, put.clone())),
                _ => mutate(&mut fields[&key], steer, put),
            }
        }
        Value::Array(items) if !items.is_empty() => {
            let at = at % items.len();
            match act % 12 {
                0 => items.truncate(at),
                1 => items.push(items[at].clone()),
                2 => items[at] = put.clone(),
                3 => items.insert(at, put.clone()),
                4 => items.extend(items.clone()),
                _ => mutate(&mut items[at], steer, put),
            }
        }
        Value::String(text) if act % 4 == 0 => *text = text.repeat(2),
        Value::String(text) if act % 4 == 1 => *text = text.chars().take(text.chars().count() / 2).collect(),
        Value::Number(number) if act % 4 == 0 => *value = json!(number.as_f64().unwrap_or(0.0) * -2e30),
        other => *other = put.clone(),
    }
}

fn odd_values() -> Vec<Value> {
    let deep = (0..40).fold(json!(1), |inner, _| json!([inner]));
    let odd = json!([
        null, true, 0, -1, 0.5, 1.5, 1e300, 4_294_967_296_u64, u64::MAX, 2_147_483_647, "", "[1, 2", "['token_ids']",
        "token_id:7", "NaN", "data: {", [], [1], [null], [[1, 2]], [[]], {}, {"role": "assistant", "content": "x"},
        {"0": {"token_ids": [1]}}, {"type": "x"}, deep
    ]);
    odd.as_array().cloned().unwrap_or_default()
}

#[test]
fn every_golden_record_is_sound_by_name_and_without() {
    assert!(GOLDENS.len() > 40);
    for record in GOLDENS.iter().map(Value::to_string) {
        assert_sound(&decoded(record.as_bytes(), None).unwrap());
        for form in forms() {
            check(record.as_bytes(), Some(form.name));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5000))]

    #[test]
    fn a_broken_record_is_a_sound_trace_or_a_located_error(
        which in any::<prop::sample::Index>(),
        puts in prop::collection::vec(prop::sample::select(odd_values()), 0..4),
        steps in prop::collection::vec(any::<u32>(), 60),
        form in any::<prop::sample::Index>(),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut record = which.get(&GOLDENS[..]).clone();
        let mut steer = steps.into_iter();
        for put in &puts {
            mutate(&mut record, &mut steer, put);
        }
        let mut text = record.to_string().into_bytes();
        if let Some(cut) = cut {
            text.truncate(cut.index(text.len()));
        }
        check(&text, None);
        let names: Vec<_> = forms().map(|form| form.name).collect();
        check(&text, Some(names[form.index(names.len())]));
    }
}

#[test]
fn many_branches_on_a_long_prompt_are_refused_before_they_fill_memory() {
    let ids: Vec<u32> = (0..200_000).collect();
    let mut nodes =
        vec![json!({"message": {"role": "user", "content": ""}, "token_ids": ids, "mask": vec![false; 200_000]})];
    let leaf = json!({"parent": 0, "message": {"role": "assistant", "content": ""}, "sampled": true, "token_ids": [1], "mask": [true]});
    nodes.extend(std::iter::repeat_n(leaf, 1000));
    let start = Instant::now();
    let rejection = decoded(json!({"nodes": nodes, "calls": []}).to_string().as_bytes(), None).unwrap_err();
    assert_eq!(rejection.reason.name(), "too_long");
    assert!(start.elapsed() < Duration::from_secs(20));
}
