//! The threads that the core works on: the one place where work is spread, so that it can be stopped and outlives a fork.
//!
//! A child of a fork has none of its parent's threads, and waits for ever for a pool that was started before. Each process
//! therefore has a pool of its own, started when it is first needed.

use crate::cancel;
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::mem::forget;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, TryLockError};
use std::thread::yield_now;

/// A pool, and the process that its threads are of.
#[derive(Clone)]
struct Started {
    process: u32,
    pool: Arc<ThreadPool>,
}

static STARTED: RwLock<Option<Started>> = RwLock::new(None);

/// How often a lock is asked for that should be free in nanoseconds. After a fork its holder may not exist.
const TRIES: usize = 256;

/// The pool of this process; `None` where no thread can be started.
fn pool() -> Option<Arc<ThreadPool>> {
    let process = std::process::id();
    for _ in 0..TRIES {
        let started = match STARTED.try_read() {
            Ok(started) => started,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                yield_now();
                continue;
            }
        };
        match &*started {
            Some(started) if started.process == process => return Some(Arc::clone(&started.pool)),
            _ => break,
        }
    }
    let pool = Arc::new(ThreadPoolBuilder::new().build().ok()?);
    if let Ok(mut started) = STARTED.try_write() {
        // A parent's pool is left as it is: dropping it would wake threads that do not exist here.
        forget(started.replace(Started { process, pool: Arc::clone(&pool) }));
    }
    Some(pool)
}

/// How many threads [`map`] and [`join`] use.
pub fn count() -> usize {
    if rayon::current_thread_index().is_some() {
        return rayon::current_num_threads();
    }
    pool().map_or(1, |pool| pool.current_num_threads())
}

/// What `work` makes of each item, in their order, on all threads; `init` makes what a thread keeps from item to item.
///
/// Each item is a [`cancel::check`]. One thread is the caller's: memory is then given back where it was taken.
pub fn map<I, S, T>(
    items: I,
    init: impl Fn() -> S + Sync + Send,
    work: impl Fn(&mut S, <I as IntoIterator>::Item) -> T + Sync + Send,
) -> Vec<T>
where
    I: IntoIterator + IntoParallelIterator<Item = <I as IntoIterator>::Item, Iter: IndexedParallelIterator> + Send,
    T: Send,
{
    if count() == 1 {
        let mut kept = init();
        let each = |item| {
            cancel::check();
            work(&mut kept, item)
        };
        return items.into_iter().map(each).collect();
    }
    let here = cancel::here();
    let each = |kept: &mut S, item| {
        here.within(|| {
            cancel::check();
            work(kept, item)
        })
    };
    in_pool(|| items.into_par_iter().map_init(&init, each).collect())
}

/// Both, at once where there are threads for it.
pub fn join<A: Send, B: Send>(one: impl FnOnce() -> A + Send, other: impl FnOnce() -> B + Send) -> (A, B) {
    if count() == 1 {
        return (one(), other());
    }
    let here = cancel::here();
    in_pool(|| rayon::join(|| here.within(one), || here.within(other)))
}

/// Something to do, once.
pub type Task<'a> = Box<dyn FnOnce() + Send + 'a>;

/// All tasks, at once where there are threads for it.
pub fn all(tasks: Vec<Task<'_>>) {
    map(tasks, || (), |(), task| task());
}

/// Does `work` once on each thread of the pool, where there are several.
pub fn elsewhere(work: impl Fn() + Sync) {
    if count() > 1
        && let Some(pool) = pool()
    {
        pool.broadcast(|_| work());
    }
}

/// Does `work` in the pool, while this thread waits and asks its caller whether to stop.
///
/// For work that spreads itself by rayon's own means: outside of a pool that would start the one of the parent process.
pub fn in_pool<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    if rayon::current_thread_index().is_some() {
        return work();
    }
    let Some(pool) = pool() else { return work() };
    let (here, done, mut found) = (cancel::here(), Done::default(), None);
    pool.in_place_scope(|scope| {
        scope.spawn(|_| {
            let _said = SaysDone(&done);
            found = Some(here.within(work));
        });
        // The scope waits for the task, whatever is unwound here.
        while !done.soon() {
            cancel::check_now();
        }
    });
    // A task that panicked has unwound the scope.
    found.unwrap_or_else(|| unreachable!("a task that ended has a result"))
}

/// Does `work` on a thread of its own, while this one looks whether to stop: for code that takes long and cannot look.
///
/// Where the work must stop, its thread is left behind: it ends at its next [`cancel::check`] or when it is done, and gives
/// its memory back there. What it does by rayon's means it does alone. Where nobody watches it is done here.
pub fn apart<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let here = cancel::here();
    let pool = here.is_watched().then(|| ThreadPoolBuilder::new().num_threads(1).build().ok()).flatten();
    let Some(pool) = pool else { return work() };
    let (gives, given) = sync_channel(1);
    pool.spawn(move || {
        let found = catch_unwind(AssertUnwindSafe(|| here.within(work)));
        // Nobody takes it where the work was left.
        let _ = gives.send(found);
    });
    loop {
        match given.recv_timeout(cancel::PAUSE) {
            Ok(found) => return found.unwrap_or_else(|panic| resume_unwind(panic)),
            Err(RecvTimeoutError::Timeout) => cancel::check_now(),
            Err(RecvTimeoutError::Disconnected) => unreachable!("a task that ended has a result"),
        }
    }
}

/// Whether a task has ended.
#[derive(Default)]
struct Done {
    done: Mutex<bool>,
    changed: Condvar,
}

impl Done {
    /// Waits for it, but not for long.
    fn soon(&self) -> bool {
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(done, cancel::PAUSE, |done| !*done);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Says so when it is dropped.
struct SaysDone<'a>(&'a Done);

impl Drop for SaysDone<'_> {
    fn drop(&mut self) {
        *self.0.done.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.changed.notify_all();
    }
}

/// A lock that is held for some microseconds, as those of memories are; `None` where it does not come.
///
/// After a fork the thread that held it may not exist: what only remembers goes on without.
pub fn soon<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    for _ in 0..TRIES {
        match mutex.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => yield_now(),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn results_come_in_the_order_of_the_items() {
        let doubled = map((0..1000).collect::<Vec<usize>>(), || (), |(), n| 2 * n);
        assert_eq!(doubled, (0..1000).map(|n| 2 * n).collect::<Vec<_>>());
        assert_eq!(join(|| 1, || "a"), (1, "a"));
        assert_eq!(map(&[1, 2][..], || (), |(), n| map(vec![*n], || (), |(), n| n + 1)), [[2], [3]]);
    }

    #[test]
    fn a_stop_ends_the_tasks_of_all_threads() {
        static DONE: AtomicUsize = AtomicUsize::new(0);
        let work = |(): &mut (), _| {
            DONE.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(std::time::Duration::from_millis(1));
        };
        let stopped = cancel::watched(|| true, || map((0..100_000).collect::<Vec<u32>>(), || (), work));
        assert!(stopped.is_none());
        assert!(DONE.load(Ordering::Relaxed) < 50_000);
    }

    #[test]
    fn work_apart_is_left_behind_where_it_must_stop_and_lets_go_of_what_it_holds() {
        let (go, held) = (Arc::new(AtomicUsize::new(0)), Arc::new(()));
        let (until, inside) = (Arc::clone(&go), Arc::clone(&held));
        let endless = move || {
            // It never looks.
            while until.load(Ordering::Relaxed) == 0 {
                yield_now();
            }
            inside
        };
        assert!(cancel::watched(|| true, || apart(endless)).is_none());
        assert_eq!(Arc::strong_count(&held), 2);
        go.store(1, Ordering::Relaxed);
        while Arc::strong_count(&held) > 1 {
            yield_now();
        }
    }

    #[test]
    fn work_apart_gives_what_it_makes_panics_where_it_panics_and_stops_where_it_looks() {
        assert_eq!(cancel::watched(|| false, || apart(|| (1, rayon::current_num_threads()))), Some((1, 1)));
        let panic = catch_unwind(|| cancel::watched(|| false, || apart(|| panic!("seven"))));
        assert_eq!(*panic.unwrap_err().downcast::<&str>().unwrap(), "seven");
        let (sender, receiver) = sync_channel::<()>(0);
        let looks = move || {
            let _sender = sender;
            loop {
                cancel::check();
                yield_now();
            }
        };
        assert!(cancel::watched(|| true, || apart(looks)).is_none());
        assert!(receiver.recv().is_err(), "its thread ended");
    }

    #[test]
    fn a_panic_in_a_task_reaches_the_caller() {
        let failing = |(): &mut (), n: usize| assert!(n != 70, "seventy");
        let panic = catch_unwind(AssertUnwindSafe(|| map((0..100).collect::<Vec<usize>>(), || (), failing)));
        assert!(panic.is_err());
    }

    #[test]
    fn a_lock_that_never_comes_is_done_without() {
        let mutex = Mutex::new(5);
        let held = soon(&mutex).map(|guard| *guard);
        assert_eq!(held, Some(5));
        std::thread::scope(|scope| {
            let _never = mutex.lock().unwrap();
            scope.spawn(|| assert!(soon(&mutex).is_none())).join().unwrap();
        });
    }
}
