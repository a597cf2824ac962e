//! How long one match of a regular expression may take, from what is written in it.
//!
//! The engine counts only how often it goes back. Between two of these it can go over a whole text, and by a look-around
//! in a repetition over the whole text for each byte of it. So the work between two is bounded here from the expression,
//! and how often the engine may go back follows from the bound and the length of the text. Called by `pattern`.

use std::iter::Peekable;
use std::str::Chars;

/// Steps of a match, always and for each byte of text.
const STEPS: (f64, f64) = (1e8, 200.0);
/// How often the engine may go back at most: its own bound.
const RETRIES: f64 = 1e7;
/// Groups in groups, which are read by recursion.
const DEPTH: usize = 250;

/// What one way through an expression costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cost {
    /// Steps besides those that take a byte of the text each.
    size: u64,
    /// The longest body of a repetition without an end.
    body: u64,
    /// How many repetitions without an end stand on one way with something behind them that may fail.
    open: u64,
    /// Whether there is a repetition without an end.
    loops: bool,
    /// Of what looks at text without taking it, the power of the text's length; `None` if nothing does.
    aside: Option<i32>,
    can_fail: bool,
}

impl Cost {
    const NONE: Self = Self { size: 0, body: 1, open: 0, loops: false, aside: None, can_fail: false };
    const STEP: Self = Self { size: 1, can_fail: true, ..Self::NONE };

    /// Reads an expression in the syntax of Ruby, as the `tokenizers` crate does.
    ///
    /// # Errors
    /// What it has whose cost has no bound, in words that go on after "it has".
    pub fn of(source: &str) -> Result<Self, String> {
        let mut reader = Reader { rest: source.chars().peekable(), depth: 0 };
        let cost = reader.alternatives(false)?;
        if reader.rest.next().is_some() { Err("a bracket that is not opened".to_owned()) } else { Ok(cost) }
    }

    /// How often the engine may go back in one match of a text of so many bytes; `None` if not even once.
    pub fn retries(self, bytes: usize) -> Option<u32> {
        let length = bytes as f64 + 1.0;
        let most = STEPS.0 + STEPS.1 * length;
        let once = if self.open <= 1 && self.aside.is_none_or(|power| power <= 1) {
            // Of one repetition each step back is followed by what has no repetition.
            self.size as f64
        } else {
            let power = self.aside.unwrap_or(0).max(1);
            self.size as f64 + self.body as f64 * length.powi(power)
        };
        let retries = (most / once.max(1.0)).min(RETRIES);
        (retries >= 1.0).then_some(retries as u32)
    }

    /// One after the other.
    fn and(self, next: Self) -> Self {
        Self {
            size: self.size.saturating_add(next.size),
            body: self.body.max(next.body),
            open: self.open.saturating_add(next.open),
            loops: self.loops || next.loops,
            aside: self.aside.max(next.aside),
            can_fail: self.can_fail || next.can_fail,
        }
    }

    /// One or the other.
    fn or(self, other: Self) -> Self {
        Self { open: self.open.max(other.open), can_fail: self.can_fail && other.can_fail, ..self.and(other) }
    }

    /// So many times, without an end if `most` is `None`; `behind` tells whether something behind it may fail.
    fn times(self, least: u64, most: Option<u64>, behind: bool) -> Self {
        let can_fail = self.can_fail && least > 0;
        let count = most.unwrap_or(least).max(1);
        let size = self.size.saturating_mul(count);
        if most.is_some() {
            return Self { size, open: self.open.saturating_mul(count), can_fail, ..self };
        }
        Self {
            size,
            body: self.body.max(self.size),
            // What is repeated within a repetition is gone over in many ways.
            open: if self.loops { 2 } else { self.open + u64::from(behind) },
            loops: true,
            aside: self.aside.map(|power| power + 1),
            can_fail,
        }
    }

    /// Looked at from one place, or from each place before it (`behind`).
    fn looked(self, behind: bool) -> Self {
        let tries = i32::from(behind && self.loops);
        let power = self.aside.unwrap_or(0).max(i32::from(self.loops)) + tries;
        let size = if behind { self.size.saturating_mul(self.size.max(1)) } else { self.size };
        Self { size, aside: Some(power), can_fail: true, ..self }
    }
}

struct Reader<'s> {
    rest: Peekable<Chars<'s>>,
    depth: usize,
}

/// A part that is read before it is known what stands behind it.
#[derive(Clone, Copy)]
enum Part {
    Plain(Cost),
    Repeated(Cost, u64, Option<u64>),
}

impl Reader<'_> {
    fn alternatives(&mut self, behind: bool) -> Result<Cost, String> {
        let mut cost = self.sequence(behind)?;
        while self.rest.next_if_eq(&'|').is_some() {
            cost = cost.or(self.sequence(behind)?);
        }
        Ok(cost)
    }

    fn sequence(&mut self, behind: bool) -> Result<Cost, String> {
        let mut parts: Vec<Part> = Vec::new();
        while let Some(next) = self.rest.next_if(|next| !matches!(next, '|' | ')')) {
            if let Some((least, most)) = self.quantifier(next) {
                let inner = parts.pop().map_or(Cost::NONE, |part| resolved(part, true));
                parts.push(Part::Repeated(inner, least, most));
                continue;
            }
            parts.push(Part::Plain(match next {
                '(' => self.group(behind)?,
                '[' => self.class()?,
                '\\' => self.escape()?,
                _ => Cost::STEP,
            }));
        }
        let (mut cost, mut behind) = (Cost::NONE, behind);
        for part in parts.into_iter().rev() {
            let part = resolved(part, behind);
            behind |= part.can_fail;
            cost = part.and(cost);
        }
        Ok(cost)
    }

    /// How many times, if this character begins to say so.
    fn quantifier(&mut self, next: char) -> Option<(u64, Option<u64>)> {
        let found = match next {
            '*' => (0, None),
            '+' => (1, None),
            '?' => (0, Some(1)),
            '{' => {
                let text: String = self.rest.clone().take_while(|c| *c != '}').collect();
                let (least, most) = text.split_once(',').map_or((&*text, None), |(least, most)| (least, Some(most)));
                let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
                let whole = self.rest.clone().nth(text.chars().count()) == Some('}');
                if !whole || !digits(least) || !most.is_none_or(digits) || text.len() < 1 + usize::from(most.is_some())
                {
                    return None;
                }
                self.rest.nth(text.chars().count());
                let number = |text: &str| text.parse::<u64>().unwrap_or(u64::MAX);
                let low = if least.is_empty() { 0 } else { number(least) };
                let high = match most {
                    None => Some(low),
                    Some("") => None,
                    // The engine takes numbers in either order.
                    Some(most) => Some(number(most).max(low)),
                };
                (low, high)
            }
            _ => return None,
        };
        // In another order, or without going back; behind a number a plus repeats once more.
        let _ = self.rest.next_if(|sign| *sign == '?' || *sign == '+' && next != '{');
        Some(found)
    }

    fn group(&mut self, behind: bool) -> Result<Cost, String> {
        self.depth += 1;
        if self.depth > DEPTH {
            return Err(format!("groups in groups more than {DEPTH} deep"));
        }
        let cost = if self.rest.next_if_eq(&'?').is_some() {
            self.named()?
        } else if self.rest.peek() == Some(&'*') {
            return Err("a call of a function (*...)".to_owned());
        } else {
            // What follows is not known yet, and may fail.
            Some(self.alternatives(true)?)
        };
        self.depth -= 1;
        let Some(cost) = cost else {
            // Flags hold up to the bracket that closes the group around them.
            return self.alternatives(behind);
        };
        if self.rest.next() == Some(')') { Ok(cost) } else { Err("a bracket that is not closed".to_owned()) }
    }

    /// A group that begins with `(?`; `None` for flags, which hold for all that follows in the group around them.
    fn named(&mut self) -> Result<Option<Cost>, String> {
        let kind = self.rest.next();
        let second = self.rest.peek().copied();
        Ok(Some(match (kind, second) {
            (Some(':' | '>'), _) => self.alternatives(true)?,
            (Some('=' | '!'), _) => self.alternatives(true)?.looked(false),
            (Some('<'), Some('=' | '!')) => {
                self.rest.next();
                self.alternatives(true)?.looked(true)
            }
            (Some('<'), _) => self.after_name('>')?,
            (Some('\''), _) => self.after_name('\'')?,
            (Some(flag), _) => {
                let mut flags = flag.to_string();
                while let Some(flag) = self.rest.next_if(|flag| flag.is_ascii_alphabetic() || *flag == '-') {
                    flags.push(flag);
                }
                if !flags.bytes().all(|flag| b"imadu-".contains(&flag)) {
                    return Err(format!("a group (?{flags}"));
                }
                match self.rest.next() {
                    Some(':') => self.alternatives(true)?,
                    Some(')') => return Ok(None),
                    _ => return Err(format!("a group (?{flags}")),
                }
            }
            (None, _) => return Err("a bracket that is not closed".to_owned()),
        }))
    }

    fn after_name(&mut self, end: char) -> Result<Cost, String> {
        while self.rest.next().ok_or("a name that does not end")? != end {}
        self.alternatives(true)
    }

    /// A set of characters, behind its opening bracket.
    fn class(&mut self) -> Result<Cost, String> {
        let (mut depth, mut first) = (1, true);
        let _ = self.rest.next_if_eq(&'^');
        while depth > 0 {
            let next = self.rest.next().ok_or("a set of characters that is not closed")?;
            match next {
                // A bracket that closes is a character where a set begins.
                ']' if !first => depth -= 1,
                '[' if self.rest.peek() == Some(&':') => {
                    let name: String = self.rest.clone().take_while(|c| *c != ']').take(20).collect();
                    let word = name.trim_start_matches([':', '^']).trim_end_matches(':');
                    let whole = name.len() > 2 && name.ends_with(':') && !word.is_empty();
                    if !whole || !word.bytes().all(|byte| byte.is_ascii_alphabetic()) {
                        return Err("a set of characters with [: in it".to_owned());
                    }
                    self.rest.nth(name.chars().count());
                }
                '[' => {
                    (depth, first) = (depth + 1, true);
                    let _ = self.rest.next_if_eq(&'^');
                    continue;
                }
                '\\' => {
                    self.escape()?;
                }
                _ => {}
            }
            first = false;
        }
        Ok(Cost::STEP)
    }

    /// What stands behind a backslash.
    fn escape(&mut self) -> Result<Cost, String> {
        let next = self.rest.next().ok_or("a backslash at its end")?;
        if matches!(next, 'p' | 'P' | 'x' | 'o') && self.rest.next_if_eq(&'{').is_some() {
            while self.rest.next().ok_or("a name that does not end")? != '}' {}
        }
        match next {
            'g' => Err("a call of a group (\\g)".to_owned()),
            'c' | 'C' | 'M' => Err(format!("a control character (\\{next})")),
            // The text of a group again.
            'k' | '1'..='9' => Ok(Cost { loops: true, ..Cost::STEP }.looked(false)),
            // A border or a character that is found by going over the text before it.
            'X' | 'y' | 'Y' => Ok(Cost { loops: true, ..Cost::STEP }.looked(true)),
            _ => Ok(Cost::STEP),
        }
    }
}

fn resolved(part: Part, behind: bool) -> Cost {
    match part {
        Part::Plain(cost) => cost,
        Part::Repeated(cost, least, most) => cost.times(least, most, behind),
    }
}
