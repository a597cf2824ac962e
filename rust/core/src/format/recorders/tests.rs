//! The golden records, mutated: a located error or a sound trace, never a panic.

use super::super::{Record, decode, forms};
use crate::error::Location;
use crate::raw::Raw;
use crate::trace::{Prompt, Trace};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

fn place() -> Location {
    Location { file: Some("runs.jsonl".into()), line: Some(7), ..Location::default() }
}

fn goldens() -> Vec<Value> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/dumps");
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|suffix| suffix == "jsonl"));
    paths.sort();
    let texts = paths.iter().map(|path| std::fs::read_to_string(path).unwrap());
    texts.flat_map(|text| text.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<_>>()).collect()
}

/// Indices are in range and columns that a reader makes itself fit.
fn assert_sound(trace: &Trace) {
    let messages = trace.messages.len() as u32;
    assert!(trace.conversation.iter().all(|&index| index < messages));
    for (turn, generation) in trace.generations.iter().enumerate() {
        assert!(generation.message < messages && generation.context.iter().all(|&index| index < messages));
        if let Prompt::Follows { turn: earlier, .. } = generation.prompt {
            assert!((earlier as usize) < turn && trace.generations[earlier as usize].tokens.ids.is_some());
        }
        let count = generation.tokens.len() as u32;
        assert!(generation.versions.iter().all(|span| span.start < span.end && span.end <= count));
        for extra in &generation.extras {
            assert!(extra.ends.is_sorted() && extra.ends.last().is_none_or(|&end| end as usize == extra.values.len()));
        }
        let nan = generation.tokens.logprobs.iter().flatten().filter(|logprob| logprob.is_nan()).count();
        assert_eq!(nan as u32, generation.tokens.missing + generation.tokens.invalid);
    }
}

fn check(record: &[u8], wanted: Option<&str>) {
    match decode(record, Raw::Held(record.into()), &place(), wanted) {
        Ok(Record { trace, .. }) => assert_sound(&trace),
        Err(rejection) => {
            let said = rejection.error.to_string();
            assert!(said.starts_with("runs.jsonl:7") && !rejection.error.cure.is_empty(), "{said}");
        }
    }
}

/// One place of a value, by a walk that random numbers steer; lists of numbers are entered as the rest.
fn mutate(value: &mut Value, steer: &mut impl Iterator<Item = u32>, put: &Value) {
    let mut next = || steer.next().unwrap_or(0) as usize;
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            let at = next() % fields.len();
            let key = fields.keys().nth(at).cloned().unwrap_or_default();
            match next() % 6 {
                0 => drop(fields.remove(&key)),
                1 => drop(fields.insert(key, put.clone())),
                _ => mutate(&mut fields[&key], steer, put),
            }
        }
        Value::Array(items) if !items.is_empty() => {
            let at = next() % items.len();
            match next() % 8 {
                0 => items.truncate(at),
                1 => items.push(items[at].clone()),
                2 => items[at] = put.clone(),
                3 => items.insert(at, put.clone()),
                _ => mutate(&mut items[at], steer, put),
            }
        }
        other => *other = put.clone(),
    }
}

fn odd_values() -> Vec<Value> {
    let deep = (0..40).fold(json!(1), |inner, _| json!([inner]));
    vec![
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(1.5),
        json!(1e300),
        json!(4_294_967_296_u64),
        json!(u64::MAX),
        json!(2_147_483_647),
        json!(""),
        json!("[1, 2"),
        json!("['token_ids']"),
        json!([]),
        json!([1]),
        json!([[1, 2]]),
        json!([[]]),
        json!({}),
        json!({"role": "assistant", "content": "x"}),
        json!({"0": {"token_ids": [1]}}),
        deep,
    ]
}

#[test]
fn every_golden_record_is_sound_by_name_and_without() {
    let records = goldens();
    assert!(records.len() > 20);
    for record in &records {
        let text = record.to_string();
        let read = decode(text.as_bytes(), Raw::Held(b""[..].into()), &place(), None).unwrap();
        assert_sound(&read.trace);
        for form in forms() {
            check(text.as_bytes(), Some(form.name));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn a_mutated_record_is_a_sound_trace_or_a_located_error(
        which in any::<prop::sample::Index>(),
        puts in prop::collection::vec(prop::sample::select(odd_values()), 1..4),
        steps in prop::collection::vec(any::<u32>(), 40),
        form in any::<prop::sample::Index>(),
    ) {
        thread_local!(static GOLDENS: Vec<Value> = goldens());
        let mut record = GOLDENS.with(|goldens| which.get(goldens).clone());
        let mut steer = steps.into_iter();
        for put in &puts {
            mutate(&mut record, &mut steer, put);
        }
        let text = record.to_string();
        check(text.as_bytes(), None);
        let names: Vec<_> = forms().map(|form| form.name).collect();
        check(text.as_bytes(), Some(names[form.index(names.len())]));
    }

    #[test]
    fn a_cut_record_is_a_located_error(which in any::<prop::sample::Index>(), cut in any::<prop::sample::Index>()) {
        let text = which.get(&goldens()).to_string();
        let end = cut.index(text.len());
        check(&text.as_bytes()[..end], None);
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
    let text = json!({"nodes": nodes, "calls": []}).to_string();
    let rejection = decode(text.as_bytes(), Raw::Held(b""[..].into()), &place(), None).unwrap_err();
    assert_eq!(rejection.reason.name(), "too_long");
    assert!(start.elapsed() < Duration::from_secs(20));
}
