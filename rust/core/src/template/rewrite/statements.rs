//! Statements of a template, with the expressions in them rewritten.
//!
//! Called through `rewrite`.

use super::super::tokens::{Token, is_constant};
use super::reader::Reader;

/// The inside of `{% %}` rewritten; `None` for what cannot be read, and for statements that transformers does not know.
pub(in crate::template) fn statement(inside: &str) -> Option<String> {
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
