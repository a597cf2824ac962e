use super::*;
use proptest::prelude::*;
use std::sync::LazyLock;

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(crate::tokenizer::example);

fn piece() -> impl Strategy<Value = Option<Vec<u8>>> {
    let bytes_of = |id: u32| TOKENIZER.token_bytes(id % TOKENIZER.vocab_size()).map(<[u8]>::to_vec);
    let odd: [&[u8]; 8] = [b"", br"\x41", b"bytes:", "Ġthe".as_bytes(), "\u{FFFD}".as_bytes(), b"\xC3", b"zqzq", b"\0"];
    prop_oneof![
        12 => any::<u32>().prop_map(bytes_of),
        1 => (0..odd.len()).prop_map(move |at| Some(odd[at].to_vec())),
        1 => (0..TOKENIZER.special_ids().len()).prop_map(move |at| bytes_of(TOKENIZER.special_ids()[at])),
    ]
}

proptest! {
    #[test]
    fn tokens_that_show_themselves_are_seen_alike_one_by_one(
        pieces in proptest::collection::vec(piece(), 0..12), is_text in any::<bool>(),
    ) {
        let mut listed_pieces = Pieces::default();
        for piece in &pieces {
            listed_pieces.push(piece.as_deref());
        }
        let (texts, bytes) = if is_text { (Some(listed_pieces), None) } else { (None, Some(listed_pieces)) };
        let tokens = Tokens { bytes, texts, ..Tokens::default() };
        let see = |index| see(&tokens, index, false, &TOKENIZER, &mut 0);
        let seen: Vec<_> = (0..pieces.len()).map(see).collect();
        if let Some(ids) = all_by_own_bytes(&tokens, pieces.len(), &TOKENIZER, &mut Lookup::default()) {
            let expected: Vec<_> = ids.into_iter().map(|id| Ok(ShownToken::Id(id))).collect();
            prop_assert_eq!(seen, expected);
        }
    }
}
