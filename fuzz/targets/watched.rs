//! Limits of one input, in bytes on the heap and seconds of CPU, and the text that no error may contain.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use tracegrad_core::{Error, Kind};

/// CPU time of one input: several times what tests allow, as builds for fuzzing count and check all they do.
const SECONDS: f64 = 5.0;

/// The system's allocator, which ends the process if one input allocates too much.
struct Counted;

static HELD: AtomicUsize = AtomicUsize::new(0);
static ALLOWED: AtomicUsize = AtomicUsize::new(usize::MAX);

#[global_allocator]
static ALLOCATOR: Counted = Counted;

fn take(bytes: usize) {
    let held = HELD.fetch_add(bytes, Ordering::Relaxed) + bytes;
    let allowed = ALLOWED.load(Ordering::Relaxed);
    if held > allowed {
        ALLOWED.store(usize::MAX, Ordering::Relaxed);
        eprintln!("{held} bytes are held, and {allowed} are what one input may take");
        std::process::abort();
    }
}

// SAFETY: the system's allocator does all the work; this only counts sizes.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        take(size);
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Runs `work` with a limit of bytes in addition to those already allocated.
pub fn within(mebibytes: usize, work: impl FnOnce()) {
    ALLOWED.store(HELD.load(Ordering::Relaxed) + (mebibytes << 20), Ordering::Relaxed);
    let began = seconds();
    work();
    let took = seconds() - began;
    ALLOWED.store(usize::MAX, Ordering::Relaxed);
    assert!(took < SECONDS, "{took} seconds of CPU");
}

/// Checks an error: it is not about a panic, and has no control characters.
pub fn told(error: &Error) {
    let text = error.to_string();
    assert!(error.kind != Kind::Fault && !text.contains("met a fault in the code"), "a panic was caught: {text}");
    assert!(!text.contains(['\u{1b}', '\u{202e}', '\0']), "raw control characters");
}

/// CPU time of this process.
fn seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a complete timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
