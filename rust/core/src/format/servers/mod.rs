//! Responses of servers: one small file for each server, which reads an `Entry` and, if there is a request, a
//! `Request`.
//!
//! A response is recognised by its structure, not by a name, since proxies rewrite names. Each file fills in the
//! `interface` and has a line in the table below. `messages` builds messages from the parts of other APIs, and `stream`
//! builds one response from the chunks of a stream.

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

/// All servers. Those with the most specific signs come first.
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
