//! The budget of a render: steps, bytes and, for what neither bounds, processor time.
//!
//! Steps and bytes are counted, so that a template fails on every machine or on none. Time is looked at only by renders
//! that have done more than any conversation makes them, and is that of the processor: a busy machine takes none of it.
//! Called by `environment`, `operators`, `filters` and `methods`.

use crate::stop;
use minijinja::value::{Enumerator, Object, ObjectRepr, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, functions};
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

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
/// Text outside tags that is not counted when it is written; what is longer becomes a printed string.
pub(super) const FREE_TEXT: usize = 32;
/// Work, in units of about ten nanoseconds, before the clock is looked at, and between looks; work that would take longer
/// than there is time is refused before it is done.
const FREE_WORK: usize = 4_000_000;
const WORK_BETWEEN_LOOKS: usize = 20_000;
const UNIT: Duration = Duration::from_nanos(10);
/// An item of a loop.
const ITEM_WORK: usize = 20;
const TIME: Duration = Duration::from_millis(600);
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

/// What this thread's render has left: cells beside each other, so that an operation finds all of them at once.
struct Budget {
    /// Work until the clock is looked at.
    work: Cell<usize>,
    bytes: Cell<usize>,
    /// Bytes that the run began with.
    all_bytes: Cell<usize>,
    /// Bytes that one value may have.
    largest: Cell<usize>,
    time: Cell<Time>,
}

/// The time of a call.
#[derive(Debug, Clone, Copy)]
struct Time {
    /// By [`spent`].
    deadline: Duration,
    /// Runs that still get time of their own.
    runs: u8,
}

thread_local! {
    static BUDGET: Budget = const {
        Budget {
            work: Cell::new(0),
            bytes: Cell::new(0),
            all_bytes: Cell::new(0),
            largest: Cell::new(0),
            time: Cell::new(Time { deadline: Duration::MAX, runs: 0 }),
        }
    };
}

/// How long this thread has worked.
#[cfg(unix)]
fn spent() -> Duration {
    use rustix::time::{ClockId, clock_gettime};

    let spent = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(spent.tv_sec).unwrap_or(0), u32::try_from(spent.tv_nsec).unwrap_or(0))
}

/// How long this process has been there, where nothing says how long it has worked.
#[cfg(not(unix))]
fn spent() -> Duration {
    static BEGAN: std::sync::LazyLock<std::time::Instant> = std::sync::LazyLock::new(std::time::Instant::now);
    BEGAN.elapsed()
}

impl Budget {
    #[inline]
    fn work(&self, units: usize) -> Result<(), Error> {
        let left = self.work.get();
        if units <= left {
            self.work.set(left - units);
            return Ok(());
        }
        self.look(units - left)
    }

    #[cold]
    fn look(&self, units: usize) -> Result<(), Error> {
        stop::check();
        self.work.set(WORK_BETWEEN_LOOKS);
        let takes = UNIT.saturating_mul(u32::try_from(units).unwrap_or(u32::MAX));
        let time = self.time.get();
        if spent().saturating_add(takes) <= time.deadline {
            return Ok(());
        }
        // What a run had no time for, the call has none for, though some may be left.
        self.time.set(Time { deadline: Duration::ZERO, ..time });
        Err(Error::from(ErrorKind::OutOfFuel))
    }

    #[inline]
    fn spend(&self, bytes: usize) -> Result<(), Error> {
        stop::before(bytes);
        let left = self.bytes.get().checked_sub(bytes).ok_or_else(|| Error::from(ErrorKind::WriteFailure))?;
        self.bytes.set(left);
        self.work(4 + bytes / 64)
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
    BUDGET.with(|left| {
        left.bytes.set(0);
        left.largest.set(0);
        left.work.set(FREE_WORK);
        left.time.set(Time { deadline: spent().saturating_add(TIME), runs: RUNS });
    });
}

/// Starts the budget of a run.
pub(super) fn start(size: Size) {
    let piecemeal = size.bytes.saturating_mul(size.messages).min(PIECEMEAL_BYTES);
    BUDGET.with(|left| {
        left.all_bytes.set(ALL_BYTES.saturating_add(size.bytes.saturating_mul(16)).saturating_add(piecemeal));
        left.bytes.set(left.all_bytes.get());
        left.largest.set(LARGEST.saturating_add(size.bytes.saturating_mul(8)));
        let Time { deadline, runs } = left.time.get();
        let Some(runs) = runs.checked_sub(1) else { return };
        let times = |each: Duration, count: usize| each.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX));
        let more = times(TIME_PER_MESSAGE, size.messages).saturating_add(times(TIME_PER_MEBIBYTE, size.bytes >> 20));
        let deadline = deadline.saturating_add(more);
        left.time.set(Time { deadline, runs });
    });
}

/// Takes work off the budget, before it is done.
pub(super) fn work(units: usize) -> Result<(), Error> {
    BUDGET.with(|left| left.work(units))
}

/// What `call` takes off the work.
#[cfg(test)]
pub(super) fn paid_by(call: impl FnOnce()) -> usize {
    BUDGET.with(|left| left.work.set(usize::MAX));
    call();
    usize::MAX - BUDGET.with(|left| left.work.get())
}

/// Whether there is time left, whatever was done.
pub(super) fn in_time() -> Result<(), Error> {
    BUDGET.with(|left| left.look(0))
}

/// Takes a printed value of `bytes` off the budget.
pub(super) fn spend(bytes: usize) -> Result<(), Error> {
    BUDGET.with(|left| left.spend(bytes))
}

pub(super) fn spent_bytes() -> usize {
    BUDGET.with(|left| left.all_bytes.get().saturating_sub(left.bytes.get()))
}

pub(super) fn left_bytes() -> usize {
    BUDGET.with(|left| left.bytes.get())
}

/// Bytes that a value may have.
pub(super) fn largest() -> usize {
    BUDGET.with(|left| left.largest.get())
}

/// Takes a value of so many bytes, which is about to be made, off the budget.
pub(super) fn make(bytes: usize) -> Result<(), Error> {
    BUDGET.with(|left| {
        if bytes > left.largest.get() {
            return Err(Error::from(ErrorKind::WriteFailure));
        }
        left.spend(bytes)
    })
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
        let Ok(numbers) = self.numbers.try_iter() else { return Enumerator::Empty };
        Enumerator::Iter(Box::new(numbers.map(|number| work(ITEM_WORK).map_or_else(Value::from, |()| number))))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        self.numbers.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::Template;
    use serde_json::{Map, json};

    #[test]
    #[cfg(unix)]
    fn time_in_which_others_work_is_not_the_renders() {
        open();
        start(Size { messages: 1, bytes: 1 });
        std::thread::sleep(2 * TIME);
        assert!(in_time().is_ok());
        let began = spent();
        while spent() < began + TIME + 2 * TIME_PER_MESSAGE {}
        assert!(in_time().is_err());
    }

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
