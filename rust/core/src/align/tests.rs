//! Complete traces through `align`, built by hand. They cover cases that no reader of this crate's own formats can
//! express yet.

use super::{Aligned, NO_VALUE, Options, Reason, align};
use crate::tokenizer::{Tokenizer, TokenizerConfig, example as tokenizer};
use crate::trace::{Extra, ExtraStart, Generation, LogprobKind, Message, Note, Prompt, Tokens, Trace, VersionSpan};
use serde_json::json;
use std::sync::Arc;

fn sampled(ids: &[u32], prompt: Prompt) -> Generation {
    let logprobs = Some(vec![-0.5; ids.len()]);
    let tokens = Tokens { ids: Some(ids.to_vec()), logprobs, ..Tokens::default() };
    Generation { tokens, prompt, finish_reason: Some("length".into()), ..Generation::default() }
}

/// Returns a trace of these generations over one assistant message.
fn trace(generations: Vec<Generation>) -> Vec<Arc<Trace>> {
    let messages = vec![Message::new(json!({"role": "assistant"}), None)];
    vec![Arc::new(Trace { messages, generations, conversation: vec![0], ..Trace::default() })]
}

fn aligned(generations: Vec<Generation>) -> Aligned {
    align(&trace(generations), &tokenizer(), None, Options::default()).unwrap()
}

fn reasons(aligned: &Aligned) -> Vec<Reason> {
    aligned.mismatches.iter().map(|finding| finding.reason).collect()
}

#[test]
fn case_61_a_policy_change_inside_a_turn_is_recorded_per_token() {
    let mut generation = sampled(&[10, 11, 12, 13], Prompt::Ids(vec![5]));
    generation.policy_version = 3;
    generation.versions =
        vec![VersionSpan { start: 0, end: 2, version: 7 }, VersionSpan { start: 2, end: 3, version: 8 }];
    assert_eq!(aligned(vec![generation]).version, [-1, 7, 7, 8, 3]);
}

#[test]
fn text_without_a_template_is_prompt_and_the_next_turn_continues_it() {
    let tokenizer = tokenizer();
    let words = tokenizer.encode("price of two").unwrap();
    let first = sampled(&[10, 11], Prompt::Text("price of two".into()));
    let second = sampled(&[12], Prompt::Follows { turn: 0, ids: vec![20, 21] });
    let result = aligned(vec![first, second]);
    assert_eq!(result.cu_seqlens.len(), 2);
    let expected: Vec<i32> = words.iter().map(|&id| id as i32).chain([10, 11, 20, 21, 12]).collect();
    assert_eq!(result.ids, expected);
    assert_eq!(result.trainable.iter().filter(|&&trained| trained).count(), 3);
    assert!(result.mismatches.is_empty());
}

#[test]
fn two_turns_after_the_same_one_are_two_branches_and_shared_tokens_train_once() {
    let first = sampled(&[10, 11], Prompt::Ids(vec![5]));
    let follow = |id: u32| sampled(&[id], Prompt::Follows { turn: 0, ids: vec![20] });
    let result = aligned(vec![first, follow(12), follow(13)]);
    assert_eq!(result.ids, [5, 10, 11, 20, 12, 5, 10, 11, 20, 13]);
    assert_eq!(result.cu_seqlens, [0, 5, 10]);
    let terms: Vec<usize> = (0..10).filter(|&at| result.trainable[at]).collect();
    assert_eq!(terms, [1, 2, 4, 9]);
    assert_eq!(result.source[6..8], [2, 2]);
    assert_eq!(reasons(&result), [Reason::PrefixNotExtended]);
}

#[test]
fn a_turn_without_a_recorded_prompt_is_kept_but_not_trained() {
    let result =
        aligned(vec![sampled(&[10, 11], Prompt::Unknown), sampled(&[12], Prompt::Follows { turn: 0, ids: vec![9] })]);
    assert_eq!(result.ids, [10, 11, 9, 12]);
    assert_eq!(result.trainable, [false; 4]);
    assert_eq!(result.source, [2, 2, 0, 2]);
    assert_eq!(reasons(&result), [Reason::PromptMismatch; 2]);
    assert_eq!(result.mismatches.iter().map(|row| row.count).collect::<Vec<_>>(), [2, 1]);
    assert_eq!((result.recorded, result.exact), (3, 0));
    let again = aligned(vec![sampled(&[10, 11], Prompt::Unknown), sampled(&[12], Prompt::Ids(vec![10, 11, 9]))]);
    assert_eq!((again.ids, again.cu_seqlens), (vec![10, 11, 10, 11, 9, 12], vec![0, 2, 6])); // none of it is a prompt
    let ahead = aligned(vec![sampled(&[12], Prompt::Follows { turn: 4, ids: vec![9] })]);
    assert_eq!((ahead.trainable.as_slice(), reasons(&ahead).as_slice()), (&[false][..], &[Reason::PromptMismatch][..]));
}

#[test]
fn a_text_of_ids_that_the_model_lacks_is_left_out_as_a_whole() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/quickstart/model");
    let mut config = TokenizerConfig::from_dir(folder.as_ref()).unwrap();
    config.model.vocab_size = Some(6);
    let json = std::fs::read(format!("{folder}/tokenizer.json")).unwrap();
    let tokenizer = Tokenizer::from_json(&json, &config).unwrap();
    let generation = Generation { text: Some("price".into()), prompt: Prompt::Ids(vec![5]), ..Generation::default() };
    let result =
        align(&trace(vec![generation]), &tokenizer, None, Options { text_only: true, ..Options::default() }).unwrap();
    assert_eq!(reasons(&result), [Reason::VocabOutOfRange]);
    assert_eq!(result.mismatches[0].token, -1);
}

#[test]
fn a_trace_of_which_nothing_is_left_keeps_its_place() {
    let traces = [9, 99_999, 9].map(|id| trace(vec![sampled(&[10], Prompt::Ids(vec![id]))])).concat();
    let result = align(&traces, &tokenizer(), None, Options::default()).unwrap();
    assert_eq!((result.trace, result.cu_seqlens), (vec![0, 1, 2], vec![0, 2, 2, 4]));
}

#[test]
fn notes_of_the_reader_become_findings() {
    let mut generation = sampled(&[10], Prompt::Ids(vec![5]));
    generation.notes = vec![Note { reason: Reason::StreamIncomplete, count: 3, detail: "3 chunks are missing".into() }];
    let result = aligned(vec![generation]);
    assert_eq!(reasons(&result), [Reason::StreamIncomplete]);
    assert_eq!(result.mismatches[0].count, 3);
}

#[test]
fn extras_belong_to_their_tokens_and_other_tokens_have_none() {
    // Two experts for every prompt and sampled token except the last; masks of different lengths for the sampled
    // tokens.
    let experts = |rows: u32, base: i32| Extra {
        name: "routed_experts",
        first: ExtraStart::Prompt,
        shape: vec![2],
        ends: (1..=rows).map(|row| 2 * row).collect(),
        values: (0..2 * rows as i32).map(|value| base + value).collect(),
    };
    let mask = Extra {
        name: "sampling_mask",
        first: ExtraStart::Sampled,
        shape: Vec::new(),
        ends: vec![2, 4],
        values: vec![10, 9, 11, 8],
    };
    let mut first = sampled(&[10, 11], Prompt::Ids(vec![5, 6]));
    first.extras = vec![experts(3, 0), mask];
    first.logprob_kind = LogprobKind::Processed;
    let mut second = sampled(&[12], Prompt::Ids(vec![5, 6, 10, 11, 20]));
    second.extras = vec![experts(5, 100)];
    let result = aligned(vec![first, second]);
    let [routed, masks] = result.extras.as_slice() else { panic!("two columns") };
    assert_eq!((routed.name, masks.name), ("routed_experts", "sampling_mask"));
    // Tokens 0 to 2 keep the rows of the first call, 3 and 4 get those of the second, and 5 has none.
    assert_eq!(routed.values, [0, 1, 2, 3, 4, 5, 106, 107, 108, 109, NO_VALUE, NO_VALUE]);
    assert_eq!(masks.offsets, [0, 0, 0, 2, 4, 4, 4]);
    assert_eq!(masks.values, [10, 9, 11, 8]);
}

#[test]
fn alignment_does_not_depend_on_the_number_of_threads() {
    let first = || sampled(&[10, 11], Prompt::Ids(vec![5]));
    let traces: Vec<_> =
        (0..32).flat_map(|k| trace(vec![first(), sampled(&[k], Prompt::Follows { turn: 0, ids: vec![k] })])).collect();
    let tokenizer = tokenizer();
    let align_with = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let result = pool.install(|| align(&traces, &tokenizer, None, Options::default()).unwrap());
        (result.ids, result.trainable, result.cu_seqlens, result.trace)
    };
    assert_eq!(align_with(1), align_with(2));
}
