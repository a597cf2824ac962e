//! The budget of a render: steps, bytes and, for what neither bounds, processor time, charged around each operation.
//!
//! Steps and bytes are counted, so that a template fails on every machine or on none. Time is looked at only by renders
//! that have done more than any conversation makes them, and is that of the processor: a busy machine takes none of it.
//! One wrapper around every filter, test and function charges for what it reads before it runs, and has `watch` look at
//! the arguments.

use super::value::{Generator, big};
use super::watch;
use crate::cancel;
use minijinja::functions::{self, Function};
use minijinja::value::{
    ArgType, DynObject, Enumerator, FunctionArgs, FunctionResult, Object, ObjectRepr, Value, ValueKind,
};
use minijinja::{Environment, Error, ErrorKind, State};
use std::cell::Cell;
use std::fmt::Write;
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
        cancel::check();
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
        cancel::before(bytes);
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

/// Bytes that an operation reads in the time of one unit of work, at its slowest.
const BYTES_PER_UNIT: usize = 4;
/// Bytes that are compared in that time.
const COMPARED_PER_UNIT: usize = 64;
/// Units that an item of a container costs.
const UNITS_PER_ITEM: usize = 4;

/// How far an operation looks into its arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reads {
    /// At the strings among them.
    Strings,
    /// At all of them as texts, which the engine makes of what is none.
    Texts,
    /// At the items of the first, with the others for each of them, and at those once as texts.
    Items,
    /// At what lies inside of them, and at no string there.
    Shape,
    /// At all that lies inside of them.
    All,
    /// At all that lies inside of the first, as often as sorting it does.
    Sorted,
}

/// All arguments of a call as the engine has them, keywords too.
pub(super) struct Arguments<'a>(pub &'a [Value]);

impl<'a> ArgType<'a> for Arguments<'_> {
    type Output = Arguments<'a>;

    fn from_value(value: Option<&'a Value>) -> Result<Arguments<'a>, Error> {
        Ok(Arguments(value.map_or(&[], std::slice::from_ref)))
    }

    fn from_state_and_values(
        _: Option<&'a State>,
        values: &'a [Value],
        from: usize,
    ) -> Result<(Arguments<'a>, usize), Error> {
        Self::from_state_and_values_mut(None, values, from)
    }

    fn from_state_and_values_mut(
        _: Option<&State>,
        values: &'a [Value],
        from: usize,
    ) -> Result<(Arguments<'a>, usize), Error> {
        let values = values.get(from..).unwrap_or_default();
        Ok((Arguments(values), values.len()))
    }
}

/// What a template can call: every filter, test and function of an environment is added here, and pays.
pub(super) struct Paid<'a>(pub &'a mut Environment<'static>);

impl Paid<'_> {
    pub fn filter<F, Rv, Args>(&mut self, name: &'static str, reads: Reads, filter: F)
    where
        F: Function<Rv, Args>,
        Rv: FunctionResult,
        Args: for<'a> FunctionArgs<'a>,
    {
        self.0.add_filter(name, paid(name, reads, Value::from_function(filter)));
    }

    /// A filter that takes its arguments as they are.
    pub fn direct<F>(&mut self, name: &'static str, reads: Reads, filter: F)
    where
        F: Fn(&mut State, &[Value]) -> Result<Value, Error> + Send + Sync + 'static,
    {
        let tells = watch::tells(name);
        self.0.add_filter(name, move |state: &mut State, arguments: Arguments<'_>| {
            charge(arguments.0, reads)?;
            watch::look(arguments.0, tells);
            filter(state, arguments.0)
        });
    }

    pub fn test<F, Rv, Args>(&mut self, name: &'static str, reads: Reads, test: F)
    where
        F: Function<Rv, Args>,
        Rv: FunctionResult,
        Args: for<'a> FunctionArgs<'a>,
    {
        self.0.add_test(name, paid(name, reads, Value::from_function(test)));
    }

    /// A test that looks at what its value is, and at nothing in it.
    pub fn kind<F>(&mut self, name: &'static str, test: F)
    where
        F: Fn(&Value) -> bool + Send + Sync + 'static,
    {
        self.0.add_test(name, test);
    }

    pub fn function<F, Rv, Args>(&mut self, name: &'static str, reads: Reads, function: F)
    where
        F: Function<Rv, Args>,
        Rv: FunctionResult,
        Args: for<'a> FunctionArgs<'a>,
    {
        self.0.add_function(name, paid(name, reads, Value::from_function(function)));
    }
}

fn paid(
    name: &str,
    reads: Reads,
    inner: Value,
) -> impl Fn(&mut State, Arguments<'_>) -> Result<Value, Error> + Send + Sync + use<> {
    let tells = watch::tells(name);
    move |state: &mut State, arguments: Arguments<'_>| {
        charge(arguments.0, reads)?;
        watch::look(arguments.0, tells);
        inner.call(state, arguments.0)
    }
}

/// Takes what an operation that `reads` so far reads of its arguments off the budget.
pub(super) fn charge(arguments: &[Value], reads: Reads) -> Result<(), Error> {
    let Some((first, others)) = arguments.split_first() else { return work(1) };
    let strings: usize = others.iter().map(strings).sum();
    let units = match reads {
        Reads::Strings => 1,
        Reads::Texts => 1 + texts(arguments)? / BYTES_PER_UNIT,
        Reads::Items => {
            let each = UNITS_PER_ITEM + strings / BYTES_PER_UNIT;
            items(first).saturating_mul(each).saturating_add(texts(others)? / BYTES_PER_UNIT)
        }
        Reads::Shape => arguments.iter().map(|argument| seen(argument, usize::MAX)).sum::<Result<usize, Error>>()?,
        Reads::All => {
            let seen = arguments.iter().map(|argument| seen(argument, BYTES_PER_UNIT));
            return work(seen.sum::<Result<usize, Error>>()?);
        }
        Reads::Sorted => {
            let times = usize::BITS - items(first).leading_zeros();
            let each = UNITS_PER_ITEM + strings / BYTES_PER_UNIT;
            seen(first, COMPARED_PER_UNIT)?
                .saturating_mul(times as usize)
                .saturating_add(items(first).saturating_mul(each))
                .saturating_add(texts(others)? / BYTES_PER_UNIT)
        }
    };
    work(units.saturating_add((first.as_str().map_or(0, str::len) + strings) / BYTES_PER_UNIT))
}

/// As [`charge`], for the strings of a method's value and arguments.
pub(super) fn charge_method(value: &Value, arguments: &[Value]) -> Result<(), Error> {
    let read: usize = strings(value) + arguments.iter().map(strings).sum::<usize>();
    work(2 + read / BYTES_PER_UNIT)
}

/// Bytes of the texts that the engine may make of what is no string, if they are not too many: a name of an attribute
/// or a test may be anything.
fn texts(arguments: &[Value]) -> Result<usize, Error> {
    let texts = arguments.iter().filter(|argument| argument.as_object().is_some()).map(text_bytes);
    let bytes = texts.sum::<Result<usize, Error>>()?;
    if bytes > largest() { Err(ErrorKind::WriteFailure.into()) } else { Ok(bytes) }
}

/// Bytes of a string, or of the strings among keyword arguments.
fn strings(value: &Value) -> usize {
    if let Some(text) = value.as_str() {
        return text.len();
    }
    if !value.is_kwargs() {
        return 0;
    }
    let pairs = value.as_object().and_then(DynObject::try_iter_pairs).into_iter().flatten();
    pairs.map(|(key, value)| key.as_str().map_or(0, str::len) + value.as_str().map_or(0, str::len)).sum()
}

/// Items that an operation may take from `value`.
pub(super) fn items(value: &Value) -> usize {
    match value.downcast_object_ref::<Generator>() {
        Some(generator) => generator.items().len(),
        None if value.kind() == ValueKind::String => value.as_str().map_or(0, str::len),
        None => value.len().unwrap_or(0),
    }
}

/// Takes a walk over everything below `value` off the budget, and refuses what is too large or too deep for one.
pub(super) fn walk(value: &Value) -> Result<(), Error> {
    work(seen(value, usize::MAX)?)
}

/// As [`walk`], for a key, which is hashed with all that lies in it.
pub(super) fn hashed(key: &Value) -> Result<(), Error> {
    work(3 + seen(key, BYTES_PER_UNIT)?)
}

/// As [`walk`], for what is compared on the way.
pub(super) fn compared(value: &Value) -> Result<(), Error> {
    work(seen(value, COMPARED_PER_UNIT)?)
}

/// Units that a walk over everything below `value` takes, if so many bytes of its strings take one.
fn seen(value: &Value, bytes_per_unit: usize) -> Result<usize, Error> {
    if let Some(text) = value.as_str() {
        return Ok(1 + text.len() / bytes_per_unit);
    }
    let (nodes, bytes) = walked(value, false)?;
    Ok(nodes + bytes / bytes_per_unit)
}

/// Bytes of the strings below `value`, if a walk over it is allowed.
pub(super) fn text_bytes(value: &Value) -> Result<usize, Error> {
    let (nodes, bytes) = walked(value, false)?;
    work(nodes)?;
    Ok(bytes.saturating_add(nodes.saturating_mul(8)))
}

/// Allows a value to be kept in a namespace: one that holds a namespace or a loop could come to hold itself, which is
/// never given back, or grow deeper without being walked.
pub(super) fn held(value: &Value) -> Result<(), Error> {
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
        return Ok(());
    }
    let (nodes, _) = walked(value, true)?;
    work(nodes)
}

/// Values below `value`, itself among them, and the bytes of their strings, if a walk over it is allowed.
fn walked(value: &Value, holds: bool) -> Result<(usize, usize), Error> {
    let mut walk = Walk { left: NODES, bytes: 0, holds };
    walk.visit(value, 0)?;
    Ok((NODES - walk.left, walk.bytes))
}

struct Walk {
    /// Values that may still be seen.
    left: usize,
    bytes: usize,
    /// Whether namespaces and loops are refused.
    holds: bool,
}

impl Walk {
    fn visit(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let too_large = || Error::from(ErrorKind::WriteFailure);
        self.left = self.left.checked_sub(1).ok_or_else(too_large)?;
        if let Some(text) = value.as_str() {
            self.bytes = self.bytes.saturating_add(text.len());
            return Ok(());
        }
        let Some(object) = value.as_object() else { return Ok(()) };
        if self.holds && is_engines(object) {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "a namespace cannot keep a namespace or a loop, or what holds one",
            ));
        }
        if let Some(generator) = value.downcast_object_ref::<Generator>() {
            return deeper(depth)
                .and_then(|depth| generator.items().iter().try_for_each(|item| self.visit(item, depth)));
        }
        if let Some(integer) = big(value) {
            self.bytes = self.bytes.saturating_add(integer.len());
            return Ok(());
        }
        if value.kind() == ValueKind::Plain || value.downcast_object_ref::<Range>().is_some() {
            return Ok(());
        }
        let depth = deeper(depth)?;
        let keyed = value.kind() == ValueKind::Map;
        for (key, item) in object.try_iter_pairs().into_iter().flatten() {
            match key.as_str() {
                Some(text) => self.bytes = self.bytes.saturating_add(text.len()),
                None if keyed => self.visit(&key, depth)?,
                None => {}
            }
            self.visit(&item, depth)?;
        }
        Ok(())
    }
}

fn deeper(depth: usize) -> Result<usize, Error> {
    if depth == NESTING { Err(ErrorKind::WriteFailure.into()) } else { Ok(depth + 1) }
}

/// What the engine's namespaces and loops begin with when they are written.
const ENGINES: [&str; 2] = ["Namespace", "Loop"];

/// Whether an object is a namespace or a loop of the engine, which has no other way to tell.
fn is_engines(object: &DynObject) -> bool {
    let mut start = Start(String::new());
    let _ = write!(start, "{object:?}");
    ENGINES.iter().any(|name| start.0.starts_with(name))
}

/// The first bytes of what is written, as long as they may be one of [`ENGINES`]: what is a container of long strings is not
/// written any further.
struct Start(String);

impl Write for Start {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0.extend(text.chars().take(16));
        if ENGINES.iter().any(|name| name.starts_with(&self.0)) { Ok(()) } else { Err(std::fmt::Error) }
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
