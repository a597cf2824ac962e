//! Panics as errors: a fault in a dependency ends one call, and not the process.
//!
//! Input that is known to panic is refused where it is read, and not here. It stands around every call into an engine that
//! runs a stranger's program, and in the binding crate around all work.

use crate::cancel::Stopped;
use crate::error::{Error, Kind, Result};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, resume_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Calls of [`caught`] that this thread is inside of.
    static INSIDE: Cell<usize> = const { Cell::new(0) };
    /// What the last of this thread's panics said, and where.
    static SAID: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// What `work` gives; a panic inside it as an error of `kind`, with `what` was done and where the panic was raised.
///
/// Nothing is printed for a panic that is caught; any other one goes to the hook that was there before. A hook sees only
/// the thread that panics, so work that spreads over threads calls this in each of its tasks. Locks that `work` holds are
/// poisoned, as by any panic.
///
/// ```
/// use tracegrad_core::{Kind, Result, caught};
///
/// let error = caught(Kind::Template, "the chat template", || -> Result<()> { panic!("no such block") }).unwrap_err();
/// assert!(error.to_string().starts_with("the chat template met a fault in the code that runs it: no such block"));
/// ```
///
/// # Errors
/// What `work` returns, or `kind` where it panics.
pub fn caught<T>(kind: Kind, what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| set_hook(beside(take_hook())));
    let inside = INSIDE.get();
    INSIDE.set(inside + 1);
    let result = catch_unwind(AssertUnwindSafe(work));
    INSIDE.set(inside);
    result.unwrap_or_else(|panic| {
        if panic.is::<Stopped>() {
            resume_unwind(panic);
        }
        let text = message(&*panic);
        let said = SAID.take().filter(|said| said.starts_with(&text)).unwrap_or(text);
        Err(Error::new(kind, format!("{what} met a fault in the code that runs it: {said}"))
            .why("A fault there says nothing about your data, and this call has no result")
            .cure("Report it with what was given, so that it is refused with a reason"))
    })
}

type Hook = Box<dyn Fn(&PanicHookInfo<'_>) + Send + Sync>;

/// A hook that keeps what [`caught`] will say and leaves all else to `others`.
fn beside(others: Hook) -> Hook {
    Box::new(move |info| {
        if !is_kept(info) {
            others(info);
        }
    })
}

/// Keeps what a panic says for [`caught`], if this thread is inside a call of it.
fn is_kept(info: &PanicHookInfo<'_>) -> bool {
    let inside = INSIDE.try_with(Cell::get).is_ok_and(|inside| inside > 0);
    if inside {
        let place = info.location().map_or_else(String::new, |at| format!(" ({}:{})", short(at.file()), at.line()));
        SAID.set(Some(message(info.payload()) + &place));
    }
    inside
}

/// What a panic says, within bounds.
fn message(payload: &dyn Any) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").chars().take(200).collect()
}

/// A source file by its crate and its path in there: where the crate lay when it was built is nobody's concern.
fn short(file: &str) -> &str {
    let above = file.rfind("/src/").and_then(|at| file[..at].rfind('/'));
    above.map_or(file, |at| &file[at + 1..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_caught_panic_is_an_error_and_others_go_to_the_hook_that_was_there() {
        static SEEN: AtomicUsize = AtomicUsize::new(0);
        caught(Kind::Format, "a first call", || Ok(())).unwrap();
        let before = take_hook();
        set_hook(beside(Box::new(|info| {
            SEEN.fetch_add(usize::from(message(info.payload()).starts_with("seen")), Ordering::Relaxed);
        })));
        let error = caught(Kind::Template, "the template", || {
            let inner = caught(Kind::Format, "a part", || -> Result<()> { panic!("seen {}", "x".repeat(999)) });
            assert_eq!(inner.unwrap_err().kind, Kind::Format);
            let _ = catch_unwind(|| panic!("seen, but by another"));
            Ok([0; 2][std::hint::black_box(2)])
        });
        let _ = catch_unwind(|| panic!("seen"));
        set_hook(before);
        let error = error.unwrap_err();
        assert_eq!(error.kind, Kind::Template);
        assert!(error.what.contains("the code that runs it: index out of bounds"), "{error}");
        assert!(error.what.contains("core/src/panic.rs:"), "{error}");
        assert_eq!(SEEN.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_place_is_a_crate_and_a_path_in_it() {
        assert_eq!(short("/home/x/.cargo/registry/src/index-1/some-3.0/src/vm/mod.rs"), "some-3.0/src/vm/mod.rs");
        assert_eq!(short("rust/core/src/read/mod.rs"), "core/src/read/mod.rs");
        assert_eq!(short("main.rs"), "main.rs");
    }
}
