//! Renders made before: the prompt that a group of traces shares is rendered once.
//!
//! Keyed by everything a render depends on, compared whole and in order, and bounded in bytes. Called by
//! `Template::render`.

use super::Rendered;
use super::value::size;
use crate::generations::Generations;
use foldhash::fast::RandomState;
use serde_json::{Map, Value as Json};
use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};

/// Parts with a lock each.
const SHARDS: usize = 8;
/// Bytes of one generation of one part; two generations are kept, 32 MiB in all.
const GENERATION_BYTES: usize = 2 << 20;

/// What a render depends on, beside its template.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked<'a> {
    pub messages: &'a [Json],
    pub tools: Option<&'a Json>,
    pub add_generation_prompt: bool,
    pub kwargs: &'a Map<String, Json>,
}

/// The renders of one template.
#[derive(Debug)]
pub(super) struct Renders {
    state: RandomState,
    shards: [Mutex<Generations<Entry>>; SHARDS],
}

impl Default for Renders {
    fn default() -> Self {
        let shards = std::array::from_fn(|_| Mutex::new(Generations::new(GENERATION_BYTES)));
        Self { state: RandomState::default(), shards }
    }
}

#[derive(Debug)]
struct Entry {
    messages: Box<[Json]>,
    tools: Option<Json>,
    add_generation_prompt: bool,
    kwargs: Map<String, Json>,
    rendered: Arc<Rendered>,
}

impl Renders {
    /// What `asked` gave before, or what `make` gives now.
    pub fn get<E>(&self, asked: Asked<'_>, make: impl FnOnce() -> Result<Rendered, E>) -> Result<Rendered, E> {
        let hash = asked.hash(&self.state);
        let shard = &self.shards[(hash >> 32) as usize % SHARDS];
        let fits = |entry: &Entry| asked.is(entry);
        let known = shard.lock().unwrap_or_else(PoisonError::into_inner).read(hash, fits, |e| Arc::clone(&e.rendered));
        if let Some(rendered) = known {
            return Ok((*rendered).clone());
        }
        let rendered = make()?;
        let bytes = asked.bytes() + rendered.text.len() + 48 * rendered.spans.len() + 256;
        if bytes <= GENERATION_BYTES / 4 {
            let entry = asked.entry(Arc::new(rendered.clone()));
            shard.lock().unwrap_or_else(PoisonError::into_inner).put(hash, bytes, entry);
        }
        Ok(rendered)
    }
}

impl Asked<'_> {
    fn hash(&self, state: &RandomState) -> u64 {
        let mut hasher = state.build_hasher();
        self.messages.iter().for_each(|message| hash(message, &mut hasher));
        self.tools.iter().for_each(|tools| hash(tools, &mut hasher));
        self.kwargs.values().for_each(|value| hash(value, &mut hasher));
        self.add_generation_prompt.hash(&mut hasher);
        hasher.finish()
    }

    /// Twice the bytes of the strings: what small JSON takes beside them.
    fn bytes(&self) -> usize {
        let kwargs: usize = self.kwargs.values().map(size).sum();
        2 * (self.messages.iter().map(size).sum::<usize>() + self.tools.map_or(0, size) + kwargs)
    }

    fn entry(&self, rendered: Arc<Rendered>) -> Entry {
        Entry {
            messages: self.messages.into(),
            tools: self.tools.cloned(),
            add_generation_prompt: self.add_generation_prompt,
            kwargs: self.kwargs.clone(),
            rendered,
        }
    }

    fn is(&self, entry: &Entry) -> bool {
        self.add_generation_prompt == entry.add_generation_prompt
            && self.messages.len() == entry.messages.len()
            && self.messages.iter().zip(&entry.messages).all(|(a, b)| same(a, b))
            && match (self.tools, &entry.tools) {
                (Some(a), Some(b)) => same(a, b),
                (a, b) => a.is_none() && b.is_none(),
            }
            && same_map(self.kwargs, &entry.kwargs)
    }
}

/// Hashes strings, and numbers as they are written; what differs in anything else is told apart by [`same`].
fn hash(json: &Json, hasher: &mut impl Hasher) {
    match json {
        Json::String(text) => text.hash(hasher),
        Json::Array(items) => items.iter().for_each(|item| hash(item, hasher)),
        Json::Object(map) => map.iter().for_each(|(key, value)| {
            key.hash(hasher);
            hash(value, hasher);
        }),
        Json::Number(number) => number.hash(hasher),
        Json::Bool(value) => value.hash(hasher),
        Json::Null => 0_u8.hash(hasher),
    }
}

/// Whether two JSON values are written alike: keys in the same order, and 0.0 is not -0.0.
pub(super) fn same(a: &Json, b: &Json) -> bool {
    match (a, b) {
        (Json::String(a), Json::String(b)) => a == b,
        (Json::Array(a), Json::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Json::Object(a), Json::Object(b)) => same_map(a, b),
        (Json::Number(a), Json::Number(b)) => a == b && a.as_f64().map(f64::to_bits) == b.as_f64().map(f64::to_bits),
        (a, b) => a == b,
    }
}

fn same_map(a: &Map<String, Json>, b: &Map<String, Json>) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|((a, x), (b, y))| a == b && same(x, y))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::convert::Infallible;

    fn ask(renders: &Renders, messages: &[Json], made: &mut usize) -> String {
        let kwargs = Map::new();
        let asked = Asked { messages, tools: None, add_generation_prompt: true, kwargs: &kwargs };
        let rendered: Result<Rendered, Infallible> = renders.get(asked, || {
            *made += 1;
            Ok(Rendered { text: format!("{messages:?}"), ..Rendered::default() })
        });
        rendered.unwrap().text
    }

    #[test]
    fn what_is_written_differently_is_rendered_apart() {
        let (renders, mut made) = (Renders::default(), 0);
        let all = [
            json!({"a": 1, "b": 2}),
            json!({"b": 2, "a": 1}),
            json!({"a": 1.0, "b": 2}),
            json!({"a": 0.0}),
            json!({"a": -0.0}),
        ];
        for _ in 0..3 {
            for message in &all {
                let messages = [message.clone()];
                assert_eq!(ask(&renders, &messages, &mut made), format!("{messages:?}"));
            }
        }
        assert_eq!(made, all.len());
    }

    #[test]
    fn what_is_remembered_has_bounds() {
        let (renders, mut made) = (Renders::default(), 0);
        for n in 0..400 {
            ask(&renders, &[json!({"content": format!("{n}{}", "0".repeat(100_000))})], &mut made);
        }
        let held: usize = renders.shards.iter().map(|shard| shard.lock().unwrap()).map(|shard| shard.len()).sum();
        assert_eq!(made, 400);
        assert!(held > 40 && held * 300_000 <= 2 * SHARDS * GENERATION_BYTES);
    }
}
