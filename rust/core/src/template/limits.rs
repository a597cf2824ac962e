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
/// Values printed, and items of ranges taken, before the clock is looked at.
const FREE_PRINTS: u32 = 10_000;
const FREE_ITEMS: u32 = 16;
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
    prints: u32,
    items: u32,
    deadline: Option<Instant>,
    grace: bool,
}

thread_local! {
    static BUDGET: Cell<Budget> =
        const { Cell::new(Budget { bytes: 0, largest: 0, prints: 0, items: 0, deadline: None, grace: false }) };
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
    let deadline = Instant::now().checked_add(time);
    BUDGET.set(Budget { bytes, largest: bytes, prints: FREE_PRINTS, items: FREE_ITEMS, deadline, grace: true });
    Limited { bytes: Vec::with_capacity(4096 + size.bytes + size.bytes / 4), limit: bytes }
}

/// Takes a printed value of `bytes` off the budget.
pub(super) fn spend(bytes: usize) -> Result<(), Error> {
    let mut left = BUDGET.get();
    left.bytes = left.bytes.checked_sub(bytes).ok_or_else(|| Error::from(ErrorKind::WriteFailure))?;
    left.prints = left.prints.saturating_sub(1);
    let late = left.prints == 0 && left.is_late();
    BUDGET.set(left);
    if late { Err(Error::from(ErrorKind::OutOfFuel)) } else { Ok(()) }
}

/// Whether a value of so many bytes may be made.
pub(super) fn allow(bytes: usize) -> Result<(), Error> {
    if bytes > BUDGET.get().largest { Err(Error::from(ErrorKind::WriteFailure)) } else { Ok(()) }
}

/// The value, if it is no string that grew past all bounds.
pub(super) fn bounded(value: Value) -> Result<Value, Error> {
    allow(value.as_str().map_or(0, str::len))?;
    Ok(value)
}

/// Takes an item of a range off the budget.
fn take_item() -> Result<(), Error> {
    let mut left = BUDGET.get();
    left.items = left.items.saturating_sub(1);
    let late = left.items == 0 && left.is_late();
    BUDGET.set(left);
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
        Some(take_item().map_or_else(Value::from, |()| item))
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
