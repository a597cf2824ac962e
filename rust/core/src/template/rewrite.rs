//! Rewrites the statements and expressions of a template. Operators become filters of this crate.
//!
//! `python_ops` implements operations for which Python and the engine differ, and operations whose results need
//! bounds. This module only reads the syntax. Names, literals and calls stay as written.

use super::lexer::{Reader, Token, is_constant};

/// Maximum depth of nested expressions, equal to that of the engine's parser.
const DEPTH: usize = 150;

/// Functions and variables that only `analyze`, the rewritten statements and the environment use.
const OURS: [&str; 8] =
    ["__load", "__begins", "__restores", "__has", "__kept", "__ended", "__clock", "__generation_marks"];

/// Keys of strings that never carry marks in a watched render.
pub(super) const UNMARKED: [&str; 2] = ["role", "type"];

/// Bytes of a constant that is compared without being charged.
const SHORT: usize = 64;

/// Rewrites the inside of `{{ }}`. Returns `None` if it is not an expression.
pub(super) fn expression(inside: &str) -> Option<String> {
    let mut reader = Reader::new(inside);
    let text = reader.list()?;
    reader.ended().then_some(text)
}

impl Reader<'_> {
    /// Parses `a` or `a, b`.
    fn list(&mut self) -> Option<String> {
        let first = self.value()?;
        self.more(first, Self::value)
    }

    fn more(&mut self, first: String, item: fn(&mut Self) -> Option<String>) -> Option<String> {
        if self.next != Token::Sign(",") {
            return Some(first);
        }
        let mut items = vec![first];
        while self.sign(",") {
            if matches!(self.next, Token::End | Token::Sign(")")) {
                break;
            }
            items.push(item(self)?);
        }
        let comma = if items.len() == 1 { "," } else { "" };
        Some(sized(&items, format!("({}{comma})", items.join(", "))))
    }

    /// Parses an expression with its `if` and `else`.
    fn value(&mut self) -> Option<String> {
        self.depth += 1;
        if self.depth > DEPTH {
            return None;
        }
        let mut value = self.either()?;
        while self.word("if") {
            let test = self.either()?;
            value = if self.word("else") {
                format!("{value} if {test} else {}", self.value()?)
            } else {
                format!("{value} if {test}")
            };
        }
        self.depth -= 1;
        Some(value)
    }

    fn either(&mut self) -> Option<String> {
        let mut left = self.both()?;
        while self.word("or") {
            left = format!("{left} or {}", self.both()?);
        }
        Some(left)
    }

    fn both(&mut self) -> Option<String> {
        let mut left = self.negation()?;
        while self.word("and") {
            left = format!("{left} and {}", self.negation()?);
        }
        Some(left)
    }

    fn negation(&mut self) -> Option<String> {
        let mut count = 0;
        while self.word("not") {
            count += 1;
        }
        Some("not ".repeat(count) + &self.comparison()?)
    }

    fn comparison(&mut self) -> Option<String> {
        let left = self.sum()?;
        let mut pairs = Vec::new();
        while let Some(operator) = self.comparator()? {
            pairs.push((operator, self.sum()?));
        }
        Some(match pairs.as_slice() {
            [] => left,
            [(operator @ ("==" | "!="), right)] if is_free(&left, right) || is_free(right, &left) => {
                format!("{left} {operator} {right}")
            }
            [("in", right)] => format!("({left}|__in({right}))"),
            [("not in", right)] => format!("(not {left}|__in({right}))"),
            _ => {
                let operands: Vec<String> =
                    pairs.iter().map(|(operator, right)| format!("'{operator}', {right}")).collect();
                format!("({left}|__compare({}))", operands.join(", "))
            }
        })
    }

    /// Parses the operator of a comparison, if one is next. The outer `None` means a `not` without `in`.
    #[expect(clippy::option_option, reason = "no operator is not an error")]
    fn comparator(&mut self) -> Option<Option<&'static str>> {
        if self.word("not") {
            return self.word("in").then_some(Some("not in"));
        }
        if self.word("in") {
            return Some(Some("in"));
        }
        let signs = ["==", "!=", "<=", ">=", "<", ">"];
        Some(signs.into_iter().find(|sign| self.sign(sign)))
    }

    fn sum(&mut self) -> Option<String> {
        let mut left = self.concatenation()?;
        loop {
            let mut summands = Vec::new();
            while self.sign("+") {
                summands.push(self.concatenation()?);
            }
            left = applied(left, "__add", &summands);
            if !self.sign("-") {
                return Some(left);
            }
            left = format!("({left} - {})", self.concatenation()?);
        }
    }

    fn concatenation(&mut self) -> Option<String> {
        let left = self.product()?;
        let mut operands = Vec::new();
        while self.sign("~") {
            operands.push(self.product()?);
        }
        Some(applied(left, "__concat", &operands))
    }

    fn product(&mut self) -> Option<String> {
        let mut left = self.power()?;
        loop {
            left = if self.sign("*") {
                applied(left, "__multiply", &[self.power()?])
            } else if self.sign("%") {
                applied(left, "__modulo", &[self.power()?])
            } else if self.sign("/") {
                format!("({left} / {})", self.power()?)
            } else if self.sign("//") {
                format!("({left} // {})", self.power()?)
            } else {
                return Some(left);
            }
        }
    }

    fn power(&mut self) -> Option<String> {
        let mut left = self.unary()?;
        while self.sign("**") {
            left = format!("({left} ** {})", self.unary()?);
        }
        Some(left)
    }

    fn unary(&mut self) -> Option<String> {
        let operand = self.operand()?;
        self.filters(operand)
    }

    /// Parses a primary with its postfixes, and minus signs before it.
    fn operand(&mut self) -> Option<String> {
        let mut count = 0;
        while self.sign("-") {
            count += 1;
        }
        let primary = self.primary()?;
        let operand = self.postfix(primary)?;
        Some(if count == 0 { operand } else { format!("({}{operand})", "-".repeat(count)) })
    }

    fn primary(&mut self) -> Option<String> {
        match self.take() {
            // `self` refers to a block of the template by name, which could call itself. No chat template uses it.
            Token::Name("self") => None,
            Token::Name(name) if OURS.contains(&name) => None,
            Token::Name(name) => Some(name.to_owned()),
            Token::Literal(first) => {
                let mut text = first.to_owned();
                while let Token::Literal(more) = self.next
                    && [first, more].iter().all(|literal| literal.starts_with(['\'', '"']))
                {
                    text = format!("{text} {more}");
                    self.take();
                }
                Some(text)
            }
            Token::Sign("(") => {
                if self.sign(")") {
                    return Some("()".into());
                }
                let inner = self.list()?;
                self.sign(")").then(|| format!("({inner})"))
            }
            Token::Sign("[") => {
                let items = self.items("]", Self::value)?;
                Some(sized(&items, format!("[{}]", items.join(", "))))
            }
            Token::Sign("{") => {
                let items = self.items("}", |reader| {
                    let key = reader.value()?;
                    let key = if is_constant(&key) { key } else { format!("(({key})|__key)") };
                    reader.sign(":").then_some(())?;
                    Some(format!("{key}: {}", reader.value()?))
                })?;
                Some(sized(&items, format!("{{{}}}", items.join(", "))))
            }
            _ => None,
        }
    }

    /// Parses comma-separated items up to `close`.
    fn items(&mut self, close: &str, item: fn(&mut Self) -> Option<String>) -> Option<Vec<String>> {
        let mut items = Vec::new();
        while !self.sign(close) {
            if !items.is_empty() {
                self.sign(",").then_some(())?;
                if self.sign(close) {
                    break;
                }
            }
            items.push(item(self)?);
        }
        Some(items)
    }

    /// Parses attributes, subscripts and calls after `value`.
    fn postfix(&mut self, mut value: String) -> Option<String> {
        loop {
            if self.sign(".") {
                let (Token::Name(name) | Token::Literal(name)) = self.take() else { return None };
                if matches!(name, "cycle" | "changed") && self.sign("(") {
                    let arguments = self.items(")", Self::argument)?;
                    value = applied(value, "__loop", &[vec![format!("'{name}'")], arguments].concat());
                    continue;
                }
                let index = name.starts_with(|c: char| c.is_ascii_digit());
                value = if index { format!("({value}|__item({name}))") } else { format!("{value}.{name}") };
            } else if self.sign("[") {
                value = self.subscript(&value)?;
            } else if self.sign("(") {
                let arguments = self.items(")", Self::argument)?;
                value = match arguments.as_slice() {
                    [argument] if value == "loop" => format!("loop({argument}|__each)"),
                    _ => format!("{value}({})", arguments.join(", ")),
                };
            } else {
                return Some(value);
            }
        }
    }

    fn argument(&mut self) -> Option<String> {
        for (star, wrapper) in [("**", "__mapping"), ("*", "__splat")] {
            if self.sign(star) {
                return Some(format!("{star}(({})|{wrapper})", self.value()?));
            }
        }
        if let Token::Name(name) = self.next {
            let rest = self.source[self.at..].trim_start();
            if rest.starts_with('=') && !rest.starts_with("==") {
                self.take();
                self.take();
                return Some(format!("{name}={}", self.value()?));
            }
        }
        self.value()
    }

    /// Parses `[index]`, or a slice as a filter.
    fn subscript(&mut self, value: &str) -> Option<String> {
        let mut bounds = ["none", "none", "none"].map(str::to_owned);
        let mut at = 0;
        loop {
            if !matches!(self.next, Token::Sign(":" | "]")) {
                *bounds.get_mut(at)? = self.value()?;
            }
            if self.sign("]") {
                break;
            }
            self.sign(":").then_some(())?;
            at += 1;
        }
        Some(match at {
            0 if is_key(&bounds[0]) => format!("{value}[{}]", bounds[0]),
            0 => format!("({value}|__item({}))", bounds[0]),
            1 | 2 => format!("({value}|__slice({}))", bounds.join(", ")),
            _ => return None,
        })
    }

    /// Parses a filter's name with its arguments.
    fn filter_name(&mut self) -> Option<String> {
        let mut name = self.name()?.to_owned();
        if name.starts_with("__") {
            return None;
        }
        while self.sign(".") {
            name = format!("{name}.{}", self.name()?);
        }
        Some(if self.sign("(") { format!("{name}({})", self.items(")", Self::argument)?.join(", ")) } else { name })
    }

    /// Parses filters and tests after `value`.
    fn filters(&mut self, mut value: String) -> Option<String> {
        loop {
            if self.sign("|") {
                value = format!("{value}|{}", self.filter_name()?);
            } else if self.word("is") {
                let not = if self.word("not") { "not " } else { "" };
                let test = self.test()?;
                value = format!("({value} is {not}{test})");
            } else {
                return Some(value);
            }
        }
    }

    /// Parses a test's name with its argument.
    fn test(&mut self) -> Option<String> {
        let filter = self.filter_name()?;
        let argument = match self.next {
            _ if filter.ends_with(')') => false,
            Token::Name(word) => !matches!(word, "and" | "or" | "else" | "is" | "if" | "in" | "not"),
            Token::Literal(_) | Token::Sign("[" | "{" | "-") => true,
            _ => false,
        };
        if !argument {
            return Some(filter);
        }
        Some(format!("{filter}({})", self.operand()?))
    }
}

/// Returns true if comparing `constant` with a value costs almost nothing, and the value is not a string of the
/// conversation that the constant could equal. Comparisons with such strings must be visible to `watch`.
fn is_free(constant: &str, value: &str) -> bool {
    let unmarked = UNMARKED.iter().any(|key| {
        let name = |value: &str| value.strip_suffix(key).is_some_and(|rest| rest.ends_with('.'));
        let item = |quote: char| {
            let rest = value.strip_suffix(']').and_then(|rest| rest.strip_suffix(quote));
            rest.and_then(|rest| rest.strip_suffix(key)).is_some_and(|rest| rest.ends_with(quote))
        };
        name(value) || item('\'') || item('"')
    });
    let is_text = constant.len() > 2 && constant.starts_with(['\'', '"']);
    is_short(constant) && (!is_text || unmarked)
}

/// Returns true if a constant is short.
fn is_short(text: &str) -> bool {
    text.len() <= SHORT && is_constant(text)
}

/// Returns true if reading the item of a key costs almost nothing: the key is a short string, and strings have no such
/// items.
fn is_key(key: &str) -> bool {
    is_short(key) && !key.starts_with(|c: char| c.is_ascii_digit())
}

/// Returns `left|filter(arguments)` in parentheses, or only `left` without arguments.
fn applied(left: String, filter: &str, arguments: &[String]) -> String {
    if arguments.is_empty() { left } else { format!("({left}|{filter}({}))", arguments.join(", ")) }
}

/// Wraps a container so that its size is checked on creation, unless it contains only constants.
fn sized(items: &[String], container: String) -> String {
    if items.iter().all(|item| is_constant(item)) { container } else { format!("({container}|__sized)") }
}

/// Rewrites the inside of `{% %}`. Returns `None` if it cannot be parsed, or if transformers does not support the
/// statement.
pub(super) fn statement(inside: &str) -> Option<String> {
    let mut reader = Reader::new(inside);
    let Token::Name(word) = reader.next else { return None };
    reader.take();
    let text = match word {
        "if" | "elif" => format!("{word} {}", reader.either()?),
        "for" => reader.for_loop()?,
        "set" => reader.assignment()?,
        "with" => format!("with {}", reader.bindings()?),
        "macro" => reader.definition()?,
        "call" => reader.call_block()?,
        "filter" => {
            let first = reader.filter_name()?;
            format!("filter {}", reader.filters(first)?)
        }
        "autoescape" => format!("autoescape {}", reader.value()?),
        // Without a loader, as in transformers' environment, these fail when they run.
        "include" | "import" | "from" | "extends" => return Some("set __unloaded = __load()".to_owned()),
        "block" => {
            let name = reader.name()?;
            format!("block {name}{}", reader.flags(&["scoped", "required"]))
        }
        "endblock" => format!("endblock {}", reader.name().unwrap_or_default()),
        "else" | "break" | "continue" | "raw" => word.to_owned(),
        _ if word.starts_with("end") => word.to_owned(),
        _ => return None,
    };
    reader.ended().then_some(text)
}

impl Reader<'_> {
    fn for_loop(&mut self) -> Option<String> {
        let target = self.until(&[Token::Name("in")]);
        self.word("in").then_some(())?;
        let first = self.either()?;
        let items = self.more(first, Self::either)?;
        let mut text = format!("for {target}in ({items})|__each");
        if self.word("if") {
            text = format!("{text} if {}", self.value()?);
        }
        if self.word("recursive") {
            text.push_str(" recursive");
        }
        Some(text)
    }

    fn assignment(&mut self) -> Option<String> {
        let target = self.until(&[Token::Sign("="), Token::Sign("|")]);
        if self.sign("=") {
            let value = self.list()?;
            let needs_check = target.contains('.') && !is_constant(&value);
            return Some(if needs_check {
                format!("set {target}= ({value})|__held")
            } else {
                format!("set {target}= {value}")
            });
        }
        Some(format!("set {}", self.filters(target)?))
    }

    /// Parses `a = 1, b = 2`.
    fn bindings(&mut self) -> Option<String> {
        let mut bindings = Vec::new();
        while self.next != Token::End {
            let target = self.until(&[Token::Sign("=")]);
            self.sign("=").then_some(())?;
            bindings.push(format!("{target}= {}", self.value()?));
            if !self.sign(",") {
                break;
            }
        }
        Some(bindings.join(", "))
    }

    fn definition(&mut self) -> Option<String> {
        let name = self.name()?;
        self.sign("(").then_some(())?;
        Some(format!("macro {name}({})", self.items(")", Self::argument)?.join(", ")))
    }

    fn call_block(&mut self) -> Option<String> {
        let mut head = String::from("call");
        if self.sign("(") {
            head = format!("call({})", self.items(")", Self::argument)?.join(", "));
        }
        Some(format!("{head} {}", self.value()?))
    }
}
