//! Converts panics to errors: a fault in a dependency ends one call and not the process.
//!
//! Input that would cause a panic is rejected where it is read. `catch_panic` wraps every call of an engine that runs
//! a third-party program, and all work in the binding crate.

use crate::cancel::Cancelled;
use crate::error::{Error, Kind, Result};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, resume_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Number of nested calls of [`catch_panic`] on this thread.
    static INSIDE: Cell<usize> = const { Cell::new(0) };
    /// Message and place of this thread's last panic.
    static LAST_PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs `work` and returns its result. A panic becomes an error of `kind` with the action `what`, the panic's message
/// and its place.
///
/// Nothing is printed for a panic that is caught. Any other panic reaches the previous hook. A hook runs only on the
/// thread that panics, so parallel work must call `catch_panic` in each task. A caught panic poisons the locks that `work`
/// held, like any panic.
///
/// ```
/// use tracegrad_core::{Kind, Result, catch_panic};
///
/// let error = catch_panic(Kind::Template, "the chat template", || -> Result<()> { panic!("no such block") }).unwrap_err();
/// assert!(error.to_string().contains(": the chat template met a fault in the code that runs it: no such block"));
/// ```
///
/// # Errors
/// The error of `work`, or an error of `kind` if it panics.
pub fn catch_panic<T>(kind: Kind, what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| set_hook(chain_hook(take_hook())));
    let inside = INSIDE.get();
    INSIDE.set(inside + 1);
    let result = catch_unwind(AssertUnwindSafe(work));
    INSIDE.set(inside);
    result.unwrap_or_else(|panic| {
        if panic.is::<Cancelled>() {
            resume_unwind(panic);
        }
        let panic_text = message(&*panic);
        let message_and_place = LAST_PANIC
            .take()
            .filter(|message_and_place| message_and_place.starts_with(&panic_text))
            .unwrap_or(panic_text);
        Err(Error::new(
            kind,
            "TG-CORE-001",
            format!("{what} met a fault in the code that runs it: {message_and_place}"),
        )
        .why("This is a bug of tracegrad and not a problem of your data. The call has no result")
        .fix("Report it with what was given, so that it is refused with a reason"))
    })
}

type Hook = Box<dyn Fn(&PanicHookInfo<'_>) + Send + Sync>;

/// Returns a hook that stores the message for [`catch_panic`], and calls `others` for all other panics.
fn chain_hook(others: Hook) -> Hook {
    Box::new(move |info| {
        if !is_kept(info) {
            others(info);
        }
    })
}

/// Stores the message of a panic for [`catch_panic`], if this thread is inside such a call. Returns whether it did.
fn is_kept(info: &PanicHookInfo<'_>) -> bool {
    let inside = INSIDE.try_with(Cell::get).is_ok_and(|inside| inside > 0);
    if inside {
        let place = info.location().map_or_else(String::new, |at| format!(" ({}:{})", short(at.file()), at.line()));
        LAST_PANIC.set(Some(message(info.payload()) + &place));
    }
    inside
}

/// Returns the message of a panic, at most 200 characters.
fn message(payload: &dyn Any) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").chars().take(200).collect()
}

/// Shortens the path of a source file to its crate and the path in the crate, without the directory of the build
/// machine.
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
        catch_panic(Kind::Format, "a first call", || Ok(())).unwrap();
        let before = take_hook();
        set_hook(chain_hook(Box::new(|info| {
            SEEN.fetch_add(usize::from(message(info.payload()).starts_with("seen")), Ordering::Relaxed);
        })));
        let error = catch_panic(Kind::Template, "the template", || {
            let inner = catch_panic(Kind::Format, "a part", || -> Result<()> { panic!("seen {}", "x".repeat(999)) });
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
