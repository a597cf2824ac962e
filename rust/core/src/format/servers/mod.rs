//! Servers' own responses: one small file each, all read into an `Entry` and, where the request is there, a `Request`.
//!
//! A file knows its response by structure, never by a name that a proxy may rewrite. It fills in the `contract` and
//! has a line in the table below; `said` makes messages of other APIs' parts, `stream` one response of a stream's chunks.

mod anthropic;
mod completions;
pub(super) mod contract;
mod fireworks;
mod gemini;
mod llama_cpp;
mod offline;
mod ollama;
mod responses;
mod said;
mod sglang;
pub(super) mod stream;
#[cfg(test)]
mod tests;
mod tgi;
mod tinker;
mod vllm_generate;

/// The servers, the most telling signs first.
pub const SERVERS: &[contract::Server] = &[
    sglang::SERVER,
    tgi::SERVER,
    offline::TENSORRT_LLM,
    offline::VLLM,
    fireworks::SERVER,
    vllm_generate::SERVER,
    tinker::SERVER,
    ollama::SERVER,
    llama_cpp::SERVER,
    gemini::SERVER,
    responses::SERVER,
    anthropic::SERVER,
    completions::SERVER,
];
