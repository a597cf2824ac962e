//! What a render may spend: steps, bytes and, for what neither bounds, time.
//!
//! Steps and bytes are counted, so that a template fails on every machine or on none. Time is looked at only by renders
//! that have done more than any conversation makes them. Called by `environment`, `operators`, `filters` and `methods`.

use super::scan::FREE_TEXT;
use minijinja::value::{Enumerator, Object, ObjectRepr, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, functions};
use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Steps a render may take: half a second of looping, and a hundred times what conversations need.
const FUEL: u64 = 5_000_000;
/// Steps a render may take for each message, where these are more.
const FUEL_PER_MESSAGE: u64 = 10_000;
/// Bytes that all values made and printed may have together, beside sixteen times the input.
const ALL_BYTES: usize = 48 << 20;
/// More of these for conversations that a template puts together bit by bit: as often as they have messages.
const PIECEMEAL_BYTES: usize = 1 << 30;
/// Bytes that one value may have beside eight times the input.
const LARGEST: usize = 4 << 20;
/// What an item of a list takes.
pub(super) const ITEM_BYTES: usize = 24;
/// Values inside a container that is written in a template, and how deep they may lie.
pub(super) const NODES: usize = 100_000;
pub(super) const NESTING: usize = 128;
/// Depth of nested macro calls times four: far above real templates, far below a small thread's stack.
pub(super) const RECURSION: usize = 160;
/// Work, in units of about ten nanoseconds, before the clock is looked at, and between looks; work that would take longer
/// than there is time is refused before it is done.
const FREE_WORK: usize = 4_000_000;
const WORK_BETWEEN_LOOKS: usize = 20_000;
const UNIT: Duration = Duration::from_nanos(10);
/// An item of a loop.
const ITEM_WORK: usize = 20;
const TIME: Duration = Duration::from_millis(400);
/// What a render gets once when its time is over: it may have been the machine that stood still.
const GRACE: Duration = Duration::from_millis(200);
const TIME_PER_MESSAGE: Duration = Duration::from_millis(2);
const TIME_PER_MEBIBYTE: Duration = Duration::from_millis(40);
/// Runs of one call that get time for what they render: without marks, and with marks in three ways.
const RUNS: u8 = 4;

/// What is rendered, for limits that grow with it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    pub messages: usize,
    pub bytes: usize,
}

/// What this thread's render has left, beside its work.
#[derive(Debug, Clone, Copy)]
struct Budget {
    bytes: usize,
    /// Bytes that one value may have.
    largest: usize,
    deadline: Option<Instant>,
    grace: bool,
    /// Runs that still get time of their own.
    runs: u8,
}

thread_local! {
    static BUDGET: Cell<Budget> =
        const { Cell::new(Budget { bytes: 0, largest: 0, deadline: None, grace: false, runs: 0 }) };
    /// Work until the clock is looked at.
    static WORK: Cell<usize> = const { Cell::new(0) };
}

impl Budget {
    /// Whether the time is over, grace and all, before so much work is done.
    fn is_late(&mut self, units: usize) -> bool {
        let now = Instant::now();
        let then = now.checked_add(UNIT.saturating_mul(u32::try_from(units).unwrap_or(u32::MAX)));
        let over = |deadline: Option<Instant>| deadline.zip(then).is_some_and(|(deadline, then)| then > deadline);
        if over(self.deadline) && self.grace {
            self.grace = false;
            self.deadline = now.checked_add(GRACE);
        }
        over(self.deadline)
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

/// Starts the time of a call, which all its runs share.
pub(super) fn open() {
    BUDGET.set(Budget { bytes: 0, largest: 0, deadline: Instant::now().checked_add(TIME), grace: true, runs: RUNS });
    WORK.set(FREE_WORK);
}

/// Starts the budget of a run.
pub(super) fn start(size: Size) {
    let mut budget = BUDGET.get();
    let piecemeal = size.bytes.saturating_mul(size.messages).min(PIECEMEAL_BYTES);
    budget.bytes = ALL_BYTES.saturating_add(size.bytes.saturating_mul(16)).saturating_add(piecemeal);
    budget.largest = LARGEST.saturating_add(size.bytes.saturating_mul(8));
    if let Some(runs) = budget.runs.checked_sub(1) {
        budget.runs = runs;
        let times = |each: Duration, count: usize| each.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX));
        let time = times(TIME_PER_MESSAGE, size.messages).saturating_add(times(TIME_PER_MEBIBYTE, size.bytes >> 20));
        budget.deadline = budget.deadline.and_then(|deadline| deadline.checked_add(time));
    }
    BUDGET.set(budget);
}

/// Takes work off the budget, before it is done.
pub(super) fn work(units: usize) -> Result<(), Error> {
    let left = WORK.get();
    if units <= left {
        WORK.set(left - units);
        return Ok(());
    }
    look(units - left)
}

#[cold]
fn look(units: usize) -> Result<(), Error> {
    WORK.set(WORK_BETWEEN_LOOKS);
    let mut left = BUDGET.get();
    let late = left.is_late(units);
    BUDGET.set(left);
    if late { Err(Error::from(ErrorKind::OutOfFuel)) } else { Ok(()) }
}

/// What `call` takes off the work.
#[cfg(test)]
pub(super) fn paid_by(call: impl FnOnce()) -> usize {
    WORK.set(usize::MAX);
    call();
    usize::MAX - WORK.get()
}

/// Whether there is time left, whatever was done.
pub(super) fn in_time() -> Result<(), Error> {
    look(0)
}

/// Takes a printed value of `bytes` off the budget.
pub(super) fn spend(bytes: usize) -> Result<(), Error> {
    let mut left = BUDGET.get();
    left.bytes = left.bytes.checked_sub(bytes).ok_or_else(|| Error::from(ErrorKind::WriteFailure))?;
    BUDGET.set(left);
    work(4 + bytes / 64)
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

/// `range` whose items are counted as they are taken.
pub(super) fn range(lower: isize, upper: Option<isize>, step: Option<isize>) -> Result<Value, Error> {
    functions::range(lower, upper, step).map(|numbers| Value::from_object(Range { numbers }))
}

/// The numbers of a `range`, which hold nothing.
#[derive(Debug)]
pub(super) struct Range {
    numbers: Value,
}

impl Object for Range {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let items = self.numbers.try_iter().into_iter().flatten();
        Enumerator::Iter(Box::new(Counted { items, length: self.numbers.len().unwrap_or(0) }))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        self.numbers.len()
    }
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
            "{{ ([['a' * 999999]] * 99999)|join }}{{ [[['a' * 999999]]]|tojson(indent='a' * 999999) }}",
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
