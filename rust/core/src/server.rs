//! The server that rendered a prompt. Servers change a request before its chat template sees it.
//!
//! The rules are in `template::server_request`, `template::server_message` and `align::prompt`. `format` sets the
//! server if a record names it; otherwise an option of `align` does.

/// A server with known rules for prompts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Server {
    /// vLLM 0.32: `renderers/hf.py`, `renderers/chat_utils.py`. The default if no server is named.
    #[default]
    Vllm,
    /// SGLang 0.5: `entrypoints/openai/serving_chat.py`.
    Sglang,
    /// llama.cpp's server: `common/chat.cpp`.
    LlamaCpp,
    /// Text Generation Inference 3: `router/src/lib.rs`.
    Tgi,
    /// An OpenAI-compatible server without known rules: messages and tools keep their keys.
    OpenAi,
}

impl Server {
    /// Returns whether the template receives an empty object for a tool call's arguments that are not a JSON object.
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

    /// Returns the server with this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::NAMES.iter().find_map(|(known, server)| (*known == name).then_some(*server))
    }

    /// Returns the name of the server.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find_map(|(name, server)| (*server == self).then_some(*name)).unwrap_or_default()
    }
}
