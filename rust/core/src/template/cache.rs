//! Caches of rendered prompts and of tool schemas as template values, which the traces of a group share.
//!
//! The key of a render consists of the bytes of everything it depends on. The cache size is bounded in bytes. Schemas
//! are looked up by their `Arc`, else by comparing values; their number and size are bounded too.

use super::marks::{Alphabet, Marker, Tag, UsedCharacters};
use super::rendered::Rendered;
use super::server_message::Rules;
use super::value;
use crate::cache::{TwoTableCache, write, write_map};
use crate::error::{Error, Kind, Result};
use crate::pool::try_lock_briefly;
use crate::server::Server;
use crate::trace::value_of;
use foldhash::fast::RandomState;
use minijinja::value::Value;
use serde_json::{Map, Value as Json, json};
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Number of shards of the cache, each with its own lock.
const SHARDS: usize = 8;
/// Bytes of one generation of one shard. Each shard has two generations, 32 MiB in total.
const GENERATION_BYTES: usize = 2 << 20;

/// Everything that a render depends on, except its template.
#[derive(Debug, Clone, Copy)]
pub(super) struct RenderKey<'a> {
    pub messages: &'a [&'a Json],
    /// Number of the cached tool schemas.
    pub tools: Option<u64>,
    pub add_generation_prompt: bool,
    pub rules: Rules,
    pub kwargs: &'a Map<String, Json>,
}

#[derive(Debug)]
pub(super) struct Renders {
    state: RandomState,
    shards: [Mutex<TwoTableCache<Entry>>; SHARDS],
}

impl Default for Renders {
    fn default() -> Self {
        let shards = std::array::from_fn(|_| Mutex::new(TwoTableCache::new(GENERATION_BYTES)));
        Self { state: RandomState::default(), shards }
    }
}

#[derive(Debug)]
struct Entry {
    key: Box<[u8]>,
    rendered: Arc<Rendered>,
}

impl Renders {
    /// Returns the cached render of `render_key`, or calls `make` and caches its result.
    pub fn get<E>(&self, render_key: RenderKey<'_>, make: impl FnOnce() -> Result<Rendered, E>) -> Result<Rendered, E> {
        let key = render_key.key();
        let hash = self.state.hash_one(&*key);
        let shard = &self.shards[(hash >> 32) as usize % SHARDS];
        let has_key = |entry: &Entry| *entry.key == *key;
        let cached =
            try_lock_briefly(shard).and_then(|mut shard| shard.read(hash, has_key, |e| Arc::clone(&e.rendered)));
        if let Some(rendered) = cached {
            return Ok((*rendered).clone());
        }
        let rendered = make()?;
        let bytes = key.len() + rendered.text.len() + 48 * rendered.spans.len() + 256;
        if bytes <= GENERATION_BYTES / 4 {
            let entry = Entry { key: key.into(), rendered: Arc::new(rendered.clone()) };
            if let Some(mut shard) = try_lock_briefly(shard) {
                shard.put(hash, bytes, entry);
            }
        }
        Ok(rendered)
    }
}

impl RenderKey<'_> {
    /// Returns the cache key. Two requests whose renders could differ have different keys.
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

/// Returns true if two JSON values are written identically: keys in the same order, and 0.0 differs from -0.0.
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

/// Maximum number of cached sets, and maximum bytes of their JSON in total.
const SETS: usize = 64;
const BYTES: usize = 4 << 20;

#[derive(Debug)]
pub(super) struct Tools {
    /// Unique among the sets of this template.
    pub number: u64,
    /// The schemas as passed by the caller.
    pub json: Arc<Json>,
    /// The server whose form the schemas have, and the schemas in that form if it differs.
    server: Option<Server>,
    own: Option<Json>,
    pub bytes: usize,
    pub used: UsedCharacters,
    pub plain: Value,
    /// The values with marks of the default alphabet.
    pub marked: Marked,
}

/// Schemas with marks, and the tags of these marks.
#[derive(Debug, Clone)]
pub(super) struct Marked {
    pub value: Value,
    pub tags: Vec<Tag>,
    /// Same meaning as in [`MarkStats`](super::marks::MarkStats).
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
    /// Returns the values of `json` in the form that a server uses. Strings among `literals` are never marked.
    pub fn get(&self, json: &Arc<Json>, server: Option<Server>, literals: &[String]) -> Result<Arc<Tools>> {
        if !json.is_array() {
            return Err(Error::new(Kind::Argument, "TG-TEMPLATE-001", "tools is not a list of JSON schemas")
                .why("Chat templates iterate over it")
                .fix("Pass tools as a list of {\"type\": \"function\", \"function\": {...}}"));
        }
        let make = || Arc::new(Tools::new(self.made.fetch_add(1, Ordering::Relaxed), json, server, literals));
        let Some(mut sets) = try_lock_briefly(&self.sets) else { return Ok(make()) };
        let cached = sets.iter().find(|tools| tools.server == server && Arc::ptr_eq(&tools.json, json));
        let cached = cached.or_else(|| sets.iter().find(|tools| tools.server == server && same(&tools.json, json)));
        if let Some(tools) = cached {
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
    fn new(number: u64, json: &Arc<Json>, server: Option<Server>, literals: &[String]) -> Self {
        let own = server.and_then(|server| in_form(json, server));
        let shown = own.as_ref().unwrap_or(json);
        let mut used = UsedCharacters::default();
        value::note(&mut used, shown);
        let plain = value::tools(shown, &mut None, literals);
        let marked = match Alphabet::avoiding(UsedCharacters::default()) {
            Some(alphabet) => Marked::new(shown, alphabet, literals),
            None => Marked { value: plain.clone(), tags: Vec::new(), doubt: true },
        };
        Self { number, json: Arc::clone(json), bytes: json.to_string().len(), server, own, used, plain, marked }
    }

    /// Returns the schemas as templates receive them.
    pub fn shown(&self) -> &Json {
        self.own.as_ref().unwrap_or(&self.json)
    }
}

/// Returns schemas as the types of a server's request write them: with its keys in its order, including its nulls.
/// Returns `None` if the server passes them on unchanged.
fn in_form(json: &Json, server: Server) -> Option<Json> {
    let none = Json::Null;
    let order: Vec<(&str, Json)> = match server {
        Server::Vllm => vec![("name", none.clone()), ("description", none.clone()), ("parameters", none)],
        Server::Sglang => {
            vec![("description", none.clone()), ("name", none.clone()), ("parameters", none), ("strict", false.into())]
        }
        Server::LlamaCpp => vec![("name", none), ("description", "".into()), ("parameters", json!({}))],
        Server::Tgi | Server::OpenAi => return None,
    };
    let has_form = |tool: &Json| {
        let Some(outer) = tool.as_object() else { return false };
        let function = value_of(outer, "function").and_then(Json::as_object);
        outer.keys().eq(["type", "function"])
            && function.is_some_and(|fields| fields.keys().eq(order.iter().map(|field| field.0)))
    };
    if json.as_array()?.iter().all(has_form) {
        return None;
    }
    let tool = |tool: &Json| {
        let Some(Json::Object(original)) = tool.get("function") else { return tool.clone() };
        let mut function: Map<String, Json> = order
            .iter()
            .map(|(key, default)| ((*key).to_owned(), original.get(*key).unwrap_or(default).clone()))
            .collect();
        let set = |key: &str| original.get(key).filter(|value| !value.is_null());
        let deferred = tool.get("defer_loading").filter(|value| !value.is_null());
        let mut result = Map::new();
        result.insert("type".to_owned(), tool.get("type").cloned().unwrap_or_else(|| "function".into()));
        if server == Server::Vllm {
            function.extend(set("strict").map(|strict| ("strict".to_owned(), strict.clone())));
            let loading = set("defer_loading").or(deferred);
            function.extend(loading.map(|value| ("defer_loading".to_owned(), value.clone())));
        }
        result.insert("function".to_owned(), Json::Object(function));
        if server == Server::Vllm {
            result.extend(deferred.map(|value| ("defer_loading".to_owned(), value.clone())));
        }
        Json::Object(result)
    };
    let converted: Json = json.as_array()?.iter().map(tool).collect();
    (!same(&converted, json)).then_some(converted)
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
    use std::convert::Infallible;

    fn ask(renders: &Renders, messages: &[&Json], made: &mut usize) -> Arc<str> {
        let kwargs = Map::new();
        let render_key =
            RenderKey { messages, tools: None, add_generation_prompt: true, rules: Rules::default(), kwargs: &kwargs };
        let rendered: Result<Rendered, Infallible> = renders.get(render_key, || {
            *made += 1;
            Ok(Rendered { text: format!("{messages:?}").into(), ..Rendered::default() })
        });
        rendered.unwrap().text
    }

    #[test]
    fn different_json_is_cached_separately() {
        let (renders, mut made) = (Renders::default(), 0);
        let variants = [
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
            for message in &variants {
                let messages = [message];
                assert_eq!(&*ask(&renders, &messages, &mut made), format!("{messages:?}"));
            }
        }
        assert_eq!(made, variants.len());
    }

    #[test]
    fn what_is_remembered_has_bounds() {
        let (renders, mut made) = (Renders::default(), 0);
        for n in 0..400 {
            ask(&renders, &[&json!({"content": format!("{n}{}", "0".repeat(100_000))})], &mut made);
        }
        let entries: usize = renders.shards.iter().map(|shard| shard.lock().unwrap()).map(|shard| shard.len()).sum();
        assert_eq!(made, 400);
        assert!(entries > 40 && entries * 200_000 <= 2 * SHARDS * GENERATION_BYTES);
    }
}

#[cfg(test)]
mod schemas_tests {
    use super::*;

    #[test]
    fn equal_schemas_are_converted_once_and_different_ones_have_numbers_of_their_own() {
        let schemas = ToolSets::default();
        let number = |json: &Json| schemas.get(&Arc::new(json.clone()), None, &[]).unwrap().number;
        let sets: Vec<Json> = (0..3).map(|n| json!([{"name": n}])).collect();
        assert_eq!([&sets[0], &sets[1], &sets[0], &sets[2]].map(number), [0, 1, 0, 2]);
        assert!(schemas.get(&Arc::new(json!({})), None, &[]).is_err());
    }

    #[test]
    fn what_is_remembered_has_bounds() {
        let schemas = ToolSets::default();
        for n in 0..2 * SETS {
            schemas.get(&Arc::new(json!([n])), None, &[]).unwrap();
        }
        assert_eq!(schemas.sets.lock().unwrap().len(), SETS);
        for n in 0..9 {
            schemas.get(&Arc::new(json!([n.to_string().repeat(1 << 20)])), None, &[]).unwrap();
        }
        assert_eq!(schemas.sets.lock().unwrap().len(), 3);
    }
}
