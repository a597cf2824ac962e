//! Tokens of Jinja's expressions: names, literals and signs; the parts of a tag; and a reader that consumes them one
//! by one.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Token<'a> {
    Name(&'a str),
    Literal(&'a str),
    Sign(&'a str),
    End,
}

/// Returns the token at or after `at`, and the position of its end.
pub(super) fn token_at(source: &str, at: usize) -> (Token<'_>, usize) {
    let rest = source[at..].trim_start();
    let text = &rest[..token_length(rest)];
    let token = match text.chars().next() {
        None => Token::End,
        Some('\'' | '"' | '0'..='9') => Token::Literal(text),
        Some(c) if c.is_alphabetic() || c == '_' => Token::Name(text),
        Some(_) => Token::Sign(text),
    };
    (token, source.len() - rest.len() + text.len())
}

/// Splits a tag into its opening delimiter, its inside and its closing delimiter, with whitespace marks in the
/// delimiters. Returns `None` if the text is not a closed tag.
pub(super) fn tag_parts(tag: &str) -> Option<(&str, &str, &str)> {
    let between = |open, close| tag.strip_prefix(open)?.strip_suffix(close);
    let inside: &str = between("{%", "%}").or_else(|| between("{{", "}}"))?;
    let code = inside.strip_prefix(['-', '+']).unwrap_or(inside);
    let trimmed = code.strip_suffix(['-', '+']).unwrap_or(code);
    let open = &tag[..2 + inside.len() - code.len()];
    Some((open, trimmed, &tag[open.len() + trimmed.len()..]))
}

/// Returns true if the expression is one literal or constant.
pub(super) fn is_constant(text: &str) -> bool {
    let is_single = token_length(text) == text.len();
    let is_word = matches!(text, "true" | "false" | "none" | "True" | "False" | "None");
    is_word || is_single && text.starts_with(['\'', '"', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9'])
}

/// Returns the number of bytes of the token that `rest` starts with.
fn token_length(rest: &str) -> usize {
    let bytes = rest.as_bytes();
    let Some(first) = rest.chars().next() else { return 0 };
    match first {
        '\'' | '"' => literal_end(bytes, 0, bytes[0]).min(bytes.len()),
        '0'..='9' => number_length(bytes),
        c if c.is_alphabetic() || c == '_' => {
            rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len())
        }
        c => {
            let double = ["**", "//", "==", "!=", "<=", ">="].iter().any(|sign| rest.starts_with(sign));
            if double { 2 } else { c.len_utf8() }
        }
    }
}

/// Returns the position after the closing quote of the literal that starts at `start`.
pub(super) fn literal_end(bytes: &[u8], start: usize, quote: u8) -> usize {
    let mut at = start + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            byte if byte == quote => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

fn number_length(bytes: &[u8]) -> usize {
    let digits =
        |from: usize| from + bytes[from..].iter().take_while(|b| b.is_ascii_alphanumeric() || **b == b'_').count();
    let integer_end = digits(0);
    let exponent = |end: usize| {
        let signed = matches!(bytes.get(end - 1), Some(b'e' | b'E')) && matches!(bytes.get(end), Some(b'-' | b'+'));
        if signed && !bytes.starts_with(b"0x") { digits(end + 1) } else { end }
    };
    match (bytes.get(integer_end), bytes.get(integer_end + 1)) {
        (Some(b'.'), Some(b'0'..=b'9')) => exponent(digits(integer_end + 1)),
        _ => exponent(integer_end),
    }
}

/// An expression or a statement that is being read.
pub(super) struct Reader<'a> {
    pub source: &'a str,
    /// Position after `next`.
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

    /// Returns the next token and advances.
    pub fn take(&mut self) -> Token<'a> {
        let (next, end) = token_at(self.source, self.at);
        self.at = end;
        std::mem::replace(&mut self.next, next)
    }

    pub fn eat(&mut self, token: Token<'_>) -> bool {
        let matches = self.next == token;
        if matches {
            self.take();
        }
        matches
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

    /// Consumes those of `words` that come next, and returns them.
    pub fn flags(&mut self, words: &[&str]) -> String {
        words.iter().filter(|word| self.word(word)).flat_map(|word| [" ", word]).collect()
    }

    /// Returns the source of all tokens up to one of `ends`, which is not consumed.
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
