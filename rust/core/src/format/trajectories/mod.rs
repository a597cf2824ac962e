//! Trajectory dumps of trainers and recorders: one small file for each, which reads a header and a body.
//!
//! A file fills in the `interface`, mostly with functions of `helpers`, and has a line in the table below. Begin with a
//! similar one: `tau_bench` (messages, text only), `rllm` (turns with ids and logprobs), `areal` (columns of one row
//! with a mask). The formats are described in docs/reference/trace-format.md, and example records are in tests/golden
//! (`more_dumps.py`).

mod agent_lightning;
mod areal;
mod art;
mod atif;
mod helpers;
pub(super) mod interface;
mod langfuse;
mod litellm_log;
mod openai_batch;
mod otel;
mod rllm;
mod skyrl;
mod slime;
mod swe_agent;
mod tau_bench;
mod trl;
mod verifiers;
mod verl;

/// All recorders. Those with the most specific signs come first.
pub(super) const DUMPS: &[interface::TrajectoryFormat] = &[
    openai_batch::DUMP,
    agent_lightning::DUMP,
    otel::DUMP,
    litellm_log::DUMP,
    art::DUMP,
    atif::DUMP,
    rllm::DUMP,
    slime::DUMP,
    verl::DUMP,
    skyrl::DUMP,
    areal::DUMP,
    verifiers::DUMP,
    trl::DUMP,
    langfuse::DUMP,
    tau_bench::DUMP,
    swe_agent::DUMP,
];
