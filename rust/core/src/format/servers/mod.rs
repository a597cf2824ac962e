//! Servers' own responses: one small file each, all read into an `Entry` and, where the request is there, a `Request`.
//!
//! A file knows its response by structure, never by a name that a proxy may rewrite. It fills in the `interface` and
//! has a line in the table below; `messages` makes messages of other APIs' parts, `stream` one response of a stream's chunks.

mod anthropic;
mod completions;
mod fireworks;
mod gemini;
pub(super) mod interface;
mod llama_cpp;
mod messages;
mod ollama;
mod request_output;
mod responses;
mod sglang;
pub(super) mod stream;
#[cfg(test)]
mod tests;
mod tgi;
mod tinker;
mod vllm_generate;

/// The servers, the most telling signs first.
pub const SERVERS: &[interface::Server] = &[
    sglang::SERVER,
    tgi::SERVER,
    request_output::TENSORRT_LLM,
    request_output::VLLM,
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
