//! The message list of a run: what the run reads of it is watched, and where a loop over it stands is noted.
//!
//! A run that goes on from an earlier one skips the items whose text stands there. What it must know is kept for the
//! beginning of each item: how much text there was, the attributes of namespaces, how far messages were read, what had
//! been spent. Whether a run may go on is decided here, from that; `analyze` says what the source allows.

use super::analyze::Resumable;
use crate::template::{limits, python_ops};
use minijinja::value::{Enumerator, Object, ObjectRepr, Value, ValueKind};
use minijinja::{Error, State};
use std::cell::{Cell, RefCell};
use std::io;
use std::sync::Arc;

/// How far a run has looked at the messages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::template) struct Seen {
    /// Whether it asked how many there are, or went through them.
    pub all: bool,
    /// One past the last that it read.
    pub read: usize,
}

/// A place in a loop: the beginning of an item, or the end behind the last one.
#[derive(Debug, Clone, Default)]
pub(in crate::template) struct Place {
    /// Bytes of text before it.
    pub text: usize,
    /// Values of the attributes that are assigned.
    kept: Vec<Value>,
    /// What the loop had looked at.
    seen: Seen,
    fuel: u64,
    spent: usize,
}

/// A loop over messages, as it ran.
#[derive(Debug, Clone)]
pub(in crate::template) struct Ran {
    /// The loop's number in the template.
    pub number: usize,
    /// The message that it began with.
    first: usize,
    /// Bytes of text before it.
    pub before: usize,
    /// What had been looked at before it.
    seen: Seen,
    /// Variables and namespaces as it began.
    entry: Vec<Value>,
    /// One for each item, and one for the end.
    pub places: Vec<Place>,
}

/// Where a run goes on.
#[derive(Debug, Clone)]
struct Goal {
    ran: Ran,
    /// Items that are skipped.
    skip: usize,
    /// Messages that are those of the earlier run.
    common: usize,
}

/// The run of this thread.
#[derive(Debug, Default)]
struct Run {
    plan: Option<Arc<Resumable>>,
    goal: Option<Goal>,
    /// Whether the goal's loop was met, and items of it skipped.
    skips: bool,
    /// Items of the loop so far.
    items: usize,
    inside: bool,
    ran: Vec<Ran>,
    /// What is added to what this run counts, once it has skipped: bytes of text, fuel, bytes spent.
    shift: usize,
    fuel: u64,
    spent: usize,
}

thread_local! {
    static RUN: RefCell<Run> = RefCell::default();
    static SEEN: Cell<Seen> = const { Cell::new(Seen { all: false, read: 0 }) };
    static WRITTEN: Cell<usize> = const { Cell::new(0) };
}

/// What a run has written and noted.
#[derive(Debug)]
pub(in crate::template) struct Outcome {
    /// The loops that it ran, in order.
    pub ran: Vec<Ran>,
    /// The number of the loop in which it skipped items, and how many.
    pub skipped: Option<(usize, usize)>,
    /// What it would have spent without skipping, beside what it did.
    pub fuel: u64,
    pub spent: usize,
}

/// The text of a run, whose length the run can ask for.
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

/// Begins a run that is noted, and goes on where `earlier` allows it: the first `common` of `count` messages are its own.
pub(in crate::template) fn begin(plan: &Arc<Resumable>, earlier: Option<&[Ran]>, common: usize, count: usize) {
    let goal = earlier.and_then(|ran| goal(plan, ran, common, count));
    RUN.set(Run { plan: Some(Arc::clone(plan)), goal, ..Run::default() });
    SEEN.set(Seen::default());
    WRITTEN.set(0);
}

/// Forgets a run that was noted and did not end: a panic may have left it.
pub(in crate::template) fn forget() {
    RUN.take();
}

pub(in crate::template) fn end() -> Outcome {
    let Run { ran, goal, skips, fuel, spent, .. } = RUN.take();
    #[cfg(test)]
    SKIPPED.set(SKIPPED.get() + goal.as_ref().filter(|_| skips).map_or(0, |goal| goal.skip));
    Outcome { ran, skipped: goal.filter(|_| skips).map(|goal| (goal.ran.number, goal.skip)), fuel, spent }
}

/// The loop with the most text, and how many of its items may be skipped.
fn goal(plan: &Resumable, ran: &[Ran], common: usize, count: usize) -> Option<Goal> {
    let length = |ran: &Ran| ran.places.last().map_or(0, |place| place.text) - ran.before;
    let ran = ran.iter().max_by_key(|ran| length(ran))?;
    let ahead = usize::from(plan.looks_ahead[ran.number]);
    // An item is left to run, so that what the loop leaves behind is what this run made.
    let most = common.saturating_sub(ran.first + ahead).min(count.saturating_sub(ran.first + 1));
    // What a place had seen holds for all behind it.
    let fits = |place: &Place| !place.seen.all && place.seen.read <= common;
    let fitting = ran.places.iter().take_while(|place| fits(place)).count();
    let skip = most.min(fitting.saturating_sub(1));
    (skip > 0).then(|| Goal { ran: ran.clone(), skip, common })
}

/// The messages of a call as a template has them: a list that notes what is read of it.
#[derive(Debug)]
pub(in crate::template) struct Messages {
    all: Arc<[Value]>,
    first: usize,
}

impl Messages {
    pub fn value(all: Arc<[Value]>) -> Value {
        Value::from_object(Self { all, first: 0 })
    }

    /// `value[start:]`, where `value` is the messages: nothing is looked at yet.
    pub fn from(value: &Value, start: usize) -> Option<Value> {
        let messages = value.downcast_object_ref::<Self>()?;
        Some(Value::from_object(Self { all: Arc::clone(&messages.all), first: messages.first.saturating_add(start) }))
    }

    fn items(&self) -> &[Value] {
        self.all.get(self.first..).unwrap_or_default()
    }
}

fn note_all() {
    SEEN.set(Seen { all: true, ..SEEN.get() });
}

impl Object for Messages {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let at = self.first.saturating_add(key.as_usize()?);
        let seen = SEEN.get();
        SEEN.set(Seen { read: seen.read.max(at.saturating_add(1)), ..seen });
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
        // Whether there is a message behind the first ones that are there: as good as having read it.
        let seen = SEEN.get();
        SEEN.set(Seen { read: seen.read.max(self.first + 1), ..seen });
        !self.items().is_empty()
    }
}

/// The messages under a loop, whose length only the loop asks for.
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

/// `items|__turns(number)`: what a loop runs over.
pub(in crate::template) fn turns(state: &mut State, items: Value, number: usize) -> Result<Value, Error> {
    let Some(messages) = items.downcast_object_ref::<Messages>() else { return python_ops::each(items) };
    limits::work(4 + messages.items().len())?;
    RUN.with_borrow_mut(|run| {
        let Some(plan) = run.plan.clone() else { return };
        let seen = SEEN.replace(Seen::default());
        let entry = entry(&plan, state);
        run.skips |= run.goal.as_ref().is_some_and(|goal| {
            let trusted = !goal.ran.seen.all && goal.ran.seen.read <= goal.common;
            let same = || !plan.holds_earlier && alike_all(&entry, &goal.ran.entry);
            goal.ran.number == number && goal.ran.first == messages.first && (trusted || same())
        });
        run.items = 0;
        run.inside = true;
        let before = WRITTEN.get() + run.shift;
        run.ran.push(Ran { number, first: messages.first, before, seen, entry, places: Vec::new() });
    });
    Ok(Value::from_object(Items(Messages { all: Arc::clone(&messages.all), first: messages.first })))
}

/// Whether attributes are put back here: the item that has begun is the first that is not skipped.
pub(in crate::template) fn restores() -> bool {
    RUN.with_borrow(|run| run.skips_now().is_some_and(|skipped| skipped + 1 == run.items))
}

/// Whether attribute `at` had a value there.
pub(in crate::template) fn has(at: usize) -> bool {
    !kept(at).is_undefined()
}

/// The value that attribute `at` had there.
pub(in crate::template) fn kept(at: usize) -> Value {
    RUN.with_borrow(|run| run.goal.as_ref().and_then(|goal| goal.place()?.kept.get(at).cloned()).unwrap_or_default())
}

impl Goal {
    fn place(&self) -> Option<&Place> {
        self.ran.places.get(self.skip)
    }
}

impl Run {
    /// How many items are skipped in the loop that runs.
    fn skips_now(&self) -> Option<usize> {
        let goal = self.goal.as_ref().filter(|_| self.skips && self.inside)?;
        (self.ran.last()?.number == goal.ran.number).then_some(goal.skip)
    }

    /// Notes where the loop stands.
    fn note(&mut self, state: &State) {
        let (Some(plan), Some(ran)) = (&self.plan, self.ran.last_mut()) else { return };
        let (fuel, spent) = counts(state);
        let kept = plan.attributes.iter().map(|(name, attribute)| {
            state.lookup(name).and_then(|namespace| namespace.get_attr(attribute).ok()).unwrap_or_default()
        });
        let (text, fuel, spent) = (WRITTEN.get() + self.shift, fuel + self.fuel, spent + self.spent);
        ran.places.push(Place { text, kept: kept.collect(), seen: SEEN.get(), fuel, spent });
    }

    /// Takes over what the earlier run noted up to the item that begins.
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

/// Fuel and bytes that the run has spent.
fn counts(state: &State) -> (u64, usize) {
    (state.fuel_levels().map_or(0, |(consumed, _)| consumed), limits::spent_bytes())
}

/// Whether the item that begins is run; it is skipped where its text stands already.
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
            // What comes behind it may know all messages.
            note_all();
        }
    });
}

/// Values of variables and namespaces as a loop begins.
fn entry(plan: &Resumable, state: &State) -> Vec<Value> {
    let mut all: Vec<Value> = plan.variables.iter().map(|name| state.lookup(name).unwrap_or_default()).collect();
    for name in &plan.namespaces {
        let Some(namespace) = state.lookup(name) else { continue };
        for key in namespace.try_iter().into_iter().flatten() {
            all.push(namespace.get_item(&key).unwrap_or_default());
            all.push(key);
        }
    }
    all
}

fn alike_all(one: &[Value], other: &[Value]) -> bool {
    let mut left = 256;
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| alike(one, other, &mut left))
}

/// Whether a template cannot tell the values apart; false where that takes more than a look.
fn alike(one: &Value, other: &Value, left: &mut usize) -> bool {
    let Some(less) = left.checked_sub(1) else { return false };
    *left = less;
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
            pairs.into_iter().all(|(one, other)| alike(&one, &other, left))
        }
        _ => false,
    }
}

#[cfg(test)]
thread_local! {
    static SKIPPED: Cell<usize> = const { Cell::new(0) };
}

/// Items that runs of this thread have skipped since this was last asked.
#[cfg(test)]
pub(in crate::template) fn skipped() -> usize {
    SKIPPED.take()
}
