//! What Python's lazy filters give: iterated once, true, without length, and no JSON.
//!
//! Called by `filters`.

use minijinja::value::{Enumerator, Object, ObjectRepr, Value};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Items that are handed out once.
#[derive(Debug)]
pub(super) struct Generator {
    items: Vec<Value>,
    taken: AtomicUsize,
}

impl Generator {
    pub fn value(items: Vec<Value>) -> Value {
        Value::from_object(Self { items, taken: AtomicUsize::new(0) })
    }

    /// All of them, taken or not.
    pub fn items(&self) -> &[Value] {
        &self.items
    }

    fn take(&self) -> Option<Value> {
        let at = self.taken.fetch_add(1, Ordering::Relaxed);
        self.items.get(at).cloned()
    }
}

impl Object for Generator {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let generator = Arc::clone(self);
        Enumerator::Iter(Box::new(std::iter::from_fn(move || generator.take())))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        None
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<generator object>")
    }
}
