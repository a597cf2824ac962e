//! What a render may spend: steps, bytes and, for what neither bounds, time.
//!
//! Steps and bytes are counted, so that a template fails on every machine or on none. Time is looked at only by loops
//! that have run longer than any conversation makes them. Called by `environment`.

use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind, functions};
use std::cell::Cell;
use std::io::{self, Write};
use std::time::{Duration, Instant};

/// Steps a render may take: half a second of looping, and a hundred times what conversations need.
const FUEL: u64 = 5_000_000;
/// Steps a render may take for each message, where these are more.
const FUEL_PER_MESSAGE: u64 = 10_000;
/// Longest literal text whose repetition costs no more than a step; templates with a longer one get less fuel.
const CHEAP_TEXT: usize = 256;
/// Steps that every template gets.
const LEAST_FUEL: u64 = 500_000;
/// Bytes a render may write beside sixteen times its input.
const OUTPUT_BYTES: usize = 64 << 20;
/// Depth of nested macro calls times four: far above real templates, far below a small thread's stack.
pub(super) const RECURSION: usize = 160;
/// Values printed and ranges counted before the clock is looked at.
const FREE_TICKS: u32 = 10_000;
const TIME: Duration = Duration::from_millis(500);
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
    ticks: u32,
    deadline: Option<Instant>,
}

thread_local! {
    static BUDGET: Cell<Budget> = const { Cell::new(Budget { bytes: 0, ticks: 0, deadline: None }) };
}

/// Steps for a template whose longest literal text has `longest_text` bytes.
pub(super) fn fuel(longest_text: usize) -> u64 {
    (FUEL * CHEAP_TEXT as u64 / longest_text.max(CHEAP_TEXT) as u64).max(LEAST_FUEL)
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

/// Starts the budget of a render and gives the buffer it writes to.
pub(super) fn start(size: Size) -> Limited {
    let bytes = OUTPUT_BYTES.saturating_add(size.bytes.saturating_mul(16));
    let time = TIME + TIME_PER_MESSAGE.saturating_mul(u32::try_from(size.messages).unwrap_or(u32::MAX));
    BUDGET.set(Budget { bytes, ticks: 0, deadline: Instant::now().checked_add(time) });
    Limited { bytes: Vec::with_capacity(4096 + size.bytes + size.bytes / 4), limit: bytes }
}

/// Takes `bytes` off the budget and counts a tick.
pub(super) fn spend(bytes: usize) -> Result<(), Error> {
    let mut left = BUDGET.get();
    left.bytes = left.bytes.checked_sub(bytes).ok_or_else(|| Error::from(ErrorKind::WriteFailure))?;
    left.ticks = left.ticks.saturating_add(1);
    BUDGET.set(left);
    let late = left.ticks > FREE_TICKS
        && left.ticks.is_multiple_of(256)
        && left.deadline.is_some_and(|deadline| Instant::now() > deadline);
    if late { Err(Error::from(ErrorKind::OutOfFuel)) } else { Ok(()) }
}

/// `range` whose items are counted as they are taken: what loops for long loops over one.
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
        Some(spend(0).map_or_else(Value::from, |()| item))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.length, Some(self.length))
    }
}

/// A buffer that refuses to grow past its limit.
pub(super) struct Limited {
    pub bytes: Vec<u8>,
    limit: usize,
}

impl Write for Limited {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + data.len() > self.limit {
            return Err(io::Error::other("output limit"));
        }
        self.bytes.extend_from_slice(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
