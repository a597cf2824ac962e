//! Lossy decoding, byte by byte: the beginning of a character that waits for its rest.

/// U+FFFD in UTF-8.
pub const REPLACEMENT: &[u8] = "\u{FFFD}".as_bytes();

/// Up to three bytes that begin a character.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct Pending {
    bytes: [u8; 3],
    length: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// It waits with those before it.
    Waits,
    /// It completes a character of `.1` bytes.
    Character([u8; 4], usize),
    /// It is no part of a character.
    Broken,
}

impl Pending {
    /// The waiting bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length as usize]
    }

    pub fn is_empty(self) -> bool {
        self.length == 0
    }

    /// The first of the beginnings that take the same bytes for as long. U+FFFD itself stays apart.
    pub fn class(self) -> Self {
        let (first, second) = match (self.bytes[0], self.length) {
            (0xC2..=0xDF, _) => (0xC2, 0),
            (0xEF, 2..) if self.bytes[1] == 0xBF => (0xEF, 0xBF),
            (0xE0..=0xEF, 2..) => (0xE1, 0x80),
            (0xE1..=0xEC | 0xEE, 1) => (0xE1, 0),
            (0xF0..=0xF4, 2..) => (0xF1, 0x80),
            (0xF1..=0xF3, 1) => (0xF1, 0),
            (first, _) => (first, 0),
        };
        let third = if self.length == 3 { 0x80 } else { 0 };
        Self { bytes: [first, second, third], length: self.length }
    }

    /// Takes one byte. True with the step: the bytes that waited before it were broken off first, as one U+FFFD.
    pub fn feed(&mut self, byte: u8) -> (bool, Step) {
        if self.length > 0 {
            if self.takes(byte) {
                let mut character = [0; 4];
                character[..self.length as usize].copy_from_slice(self.bytes());
                character[self.length as usize] = byte;
                let length = self.length as usize + 1;
                if length == width(self.bytes[0]) {
                    *self = Self::default();
                    return (false, Step::Character(character, length));
                }
                self.bytes[length - 1] = byte;
                self.length += 1;
                return (false, Step::Waits);
            }
            *self = Self::default();
            return (true, self.begin(byte));
        }
        (false, self.begin(byte))
    }

    fn begin(&mut self, byte: u8) -> Step {
        match width(byte) {
            1 => Step::Character([byte, 0, 0, 0], 1),
            0 => Step::Broken,
            _ => {
                self.bytes[0] = byte;
                self.length = 1;
                Step::Waits
            }
        }
    }

    /// Whether `byte` may follow: UTF-8 excludes overlong forms, surrogates, and what is past U+10FFFF.
    fn takes(self, byte: u8) -> bool {
        if self.length > 1 {
            return matches!(byte, 0x80..=0xBF);
        }
        match self.bytes[0] {
            0xE0 => matches!(byte, 0xA0..=0xBF),
            0xED => matches!(byte, 0x80..=0x9F),
            0xF0 => matches!(byte, 0x90..=0xBF),
            0xF4 => matches!(byte, 0x80..=0x8F),
            _ => matches!(byte, 0x80..=0xBF),
        }
    }
}

/// Bytes of the character that begins with `byte`, 0 where none does.
fn width(byte: u8) -> usize {
    match byte {
        0x00..=0x7F => 1,
        0xC2..=0xDF => 2,
        0xE0..=0xEF => 3,
        0xF0..=0xF4 => 4,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decoded(bytes: &[u8]) -> Vec<u8> {
        let mut pending = Pending::default();
        let mut text = Vec::new();
        for &byte in bytes {
            let (broken, step) = pending.feed(byte);
            if broken {
                text.extend_from_slice(REPLACEMENT);
            }
            match step {
                Step::Waits => {}
                Step::Character(character, length) => text.extend_from_slice(&character[..length]),
                Step::Broken => text.extend_from_slice(REPLACEMENT),
            }
        }
        if !pending.is_empty() {
            text.extend_from_slice(REPLACEMENT);
        }
        text
    }

    #[test]
    fn beginnings_are_of_one_class_where_the_same_bytes_end_them() {
        let class = |bytes: &[u8]| {
            let mut pending = Pending::default();
            for &byte in bytes {
                assert_eq!(pending.feed(byte), (false, Step::Waits));
            }
            pending.class().bytes().to_vec()
        };
        assert_eq!([class(&[0xE3, 0x81]), class(&[0xEF, 0xBC])], [[0xE1, 0x80]; 2]);
        assert_eq!(class(&[0xEF, 0xBF]), [0xEF, 0xBF]); // U+FFFD may come of it
    }

    proptest! {
        #[test]
        fn it_decodes_as_the_standard_library_does(bytes in proptest::collection::vec(
            prop_oneof![any::<u8>(), Just(0xE3), Just(0x81), Just(0xF0), Just(0x9F), Just(0xED), Just(0xA0), Just(0xF4)], 0..24)
        ) {
            let text = String::from_utf8_lossy(&bytes).into_owned();
            prop_assert_eq!(decoded(&bytes), text.into_bytes());
        }
    }
}
