//! The thread pool of the core. All parallel work uses this module, so that it can be cancelled and survives a
//! fork.
//!
//! A forked child has none of its parent's threads, and would wait forever for a pool that the parent started. Each
//! process therefore starts a separate pool on first use.

use crate::cancel;
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::mem::forget;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, TryLockError};
use std::thread::yield_now;

/// A pool, and the process to which its threads belong.
#[derive(Clone)]
struct Started {
    process: u32,
    pool: Arc<ThreadPool>,
}

static STARTED: RwLock<Option<Started>> = RwLock::new(None);

/// Number of attempts to take a lock that should be free within nanoseconds. After a fork its holder may not exist.
const TRIES: usize = 256;

/// Returns the pool of this process, or `None` if no thread can be started.
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
        // A pool of the parent process is leaked: dropping it would wake threads that do not exist in this process.
        forget(started.replace(Started { process, pool: Arc::clone(&pool) }));
    }
    Some(pool)
}

/// Returns the number of threads that [`map`] and [`join`] use.
pub fn count() -> usize {
    if rayon::current_thread_index().is_some() {
        return rayon::current_num_threads();
    }
    pool().map_or(1, |pool| pool.current_num_threads())
}

/// Applies `work` to each item on all threads and returns the results in order. `init` creates the state that a thread
/// reuses.
///
/// [`cancel::check`] runs before each item. With one thread the work runs on the caller's thread, so that memory is
/// freed by the thread that allocated it.
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
        let mut state = init();
        let apply = |item| {
            cancel::check();
            work(&mut state, item)
        };
        return items.into_iter().map(apply).collect();
    }
    let here = cancel::here();
    let apply = |state: &mut S, item| {
        here.within(|| {
            cancel::check();
            work(state, item)
        })
    };
    in_pool(|| items.into_par_iter().map_init(&init, apply).collect())
}

/// Runs both functions, in parallel if there are several threads.
pub fn join<A: Send, B: Send>(first: impl FnOnce() -> A + Send, second: impl FnOnce() -> B + Send) -> (A, B) {
    if count() == 1 {
        return (first(), second());
    }
    let here = cancel::here();
    in_pool(|| rayon::join(|| here.within(first), || here.within(second)))
}

/// A function that runs once.
pub type Task<'a> = Box<dyn FnOnce() + Send + 'a>;

/// Runs all tasks, in parallel if there are several threads.
pub fn run_tasks(tasks: Vec<Task<'_>>) {
    map(tasks, || (), |(), task| task());
}

/// Runs `work` once on each thread of the pool, if there are several.
pub fn broadcast(work: impl Fn() + Sync) {
    if count() > 1
        && let Some(pool) = pool()
    {
        pool.broadcast(|_| work());
    }
}

/// Runs `work` in the pool. This thread waits and polls its caller for cancellation.
///
/// Use it for code that calls rayon itself: outside of this pool that code would use rayon's global pool, which a
/// parent process may have started.
pub fn in_pool<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    if rayon::current_thread_index().is_some() {
        return work();
    }
    let Some(pool) = pool() else { return work() };
    let (here, done, mut result) = (cancel::here(), Done::default(), None);
    pool.in_place_scope(|scope| {
        scope.spawn(|_| {
            let _guard = DoneGuard(&done);
            result = Some(here.within(work));
        });
        // The scope waits for the task even if this thread unwinds.
        while !done.soon() {
            cancel::check_now();
        }
    });
    // If the task panicked, the scope has unwound already.
    result.unwrap_or_else(|| unreachable!("a task that ended has a result"))
}

/// Runs `work` on a separate thread while this one polls for cancellation. Use it for long work that cannot check by
/// itself.
///
/// If the work is cancelled, its thread is abandoned. It ends at its next [`cancel::check`] or when it is done, and
/// frees its memory then. Calls of rayon inside `work` run on that one thread. If the work cannot be cancelled, it runs on this
/// thread.
pub fn run_abandonable<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let here = cancel::here();
    let pool = here.is_watched().then(|| ThreadPoolBuilder::new().num_threads(1).build().ok()).flatten();
    let Some(pool) = pool else { return work() };
    let (sender, receiver) = sync_channel(1);
    pool.spawn(move || {
        let result = catch_unwind(AssertUnwindSafe(|| here.within(work)));
        // No caller receives the result of abandoned work.
        let _ = sender.send(result);
    });
    loop {
        match receiver.recv_timeout(cancel::PAUSE) {
            Ok(result) => return result.unwrap_or_else(|panic| resume_unwind(panic)),
            Err(RecvTimeoutError::Timeout) => cancel::check_now(),
            Err(RecvTimeoutError::Disconnected) => unreachable!("a task that ended has a result"),
        }
    }
}

/// Flag for the end of a task.
#[derive(Default)]
struct Done {
    done: Mutex<bool>,
    changed: Condvar,
}

impl Done {
    /// Waits for the end of the task, for at most `cancel::PAUSE`. Returns whether the task has ended.
    fn soon(&self) -> bool {
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(done, cancel::PAUSE, |done| !*done);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Guard that sets the flag when it is dropped.
struct DoneGuard<'a>(&'a Done);

impl Drop for DoneGuard<'_> {
    fn drop(&mut self) {
        *self.0.done.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.changed.notify_all();
    }
}

/// Acquires a lock that is usually free within microseconds, such as the lock of a cache. Returns `None` if it is not.
///
/// After a fork the thread that held the lock may not exist. A cache can be skipped in that case.
pub fn try_lock_briefly<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
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
        let stopped = cancel::run_cancellable(|| true, || map((0..100_000).collect::<Vec<u32>>(), || (), work));
        assert!(stopped.is_none());
        assert!(DONE.load(Ordering::Relaxed) < 50_000);
    }

    #[test]
    fn work_apart_is_left_behind_where_it_must_stop_and_lets_go_of_what_it_holds() {
        let (go, held) = (Arc::new(AtomicUsize::new(0)), Arc::new(()));
        let (until, inside) = (Arc::clone(&go), Arc::clone(&held));
        let endless = move || {
            // It never checks for cancellation.
            while until.load(Ordering::Relaxed) == 0 {
                yield_now();
            }
            inside
        };
        assert!(cancel::run_cancellable(|| true, || run_abandonable(endless)).is_none());
        assert_eq!(Arc::strong_count(&held), 2);
        go.store(1, Ordering::Relaxed);
        while Arc::strong_count(&held) > 1 {
            yield_now();
        }
    }

    #[test]
    fn work_apart_gives_what_it_makes_panics_where_it_panics_and_stops_where_it_looks() {
        assert_eq!(
            cancel::run_cancellable(|| false, || run_abandonable(|| (1, rayon::current_num_threads()))),
            Some((1, 1))
        );
        let panic = catch_unwind(|| cancel::run_cancellable(|| false, || run_abandonable(|| panic!("seven"))));
        assert_eq!(*panic.unwrap_err().downcast::<&str>().unwrap(), "seven");
        let (sender, receiver) = sync_channel::<()>(0);
        let looks = move || {
            let _sender = sender;
            loop {
                cancel::check();
                yield_now();
            }
        };
        assert!(cancel::run_cancellable(|| true, || run_abandonable(looks)).is_none());
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
        let held = try_lock_briefly(&mutex).map(|guard| *guard);
        assert_eq!(held, Some(5));
        std::thread::scope(|scope| {
            let _never = mutex.lock().unwrap();
            scope.spawn(|| assert!(try_lock_briefly(&mutex).is_none())).join().unwrap();
        });
    }
}
