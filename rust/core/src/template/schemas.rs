//! Cache of tool schemas as template values: agents repeat the same schemas in every call.
//!
//! Looked up by the `Arc` that holds them, else by comparing the values; bounded. Called by `Template`.

use super::marks::{Alphabet, Marker, Tag, Used};
use super::{renders, value};
use crate::error::{Error, Kind, Result};
use crate::server::Server;
use crate::threads::soon;
use crate::trace::value_of;
use minijinja::value::Value;
use serde_json::{Map, Value as Json, json};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Sets that are remembered, and bytes of their JSON together.
const SETS: usize = 64;
const BYTES: usize = 4 << 20;

#[derive(Debug)]
pub(super) struct Tools {
    /// No other set of this template ever has it.
    pub number: u64,
    /// As they are given.
    pub json: Arc<Json>,
    /// Whose form they have, and in that form, where it is another one.
    server: Option<Server>,
    own: Option<Json>,
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
    /// The values of `json` in the form that a server gives them; strings among `literals` are never marked.
    pub fn get(&self, json: &Arc<Json>, server: Option<Server>, literals: &[String]) -> Result<Arc<Tools>> {
        if !json.is_array() {
            return Err(Error::new(Kind::Argument, "tools is not a list of JSON schemas")
                .why("Chat templates iterate over it")
                .cure("Pass tools as a list of {\"type\": \"function\", \"function\": {...}}"));
        }
        let make = || Arc::new(Tools::new(self.made.fetch_add(1, Ordering::Relaxed), json, server, literals));
        let Some(mut sets) = soon(&self.sets) else { return Ok(make()) };
        let known = sets.iter().find(|tools| tools.server == server && Arc::ptr_eq(&tools.json, json));
        let known =
            known.or_else(|| sets.iter().find(|tools| tools.server == server && renders::same(&tools.json, json)));
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
    fn new(number: u64, json: &Arc<Json>, server: Option<Server>, literals: &[String]) -> Self {
        let own = server.and_then(|server| in_form(json, server));
        let shown = own.as_ref().unwrap_or(json);
        let mut used = Used::default();
        value::note(&mut used, shown);
        let plain = value::tools(shown, &mut None, literals);
        let marked = match Alphabet::avoiding(Used::default()) {
            Some(alphabet) => Marked::new(shown, alphabet, literals),
            None => Marked { value: plain.clone(), tags: Vec::new(), doubt: true },
        };
        Self { number, json: Arc::clone(json), bytes: json.to_string().len(), server, own, used, plain, marked }
    }

    /// The schemas as templates get them.
    pub fn shown(&self) -> &Json {
        self.own.as_ref().unwrap_or(&self.json)
    }
}

/// Schemas as the types of a server's request write them: its keys in its order, with its nulls; `None` where they are
/// handed on as they are given.
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
    let is_alike = |tool: &Json| {
        let Some(outer) = tool.as_object() else { return false };
        let function = value_of(outer, "function").and_then(Json::as_object);
        outer.keys().eq(["type", "function"])
            && function.is_some_and(|own| own.keys().eq(order.iter().map(|own| own.0)))
    };
    if json.as_array()?.iter().all(is_alike) {
        return None;
    }
    let tool = |tool: &Json| {
        let Some(Json::Object(given)) = tool.get("function") else { return tool.clone() };
        let mut function: Map<String, Json> = order
            .iter()
            .map(|(key, default)| ((*key).to_owned(), given.get(*key).unwrap_or(default).clone()))
            .collect();
        let set = |key: &str| given.get(key).filter(|value| !value.is_null());
        let deferred = tool.get("defer_loading").filter(|value| !value.is_null());
        let mut shown = Map::new();
        shown.insert("type".to_owned(), tool.get("type").cloned().unwrap_or_else(|| "function".into()));
        if server == Server::Vllm {
            function.extend(set("strict").map(|strict| ("strict".to_owned(), strict.clone())));
            let loading = set("defer_loading").or(deferred);
            function.extend(loading.map(|value| ("defer_loading".to_owned(), value.clone())));
        }
        shown.insert("function".to_owned(), Json::Object(function));
        if server == Server::Vllm {
            shown.extend(deferred.map(|value| ("defer_loading".to_owned(), value.clone())));
        }
        Json::Object(shown)
    };
    let own: Json = json.as_array()?.iter().map(tool).collect();
    (!renders::same(&own, json)).then_some(own)
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
