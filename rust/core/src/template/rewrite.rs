//! Rewrites the statements and expressions of a template, with operators turned into filters of ours.
//!
//! What Python and the engine take differently, and what makes values without bounds, is left to `python_ops`. Syntax is
//! only read here: names, literals and calls stay as they are written.

use super::lexer::{Reader, Token, is_constant};

/// Depth of nested expressions, as the engine's parser has it.
const DEPTH: usize = 150;

/// Functions and variables that only `analyze`, the rewritten statements and the environment use.
const OURS: [&str; 8] =
    ["__load", "__begins", "__restores", "__has", "__kept", "__ended", "__clock", "__generation_marks"];

/// Keys of strings that never carry marks where a render is watched.
pub(super) const UNMARKED: [&str; 2] = ["role", "type"];

/// Bytes of a constant that is compared without being counted.
const SHORT: usize = 64;

/// The inside of `{{ }}` rewritten; `None` for what is no expression.
pub(super) fn expression(inside: &str) -> Option<String> {
    let mut reader = Reader::new(inside);
    let text = reader.list()?;
    reader.ended().then_some(text)
}

impl Reader<'_> {
    /// `a` or `a, b`.
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

    /// An expression with its `if` and `else`.
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
                let rest: Vec<String> =
                    pairs.iter().map(|(operator, right)| format!("'{operator}', {right}")).collect();
                format!("({left}|__compare({}))", rest.join(", "))
            }
        })
    }

    /// The operator of a comparison, if one is next; the outer `None` for a `not` without `in`.
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
            let mut added = Vec::new();
            while self.sign("+") {
                added.push(self.concatenation()?);
            }
            left = applied(left, "__add", &added);
            if !self.sign("-") {
                return Some(left);
            }
            left = format!("({left} - {})", self.concatenation()?);
        }
    }

    fn concatenation(&mut self) -> Option<String> {
        let left = self.product()?;
        let mut more = Vec::new();
        while self.sign("~") {
            more.push(self.product()?);
        }
        Some(applied(left, "__concat", &more))
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

    /// A primary with what follows it, and minus signs before it.
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
            // A block of the template by its name, which could call itself; no chat template does.
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

    /// Items between commas up to `close`.
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

    /// Attributes, subscripts and calls behind `value`.
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
        for (star, paid) in [("**", "__mapping"), ("*", "__splat")] {
            if self.sign(star) {
                return Some(format!("{star}(({})|{paid})", self.value()?));
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

    /// `[index]`, or a slice as a filter.
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

    /// A filter's name with its arguments.
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

    /// Filters and tests behind `value`.
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

    /// A test's name with its argument.
    fn test(&mut self) -> Option<String> {
        let called = self.filter_name()?;
        let argument = match self.next {
            _ if called.ends_with(')') => false,
            Token::Name(word) => !matches!(word, "and" | "or" | "else" | "is" | "if" | "in" | "not"),
            Token::Literal(_) | Token::Sign("[" | "{" | "-") => true,
            _ => false,
        };
        if !argument {
            return Some(called);
        }
        Some(format!("{called}({})", self.operand()?))
    }
}

/// Whether comparing `constant` with a value is as good as free, and that value is no string of a conversation's that the
/// constant could be: those are compared where `watch` sees it.
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

/// Whether a constant is short.
fn is_short(text: &str) -> bool {
    text.len() <= SHORT && is_constant(text)
}

/// Whether taking the item of a key is as good as free: a short string, of which strings have no items.
fn is_key(key: &str) -> bool {
    is_short(key) && !key.starts_with(|c: char| c.is_ascii_digit())
}

/// `left|filter(more)` in brackets, or `left` alone.
fn applied(left: String, filter: &str, more: &[String]) -> String {
    if more.is_empty() { left } else { format!("({left}|{filter}({}))", more.join(", ")) }
}

/// A container whose size is looked at when it is made, unless it holds nothing but constants.
fn sized(items: &[String], container: String) -> String {
    if items.iter().all(|item| is_constant(item)) { container } else { format!("({container}|__sized)") }
}

/// The inside of `{% %}` rewritten; `None` for what cannot be read, and for statements that transformers does not know.
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
        // Without a loader, as transformers' environment is, these fail where they are run.
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
            let held = target.contains('.') && !is_constant(&value);
            return Some(if held {
                format!("set {target}= ({value})|__held")
            } else {
                format!("set {target}= {value}")
            });
        }
        Some(format!("set {}", self.filters(target)?))
    }

    /// `a = 1, b = 2`.
    fn bindings(&mut self) -> Option<String> {
        let mut all = Vec::new();
        while self.next != Token::End {
            let target = self.until(&[Token::Sign("=")]);
            self.sign("=").then_some(())?;
            all.push(format!("{target}= {}", self.value()?));
            if !self.sign(",") {
                break;
            }
        }
        Some(all.join(", "))
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
