//! What a render may spend: steps, bytes and, for what neither bounds, time.
//!
//! Steps and bytes are counted, so that a template fails on every machine or on none. Time is looked at only by renders
//! that have done more than any conversation makes them. Called by `environment`, `operators`, `filters` and `methods`.

use super::scan::FREE_TEXT;
use minijinja::value::{DynObject, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, functions};
use std::cell::Cell;
use std::time::{Duration, Instant};

/// Steps a render may take: half a second of looping, and a hundred times what conversations need.
const FUEL: u64 = 5_000_000;
/// Steps a render may take for each message, where these are more.
const FUEL_PER_MESSAGE: u64 = 10_000;
/// Bytes that all values made and printed may have together, beside sixteen times the input.
const ALL_BYTES: usize = 96 << 20;
/// More of these for conversations that a template puts together bit by bit: as often as they have messages.
const PIECEMEAL_BYTES: usize = 1 << 30;
/// Bytes that one value may have beside eight times the input.
const LARGEST: usize = 4 << 20;
/// What an item of a list takes.
pub(super) const ITEM_BYTES: usize = 24;
/// Values inside a container that is written in a template, and how deep they may lie.
const NODES: usize = 100_000;
const NESTING: usize = 128;
/// Depth of nested macro calls times four: far above real templates, far below a small thread's stack.
pub(super) const RECURSION: usize = 160;
/// Work, in units of about ten nanoseconds, before the clock is looked at, and between looks.
const FREE_WORK: usize = 4_000_000;
const WORK_BETWEEN_LOOKS: usize = 20_000;
/// An item of a loop.
const ITEM_WORK: usize = 20;
const TIME: Duration = Duration::from_millis(400);
/// What a render gets once when its time is over: it may have been the machine that stood still.
const GRACE: Duration = Duration::from_millis(200);
const TIME_PER_MESSAGE: Duration = Duration::from_millis(2);

/// What is rendered, for limits that grow with it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    pub messages: usize,
    pub bytes: usize,
}

/// What this thread's render has left.
#[derive(Debug, Clone, Copy)]
struct Budget {
    bytes: usize,
    /// Bytes that one value may have.
    largest: usize,
    work: usize,
    deadline: Option<Instant>,
    grace: bool,
}

thread_local! {
    static BUDGET: Cell<Budget> =
        const { Cell::new(Budget { bytes: 0, largest: 0, work: 0, deadline: None, grace: false }) };
}

impl Budget {
    /// Whether the time is over, grace and all.
    fn is_late(&mut self) -> bool {
        let now = Instant::now();
        let over = self.deadline.is_some_and(|deadline| now > deadline);
        if over && self.grace {
            self.grace = false;
            self.deadline = now.checked_add(GRACE);
            return false;
        }
        over
    }

    fn work(&mut self, units: usize) -> Result<(), Error> {
        if let Some(left) = self.work.checked_sub(units) {
            self.work = left;
            return Ok(());
        }
        self.work = WORK_BETWEEN_LOOKS;
        if self.is_late() { Err(Error::from(ErrorKind::OutOfFuel)) } else { Ok(()) }
    }
}

/// Steps for a template whose longest uncounted text has `longest_text` bytes.
pub(super) fn fuel(longest_text: usize) -> u64 {
    FUEL * FREE_TEXT as u64 / longest_text.max(FREE_TEXT) as u64
}

/// The environment with more fuel, where a long conversation needs more than it has.
pub(super) fn widened(env: &Environment<'static>, size: Size) -> Option<Environment<'static>> {
    let wanted = size.messages as u64 * FUEL_PER_MESSAGE;
    env.fuel().is_some_and(|fuel| fuel < wanted).then(|| {
        let mut wider = env.clone();
        wider.set_fuel(Some(wanted));
        wider
    })
}

/// Starts the budget of a render.
pub(super) fn start(size: Size) {
    let piecemeal = size.bytes.saturating_mul(size.messages).min(PIECEMEAL_BYTES);
    let bytes = ALL_BYTES.saturating_add(size.bytes.saturating_mul(16)).saturating_add(piecemeal);
    let largest = LARGEST.saturating_add(size.bytes.saturating_mul(8));
    let time = TIME + TIME_PER_MESSAGE.saturating_mul(u32::try_from(size.messages).unwrap_or(u32::MAX));
    let deadline = Instant::now().checked_add(time);
    BUDGET.set(Budget { bytes, largest, work: FREE_WORK, deadline, grace: true });
}

/// Takes work that makes nothing off the budget.
pub(super) fn work(units: usize) -> Result<(), Error> {
    let mut left = BUDGET.get();
    let result = left.work(units);
    BUDGET.set(left);
    result
}

/// Takes a printed value of `bytes` off the budget.
pub(super) fn spend(bytes: usize) -> Result<(), Error> {
    let mut left = BUDGET.get();
    left.bytes = left.bytes.checked_sub(bytes).ok_or_else(|| Error::from(ErrorKind::WriteFailure))?;
    let result = left.work(4 + bytes / 64);
    BUDGET.set(left);
    result
}

/// Bytes that a value may have.
pub(super) fn largest() -> usize {
    BUDGET.get().largest
}

/// Takes a value of so many bytes, which is about to be made, off the budget.
pub(super) fn make(bytes: usize) -> Result<(), Error> {
    if bytes > largest() { Err(Error::from(ErrorKind::WriteFailure)) } else { spend(bytes) }
}

/// As [`make`], for a list of so many items.
pub(super) fn make_items(count: usize) -> Result<(), Error> {
    make(count.saturating_mul(ITEM_BYTES))
}

/// The value, taken off the budget.
pub(super) fn made(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => make(value.as_str().map_or(0, str::len))?,
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => make_items(value.len().unwrap_or(0))?,
        _ => {}
    }
    Ok(value)
}

/// The container, if what it holds can be walked: containers that hold others twice grow without any text growing.
pub(super) fn sized(value: Value) -> Result<Value, Error> {
    make_items(value.len().unwrap_or(0))?;
    weigh(&value)?;
    Ok(value)
}

/// Takes a walk over everything below `value` off the budget, and refuses what is too large for one.
pub(super) fn weigh(value: &Value) -> Result<(), Error> {
    let mut left = NODES;
    visit(value, &mut left, 0)?;
    work(NODES - left)
}

fn visit(value: &Value, left: &mut usize, depth: usize) -> Result<(), Error> {
    let too_large = || Error::from(ErrorKind::WriteFailure);
    *left = left.checked_sub(1).ok_or_else(too_large)?;
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Map) {
        return Ok(());
    }
    if depth == NESTING {
        return Err(too_large());
    }
    match value.as_object().and_then(DynObject::try_iter_pairs) {
        Some(pairs) => pairs.into_iter().try_for_each(|(_, item)| visit(&item, left, depth + 1)),
        None => Ok(()),
    }
}

/// `range` whose items are counted as they are taken.
pub(super) fn range(lower: isize, upper: Option<isize>, step: Option<isize>) -> Result<Value, Error> {
    let inner = functions::range(lower, upper, step)?;
    Ok(Value::make_iterable(move || {
        let items = inner.try_iter().into_iter().flatten();
        let length = inner.len().unwrap_or(0);
        Counted { items, length }
    }))
}

struct Counted<I> {
    items: I,
    length: usize,
}

impl<I: Iterator<Item = Value>> Iterator for Counted<I> {
    type Item = Value;

    fn next(&mut self) -> Option<Value> {
        let item = self.items.next()?;
        self.length = self.length.saturating_sub(1);
        Some(work(ITEM_WORK).map_or_else(Value::from, |()| item))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.length, Some(self.length))
    }
}

#[cfg(test)]
mod tests {
    use crate::template::Template;
    use serde_json::{Map, json};

    /// Peak resident memory of this process in KiB, where the system tells it.
    fn peak() -> Option<u64> {
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?.trim().trim_end_matches("kB").trim().parse().ok()
    }

    #[test]
    fn what_grows_without_bounds_is_an_error_before_memory_is_gone() {
        let before = peak();
        for source in [
            "{{ 'a' * 10 ** 9 }}",
            "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('ab') }}",
            "{% set n = namespace(x=['a']) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
            "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = n.x + ['a' * 999999] %}{% endfor %}",
            "{{ '%1000000000d' % 1 }}{{ 'x'|indent(10 ** 9) }}",
        ] {
            let template = Template::compile(source, &[]).expect("it compiles");
            let rendered = template.render_text(&[&json!({"role": "user", "content": "hi"})], None, false, &Map::new());
            assert!(rendered.unwrap_err().to_string().contains("made more text than its bounds allow"), "{source}");
        }
        if let (Some(before), Some(after)) = (before, peak()) {
            assert!(after - before < 256 << 10);
        }
    }
}
