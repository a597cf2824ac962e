//! Python's slices of template values.

use super::limits;
use super::operators::{like, refused, whole};
use super::turns::Messages;
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// `value[start:stop:step]`.
pub(super) fn slice((value, start, stop, step): (&Value, &Value, &Value, &Value)) -> Result<Value, Error> {
    let bound = |value: &Value| -> Result<Option<i128>, Error> {
        if value.is_none() {
            return Ok(None);
        }
        whole(value).map(Some).ok_or_else(|| refused("a slice", value, value))
    };
    let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    if step == 0 {
        return Err(Error::new(ErrorKind::InvalidOperation, "slice step cannot be zero"));
    }
    if let (Some(start), None, 1) = (start.unwrap_or(0).try_into().ok(), stop, step)
        && let Some(messages) = Messages::from(value, start)
    {
        return Ok(messages);
    }
    match value.kind() {
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            limits::make(text.len())?;
            let cut = cut_text(text, start, stop, step);
            Ok(if value.is_safe() { Value::from_safe_string(cut) } else { Value::from(cut) })
        }
        ValueKind::Seq => {
            let length = value.len().unwrap_or(0);
            limits::make_items(length)?;
            let picked = Positions::new(length, start, stop, step);
            let items = picked.filter_map(|at| value.get_item_by_index(at).ok()).collect();
            Ok(like(value, items))
        }
        ValueKind::Iterable if value.len().is_some() => {
            let items: Vec<Value> = value.try_iter()?.collect();
            limits::make_items(items.len())?;
            Ok(Value::from(
                Positions::new(items.len(), start, stop, step).map(|at| items[at].clone()).collect::<Vec<_>>(),
            ))
        }
        ValueKind::Undefined => Err(Error::new(ErrorKind::UndefinedError, "of what is undefined there are no slices")),
        // Jinja looks for an attribute of that name, and finds none.
        _ => Ok(Value::UNDEFINED),
    }
}

fn cut_text(text: &str, start: Option<i128>, stop: Option<i128>, step: i128) -> String {
    let ascii = text.is_ascii();
    let count = if ascii { text.len() } else { text.chars().count() };
    let mut positions = Positions::new(count, start, stop, step);
    if step == 1 {
        let (Some(first), Ok(last)) = (positions.next(), usize::try_from(positions.stop)) else { return String::new() };
        let byte = |at: usize| {
            if ascii { at } else { text.char_indices().nth(at).map_or(text.len(), |(byte, _)| byte) }
        };
        return text[byte(first)..byte(last)].to_owned();
    }
    let chars: Vec<char> = text.chars().collect();
    positions.map(|at| chars[at]).collect()
}

/// The positions of a Python slice.
struct Positions {
    at: i128,
    stop: i128,
    step: i128,
}

impl Positions {
    fn new(count: usize, start: Option<i128>, stop: Option<i128>, step: i128) -> Self {
        let count = count as i128;
        let (low, high) = if step > 0 { (0, count) } else { (-1, count - 1) };
        let place = |bound: i128| (if bound < 0 { bound.saturating_add(count) } else { bound }).clamp(low, high);
        let (first, last) = if step > 0 { (low, high) } else { (high, low) };
        Self { at: start.map_or(first, place), stop: stop.map_or(last, place), step }
    }
}

impl Iterator for Positions {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let inside = if self.step > 0 { self.at < self.stop } else { self.at > self.stop };
        let at = inside.then(|| usize::try_from(self.at).ok()).flatten()?;
        self.at = self.at.saturating_add(self.step);
        Some(at)
    }
}
