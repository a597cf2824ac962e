//! A bool mask as runs of true, so that the arrays beside it are copied run by run.

use std::ops::Range;

/// Where flags are set, as the longest runs of them, ascending.
pub fn runs(flags: &[bool]) -> impl Iterator<Item = Range<usize>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at + alike(&flags[at..], false);
        at = start + alike(&flags[start..], true);
        (start < at).then_some(start..at)
    })
}

/// How many flags at the beginning are `which`.
fn alike(flags: &[bool], which: bool) -> usize {
    const CHUNK: usize = 64;
    let differs = |chunk: &[bool]| chunk.iter().map(|&flag| flag ^ which).fold(false, |any, other| any | other);
    let same = CHUNK * flags.chunks_exact(CHUNK).take_while(|chunk| !differs(chunk)).count();
    same + flags[same..].iter().take_while(|&&flag| flag == which).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn they_cover_what_is_set_and_nothing_else(lengths in prop::collection::vec(0usize..200, 0..8), first in any::<bool>()) {
            let flags: Vec<bool> = lengths.iter().enumerate().flat_map(|(n, &length)| vec![first ^ (n % 2 == 1); length]).collect();
            let set: Vec<usize> = (0..flags.len()).filter(|&at| flags[at]).collect();
            prop_assert_eq!(runs(&flags).flatten().collect::<Vec<_>>(), set);
            let ends: Vec<usize> = runs(&flags).map(|run| run.end).collect();
            prop_assert!(runs(&flags).skip(1).zip(ends).all(|(run, end)| run.start > end));
        }
    }
}
