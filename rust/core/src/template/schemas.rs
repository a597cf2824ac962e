//! Cache of tool schemas as template values: agents repeat the same schemas in every call.
//!
//! Looked up by the `Arc` that holds them, else by comparing the values; bounded. Called by `Template`.

use super::marks::{Alphabet, Marker, Tag, Used};
use super::{renders, value};
use crate::error::{Error, Kind, Result};
use crate::threads::soon;
use minijinja::value::Value;
use serde_json::Value as Json;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Sets that are remembered, and bytes of their JSON together.
const SETS: usize = 64;
const BYTES: usize = 4 << 20;

#[derive(Debug)]
pub(super) struct Tools {
    /// No other set of this template ever has it.
    pub number: u64,
    pub json: Arc<Json>,
    pub bytes: usize,
    pub used: Used,
    pub plain: Value,
    /// The values with marks of the default alphabet.
    pub marked: Marked,
}

/// Schemas with marks, and the tags of these.
#[derive(Debug, Clone)]
pub(super) struct Marked {
    pub value: Value,
    pub tags: Vec<Tag>,
    /// As that of [`Noted`](super::marks::Noted).
    pub doubt: bool,
}

/// The sets of one template.
#[derive(Debug, Default)]
pub(super) struct ToolSets {
    /// Oldest first.
    sets: Mutex<Vec<Arc<Tools>>>,
    made: AtomicU64,
}

impl ToolSets {
    /// The values of `json`; strings among `literals` are never marked.
    pub fn get(&self, json: &Arc<Json>, literals: &[String]) -> Result<Arc<Tools>> {
        if !json.is_array() {
            return Err(Error::new(Kind::Argument, "tools is not a list of JSON schemas")
                .why("Chat templates iterate over it")
                .cure("Pass tools as a list of {\"type\": \"function\", \"function\": {...}}"));
        }
        let make = || Arc::new(Tools::new(self.made.fetch_add(1, Ordering::Relaxed), json, literals));
        let Some(mut sets) = soon(&self.sets) else { return Ok(make()) };
        let known = sets.iter().find(|tools| Arc::ptr_eq(&tools.json, json));
        let known = known.or_else(|| sets.iter().find(|tools| renders::same(&tools.json, json)));
        if let Some(tools) = known {
            return Ok(Arc::clone(tools));
        }
        let tools = make();
        sets.push(Arc::clone(&tools));
        let bytes = |sets: &[Arc<Tools>]| sets.iter().map(|tools| tools.bytes).sum::<usize>();
        while sets.len() > 1 && (sets.len() > SETS || bytes(&sets) > BYTES) {
            sets.remove(0);
        }
        Ok(tools)
    }
}

impl Tools {
    /// Converts `json`, with and without marks.
    fn new(number: u64, json: &Arc<Json>, literals: &[String]) -> Self {
        let mut used = Used::default();
        value::note(&mut used, json);
        let plain = value::tools(json, &mut None, literals);
        let marked = match Alphabet::avoiding(Used::default()) {
            Some(alphabet) => Marked::new(json, alphabet, literals),
            None => Marked { value: plain.clone(), tags: Vec::new(), doubt: true },
        };
        Self { number, json: Arc::clone(json), bytes: json.to_string().len(), used, plain, marked }
    }
}

impl Marked {
    pub fn new(json: &Json, alphabet: Alphabet, literals: &[String]) -> Self {
        let mut marker = Marker::new(alphabet, None, Vec::new());
        let value = value::tools(json, &mut Some(&mut marker), literals);
        Self { value, tags: marker.tags, doubt: marker.noted.doubt }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn equal_schemas_are_converted_once_and_different_ones_have_numbers_of_their_own() {
        let schemas = ToolSets::default();
        let number = |json: &Json| schemas.get(&Arc::new(json.clone()), &[]).unwrap().number;
        let sets: Vec<Json> = (0..3).map(|n| json!([{"name": n}])).collect();
        assert_eq!([&sets[0], &sets[1], &sets[0], &sets[2]].map(number), [0, 1, 0, 2]);
        assert!(schemas.get(&Arc::new(json!({})), &[]).is_err());
    }

    #[test]
    fn what_is_remembered_has_bounds() {
        let schemas = ToolSets::default();
        for n in 0..2 * SETS {
            schemas.get(&Arc::new(json!([n])), &[]).unwrap();
        }
        assert_eq!(schemas.sets.lock().unwrap().len(), SETS);
        for n in 0..9 {
            schemas.get(&Arc::new(json!([n.to_string().repeat(1 << 20)])), &[]).unwrap();
        }
        assert_eq!(schemas.sets.lock().unwrap().len(), 3);
    }
}
