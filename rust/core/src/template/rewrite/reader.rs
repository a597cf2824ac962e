//! The tokens of an expression or a statement, taken one by one.

use crate::template::tokens::{Token, token_at};

/// An expression or a statement that is being read.
pub(super) struct Reader<'a> {
    pub source: &'a str,
    /// Behind `next`.
    pub at: usize,
    pub next: Token<'a>,
    pub depth: usize,
}

impl<'a> Reader<'a> {
    pub fn new(source: &'a str) -> Self {
        let mut reader = Self { source, at: 0, next: Token::End, depth: 0 };
        reader.take();
        reader
    }

    pub fn ended(&self) -> bool {
        self.next == Token::End && self.at == self.source.len()
    }

    /// The next token, and moves on.
    pub fn take(&mut self) -> Token<'a> {
        let (next, end) = token_at(self.source, self.at);
        self.at = end;
        std::mem::replace(&mut self.next, next)
    }

    pub fn eat(&mut self, token: Token<'_>) -> bool {
        let found = self.next == token;
        if found {
            self.take();
        }
        found
    }

    pub fn sign(&mut self, sign: &str) -> bool {
        self.eat(Token::Sign(sign))
    }

    pub fn word(&mut self, word: &str) -> bool {
        self.eat(Token::Name(word))
    }

    pub fn name(&mut self) -> Option<&'a str> {
        let Token::Name(name) = self.next else { return None };
        self.take();
        Some(name)
    }

    /// Those of `words` that stand here.
    pub fn flags(&mut self, words: &[&str]) -> String {
        words.iter().filter(|word| self.word(word)).flat_map(|word| [" ", word]).collect()
    }

    /// Everything as it is written up to one of `ends`, which stays.
    pub fn until(&mut self, ends: &[Token<'_>]) -> String {
        let mut text = String::new();
        while self.next != Token::End && !ends.contains(&self.next) {
            if let Token::Name(part) | Token::Literal(part) | Token::Sign(part) = self.take() {
                text.push_str(part);
                text.push(' ');
            }
        }
        text
    }
}
