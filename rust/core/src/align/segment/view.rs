//! How a recorder that decodes tokens one by one sees them: what it shows of a token after those before it.

use super::utf8::{Pending, REPLACEMENT, Step};

/// The beginning of a character that earlier tokens left, as the recorder holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct View {
    pub pending: Pending,
    /// Bytes of text in the token that began it, before the character.
    pub before: u16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// Its own text, which does not end in U+FFFD.
    Own,
    /// Nothing: its text ends in U+FFFD, and what stands before it does not mend that.
    Nothing,
    /// The text of `.0` bytes that it completes, from the token that began the character.
    Completed(usize),
}

impl View {
    /// What is shown of a token with `bytes`, and the view after it.
    pub fn show(self, bytes: &[u8]) -> (Shown, Self) {
        let mut joint = self.pending;
        // Whether what waits at the end began in an earlier token.
        let mut earlier = !joint.is_empty();
        let mut completed = None;
        for &byte in bytes {
            let (broken, step) = joint.feed(byte);
            completed = None;
            earlier &= !broken;
            match step {
                Step::Waits => {}
                Step::Character(character, length) => {
                    completed = Some((earlier, character, length));
                    earlier = false;
                }
                Step::Broken => earlier = false,
            }
        }
        let (text, own) = fresh(bytes);
        if !text.open {
            return (Shown::Own, Self::default());
        }
        match completed {
            Some((true, character, length)) if character[..length] != *REPLACEMENT => {
                (Shown::Completed(usize::from(self.before) + length), Self::default())
            }
            _ if joint.is_empty() => (Shown::Nothing, Self::default()),
            _ if earlier => (Shown::Nothing, Self { pending: joint, before: self.before }),
            _ => (Shown::Nothing, Self { pending: own, before: text.before }),
        }
    }
}

struct Alone {
    /// Its text ends in U+FFFD.
    open: bool,
    /// Bytes of its text before what waits at its end.
    before: u16,
}

fn fresh(bytes: &[u8]) -> (Alone, Pending) {
    let mut pending = Pending::default();
    let (mut before, mut open) = (0, false);
    for &byte in bytes {
        let (broken, step) = pending.feed(byte);
        before += if broken { REPLACEMENT.len() } else { 0 };
        match step {
            Step::Waits => open = true,
            Step::Character(character, length) => {
                before += length;
                open = character[..length] == *REPLACEMENT;
            }
            Step::Broken => {
                before += REPLACEMENT.len();
                open = true;
            }
        }
    }
    (Alone { open, before: before.min(usize::from(u16::MAX)) as u16 }, pending)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_shows_its_own_text_nothing_or_the_text_of_a_character_that_it_completes() {
        use Shown::{Completed, Nothing, Own};
        let cases: [(&[&[u8]], &[Shown]); 6] = [
            // " " E3, 81, 95: the last shows " さ", four bytes.
            (&[b" \xE3", b"\x81", b"\x95"], &[Nothing, Nothing, Completed(4)]),
            // A stray part does not reach further.
            (&[b"\xC3", b"a"], &[Nothing, Own]),
            (&[b"\xC3", b"\xE3\x81", b"\x95"], &[Nothing, Nothing, Completed(3)]),
            (&[b"\x95", b"\xC3", b"\xA9\xC3"], &[Nothing; 3]),
            (&["\u{FFFD}".as_bytes()], &[Nothing]),
            // Text behind the rest of a character is its own.
            (&[b"\xC3", b"\x85sa"], &[Nothing, Own]),
        ];
        for (tokens, expected) in cases {
            let mut view = View::default();
            let show = |bytes: &&[u8]| {
                let (shown, next) = view.show(bytes);
                view = next;
                shown
            };
            assert_eq!(tokens.iter().map(show).collect::<Vec<_>>(), expected, "{tokens:?}");
        }
    }
}
