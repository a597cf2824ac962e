//! Cache of rendered prompts, so that the prompt that a group of traces shares is rendered once.
//!
//! The key is the bytes of everything a render depends on; the size is bounded in bytes. Called by `Template::render`.

use super::rendered::Rendered;
use super::served_message::Rules;
use crate::generations::Generations;
use crate::threads::soon;
use crate::written::{write, write_map};
use foldhash::fast::RandomState;
use serde_json::{Map, Value as Json};
use std::hash::BuildHasher;
use std::sync::{Arc, Mutex};

/// Shards of the cache, each with a lock of its own.
const SHARDS: usize = 8;
/// Bytes of one generation of one shard; two generations are kept, 32 MiB in all.
const GENERATION_BYTES: usize = 2 << 20;

/// What a render depends on, beside its template.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked<'a> {
    pub messages: &'a [&'a Json],
    /// Number of the remembered tool schemas.
    pub tools: Option<u64>,
    pub add_generation_prompt: bool,
    pub rules: Rules,
    pub kwargs: &'a Map<String, Json>,
}

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
    key: Box<[u8]>,
    rendered: Arc<Rendered>,
}

impl Renders {
    /// The cached render of `asked`, or that of `make`, which is then cached.
    pub fn get<E>(&self, asked: Asked<'_>, make: impl FnOnce() -> Result<Rendered, E>) -> Result<Rendered, E> {
        let key = asked.key();
        let hash = self.state.hash_one(&*key);
        let shard = &self.shards[(hash >> 32) as usize % SHARDS];
        let fits = |entry: &Entry| *entry.key == *key;
        let known = soon(shard).and_then(|mut shard| shard.read(hash, fits, |e| Arc::clone(&e.rendered)));
        if let Some(rendered) = known {
            return Ok((*rendered).clone());
        }
        let rendered = make()?;
        let bytes = key.len() + rendered.text.len() + 48 * rendered.spans.len() + 256;
        if bytes <= GENERATION_BYTES / 4 {
            let entry = Entry { key: key.into(), rendered: Arc::new(rendered.clone()) };
            if let Some(mut shard) = soon(shard) {
                shard.put(hash, bytes, entry);
            }
        }
        Ok(rendered)
    }
}

impl Asked<'_> {
    /// The cache key: two requests whose renders could differ have different keys.
    pub fn key(&self) -> Vec<u8> {
        let mut key = Vec::with_capacity(1 << 14);
        key.push(u8::from(self.add_generation_prompt));
        key.extend_from_slice(&self.rules.key());
        key.extend_from_slice(&self.tools.map_or(0, |number| number + 1).to_le_bytes());
        write_map(&mut key, self.kwargs);
        for message in self.messages {
            write(&mut key, message);
        }
        key
    }
}

/// Whether two JSON values are written alike: keys in the same order, and 0.0 is not -0.0.
pub(super) fn same(a: &Json, b: &Json) -> bool {
    match (a, b) {
        (Json::String(a), Json::String(b)) => a == b,
        (Json::Array(a), Json::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Json::Object(a), Json::Object(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|((a, x), (b, y))| a == b && same(x, y))
        }
        (Json::Number(a), Json::Number(b)) => a == b && a.as_f64().map(f64::to_bits) == b.as_f64().map(f64::to_bits),
        (a, b) => a == b,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::convert::Infallible;

    fn ask(renders: &Renders, messages: &[&Json], made: &mut usize) -> Arc<str> {
        let kwargs = Map::new();
        let asked =
            Asked { messages, tools: None, add_generation_prompt: true, rules: Rules::default(), kwargs: &kwargs };
        let rendered: Result<Rendered, Infallible> = renders.get(asked, || {
            *made += 1;
            Ok(Rendered { text: format!("{messages:?}").into(), ..Rendered::default() })
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
            json!({"a": {"b": 1}}),
            json!({"a": ["b", 1]}),
            json!({"a": "b", "c": 1}),
        ];
        for _ in 0..3 {
            for message in &all {
                let messages = [message];
                assert_eq!(&*ask(&renders, &messages, &mut made), format!("{messages:?}"));
            }
        }
        assert_eq!(made, all.len());
    }

    #[test]
    fn what_is_remembered_has_bounds() {
        let (renders, mut made) = (Renders::default(), 0);
        for n in 0..400 {
            ask(&renders, &[&json!({"content": format!("{n}{}", "0".repeat(100_000))})], &mut made);
        }
        let held: usize = renders.shards.iter().map(|shard| shard.lock().unwrap()).map(|shard| shard.len()).sum();
        assert_eq!(made, 400);
        assert!(held > 40 && held * 200_000 <= 2 * SHARDS * GENERATION_BYTES);
    }
}
