//! Tests of prompts with images through `align`: which ids belong to images, and which prompts are rejected.

use crate::align::{Aligned, ImageRule, Options, Reason, align};
use crate::images::{Image, handles};
use crate::tokenizer::example;
use crate::trace::{Generation, ImagePosition, LogprobKind, Message, Prompt, Tokens, Trace};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;

/// The pad id, and the ids that the template writes before and after it.
const PAD: u32 = 7;
const OPEN: u32 = 8;
const CLOSE: u32 = 9;

/// Images 1 and 2 have the same size and three features each; image 3 has two features.
fn picture(digest: u8) -> Image {
    let (width, height) = if digest == 3 { (56, 28) } else { (84, 28) };
    Image { digest: [digest; 32], width, height, ..Image::default() }
}

fn rule() -> ImageRule {
    let expansions = HashMap::from([((84, 28), vec![PAD; 3]), ((56, 28), vec![PAD; 2])]);
    ImageRule { pad: PAD, frames: vec![OPEN, CLOSE], expansions }
}

fn shows(images: &[u8]) -> Value {
    let part = |digest: &u8| {
        let name = format!("blake3:{}", blake3::Hash::from_bytes([*digest; 32]).to_hex());
        json!({"type": "image", "image": name})
    };
    json!({"role": "user", "content": images.iter().map(part).collect::<Vec<_>>()})
}

/// Returns one call after messages with these images, with a prompt of these ids, that sampled the given ids.
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
    let mut images = Vec::new();
    for digest in messages.iter().flat_map(|message| handles(&message.value)) {
        if !images.iter().any(|image: &Image| image.digest == digest) {
            images.push(picture(digest[0]));
        }
    }
    let conversation = (0..messages.len() as u32).collect();
    vec![Arc::new(Trace { messages, generations, conversation, images, ..Trace::default() })]
}

fn answer() -> Value {
    json!({"role": "assistant"})
}

fn single_call_trace(images: &[u8], prompt: &[u32]) -> Vec<Arc<Trace>> {
    trace(vec![shows(images), answer()], vec![call(&[0], 1, prompt, &[10, 11])])
}

fn aligned(traces: &[Arc<Trace>]) -> Aligned {
    align(traces, &example(), Some(&rule()), Options::default()).unwrap()
}

/// Returns for each place of an image the first byte of its digest and the tokens of its features.
fn places(result: &Aligned) -> Vec<(u8, Vec<i32>)> {
    let mut at = result.images.at.iter().copied();
    let rows = result.images.image.iter().zip(&result.images.features);
    rows.map(|(&row, &count)| (result.images.digests[row as usize][0], at.by_ref().take(count as usize).collect()))
        .collect()
}

fn has(result: &Aligned, reason: Reason) -> bool {
    result.mismatches.iter().any(|finding| finding.reason == reason)
}

fn trained(result: &Aligned) -> Vec<i32> {
    result.ids.iter().zip(&result.trainable).filter(|(_, trained)| **trained).map(|(&id, _)| id).collect()
}

#[test]
fn images_are_placed_by_the_rule_of_servers() {
    // A pad that is an ordinary word follows the images. A pad before them would count as their place.
    let prompt = [OPEN, PAD, PAD, PAD, CLOSE, OPEN, PAD, PAD, CLOSE, 20, PAD, 21];
    let result = aligned(&single_call_trace(&[1, 3], &prompt));
    assert_eq!(places(&result), [(1, vec![1, 2, 3]), (3, vec![6, 7])]);
    let ids: Vec<i32> = prompt.iter().chain(&[10, 11]).map(|&id| id as i32).collect();
    assert_eq!(result.ids, ids);
    assert_eq!(trained(&result), [10, 11]);
    assert!(result.images.at.iter().all(|&at| result.source[at as usize] == 0), "a picture is given");
    assert!(!has(&result, Reason::MediaInPrompt) && !has(&result, Reason::PictureUnplaced));

    let literal = [PAD, PAD, PAD, 20, OPEN, PAD, CLOSE, 21];
    assert_eq!(places(&aligned(&single_call_trace(&[1], &literal))), [(1, vec![0, 1, 2])]);
    // Images next to each other, and one image twice.
    let adjacent = [PAD, PAD, PAD, PAD, PAD, PAD, PAD, PAD, 20];
    let twice = aligned(&single_call_trace(&[1, 3, 1], &adjacent));
    assert_eq!(places(&twice), [(1, vec![0, 1, 2]), (3, vec![3, 4]), (1, vec![5, 6, 7])]);
    assert_eq!(twice.images.sizes, [[84, 28], [56, 28]]);
    assert_eq!(twice.images.counts, [3]);
}

#[test]
fn ids_that_do_not_match_the_images_leave_the_turn_untrained() {
    let cases: [(&[u8], &[u32]); 6] = [
        (&[1], &[OPEN, PAD, PAD, CLOSE]),
        (&[3], &[OPEN, PAD, PAD, PAD, CLOSE]),
        (&[1, 1], &[OPEN, PAD, PAD, PAD, CLOSE]),
        (&[3], &[OPEN, PAD, PAD, CLOSE, OPEN, PAD, PAD, CLOSE]),
        (&[1], &[20, 21]),
        (&[3, 1], &[OPEN, PAD, PAD, PAD, CLOSE, OPEN, PAD, PAD, CLOSE]),
    ];
    for (images, prompt) in cases {
        let result = aligned(&single_call_trace(images, prompt));
        assert!(has(&result, Reason::PictureUnplaced), "{images:?} {prompt:?}");
        assert_eq!((trained(&result), result.images.image.len()), (vec![], 0), "{images:?} {prompt:?}");
    }
}

#[test]
fn recorded_image_positions_take_precedence_and_must_match_the_ids() {
    // Ids that were already expanded and sent again: the second image is inside the run of the first.
    let prompt = [OPEN, PAD, PAD, PAD, PAD, PAD, PAD, CLOSE, OPEN, PAD, PAD, PAD, CLOSE];
    let align_with_places = |places: &[(u32, u32)]| {
        let mut generation = call(&[0], 1, &prompt, &[10, 11]);
        let place = |&(offset, length): &(u32, u32)| ImagePosition { offset, length };
        generation.placeholders = Some(places.iter().map(place).collect());
        aligned(&trace(vec![shows(&[1, 2]), answer()], vec![generation]))
    };
    assert_eq!(places(&align_with_places(&[(1, 3), (9, 3)])), [(1, vec![1, 2, 3]), (2, vec![9, 10, 11])]);
    assert_eq!(trained(&align_with_places(&[(1, 3), (4, 3)])), [10, 11]);
    for wrong in [&[(1, 3)][..], &[(1, 2), (4, 3)], &[(4, 3), (1, 3)], &[(1, 3), (11, 3)], &[(1, 3), (u32::MAX, 3)]] {
        let result = align_with_places(wrong);
        assert!(has(&result, Reason::PictureUnplaced) && trained(&result).is_empty(), "{wrong:?}");
    }
    assert!(
        has(&aligned(&single_call_trace(&[1, 2], &prompt)), Reason::PictureUnplaced),
        "the run behind it is unexplained"
    );
}

#[test]
fn a_prompt_recorded_before_expansion_is_expanded_and_counted() {
    let result = aligned(&single_call_trace(&[3, 1], &[OPEN, PAD, CLOSE, OPEN, PAD, CLOSE, 20]));
    assert_eq!(places(&result), [(3, vec![1, 2]), (1, vec![5, 6, 7])]);
    assert_eq!(trained(&result), [10, 11]);
    let finding = result.mismatches.iter().find(|finding| finding.reason == Reason::PictureExpanded).unwrap();
    assert_eq!(finding.count, 3);
}

#[test]
fn a_later_turn_continues_only_after_the_same_images() {
    let first = [OPEN, PAD, PAD, PAD, CLOSE, 20];
    // The sampled ids contain pads, which are ordinary words there.
    let sampled = [PAD, PAD, 10];
    let second: Vec<u32> = [&first[..], &sampled, &[21, OPEN, PAD, PAD, CLOSE]].concat();
    let messages = vec![shows(&[1]), answer(), shows(&[3]), answer()];
    let calls = vec![call(&[0], 1, &first, &sampled), call(&[0, 1, 2], 3, &second, &[11])];
    let result = aligned(&trace(messages.clone(), calls.clone()));
    assert_eq!(result.cu_seqlens.len(), 2, "one branch");
    assert_eq!(places(&result), [(1, vec![1, 2, 3]), (3, vec![11, 12])]);
    assert_eq!(trained(&result), [PAD as i32, PAD as i32, 10, 11]);

    // The same prompt, recorded as ids after the turn before.
    let mut follows = calls;
    follows[1].prompt = Prompt::Follows { turn: 0, ids: second[9..].to_vec() };
    let again = aligned(&trace(messages, follows.clone()));
    assert_eq!(
        (again.ids, places(&aligned(&trace(vec![shows(&[1]), answer(), shows(&[3]), answer()], follows)))),
        (result.ids.clone(), places(&result))
    );

    // Another image of the same size at the same ids is a different history.
    let other = vec![shows(&[1]), answer(), shows(&[2]), answer(), shows(&[3])];
    let second: Vec<u32> = [&first[..], &[10, 21, OPEN, PAD, PAD, CLOSE]].concat();
    let calls = vec![call(&[0], 1, &first, &[10]), call(&[2, 1, 4], 3, &second, &[11])];
    let result = aligned(&trace(other, calls));
    assert_eq!(result.cu_seqlens.len(), 3, "two branches");
    assert_eq!(result.images.counts, [1, 2]);
}

#[test]
fn without_a_rule_or_with_other_media_nothing_is_trained() {
    let traces = single_call_trace(&[1], &[OPEN, PAD, PAD, PAD, CLOSE]);
    let result = align(&traces, &example(), None, Options::default()).unwrap();
    assert!(has(&result, Reason::MediaInPrompt) && trained(&result).is_empty());
    let mut both = shows(&[1]);
    both["content"].as_array_mut().unwrap().push(json!({"type": "video_url", "video_url": {"url": "x"}}));
    let calls = vec![call(&[0], 1, &[OPEN, PAD, PAD, PAD, CLOSE], &[10])];
    let result = aligned(&trace(vec![both, answer()], calls));
    assert!(has(&result, Reason::MediaInPrompt) && trained(&result).is_empty());
}

#[test]
fn an_id_beyond_every_model_is_not_a_key() {
    let result = aligned(&single_call_trace(&[1], &[OPEN, PAD, PAD, PAD, CLOSE, 1 << 31]));
    assert!(has(&result, Reason::VocabOutOfRange) && result.ids.is_empty());
    let large = aligned(&single_call_trace(&[1], &[OPEN, PAD, PAD, PAD, CLOSE, (1 << 31) - 1]));
    assert!(has(&large, Reason::VocabOutOfRange) && large.ids.is_empty());
}
