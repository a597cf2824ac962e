//! Sampling options other than temperature and top-p: their names, the spellings of servers, and the values at which
//! they have no effect.
//!
//! This is the only table of these options. `format` reads options with it, `align` reports which are active in each
//! trace, and Python uses it for requests.

use serde_json::{Map, Value};
use std::sync::Arc;

/// Condition under which an option has no effect.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum NoEffect {
    /// At any of these numbers.
    At(&'static [f64]),
    /// If the value is false, empty, or 0 everywhere.
    Empty,
}

/// Every option under its name in vLLM or OpenAI, the others under the name of the server that has them. The index is
/// the number of its bit. `top_p` is first; it is a separate field of a generation.
pub const OPTIONS: [(&str, NoEffect); 26] = [
    ("top_p", NoEffect::At(&[1.0])),
    ("top_k", NoEffect::At(&[0.0, -1.0])),
    ("min_p", NoEffect::At(&[0.0])),
    ("typical_p", NoEffect::At(&[1.0])),
    ("tfs_z", NoEffect::At(&[1.0])),
    ("top_a", NoEffect::At(&[0.0])),
    ("top_n_sigma", NoEffect::At(&[0.0, -1.0])),
    ("epsilon_cutoff", NoEffect::At(&[0.0])),
    ("eta_cutoff", NoEffect::At(&[0.0])),
    ("xtc_probability", NoEffect::At(&[0.0])),
    ("mirostat", NoEffect::At(&[0.0])),
    ("dynatemp_range", NoEffect::At(&[0.0])),
    ("repetition_penalty", NoEffect::At(&[1.0])),
    ("presence_penalty", NoEffect::At(&[0.0])),
    ("frequency_penalty", NoEffect::At(&[0.0])),
    ("dry_multiplier", NoEffect::At(&[0.0])),
    ("no_repeat_ngram_size", NoEffect::At(&[0.0])),
    ("min_tokens", NoEffect::At(&[0.0])),
    ("min_new_tokens", NoEffect::At(&[0.0])),
    ("logit_bias", NoEffect::Empty),
    ("allowed_token_ids", NoEffect::Empty),
    ("bad_words", NoEffect::Empty),
    ("watermark", NoEffect::Empty),
    ("use_beam_search", NoEffect::Empty),
    ("num_beams", NoEffect::At(&[1.0])),
    ("best_of", NoEffect::At(&[1.0])),
];

/// Other spellings, from llama.cpp and Ollama, Gemini, and transformers.
pub const SPELLINGS: [(&str, &str); 12] = [
    ("repeat_penalty", "repetition_penalty"),
    ("repetitionPenalty", "repetition_penalty"),
    ("presencePenalty", "presence_penalty"),
    ("frequencyPenalty", "frequency_penalty"),
    ("topK", "top_k"),
    ("top-k", "top_k"),
    ("minP", "min_p"),
    ("typicalP", "typical_p"),
    ("typ_p", "typical_p"),
    ("logitBias", "logit_bias"),
    ("beam_search", "use_beam_search"),
    ("bestOf", "best_of"),
];

/// The bit of `top_p`.
pub const TOP_P: u32 = 1;
/// SGLang writes 2^30 for "no top-k". No vocabulary is that large.
const EVERY_TOKEN: f64 = 1_048_576.0;

/// Returns the index of an option in `OPTIONS`, in any spelling. `top_p` is not included.
pub fn place_of(key: &str) -> Option<usize> {
    // This runs for every key of a request. The first letters exclude most keys.
    if !matches!(
        key.as_bytes().first_chunk::<2>(),
        Some(
            b"to"
                | b"mi"
                | b"ty"
                | b"tf"
                | b"ep"
                | b"et"
                | b"xt"
                | b"dy"
                | b"re"
                | b"pr"
                | b"fr"
                | b"dr"
                | b"no"
                | b"lo"
                | b"al"
                | b"ba"
                | b"wa"
                | b"us"
                | b"nu"
                | b"be"
        )
    ) {
        return None;
    }
    let name = SPELLINGS.iter().find(|(spelled, _)| *spelled == key).map_or(key, |(_, name)| name);
    OPTIONS.iter().skip(1).position(|(option, _)| *option == name).map(|place| place + 1)
}

impl NoEffect {
    /// Returns whether the option has no effect at this value.
    pub fn contains(self, name: &str, value: &Value) -> bool {
        match (self, value) {
            (_, Value::Null | Value::Bool(false)) => true,
            (Self::At(off), value) => number(value).is_some_and(|number| {
                off.contains(&number) || name == "top_k" && number >= EVERY_TOKEN || name == "min_p" && number < 0.0
            }),
            (Self::Empty, Value::Array(list)) => list.iter().all(pair_is_idle),
            (Self::Empty, Value::Object(map)) => map.values().all(|number_value| number(number_value) == Some(0.0)),
            (Self::Empty, Value::String(text)) => text.is_empty(),
            (Self::Empty, value) => number(value) == Some(0.0),
        }
    }
}

/// Returns whether an entry of a list is llama.cpp's `[token, 0]`.
fn pair_is_idle(entry: &Value) -> bool {
    entry.as_array().is_some_and(|pair| pair.len() == 2 && number(&pair[1]) == Some(0.0))
}

/// Returns the number that an option has, also if it is written as text.
pub fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    }
}

/// Recorded options except `top_p`, as pairs of an index in `OPTIONS` and a value. An empty set allocates nothing.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Options(Option<Arc<[(u8, Value)]>>);

impl Options {
    /// No option.
    pub const NONE: Self = Self(None);

    /// Reads the options of an object. If an option occurs in two spellings, the first counts. Null counts as missing.
    pub fn read(fields: &Map<String, Value>) -> Self {
        let mut options: Vec<(u8, Value)> = Vec::new();
        for (key, value) in fields {
            if let Some(place) = place_of(key).filter(|_| !value.is_null())
                && options.iter().all(|(index, _)| usize::from(*index) != place)
            {
                options.push((place as u8, value.clone()));
            }
        }
        Self((!options.is_empty()).then(|| options.into()))
    }

    /// Adds the options of `outer` that are missing.
    #[must_use]
    pub fn or(self, outer: &Self) -> Self {
        match (&self.0, &outer.0) {
            (_, None) => self,
            (None, Some(_)) => outer.clone(),
            (Some(options), Some(outer)) => {
                let more = outer.iter().filter(|(place, _)| options.iter().all(|(index, _)| index != place));
                Self(Some(options.iter().chain(more).cloned().collect()))
            }
        }
    }

    /// Returns names and values.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &Value)> {
        self.0.iter().flat_map(|all| all.iter()).map(|(place, value)| (OPTIONS[usize::from(*place)].0, value))
    }

    /// Returns the value of an option, by its name in `OPTIONS`.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.iter().find_map(|(option, value)| (option == name).then_some(value))
    }

    /// Returns whether there are no options.
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Returns the bits of the recorded options.
    pub fn bits(&self) -> u32 {
        self.0.iter().flat_map(|all| all.iter()).fold(0, |bits, (place, _)| bits | 1 << place)
    }

    /// Returns the bits of the active options, which truncate, scale, favour or forbid tokens.
    pub fn active_bits(&self) -> u32 {
        let on = |place: u8, value: &Value| {
            let (name, off) = OPTIONS[usize::from(place)];
            !off.contains(name, value)
        };
        let all = self.0.iter().flat_map(|all| all.iter());
        all.filter(|(place, value)| on(*place, value)).fold(0, |bits, (place, _)| bits | 1 << place)
    }
}

/// Defaults of a server for omitted options: the model's generation_config.json.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Defaults {
    /// Temperature, if the file contains it.
    pub temperature: Option<f32>,
    /// Bits of the options that the file activates, including `top_p`.
    pub active_bits: u32,
}

impl Defaults {
    /// Reads the fields of a generation_config.json.
    pub fn read(fields: &Map<String, Value>) -> Self {
        let number = |key: &str| fields.get(key).and_then(number).filter(|number| number.is_finite());
        let top_p = number("top_p").is_some_and(|top_p| top_p < 1.0);
        let temperature =
            number("temperature").filter(|temperature| *temperature >= 0.0).map(|temperature| temperature as f32);
        Self { temperature, active_bits: Options::read(fields).active_bits() | if top_p { TOP_P } else { 0 } }
    }
}

/// Flags for parameters that a request omits, so that the server's default applies; 0 if there is no request.
pub mod omitted {
    /// The temperature. The API's default is 1.
    pub const TEMPERATURE: u8 = 1;
    /// Top-p.
    pub const TOP_P: u8 = 2;
    /// The generation has a request, and its server reads other options from the model's generation_config.json.
    pub const REQUEST: u8 = 4;
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(value: &Value) -> Options {
        Options::read(value.as_object().unwrap())
    }

    fn on(value: &Value) -> Vec<&'static str> {
        let bits = read(value).active_bits();
        OPTIONS.iter().enumerate().filter(|(place, _)| bits & (1 << place) != 0).map(|(_, (name, _))| *name).collect()
    }

    #[test]
    fn every_name_and_spelling_is_found_and_no_other() {
        for (place, (name, _)) in OPTIONS.iter().enumerate().skip(1) {
            assert_eq!(place_of(name), Some(place), "{name}");
        }
        for (spelled, name) in SPELLINGS {
            assert_eq!(place_of(spelled), place_of(name), "{spelled}");
            assert!(place_of(name).is_some(), "{name}");
        }
        for other in ["top_p", "temperature", "model", "t", "", "top_logprobs", "tools"] {
            assert_eq!(place_of(other), None, "{other}");
        }
    }

    #[test]
    fn an_option_is_off_where_it_does_nothing() {
        let off = json!({"top_k": -1, "min_p": 0.0, "typical_p": 1, "repeat_penalty": 1.0, "presence_penalty": 0,
            "frequency_penalty": "0", "logit_bias": {}, "use_beam_search": false, "best_of": 1, "mirostat": 0});
        assert_eq!((read(&off).active_bits(), read(&off).bits().count_ones()), (0, 10));
        assert!(read(&json!({"top_k": null, "seed": 1})).is_empty());
        for idle in [
            json!({"top_k": 0}),
            json!({"top_k": 1 << 30}),
            json!({"logit_bias": {"5": 0}}),
            json!({"min_p": -1}),
            json!({"logit_bias": [[5, 0.0]]}),
            json!({"bad_words": []}),
            json!({"top_n_sigma": -1.0}),
        ] {
            assert_eq!(on(&idle), Vec::<&str>::new(), "{idle}");
        }
        assert_eq!(
            on(&json!({"topK": 5, "repeat_penalty": 1.3, "logit_bias": {"5": -100}})),
            ["top_k", "repetition_penalty", "logit_bias"]
        );
        assert_eq!(
            on(&json!({"top_k": "auto", "use_beam_search": true, "best_of": 4, "logit_bias": [[5, -1]]})),
            ["top_k", "logit_bias", "use_beam_search", "best_of"]
        );
    }

    #[test]
    fn the_inner_values_count_before_the_outer() {
        let both = read(&json!({"top_k": 5})).or(&read(&json!({"top_k": 7, "min_p": 0.1})));
        assert_eq!(
            both.iter().map(|(name, value)| (name, value.clone())).collect::<Vec<_>>(),
            [("top_k", json!(5)), ("min_p", json!(0.1))]
        );
    }
}
