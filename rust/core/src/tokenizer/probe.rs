//! The texts that a fast backend must encode as the reference does before it is used.
//!
//! A fixed set: every pair of what tokenizers have stumbled over, strings of three to eight of them from a fixed
//! sequence of numbers, and the tokenizer's own added tokens. Called by `encoder`.

use crate::threads;

/// Strings made of random pieces.
const RANDOM: usize = 1600;
/// Added tokens in one string.
const TOGETHER: usize = 12;

/// What splits, merges, normalises or is read as an added token differently from one implementation to the next.
const PIECES: [&[&str]; 7] = [
    // Words and their endings.
    &["the", " cat", " The", "'s", "'LL", "'re", "don't", " I'VE", "ſ's", "Kelvin"],
    // White space and controls.
    &[
        "  ", "   ", " \n", "\n\n", "\r\n", "\t", "\t\t ", "\u{b}", "\u{c}", "\u{85}", "\u{a0}", "\u{2028}",
        "\u{3000}", "\u{1680}", "\u{1c}", "\0", "\u{7f}",
    ],
    // Numbers and signs.
    &[
        "1", "2345", "3.14", "１２", "٣٤", "½", "Ⅻ", "²", "{}", "\":", "//", "...", "!?", " (", "_", "-", "—", "…",
        "«", "``",
    ],
    // Marks, and letters that have several forms.
    &[
        "e\u{301}",
        "\u{301}",
        "\u{327}\u{301}",
        "a\u{30a}",
        "ﬁ",
        "ß",
        "İ",
        "ı",
        "Σς",
        "Å",
        "ñ",
        "각",
        "\u{1100}\u{1161}\u{11a8}",
    ],
    // Other scripts.
    &["日本", "語", "。", "你好，", "ไทย", "\u{e33}", "नमस्ते", "שלום", "\u{5bc}", "العربية", "\u{640}"],
    // What takes no room or is none, and what is put together of it.
    &[
        "\u{200d}",
        "\u{200b}",
        "\u{feff}",
        "\u{fdd0}",
        "\u{fffd}",
        "👩\u{200d}🚀",
        "🇩🇪",
        "😊",
        "\u{fe0f}",
        "\u{1d518}",
        "\u{10ffff}",
    ],
    // What vocabularies and added tokens are written with.
    &["▁", "Ġ", "Ċ", "<", "|>", "<|im_", "end|>", "<｜", "</s>", "<0xE2>", "<unk>", "token_id:5", "function", "naïve"],
];

/// The probe strings for a tokenizer with these added tokens.
pub(super) fn texts<'a>(added: impl Iterator<Item = &'a str>) -> Vec<String> {
    let pieces = PIECES.concat();
    let mut texts: Vec<String> = pieces.iter().map(|piece| (*piece).to_owned()).collect();
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut next = |below: usize| {
        // Knuth's MMIX generator; its high bits.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) as usize) % below
    };
    for _ in 0..RANDOM {
        let count = 2 + next(7);
        texts.push((0..count).map(|_| pieces[next(pieces.len())]).collect());
    }
    for length in [16, 63, 64, 65, 300] {
        texts.extend(["a", "ab", " ", "\n", "=", "!", "1", "é", "日"].map(|piece| piece.repeat(length)));
    }
    let added: Vec<&str> = added.filter(|token| !token.is_empty()).collect();
    for tokens in added.chunks(TOGETHER) {
        let mut text = String::new();
        for token in tokens {
            text.push_str(token);
            text.push_str(pieces[next(pieces.len())]);
            text.push_str(&token[..token.char_indices().next_back().map_or(0, |(at, _)| at)]);
        }
        texts.push(text);
    }
    texts
}

/// The first text of which `differs` is true.
pub(super) fn first_difference(texts: &[String], differs: impl Fn(&str) -> bool + Sync + Send) -> Option<&str> {
    let found = threads::map(texts, || (), |(), text| differs(text));
    texts.iter().zip(found).find(|(_, differs)| *differs).map(|(text, _)| text.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_probe_is_fixed_and_holds_every_added_token() {
        let added: Vec<String> = (0..40).map(|n| format!("<é{n}é>")).collect();
        let made = || texts(added.iter().map(String::as_str));
        let all = made();
        assert_eq!(all, made());
        assert!(added.iter().all(|token| all.iter().any(|text| text.contains(token))));
        assert!(all.len() > 1700);
    }

    #[test]
    fn the_first_difference_is_told() {
        let texts = ["a", "bb", "cc"].map(str::to_owned);
        assert_eq!(first_difference(&texts, |text| text.len() == 2), Some("bb"));
        assert_eq!(first_difference(&texts, |_| false), None);
    }
}
