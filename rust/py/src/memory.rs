//! Gives memory that was freed back to the system; a thread that has nothing to do keeps it otherwise.

use tracegrad_core::pool;

/// After fewer bytes of a file, taking memory from the system again costs more than what is given back is worth.
pub const WORTH: u64 = 128 << 20;

/// Has each thread of the pool give back what it holds and does not use. The caller's own memory is what it uses next.
#[allow(unsafe_code, reason = "the allocator has no safe name for it")]
pub fn give_back() {
    // SAFETY: it takes no pointer, and looks at the heap of the thread that calls it alone.
    pool::elsewhere(|| unsafe { libmimalloc_sys::mi_collect(true) });
}
