//! What is known of a token, of its recorder and of the vocabulary.

use crate::tokenizer::Tokenizer;

/// What the record shows of one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen<'a> {
    /// Its id, by bytes of its own.
    Id(u32),
    /// Nothing: its bytes end inside a character, or it is a special token that the recorder hides.
    Nothing,
    /// Text that is its own, perhaps with U+FFFD for what is no character, or its own behind that of the tokens before.
    Text(&'a str),
}

/// What is known of the recorder and the vocabulary.
#[derive(Clone, Copy)]
pub struct Setting<'a> {
    pub tokenizer: &'a Tokenizer,
    /// Whether a special token may show nothing.
    pub hides_specials: bool,
}

/// The ids that one token may have, as far as it matters: none, one, or several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Choice {
    /// Nothing fits.
    #[default]
    None,
    /// Only this id fits.
    One(u32),
    /// At least two fit.
    Many,
}

impl Choice {
    pub(super) fn add(&mut self, id: u32) {
        *self = match *self {
            Self::None => Self::One(id),
            Self::One(known) if known == id => Self::One(known),
            _ => Self::Many,
        };
    }

    /// The id, if there is only one.
    pub fn id(self) -> Option<u32> {
        if let Self::One(id) = self { Some(id) } else { None }
    }
}

/// Ids that a token which shows nothing may have, whatever stands around it.
pub(super) fn hidden(setting: Setting<'_>) -> impl Iterator<Item = u32> {
    let specials = if setting.hides_specials { setting.tokenizer.special_ids() } else { &[] };
    setting.tokenizer.partial().open().iter().chain(specials).copied()
}
