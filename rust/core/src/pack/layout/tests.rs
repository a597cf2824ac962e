//! Rows computed by hand.

use super::*;

// Branch 0: ids 10 11 12, terms at 1, 2. Branch 1: ids 20 21, term at 1. Branch 2: 30 31 32 33, terms at 2, 3.
const TOKENS: Tokens<'static> = Tokens {
    ids: &[10, 11, 12, 20, 21, 30, 31, 32, 33],
    trainable: &[false, true, true, false, true, false, false, true, true],
    inv_temperature: &[1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    cu_seqlens: &[0, 3, 5, 9],
};

fn plan<'a>(length: &'a [i32], step: &'a [i32], row: &'a [i32], rows: &'a [i32]) -> Plan<'a> {
    Plan { length, step, row, order: &[0, 1, 2, 3, 4][..length.len()], rows, shared: &[false; 2][..rows.len()] }
}

#[test]
fn a_row_reads_each_term_at_its_predecessor() {
    let out = write_rows(TOKENS, plan(&[3, 2, 4], &[0, 0, 0], &[1, 0, 0], &[2]), 1).unwrap();
    assert_eq!(out.ids, [20, 21, 30, 31, 32, 33, 10, 11, 12]);
    assert_eq!(out.positions, [0, 1, 0, 1, 2, 3, 0, 1, 2]);
    assert_eq!(out.tree_end, [2, 2, 6, 6, 6, 6, 3, 3, 3]);
    assert_eq!(out.cu_tokens, [0, 6, 9]);
    assert_eq!(out.predictor, [0, 3, 4, 0, 1]);
    assert_eq!(out.target, [21, 32, 33, 11, 12]);
    assert_eq!(out.inv_temperature, [1.0, 1.0, 1.0, 1.0, 2.0]);
    assert_eq!(out.row, [0, 1, 2, 0, 1]);
    assert_eq!(out.term, [2, 3, 4, 0, 1]);
    assert_eq!(out.cu_logit_rows, [0, 3, 5]);
    assert_eq!(out.origin, [1, 2, 4, 7, 8]);
    assert_eq!(out.branch, [0, 0, 1, 2, 2]);
    assert_eq!(out.cu_terms, [0, 5]);
}

#[test]
fn steps_number_their_terms_from_zero_and_lengths_cut_branches() {
    let out = write_rows(TOKENS, plan(&[2, 2, 4], &[1, -1, 0], &[0, 0, 0], &[1, 1]), 1).unwrap();
    assert_eq!(out.ids, [30, 31, 32, 33, 10, 11]);
    assert_eq!(out.term, [0, 1, 0]);
    assert_eq!(out.origin, [7, 8, 1]);
    assert_eq!((out.cu_rows, out.cu_terms), (vec![0, 1, 2], vec![0, 2, 3]));
}

#[test]
fn padding_and_empty_rows_see_only_themselves() {
    let out = write_rows(TOKENS, plan(&[3, 0, 0], &[0, -1, -1], &[0, 0, 0], &[2]), 4).unwrap();
    assert_eq!(out.ids, [10, 11, 12, 0, 0, 0, 0, 0]);
    assert_eq!(out.tree_end, [3, 3, 3, 4, 1, 2, 3, 4]);
    assert_eq!(out.positions, [0, 1, 2, 0, 0, 0, 0, 0]);
    assert_eq!((out.cu_tokens, out.cu_logit_rows), (vec![0, 4, 8], vec![0, 2, 2]));
}

#[test]
fn a_row_that_does_not_exist_is_refused() {
    assert!(write_rows(TOKENS, plan(&[3, 2, 4], &[0, 0, 0], &[0, 0, 1], &[1]), 1).is_err());
    assert!(write_rows(TOKENS, plan(&[4, 2, 4], &[0, 0, 0], &[0, 0, 0], &[1]), 1).is_err());
    assert!(write_rows(TOKENS, plan(&[3, 2, 4], &[0, 1, 0], &[0, 0, 0], &[1]), 1).is_err());
}

// 0: 4 5 6 7 8, terms 6 7 8. 1: 4 5 6 7, term 7. 2: 4 5 6 9, terms 6 9. 3: 4 5 6 7 8 again, term 8, at another
// temperature. 4: the same as branch 3. In order: 1, 0, 3, 4, 2.
const FORKED: Tokens<'static> = Tokens {
    ids: &[4, 5, 6, 7, 8, 4, 5, 6, 7, 4, 5, 6, 9, 4, 5, 6, 7, 8, 4, 5, 6, 7, 8],
    trainable: &[
        false, false, true, true, true, false, false, false, true, false, false, true, true, false, false, false,
        false, true, false, false, false, false, true,
    ],
    inv_temperature: &[
        1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0,
        2.0,
    ],
    cu_seqlens: &[0, 5, 9, 13, 18, 23],
};

#[test]
fn a_row_that_does_not_share_holds_every_branch_whole_though_they_begin_alike() {
    let out = write_rows(FORKED, Plan { order: &[1, 0, 4, 2, 3], ..plan(&[5, 4, 4, 5, 5], &[0; 5], &[0; 5], &[1]) }, 1);
    let out = out.unwrap();
    // Branches 1, 0, 3, 4, 2 start at positions 0, 4, 9, 14, 19.
    assert_eq!(out.ids, [4, 5, 6, 7, 4, 5, 6, 7, 8, 4, 5, 6, 7, 8, 4, 5, 6, 7, 8, 4, 5, 6, 9]);
    assert_eq!(out.positions, [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3]);
    assert_eq!(out.tree_end[..9], [4, 4, 4, 4, 9, 9, 9, 9, 9]);
    assert_eq!(out.tree_end[9..], [14, 14, 14, 14, 14, 19, 19, 19, 19, 19, 23, 23, 23, 23]);
    assert_eq!(out.predictor, [2, 5, 6, 7, 12, 17, 20, 21]);
    assert_eq!(out.target, [7, 6, 7, 8, 8, 8, 6, 9]);
    assert_eq!(out.row, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(out.term, [3, 0, 1, 2, 6, 7, 4, 5]);
}

#[test]
fn each_step_shares_by_its_own_flag() {
    // Branches 1 and 0 in step 0, which shares; 3 and 4 in step 1, which does not.
    let steps = [0, 0, -1, 1, 1];
    let plan =
        Plan { order: &[1, 0, 4, 2, 3], shared: &[true, false], ..plan(&[5, 4, 4, 5, 5], &steps, &[0; 5], &[1, 1]) };
    let out = write_rows(FORKED, plan, 1).unwrap();
    assert_eq!(out.ids, [4, 5, 6, 7, 8, 4, 5, 6, 7, 8, 4, 5, 6, 7, 8]);
    assert_eq!(out.tree_end, [5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 10, 10, 10, 10, 10]);
    assert_eq!(out.cu_tokens, [0, 5, 15]);
}

#[test]
fn a_shared_row_holds_each_prefix_once_and_each_head_row_once() {
    let plan = Plan { order: &[1, 0, 4, 2, 3], shared: &[true], ..plan(&[5, 4, 4, 5, 5], &[0; 5], &[0; 5], &[1]) };
    let out = write_rows(FORKED, plan, 1).unwrap();
    assert_eq!(out.ids, [4, 5, 6, 7, 8, 9]);
    assert_eq!(out.positions, [0, 1, 2, 3, 4, 3]);
    assert_eq!(out.tree_end, [6, 6, 6, 5, 5, 6]);
    // 7 (by branch 1), then 6 and 8 (by branch 0), 8 at the other temperature, 9.
    assert_eq!(out.predictor, [2, 1, 3, 3, 2]);
    assert_eq!(out.target, [7, 6, 8, 8, 9]);
    assert_eq!(out.inv_temperature, [1.0, 1.0, 1.0, 2.0, 1.0]);
    // Branch 1: term 3. Branch 0: terms 0 1 2 are 6 7 8. Branches 3 and 4: 8. Branch 2: 6 9.
    assert_eq!(out.row, [0, 1, 0, 2, 3, 3, 1, 4]);
    assert_eq!(out.term, [3, 0, 1, 2, 6, 7, 4, 5]);
    assert_eq!((out.cu_logit_rows, out.cu_row_terms), (vec![0, 5], vec![0, 8]));
}
