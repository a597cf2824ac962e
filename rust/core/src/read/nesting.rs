//! How the records of a file are told apart, and where one value without line breaks around it ends.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// Not looked at yet.
    Unknown,
    /// One a line.
    Lines,
    /// Elements of one array; whether a comma must come first, and whether the array has ended.
    Array { comma_due: bool, closed: bool },
    /// Objects over several lines, one after another.
    Objects,
}

/// Where a scan through one JSON value stands.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Nesting {
    pub depth: u32,
    in_string: bool,
    escaped: bool,
}

impl Layout {
    /// The layout of records whose first bytes these are.
    pub fn of(bytes: &[u8]) -> Self {
        match bytes {
            [b'[', ..] => Self::Array { comma_due: false, closed: false },
            [b'{', b'\n' | b'\r', ..] => Self::Objects,
            _ => Self::Lines,
        }
    }
}

impl Nesting {
    /// Whether a value without brackets ends before this byte.
    pub fn ends_before(self, byte: u8) -> bool {
        self.depth == 0 && !self.in_string && matches!(byte, b',' | b']' | b' ' | b'\t' | b'\r' | b'\n')
    }

    /// Takes one byte; whether it closes a value in brackets.
    pub fn ends_with(&mut self, byte: u8) -> bool {
        if self.in_string {
            let escaped = std::mem::take(&mut self.escaped);
            match byte {
                b'"' if !escaped => self.in_string = false,
                b'\\' => self.escaped = !escaped,
                _ => {}
            }
            return false;
        }
        match byte {
            b'"' => self.in_string = true,
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                return self.depth == 0;
            }
            _ => {}
        }
        false
    }
}

/// A line of an array that lost its brackets: the comma behind its object is no part of the record.
pub(super) fn without_comma(line: &[u8]) -> &[u8] {
    match line.trim_ascii_end().strip_suffix(b",").map(<[u8]>::trim_ascii_end) {
        Some(record) if record.ends_with(b"}") => record,
        _ => line,
    }
}

/// Behind which byte of some blanks a line of them is longer than `limit`; `before` of it stand before them.
pub(super) fn passes(blanks: &[u8], before: usize, limit: usize) -> Option<usize> {
    if before.saturating_add(blanks.len()) <= limit {
        return None;
    }
    let mut count = before;
    blanks
        .iter()
        .position(|&byte| {
            count = if byte == b'\n' { 0 } else { count + 1 };
            count > limit
        })
        .map(|at| at + 1)
}

pub(super) fn count_lines(bytes: &[u8]) -> u64 {
    memchr::memchr_iter(b'\n', bytes).count() as u64
}
