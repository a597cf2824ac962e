//! Dumps of whole trajectories by trainers and recorders: one small file each, all read into a header and a body.

use super::body::Body;
use super::fields::Header;
use super::form::Form;
use super::outline::Outline;
use super::rejection::Decoded;

mod agent_lightning;
mod areal;
mod art;
mod atif;
mod attributes;
mod columns;
mod graph;
mod langfuse;
mod litellm_log;
mod literal;
mod masked;
mod openai_batch;
mod otel;
mod rllm;
mod skyrl;
mod slime;
mod splice;
mod swe_agent;
mod talk;
mod tau_bench;
mod trl;
mod verifiers;
mod verl;

#[cfg(test)]
mod tests;

/// How one recorder writes a trajectory.
pub(super) struct Dump {
    pub form: Form,
    /// Keys that make a record worth asking about.
    pub signs: &'static [&'static str],
    /// Whether this is a record of it.
    pub knows: fn(&Outline<'_>) -> bool,
    /// The record's header and body.
    pub decode: fn(&Outline<'_>) -> Decoded<(Header, Body)>,
}

/// The recorders, the most telling signs first.
pub(super) const DUMPS: &[Dump] = &[
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
