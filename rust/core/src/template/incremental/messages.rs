//! The message list of a run. It tracks which messages the run reads, and records the state of each loop over them.
//!
//! A run that resumes an earlier one skips the items whose text already exists. For this, the state at the beginning
//! of each item is stored: the length of the text, the attributes of namespaces, the messages read so far, and the
//! cost so far. This module decides from that state whether a run may resume; `analyze` determines what the source
//! allows.

use super::analyze::Resumable;
use crate::template::{limits, python_ops};
use minijinja::value::{Enumerator, Object, ObjectRepr, Value, ValueKind};
use minijinja::{Error, State};
use std::cell::{Cell, RefCell};
use std::io;
use std::sync::Arc;

/// The messages that a run has read so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::template) struct ReadState {
    /// True if it used the number of messages or iterated over all of them.
    pub all: bool,
    /// One past the last message that it read.
    pub read: usize,
}

/// A position in a loop: the beginning of an item, or the end after the last one.
#[derive(Debug, Clone, Default)]
pub(in crate::template) struct Place {
    /// Bytes of text before the position.
    pub text: usize,
    /// Values of the assigned attributes.
    kept: Vec<Value>,
    /// Messages that the loop had read.
    seen: ReadState,
    fuel: u64,
    spent: usize,
}

/// The record of a loop over messages.
#[derive(Debug, Clone)]
pub(in crate::template) struct LoopRecord {
    /// The loop's number in the template.
    pub number: usize,
    /// The index of its first message.
    first: usize,
    /// Bytes of text before the loop.
    pub before: usize,
    /// Messages that had been read before the loop.
    seen: ReadState,
    /// Variables and namespaces at the start of the loop.
    entry: Vec<Value>,
    /// One position for each item, and one for the end.
    pub places: Vec<Place>,
}

/// The position at which a run resumes.
#[derive(Debug, Clone)]
struct ResumePoint {
    ran: LoopRecord,
    /// Number of items to skip.
    skip: usize,
    /// Number of leading messages that are equal to those of the earlier run.
    common: usize,
}

/// The run of this thread.
#[derive(Debug, Default)]
struct Run {
    plan: Option<Arc<Resumable>>,
    goal: Option<ResumePoint>,
    /// True once the goal's loop was reached and its items are skipped.
    skips: bool,
    /// Number of items of the loop so far.
    items: usize,
    inside: bool,
    ran: Vec<LoopRecord>,
    /// Amounts added to the counters of this run after it skipped items: bytes of text, fuel, bytes spent.
    shift: usize,
    fuel: u64,
    spent: usize,
}

thread_local! {
    static RUN: RefCell<Run> = RefCell::default();
    static SEEN: Cell<ReadState> = const { Cell::new(ReadState { all: false, read: 0 }) };
    static WRITTEN: Cell<usize> = const { Cell::new(0) };
}

/// The records of a run.
#[derive(Debug)]
pub(in crate::template) struct Outcome {
    /// The loops that ran, in order.
    pub ran: Vec<LoopRecord>,
    /// The number of the loop in which items were skipped, and how many were.
    pub skipped: Option<(usize, usize)>,
    /// Additional cost that the run would have had without skipping.
    pub fuel: u64,
    pub spent: usize,
}

/// The text of a run. The run can query its length.
#[derive(Debug, Default)]
pub(in crate::template) struct Text(Vec<u8>);

impl Text {
    pub fn written(&self) -> Option<&str> {
        simdutf8::basic::from_utf8(&self.0).ok()
    }
}

impl io::Write for Text {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.extend_from_slice(bytes);
        WRITTEN.set(self.0.len());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Starts a recorded run. It resumes `earlier` if possible; the first `common` of `count` messages are equal in both.
pub(in crate::template) fn begin(plan: &Arc<Resumable>, earlier: Option<&[LoopRecord]>, common: usize, count: usize) {
    let goal = earlier.and_then(|ran| goal(plan, ran, common, count));
    RUN.set(Run { plan: Some(Arc::clone(plan)), goal, ..Run::default() });
    SEEN.set(ReadState::default());
    WRITTEN.set(0);
}

/// Discards a recorded run that did not end, for example because of a panic.
pub(in crate::template) fn forget() {
    RUN.take();
}

pub(in crate::template) fn end() -> Outcome {
    let Run { ran, goal, skips, fuel, spent, .. } = RUN.take();
    #[cfg(test)]
    SKIPPED.set(SKIPPED.get() + goal.as_ref().filter(|_| skips).map_or(0, |goal| goal.skip));
    Outcome { ran, skipped: goal.filter(|_| skips).map(|goal| (goal.ran.number, goal.skip)), fuel, spent }
}

/// Chooses the loop with the most text, and the number of its items that may be skipped.
fn goal(plan: &Resumable, ran: &[LoopRecord], common: usize, count: usize) -> Option<ResumePoint> {
    let length = |ran: &LoopRecord| ran.places.last().map_or(0, |place| place.text) - ran.before;
    let ran = ran.iter().max_by_key(|ran| length(ran))?;
    let ahead = usize::from(plan.looks_ahead[ran.number]);
    // At least one item must run, so that this run produces the state after the loop.
    let limit = common.saturating_sub(ran.first + ahead).min(count.saturating_sub(ran.first + 1));
    // A position's reads include those of all earlier positions.
    let is_valid = |place: &Place| !place.seen.all && place.seen.read <= common;
    let valid_count = ran.places.iter().take_while(|place| is_valid(place)).count();
    let skip = limit.min(valid_count.saturating_sub(1));
    (skip > 0).then(|| ResumePoint { ran: ran.clone(), skip, common })
}

/// The messages of a call as a template sees them: a list that tracks which messages are read.
#[derive(Debug)]
pub(in crate::template) struct Messages {
    all: Arc<[Value]>,
    first: usize,
}

impl Messages {
    pub fn value(all: Arc<[Value]>) -> Value {
        Value::from_object(Self { all, first: 0 })
    }

    /// Returns `value[start:]` if `value` is the messages. This reads no message yet.
    pub fn from(value: &Value, start: usize) -> Option<Value> {
        let messages = value.downcast_object_ref::<Self>()?;
        Some(Value::from_object(Self { all: Arc::clone(&messages.all), first: messages.first.saturating_add(start) }))
    }

    fn items(&self) -> &[Value] {
        self.all.get(self.first..).unwrap_or_default()
    }
}

fn note_all() {
    SEEN.set(ReadState { all: true, ..SEEN.get() });
}

impl Object for Messages {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let at = self.first.saturating_add(key.as_usize()?);
        let seen = SEEN.get();
        SEEN.set(ReadState { read: seen.read.max(at.saturating_add(1)), ..seen });
        self.all.get(at).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        note_all();
        Enumerator::Values(self.items().to_vec())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        note_all();
        Some(self.items().len())
    }

    fn is_true(self: &Arc<Self>) -> bool {
        // Checking for a message after `first` counts as reading it.
        let seen = SEEN.get();
        SEEN.set(ReadState { read: seen.read.max(self.first + 1), ..seen });
        !self.items().is_empty()
    }
}

/// The messages that a loop iterates over. Only the loop uses their length.
#[derive(Debug)]
struct Items(Messages);

impl Object for Items {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.0.items().to_vec())
    }
}

/// Implements `items|__turns(number)`: returns the items of a loop.
pub(in crate::template) fn turns(state: &mut State, items: Value, number: usize) -> Result<Value, Error> {
    let Some(messages) = items.downcast_object_ref::<Messages>() else { return python_ops::each(items) };
    limits::work(4 + messages.items().len())?;
    RUN.with_borrow_mut(|run| {
        let Some(plan) = run.plan.clone() else { return };
        let seen = SEEN.replace(ReadState::default());
        let entry = entry(&plan, state);
        run.skips |= run.goal.as_ref().is_some_and(|goal| {
            let independent = !goal.ran.seen.all && goal.ran.seen.read <= goal.common;
            let same_entry = || !plan.holds_earlier && alike_all(&entry, &goal.ran.entry);
            goal.ran.number == number && goal.ran.first == messages.first && (independent || same_entry())
        });
        run.items = 0;
        run.inside = true;
        let before = WRITTEN.get() + run.shift;
        run.ran.push(LoopRecord { number, first: messages.first, before, seen, entry, places: Vec::new() });
    });
    Ok(Value::from_object(Items(Messages { all: Arc::clone(&messages.all), first: messages.first })))
}

/// Returns true if attributes are restored here: the current item is the first that is not skipped.
pub(in crate::template) fn restores() -> bool {
    RUN.with_borrow(|run| run.skips_now().is_some_and(|skipped| skipped + 1 == run.items))
}

/// Returns true if attribute `at` had a value at the position to resume from.
pub(in crate::template) fn has(at: usize) -> bool {
    !kept(at).is_undefined()
}

/// Returns the value of attribute `at` at the position to resume from.
pub(in crate::template) fn kept(at: usize) -> Value {
    RUN.with_borrow(|run| run.goal.as_ref().and_then(|goal| goal.place()?.kept.get(at).cloned()).unwrap_or_default())
}

impl ResumePoint {
    fn place(&self) -> Option<&Place> {
        self.ran.places.get(self.skip)
    }
}

impl Run {
    /// Returns the number of items to skip in the current loop.
    fn skips_now(&self) -> Option<usize> {
        let goal = self.goal.as_ref().filter(|_| self.skips && self.inside)?;
        (self.ran.last()?.number == goal.ran.number).then_some(goal.skip)
    }

    /// Records the current position of the loop.
    fn note(&mut self, state: &State) {
        let (Some(plan), Some(ran)) = (&self.plan, self.ran.last_mut()) else { return };
        let (fuel, spent) = counts(state);
        let kept = plan.attributes.iter().map(|(name, attribute)| {
            state.lookup(name).and_then(|namespace| namespace.get_attr(attribute).ok()).unwrap_or_default()
        });
        let (text, fuel, spent) = (WRITTEN.get() + self.shift, fuel + self.fuel, spent + self.spent);
        ran.places.push(Place { text, kept: kept.collect(), seen: SEEN.get(), fuel, spent });
    }

    /// Copies the positions that the earlier run recorded up to the current item.
    fn take_over(&mut self, state: &State) {
        let (Some(goal), Some(ran)) = (&self.goal, self.ran.last_mut()) else { return };
        let Some(place) = goal.place() else { return };
        let (fuel, spent) = counts(state);
        ran.places = goal.ran.places[..=goal.skip].to_vec();
        self.shift = place.text - goal.ran.before;
        self.fuel = place.fuel.saturating_sub(fuel);
        self.spent = place.spent.saturating_sub(spent);
    }
}

/// Returns the fuel and bytes that the run has spent.
fn counts(state: &State) -> (u64, usize) {
    (state.fuel_levels().map_or(0, |(consumed, _)| consumed), limits::spent_bytes())
}

/// Returns true if the current item must run. It is skipped if its text already exists.
pub(in crate::template) fn begins(state: &State) -> bool {
    RUN.with_borrow_mut(|run| {
        if run.plan.is_none() || !run.inside {
            return true;
        }
        let skipped = run.skips_now();
        if skipped == Some(run.items) {
            run.take_over(state);
        } else if skipped.is_none_or(|skipped| run.items > skipped) {
            run.note(state);
        }
        run.items += 1;
        skipped.is_none_or(|skipped| run.items > skipped)
    })
}

pub(in crate::template) fn ended(state: &State) {
    RUN.with_borrow_mut(|run| {
        if run.plan.is_some() && run.inside {
            run.note(state);
            run.inside = false;
            // Code after the loop may depend on all messages.
            note_all();
        }
    });
}

/// Returns the values of variables and namespaces at the start of a loop.
fn entry(plan: &Resumable, state: &State) -> Vec<Value> {
    let mut values: Vec<Value> = plan.variables.iter().map(|name| state.lookup(name).unwrap_or_default()).collect();
    for name in &plan.namespaces {
        let Some(namespace) = state.lookup(name) else { continue };
        for key in namespace.try_iter().into_iter().flatten() {
            values.push(namespace.get_item(&key).unwrap_or_default());
            values.push(key);
        }
    }
    values
}

fn alike_all(first: &[Value], second: &[Value]) -> bool {
    let mut budget = 256;
    first.len() == second.len() && first.iter().zip(second).all(|(first, second)| alike(first, second, &mut budget))
}

/// Returns true if a template cannot distinguish the values. Returns false if the comparison would be too long.
fn alike(one: &Value, other: &Value, budget: &mut usize) -> bool {
    let Some(remaining) = budget.checked_sub(1) else { return false };
    *budget = remaining;
    if one.kind() != other.kind() || one.is_safe() != other.is_safe() || one.is_tuple() != other.is_tuple() {
        return false;
    }
    let messages = |value: &Value| value.downcast_object_ref::<Messages>().map(|messages| messages.first);
    match one.kind() {
        ValueKind::Undefined | ValueKind::None => true,
        ValueKind::String | ValueKind::Bool => one == other,
        ValueKind::Number => one.is_integer() == other.is_integer() && one == other,
        ValueKind::Seq if messages(one).is_some() || messages(other).is_some() => messages(one) == messages(other),
        ValueKind::Seq if one.len() == other.len() => {
            let pairs = one.try_iter().into_iter().flatten().zip(other.try_iter().into_iter().flatten());
            pairs.into_iter().all(|(one, other)| alike(&one, &other, budget))
        }
        _ => false,
    }
}

#[cfg(test)]
thread_local! {
    static SKIPPED: Cell<usize> = const { Cell::new(0) };
}

/// Returns the number of items that runs of this thread skipped since the last call.
#[cfg(test)]
pub(in crate::template) fn skipped() -> usize {
    SKIPPED.take()
}
