//! Work that can be stopped: a check between two pieces of it, and a question that its caller answers now and then.
//!
//! [`watched`] is for whoever calls the core, [`check`] stands in everything that may take long. What stops ends by
//! unwinding, so that memory is given back, up to [`watched`] and no further.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long the caller is not asked again.
pub(crate) const PAUSE: Duration = Duration::from_millis(50);

/// What unwinds where work stops. Whoever catches panics lets it pass.
pub(crate) struct Stopped;

/// One piece of work that its caller may stop.
struct Watch {
    asked: AtomicBool,
    /// Whether to stop. Called on the thread that called [`watched`], and on no other.
    poll: fn() -> bool,
}

/// The work that a thread is part of.
#[derive(Default)]
struct Place {
    watch: Option<Arc<Watch>>,
    /// The thread called [`watched`] itself.
    is_caller: bool,
    polled: Option<Instant>,
}

thread_local! {
    static PLACE: RefCell<Place> = const { RefCell::new(Place { watch: None, is_caller: false, polled: None }) };
}

/// Gives a thread back the place that it had.
struct Back(Place);

impl Drop for Back {
    fn drop(&mut self) {
        PLACE.replace(std::mem::take(&mut self.0));
    }
}

/// What `work` gives; `None` where `poll` said that it must stop.
///
/// `poll` is called on this thread, every 50 milliseconds while the work is busy with what may take long, on whichever
/// threads that is done. After it said so the work ends at its next [`check`].
///
/// ```
/// use tracegrad_core::cancel;
///
/// let endless = || loop {
///     cancel::check();
/// };
/// assert!(cancel::watched(|| true, endless).is_none());
/// assert_eq!(cancel::watched(|| true, || 2 + 2), Some(4));
/// ```
pub fn watched<T>(poll: fn() -> bool, work: impl FnOnce() -> T) -> Option<T> {
    let watch = Some(Arc::new(Watch { asked: AtomicBool::new(false), poll }));
    let _back = Back(PLACE.replace(Place { watch, is_caller: true, polled: None }));
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => Some(done),
        Err(panic) if panic.is::<Stopped>() => None,
        Err(panic) => resume_unwind(panic),
    }
}

/// Ends the work that this thread is part of, if it must stop. Some nanoseconds where nobody watches, some tens where
/// somebody does: for pieces of work of 10 microseconds and more.
pub fn check() {
    look(|polled| polled.is_some_and(|polled| polled.elapsed() >= PAUSE));
}

/// [`check`] for one round of 16384: for loops whose rounds take nanoseconds.
#[inline]
pub(crate) fn now_and_then(round: usize) {
    if round & 0x3fff == 0x3fff {
        check();
    }
}

/// [`check`] before work on so many bytes, where they are a mebibyte and more: for what is copied or searched whole.
#[inline]
pub(crate) fn before(bytes: usize) {
    if bytes >= 1 << 20 {
        check();
    }
}

/// `sort_unstable_by_key` of a slice that may be very long.
pub(crate) fn sort_by_key<T, K: Ord>(items: &mut [T], mut key: impl FnMut(&T) -> K) {
    let mut round: usize = 0;
    items.sort_unstable_by(|one, other| {
        now_and_then(round);
        round += 1;
        key(one).cmp(&key(other))
    });
}

/// As [`check`], and asks the caller now: for whoever has waited.
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
        resume_unwind(Box::new(Stopped));
    }
}

impl Watch {
    /// Asks, and remembers for the other threads.
    fn stops(&self) -> bool {
        let stops = (self.poll)();
        self.asked.fetch_or(stops, Ordering::Relaxed);
        stops
    }
}

/// The work that a thread is part of, for its tasks on other threads.
#[derive(Clone)]
pub(crate) struct Here(Option<Arc<Watch>>);

/// Of this thread.
pub(crate) fn here() -> Here {
    Here(PLACE.with_borrow(|place| place.watch.clone()))
}

impl Here {
    /// Whether anybody may stop it.
    pub fn is_watched(&self) -> bool {
        self.0.is_some()
    }

    /// Does `task` as a part of this work.
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
    use crate::{Kind, caught};

    #[test]
    fn work_is_stopped_through_whatever_catches_panics_and_gives_its_memory_back() {
        let held = Arc::new(());
        let inside = Arc::clone(&held);
        let stopped = watched(
            || true,
            move || {
                caught(Kind::Format, "work", || {
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
        let outer = watched(
            || false,
            || {
                assert!(watched(|| true, check_now).is_none());
                check_now();
                7
            },
        );
        assert_eq!(outer, Some(7));
    }

    #[test]
    fn a_panic_is_not_taken_for_a_stop() {
        let caught = catch_unwind(|| watched(|| false, || panic!("no")));
        assert!(caught.is_err());
    }
}
