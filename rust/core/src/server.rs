//! Which server rendered a prompt: servers make something of a request before its chat template gets it.
//!
//! What each of them makes of it is in `template::server_request`, `template::server_message` and `align::prompt`. Read by `format`
//! where a record names its producer; else an option of `align` says it.

/// A server whose rules for prompts are known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Server {
    /// vLLM 0.32: `renderers/hf.py`, `renderers/chat_utils.py`. Taken where nothing names another one.
    #[default]
    Vllm,
    /// SGLang 0.5: `entrypoints/openai/serving_chat.py`.
    Sglang,
    /// llama.cpp's server: `common/chat.cpp`.
    LlamaCpp,
    /// Text Generation Inference 3: `router/src/lib.rs`.
    Tgi,
    /// An OpenAI-like server of which nothing is known: messages and tools keep their keys.
    OpenAi,
}

impl Server {
    /// Whether a tool call's arguments that are no JSON object reach the template as an empty one.
    pub fn empties_arguments(self) -> bool {
        matches!(self, Self::Vllm | Self::OpenAi)
    }

    /// All servers, by the names of the `server` option.
    pub const NAMES: [(&'static str, Self); 5] = [
        ("vllm", Self::Vllm),
        ("sglang", Self::Sglang),
        ("llama.cpp", Self::LlamaCpp),
        ("tgi", Self::Tgi),
        ("openai", Self::OpenAi),
    ];

    /// The server of that name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::NAMES.iter().find_map(|(known, server)| (*known == name).then_some(*server))
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find_map(|(name, server)| (*server == self).then_some(*name)).unwrap_or_default()
    }
}
