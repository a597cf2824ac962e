//! Gives memory that was freed back to the system; a thread that has nothing to do keeps it otherwise.

use tracegrad_core::threads;

/// Reading fewer bytes than this leaves nothing worth a walk through the heaps.
pub const WORTH: u64 = 16 << 20;

/// Has every thread give back what it holds and does not use.
#[allow(unsafe_code, reason = "the allocator has no safe name for it")]
pub fn give_back() {
    // SAFETY: it takes no pointer, and looks at the heap of the thread that calls it alone.
    threads::everywhere(|| unsafe { libmimalloc_sys::mi_collect(true) });
}
