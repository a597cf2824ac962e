//! The budget of a render: steps, bytes and processor time, charged for each operation.
//!
//! Steps and bytes are counted, so that a template fails either on every machine or on none. Time bounds what steps
//! and bytes do not. It is only checked in renders that have done more work than any conversation needs. It is
//! processor time, so that a busy machine does not shorten it. One wrapper around every filter, test and function
//! charges for the values it reads before it runs, and passes its arguments to `watch`.

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

/// Steps that a render may take: half a second of looping, and a hundred times the need of real conversations.
const FUEL: u64 = 5_000_000;
/// Steps per message, if this is more in total.
const FUEL_PER_MESSAGE: u64 = 10_000;
/// Bytes that all created and printed values may have in total, in addition to sixteen times the input.
const ALL_BYTES: usize = 48 << 20;
/// Maximum of the additional bytes for templates that build a conversation piece by piece: input bytes times messages.
const PIECEMEAL_BYTES: usize = 1 << 30;
/// Bytes that one value may have, in addition to eight times the input.
const LARGEST: usize = 4 << 20;
/// Bytes that an item of a list is charged.
pub(super) const ITEM_BYTES: usize = 24;
/// Maximum number of values inside a container that a template writes, and maximum nesting depth.
pub(super) const NODES: usize = 100_000;
pub(super) const NESTING: usize = 128;
/// Depth of nested macro calls times four: far above real templates, far below the stack of a small thread.
pub(super) const RECURSION: usize = 160;
/// Length of text outside tags that is not counted when written. Longer text becomes a printed string.
pub(super) const FREE_TEXT: usize = 32;
/// Work, in units of about ten nanoseconds, before the clock is first checked, and between checks. Work that would
/// exceed the remaining time is rejected before it is done.
const FREE_WORK: usize = 4_000_000;
const WORK_BETWEEN_LOOKS: usize = 20_000;
const UNIT: Duration = Duration::from_nanos(10);
/// Work for an item of a loop.
const ITEM_WORK: usize = 20;
const TIME: Duration = Duration::from_millis(600);
const TIME_PER_MESSAGE: Duration = Duration::from_millis(2);
const TIME_PER_MEBIBYTE: Duration = Duration::from_millis(40);
/// Number of runs per call that get their own time: without marks, and with marks in three ways.
const RUNS: u8 = 4;

/// The size of the input, for limits that grow with it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    pub messages: usize,
    pub bytes: usize,
}

/// The remaining budget of this thread's render. The cells are adjacent, so that one operation loads all of them at
/// once.
struct Budget {
    /// Work until the clock is checked.
    work: Cell<usize>,
    bytes: Cell<usize>,
    /// Bytes at the start of the run.
    all_bytes: Cell<usize>,
    /// Bytes that one value may have.
    largest: Cell<usize>,
    time: Cell<Time>,
}

/// The time of a call.
#[derive(Debug, Clone, Copy)]
struct Time {
    /// In the time of [`spent`].
    deadline: Duration,
    /// Number of further runs that get their own time.
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

/// Returns the processor time of this thread.
#[cfg(unix)]
fn spent() -> Duration {
    use rustix::time::{ClockId, clock_gettime};

    let spent = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(spent.tv_sec).unwrap_or(0), u32::try_from(spent.tv_nsec).unwrap_or(0))
}

/// Returns the time since the first call, on systems without a thread clock.
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
        let cost = UNIT.saturating_mul(u32::try_from(units).unwrap_or(u32::MAX));
        let time = self.time.get();
        if spent().saturating_add(cost) <= time.deadline {
            return Ok(());
        }
        // If one run exceeds the time, the call has none left, even if some would remain.
        self.time.set(Time { deadline: Duration::ZERO, ..time });
        Err(Error::from(ErrorKind::OutOfFuel))
    }

    #[inline]
    fn spend(&self, bytes: usize) -> Result<(), Error> {
        cancel::check_before_bytes(bytes);
        let left = self.bytes.get().checked_sub(bytes).ok_or_else(|| Error::from(ErrorKind::WriteFailure))?;
        self.bytes.set(left);
        self.work(4 + bytes / 64)
    }
}

/// Returns the steps for a template whose longest uncounted text has `longest_text` bytes.
pub(super) fn fuel(longest_text: usize) -> u64 {
    FUEL * FREE_TEXT as u64 / longest_text.max(FREE_TEXT) as u64
}

/// Returns the environment with more fuel if a long conversation needs it.
pub(super) fn widened(env: &Environment<'static>, size: Size) -> Option<Environment<'static>> {
    let min_fuel = size.messages as u64 * FUEL_PER_MESSAGE;
    env.fuel().is_some_and(|fuel| fuel < min_fuel).then(|| {
        let mut wider = env.clone();
        wider.set_fuel(Some(min_fuel));
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
        let times = |unit: Duration, count: usize| unit.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX));
        let extra = times(TIME_PER_MESSAGE, size.messages).saturating_add(times(TIME_PER_MEBIBYTE, size.bytes >> 20));
        let deadline = deadline.saturating_add(extra);
        left.time.set(Time { deadline, runs });
    });
}

/// Charges work before it is done.
pub(super) fn work(units: usize) -> Result<(), Error> {
    BUDGET.with(|left| left.work(units))
}

/// Returns the work that `call` is charged.
#[cfg(test)]
pub(super) fn paid_by(call: impl FnOnce()) -> usize {
    BUDGET.with(|left| left.work.set(usize::MAX));
    call();
    usize::MAX - BUDGET.with(|left| left.work.get())
}

/// Returns an error if no time is left.
pub(super) fn in_time() -> Result<(), Error> {
    BUDGET.with(|left| left.look(0))
}

/// Charges a printed value of `bytes`.
pub(super) fn spend(bytes: usize) -> Result<(), Error> {
    BUDGET.with(|left| left.spend(bytes))
}

pub(super) fn spent_bytes() -> usize {
    BUDGET.with(|left| left.all_bytes.get().saturating_sub(left.bytes.get()))
}

pub(super) fn left_bytes() -> usize {
    BUDGET.with(|left| left.bytes.get())
}

/// Returns the number of bytes that one value may have.
pub(super) fn largest() -> usize {
    BUDGET.with(|left| left.largest.get())
}

/// Charges a value of this many bytes before it is created.
pub(super) fn make(bytes: usize) -> Result<(), Error> {
    BUDGET.with(|left| {
        if bytes > left.largest.get() {
            return Err(Error::from(ErrorKind::WriteFailure));
        }
        left.spend(bytes)
    })
}

/// Same as [`make`] for a list of this many items.
pub(super) fn make_items(count: usize) -> Result<(), Error> {
    make(count.saturating_mul(ITEM_BYTES))
}

/// Charges a value and returns it.
pub(super) fn made(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => make(value.as_str().map_or(0, str::len))?,
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => make_items(value.len().unwrap_or(0))?,
        _ => {}
    }
    Ok(value)
}

/// Implements `range`. Its items are charged as they are consumed.
pub(super) fn range(lower: isize, upper: Option<isize>, step: Option<isize>) -> Result<Value, Error> {
    functions::range(lower, upper, step).map(|numbers| Value::from_object(Range { numbers }))
}

/// The numbers of a `range`. They contain no other values.
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

/// Bytes that an operation reads per unit of work, at its slowest.
const BYTES_PER_UNIT: usize = 4;
/// Bytes that are compared per unit of work.
const COMPARED_PER_UNIT: usize = 64;
/// Units of work for an item of a container.
const UNITS_PER_ITEM: usize = 4;

/// How deeply an operation reads its arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reads {
    /// The strings among the arguments.
    Strings,
    /// All arguments as texts. The engine converts those that are not strings.
    Texts,
    /// The items of the first argument, with the other arguments once for each item and once as texts.
    Items,
    /// Everything inside the arguments, except the contents of strings.
    Shape,
    /// Everything inside the arguments.
    All,
    /// Everything inside the first argument, as often as sorting reads it.
    Sorted,
}

/// All arguments of a call as the engine passes them, including keywords.
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

/// The callables of a template. Every filter, test and function of an environment is added here and charged.
pub(super) struct ChargedEnvironment<'a>(pub &'a mut Environment<'static>);

impl ChargedEnvironment<'_> {
    pub fn filter<F, Rv, Args>(&mut self, name: &'static str, reads: Reads, filter: F)
    where
        F: Function<Rv, Args>,
        Rv: FunctionResult,
        Args: for<'a> FunctionArgs<'a>,
    {
        self.0.add_filter(name, paid(name, reads, Value::from_function(filter)));
    }

    /// Adds a filter that receives its arguments unconverted.
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

    /// Adds a test that checks the kind of its value and reads nothing inside it.
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

/// Charges the part of the arguments that an operation reads according to `reads`.
pub(super) fn charge(arguments: &[Value], reads: Reads) -> Result<(), Error> {
    let Some((first, others)) = arguments.split_first() else { return work(1) };
    let strings: usize = others.iter().map(strings).sum();
    let units = match reads {
        Reads::Strings => 1,
        Reads::Texts => 1 + texts(arguments)? / BYTES_PER_UNIT,
        Reads::Items => {
            let per_item = UNITS_PER_ITEM + strings / BYTES_PER_UNIT;
            items(first).saturating_mul(per_item).saturating_add(texts(others)? / BYTES_PER_UNIT)
        }
        Reads::Shape => arguments.iter().map(|argument| seen(argument, usize::MAX)).sum::<Result<usize, Error>>()?,
        Reads::All => {
            let units = arguments.iter().map(|argument| seen(argument, BYTES_PER_UNIT));
            return work(units.sum::<Result<usize, Error>>()?);
        }
        Reads::Sorted => {
            let times = usize::BITS - items(first).leading_zeros();
            let per_item = UNITS_PER_ITEM + strings / BYTES_PER_UNIT;
            seen(first, COMPARED_PER_UNIT)?
                .saturating_mul(times as usize)
                .saturating_add(items(first).saturating_mul(per_item))
                .saturating_add(texts(others)? / BYTES_PER_UNIT)
        }
    };
    work(units.saturating_add((first.as_str().map_or(0, str::len) + strings) / BYTES_PER_UNIT))
}

/// Charges for the strings of a method's value and arguments.
pub(super) fn charge_method(value: &Value, arguments: &[Value]) -> Result<(), Error> {
    let bytes: usize = strings(value) + arguments.iter().map(strings).sum::<usize>();
    work(2 + bytes / BYTES_PER_UNIT)
}

/// Returns the bytes of the texts that the engine may make of arguments that are not strings, or an error if there are
/// too many. A name of an attribute or a test may be any value.
fn texts(arguments: &[Value]) -> Result<usize, Error> {
    let texts = arguments.iter().filter(|argument| argument.as_object().is_some()).map(text_bytes);
    let bytes = texts.sum::<Result<usize, Error>>()?;
    if bytes > largest() { Err(ErrorKind::WriteFailure.into()) } else { Ok(bytes) }
}

/// Returns the bytes of a string, or of the strings among keyword arguments.
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

/// Returns the number of items that an operation may read from `value`.
pub(super) fn items(value: &Value) -> usize {
    match value.downcast_object_ref::<Generator>() {
        Some(generator) => generator.items().len(),
        None if value.kind() == ValueKind::String => value.as_str().map_or(0, str::len),
        None => value.len().unwrap_or(0),
    }
}

/// Charges a walk over everything inside `value`. Returns an error if the value is too large or too deep for a walk.
pub(super) fn walk(value: &Value) -> Result<(), Error> {
    work(seen(value, usize::MAX)?)
}

/// Same as [`walk`] for a key, which is hashed with everything inside it.
pub(super) fn hashed(key: &Value) -> Result<(), Error> {
    work(3 + seen(key, BYTES_PER_UNIT)?)
}

/// Same as [`walk`] for a value that is compared during the walk.
pub(super) fn compared(value: &Value) -> Result<(), Error> {
    work(seen(value, COMPARED_PER_UNIT)?)
}

/// Returns the units of a walk over everything inside `value`, with `bytes_per_unit` bytes of its strings per unit.
fn seen(value: &Value, bytes_per_unit: usize) -> Result<usize, Error> {
    if let Some(text) = value.as_str() {
        return Ok(1 + text.len() / bytes_per_unit);
    }
    let (nodes, bytes) = walked(value, false)?;
    Ok(nodes + bytes / bytes_per_unit)
}

/// Returns the bytes of the strings inside `value`, if a walk over it is allowed.
pub(super) fn text_bytes(value: &Value) -> Result<usize, Error> {
    let (nodes, bytes) = walked(value, false)?;
    work(nodes)?;
    Ok(bytes.saturating_add(nodes.saturating_mul(8)))
}

/// Returns an error if a value may not be stored in a namespace. A value that contains a namespace or a loop could
/// come to contain itself, which leaks memory, or grow deeper without being walked.
pub(super) fn held(value: &Value) -> Result<(), Error> {
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
        return Ok(());
    }
    let (nodes, _) = walked(value, true)?;
    work(nodes)
}

/// Returns the number of values inside `value` (including itself) and the bytes of their strings, if a walk over it is
/// allowed.
fn walked(value: &Value, holds: bool) -> Result<(usize, usize), Error> {
    let mut walk = Walk { left: NODES, bytes: 0, holds };
    walk.visit(value, 0)?;
    Ok((NODES - walk.left, walk.bytes))
}

struct Walk {
    /// Number of values that may still be visited.
    left: usize,
    bytes: usize,
    /// True if namespaces and loops are rejected.
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

/// Prefixes of the engine's namespaces and loops when they are printed.
const ENGINES: [&str; 2] = ["Namespace", "Loop"];

/// Returns true if an object is a namespace or a loop of the engine. The engine offers no other way to recognize them.
fn is_engines(object: &DynObject) -> bool {
    let mut start = Start(String::new());
    let _ = write!(start, "{object:?}");
    ENGINES.iter().any(|name| start.0.starts_with(name))
}

/// Receives the first printed bytes as long as they may be one of [`ENGINES`]. Printing stops early for containers of
/// long strings.
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
    fn time_of_other_threads_does_not_count() {
        open();
        start(Size { messages: 1, bytes: 1 });
        std::thread::sleep(2 * TIME);
        assert!(in_time().is_ok());
        let began = spent();
        while spent() < began + TIME + 2 * TIME_PER_MESSAGE {}
        assert!(in_time().is_err());
    }

    /// Returns the peak resident memory of this process in KiB, if the system reports it.
    fn peak() -> Option<u64> {
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?.trim().trim_end_matches("kB").trim().parse().ok()
    }

    #[test]
    fn unbounded_growth_is_an_error_before_memory_runs_out() {
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
