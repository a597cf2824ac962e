//! Cancellation: work calls [`check`] at short intervals, and the caller's function decides now and then whether to
//! stop.
//!
//! Callers of the core use [`run_cancellable`]; everything that may take long calls [`check`]. Cancelled work unwinds up to
//! [`run_cancellable`], so that its memory is freed.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Minimum time between two polls of the caller.
pub(crate) const PAUSE: Duration = Duration::from_millis(50);

/// Panic payload of cancelled work. Code that catches panics must let it pass.
pub(crate) struct Cancelled;

/// A piece of work that its caller may cancel.
struct Watch {
    asked: AtomicBool,
    /// Returns whether to stop. It is called only on the thread that called [`run_cancellable`].
    poll: fn() -> bool,
}

/// The work that a thread is part of.
#[derive(Default)]
struct Place {
    watch: Option<Arc<Watch>>,
    /// Whether this thread called [`run_cancellable`] itself.
    is_caller: bool,
    polled: Option<Instant>,
}

thread_local! {
    static PLACE: RefCell<Place> = const { RefCell::new(Place { watch: None, is_caller: false, polled: None }) };
}

/// Guard that restores the thread's previous place.
struct Back(Place);

impl Drop for Back {
    fn drop(&mut self) {
        PLACE.replace(std::mem::take(&mut self.0));
    }
}

/// Runs `work` and returns its result, or `None` if `poll` cancelled it.
///
/// `poll` is called on this thread, about every 50 milliseconds, as long as the work on any thread calls [`check`].
/// After `poll` returns true, the work ends at its next [`check`].
///
/// ```
/// use tracegrad_core::cancel;
///
/// let endless = || loop {
///     cancel::check();
/// };
/// assert!(cancel::run_cancellable(|| true, endless).is_none());
/// assert_eq!(cancel::run_cancellable(|| true, || 2 + 2), Some(4));
/// ```
pub fn run_cancellable<T>(poll: fn() -> bool, work: impl FnOnce() -> T) -> Option<T> {
    let watch = Some(Arc::new(Watch { asked: AtomicBool::new(false), poll }));
    let _back = Back(PLACE.replace(Place { watch, is_caller: true, polled: None }));
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => Some(result),
        Err(panic) if panic.is::<Cancelled>() => None,
        Err(panic) => resume_unwind(panic),
    }
}

/// Unwinds if the work of this thread was cancelled.
///
/// It costs some nanoseconds if the work cannot be cancelled, and some tens of nanoseconds otherwise. Call it between pieces of work
/// of 10 microseconds and more.
pub fn check() {
    look(|polled| polled.is_some_and(|polled| polled.elapsed() >= PAUSE));
}

/// Calls [`check`] in one of 16384 rounds, for loops whose rounds take nanoseconds.
#[inline]
pub(crate) fn check_every_16384(round: usize) {
    if round & 0x3fff == 0x3fff {
        check();
    }
}

/// Calls [`check`] before work on a mebibyte and more, for bytes that are copied or searched in one piece.
#[inline]
pub(crate) fn check_before_bytes(bytes: usize) {
    if bytes >= 1 << 20 {
        check();
    }
}

/// Sorts like `sort_unstable_by_key`, with checks for cancellation. For slices that may be very long.
pub(crate) fn sort_by_key<T, K: Ord>(items: &mut [T], mut key: impl FnMut(&T) -> K) {
    let mut round: usize = 0;
    items.sort_unstable_by(|one, other| {
        check_every_16384(round);
        round += 1;
        key(one).cmp(&key(other))
    });
}

/// As [`check`], but polls the caller immediately. For code that has just waited.
pub(crate) fn check_now() {
    look(|_| true);
}

fn look(is_due: impl Fn(Option<Instant>) -> bool) {
    let (must_stop, poll) = PLACE.with_borrow_mut(|place| {
        let Some(watch) = &place.watch else { return (false, None) };
        if watch.asked.load(Ordering::Relaxed) {
            return (true, None);
        }
        if !place.is_caller {
            return (false, None);
        }
        let due = is_due(place.polled);
        if due || place.polled.is_none() {
            place.polled = Some(Instant::now());
        }
        (false, due.then(|| Arc::clone(watch)))
    });
    if must_stop || poll.is_some_and(|watch| watch.stops()) {
        resume_unwind(Box::new(Cancelled));
    }
}

impl Watch {
    /// Polls the caller, and stores the answer for the other threads.
    fn stops(&self) -> bool {
        let stops = (self.poll)();
        self.asked.fetch_or(stops, Ordering::Relaxed);
        stops
    }
}

/// Handle to a thread's work, for its tasks on other threads.
#[derive(Clone)]
pub(crate) struct WorkHandle(Option<Arc<Watch>>);

/// Returns the handle of this thread's work.
pub(crate) fn here() -> WorkHandle {
    WorkHandle(PLACE.with_borrow(|place| place.watch.clone()))
}

impl WorkHandle {
    /// Returns whether somebody may cancel the work.
    pub fn is_watched(&self) -> bool {
        self.0.is_some()
    }

    /// Runs `task` as a part of this work.
    pub fn within<T>(&self, task: impl FnOnce() -> T) -> T {
        let is_here = PLACE.with_borrow(|place| match (&place.watch, &self.0) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (None, None) => true,
            _ => false,
        });
        if is_here {
            return task();
        }
        let _back = Back(PLACE.replace(Place { watch: self.0.clone(), is_caller: false, polled: None }));
        task()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Kind, catch_panic};

    #[test]
    fn work_is_stopped_through_whatever_catches_panics_and_gives_its_memory_back() {
        let held = Arc::new(());
        let inside = Arc::clone(&held);
        let stopped = run_cancellable(
            || true,
            move || {
                catch_panic(Kind::Format, "work", || {
                    while Arc::strong_count(&inside) > 1 {
                        check();
                    }
                    Ok(())
                })
            },
        );
        assert!(stopped.is_none());
        assert_eq!(Arc::strong_count(&held), 1);
        check();
    }

    #[test]
    fn work_inside_of_other_work_leaves_it_its_own_caller() {
        let outer = run_cancellable(
            || false,
            || {
                assert!(run_cancellable(|| true, check_now).is_none());
                check_now();
                7
            },
        );
        assert_eq!(outer, Some(7));
    }

    #[test]
    fn a_panic_is_not_taken_for_a_stop() {
        let caught = catch_unwind(|| run_cancellable(|| false, || panic!("no")));
        assert!(caught.is_err());
    }
}
