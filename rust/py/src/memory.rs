//! Returns freed memory to the system. Without this an idle thread keeps it.

use tracegrad_core::pool;

/// Smallest size of a file, in bytes, after which memory is returned. For smaller ones allocating it again costs more
/// than it saves.
pub const MIN_FILE_BYTES: u64 = 128 << 20;

/// Makes each thread of the pool return its unused memory. The caller's thread is skipped, because it will use its
/// memory next.
#[allow(unsafe_code, reason = "the allocator has no safe name for it")]
pub fn release_to_system() {
    // SAFETY: the function takes no pointer, and accesses only the heap of the calling thread.
    pool::broadcast(|| unsafe { libmimalloc_sys::mi_collect(true) });
}
