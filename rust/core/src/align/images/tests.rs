//! Prompts with pictures through `align`: which ids are theirs, and what is refused.

use crate::align::{Aligned, Options, PictureRule, Reason, align};
use crate::images::{Picture, handles};
use crate::tokenizer::example;
use crate::trace::{Generation, LogprobKind, Message, Placeholder, Prompt, Tokens, Trace};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;

/// The pad, and what the template writes before and behind it.
const PAD: u32 = 7;
const OPEN: u32 = 8;
const CLOSE: u32 = 9;

/// Pictures 1 and 2 are of one size and have three features, picture 3 has two.
fn picture(digest: u8) -> Picture {
    let (width, height) = if digest == 3 { (56, 28) } else { (84, 28) };
    Picture { digest: [digest; 32], width, height, ..Picture::default() }
}

fn rule() -> PictureRule {
    let expansions = HashMap::from([((84, 28), vec![PAD; 3]), ((56, 28), vec![PAD; 2])]);
    PictureRule { pad: PAD, frames: vec![OPEN, CLOSE], expansions }
}

fn shows(pictures: &[u8]) -> Value {
    let part = |digest: &u8| {
        let name = format!("blake3:{}", blake3::Hash::from_bytes([*digest; 32]).to_hex());
        json!({"type": "image", "image": name})
    };
    json!({"role": "user", "content": pictures.iter().map(part).collect::<Vec<_>>()})
}

/// One call after messages with these pictures, with a prompt of these ids, that sampled ids 10 and so on.
fn call(context: &[u32], message: u32, prompt: &[u32], sampled: &[u32]) -> Generation {
    Generation {
        message,
        context: context.to_vec(),
        prompt: Prompt::Ids(prompt.to_vec()),
        tokens: Tokens { ids: Some(sampled.to_vec()), logprobs: Some(vec![-0.5; sampled.len()]), ..Tokens::default() },
        logprob_kind: LogprobKind::Processed,
        finish_reason: Some("length".into()),
        ..Generation::default()
    }
}

fn trace(messages: Vec<Value>, generations: Vec<Generation>) -> Vec<Arc<Trace>> {
    let messages: Vec<_> = messages.into_iter().map(|value| Message::new(value, None)).collect();
    let mut pictures = Vec::new();
    for digest in messages.iter().flat_map(|message| handles(&message.value)) {
        if !pictures.iter().any(|picture: &Picture| picture.digest == digest) {
            pictures.push(picture(digest[0]));
        }
    }
    let conversation = (0..messages.len() as u32).collect();
    vec![Arc::new(Trace { messages, generations, conversation, pictures, ..Trace::default() })]
}

fn said() -> Value {
    json!({"role": "assistant"})
}

fn one(pictures: &[u8], prompt: &[u32]) -> Vec<Arc<Trace>> {
    trace(vec![shows(pictures), said()], vec![call(&[0], 1, prompt, &[10, 11])])
}

fn aligned(traces: &[Arc<Trace>]) -> Aligned {
    align(traces, &example(), Some(&rule()), Options::default()).unwrap()
}

/// Where each picture stands: its first byte, and the tokens of its features.
fn places(found: &Aligned) -> Vec<(u8, Vec<i32>)> {
    let mut at = found.images.at.iter().copied();
    let rows = found.images.picture.iter().zip(&found.images.features);
    rows.map(|(&row, &count)| (found.images.digests[row as usize][0], at.by_ref().take(count as usize).collect()))
        .collect()
}

fn has(found: &Aligned, reason: Reason) -> bool {
    found.drift.iter().any(|finding| finding.reason == reason)
}

fn trained(found: &Aligned) -> Vec<i32> {
    found.ids.iter().zip(&found.trainable).filter(|(_, trained)| **trained).map(|(&id, _)| id).collect()
}

#[test]
fn pictures_stand_where_the_rule_of_servers_puts_them() {
    // A word that is a pad stands behind the pictures, and one before them would be taken for their place.
    let prompt = [OPEN, PAD, PAD, PAD, CLOSE, OPEN, PAD, PAD, CLOSE, 20, PAD, 21];
    let found = aligned(&one(&[1, 3], &prompt));
    assert_eq!(places(&found), [(1, vec![1, 2, 3]), (3, vec![6, 7])]);
    let ids: Vec<i32> = prompt.iter().chain(&[10, 11]).map(|&id| id as i32).collect();
    assert_eq!(found.ids, ids);
    assert_eq!(trained(&found), [10, 11]);
    assert!(found.images.at.iter().all(|&at| found.source[at as usize] == 0), "a picture is given");
    assert!(!has(&found, Reason::MediaInPrompt) && !has(&found, Reason::PictureUnplaced));

    let literal = [PAD, PAD, PAD, 20, OPEN, PAD, CLOSE, 21];
    assert_eq!(places(&aligned(&one(&[1], &literal))), [(1, vec![0, 1, 2])]);
    // Side by side, and one twice.
    let beside = [PAD, PAD, PAD, PAD, PAD, PAD, PAD, PAD, 20];
    let twice = aligned(&one(&[1, 3, 1], &beside));
    assert_eq!(places(&twice), [(1, vec![0, 1, 2]), (3, vec![3, 4]), (1, vec![5, 6, 7])]);
    assert_eq!(twice.images.sizes, [[84, 28], [56, 28]]);
    assert_eq!(twice.images.counts, [3]);
}

#[test]
fn ids_that_are_not_those_of_the_pictures_hold_the_turn() {
    let cases: [(&[u8], &[u32]); 6] = [
        (&[1], &[OPEN, PAD, PAD, CLOSE]),
        (&[3], &[OPEN, PAD, PAD, PAD, CLOSE]),
        (&[1, 1], &[OPEN, PAD, PAD, PAD, CLOSE]),
        (&[3], &[OPEN, PAD, PAD, CLOSE, OPEN, PAD, PAD, CLOSE]),
        (&[1], &[20, 21]),
        (&[3, 1], &[OPEN, PAD, PAD, PAD, CLOSE, OPEN, PAD, PAD, CLOSE]),
    ];
    for (pictures, prompt) in cases {
        let found = aligned(&one(pictures, prompt));
        assert!(has(&found, Reason::PictureUnplaced), "{pictures:?} {prompt:?}");
        assert_eq!((trained(&found), found.images.picture.len()), (vec![], 0), "{pictures:?} {prompt:?}");
    }
}

#[test]
fn places_that_a_server_told_win_and_are_held_against_the_ids() {
    // Ids that were expanded already and sent again: the second picture stands in the first one's run.
    let prompt = [OPEN, PAD, PAD, PAD, PAD, PAD, PAD, CLOSE, OPEN, PAD, PAD, PAD, CLOSE];
    let told = |places: &[(u32, u32)]| {
        let mut generation = call(&[0], 1, &prompt, &[10, 11]);
        let place = |&(offset, length): &(u32, u32)| Placeholder { offset, length };
        generation.placeholders = Some(places.iter().map(place).collect());
        aligned(&trace(vec![shows(&[1, 2]), said()], vec![generation]))
    };
    assert_eq!(places(&told(&[(1, 3), (9, 3)])), [(1, vec![1, 2, 3]), (2, vec![9, 10, 11])]);
    assert_eq!(trained(&told(&[(1, 3), (4, 3)])), [10, 11]);
    for wrong in [&[(1, 3)][..], &[(1, 2), (4, 3)], &[(4, 3), (1, 3)], &[(1, 3), (11, 3)], &[(1, 3), (u32::MAX, 3)]] {
        let found = told(wrong);
        assert!(has(&found, Reason::PictureUnplaced) && trained(&found).is_empty(), "{wrong:?}");
    }
    assert!(has(&aligned(&one(&[1, 2], &prompt)), Reason::PictureUnplaced), "the run behind it is unexplained");
}

#[test]
fn a_prompt_as_it_was_sent_is_expanded_and_counted() {
    let found = aligned(&one(&[3, 1], &[OPEN, PAD, CLOSE, OPEN, PAD, CLOSE, 20]));
    assert_eq!(places(&found), [(3, vec![1, 2]), (1, vec![5, 6, 7])]);
    assert_eq!(trained(&found), [10, 11]);
    let finding = found.drift.iter().find(|finding| finding.reason == Reason::PictureExpanded).unwrap();
    assert_eq!(finding.count, 3);
}

#[test]
fn a_later_turn_goes_on_behind_the_same_pictures_alone() {
    let first = [OPEN, PAD, PAD, PAD, CLOSE, 20];
    // What was sampled holds pads, which are words.
    let sampled = [PAD, PAD, 10];
    let second: Vec<u32> = [&first[..], &sampled, &[21, OPEN, PAD, PAD, CLOSE]].concat();
    let messages = vec![shows(&[1]), said(), shows(&[3]), said()];
    let calls = vec![call(&[0], 1, &first, &sampled), call(&[0, 1, 2], 3, &second, &[11])];
    let found = aligned(&trace(messages.clone(), calls.clone()));
    assert_eq!(found.cu_seqlens.len(), 2, "one branch");
    assert_eq!(places(&found), [(1, vec![1, 2, 3]), (3, vec![11, 12])]);
    assert_eq!(trained(&found), [PAD as i32, PAD as i32, 10, 11]);

    // The same as ids behind the turn before.
    let mut follows = calls;
    follows[1].prompt = Prompt::Follows { turn: 0, ids: second[9..].to_vec() };
    let again = aligned(&trace(messages, follows.clone()));
    assert_eq!(
        (again.ids, places(&aligned(&trace(vec![shows(&[1]), said(), shows(&[3]), said()], follows)))),
        (found.ids.clone(), places(&found))
    );

    // Another picture of the same size at the same ids is another history.
    let other = vec![shows(&[1]), said(), shows(&[2]), said(), shows(&[3])];
    let second: Vec<u32> = [&first[..], &[10, 21, OPEN, PAD, PAD, CLOSE]].concat();
    let calls = vec![call(&[0], 1, &first, &[10]), call(&[2, 1, 4], 3, &second, &[11])];
    let found = aligned(&trace(other, calls));
    assert_eq!(found.cu_seqlens.len(), 3, "two branches");
    assert_eq!(found.images.counts, [1, 2]);
}

#[test]
fn without_a_rule_or_with_something_else_that_is_no_text_nothing_is_trained() {
    let traces = one(&[1], &[OPEN, PAD, PAD, PAD, CLOSE]);
    let found = align(&traces, &example(), None, Options::default()).unwrap();
    assert!(has(&found, Reason::MediaInPrompt) && trained(&found).is_empty());
    let mut both = shows(&[1]);
    both["content"].as_array_mut().unwrap().push(json!({"type": "video_url", "video_url": {"url": "x"}}));
    let calls = vec![call(&[0], 1, &[OPEN, PAD, PAD, PAD, CLOSE], &[10])];
    let found = aligned(&trace(vec![both, said()], calls));
    assert!(has(&found, Reason::MediaInPrompt) && trained(&found).is_empty());
}

#[test]
fn an_id_that_no_model_has_is_no_key() {
    let found = aligned(&one(&[1], &[OPEN, PAD, PAD, PAD, CLOSE, 1 << 31]));
    assert!(has(&found, Reason::VocabOutOfRange) && found.ids.is_empty());
    let large = aligned(&one(&[1], &[OPEN, PAD, PAD, PAD, CLOSE, (1 << 31) - 1]));
    assert!(has(&large, Reason::VocabOutOfRange) && large.ids.is_empty());
}
