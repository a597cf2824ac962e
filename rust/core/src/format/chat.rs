//! Reads a record that is one message list: `{"messages": [...]}`.
//!
//! Every assistant message is a generation of the policy, in the context of all messages before it, unless it has
//! `"sampled": false`. Token lists may be on the message, on a choice around it, or in its `generation`.

use super::build::message::Entry;
use super::build::{Body, tokens};
use super::fields::{Fields, Sampling};
use super::json::object::{Node, Object};
use super::rejection::{Decoded, Reason, reject};

/// Fields of the `generation` objects that place generations: index of the generation, and its fields.
pub(super) type Placings = Vec<(usize, Fields)>;

pub(super) fn decode(record: &mut Object, sampling: &Sampling) -> Decoded<Body> {
    let nodes = record.take_list("messages")?.unwrap_or_default();
    if nodes.is_empty() {
        return Err(reject(Reason::Incomplete, "TG-FORMAT-019", "`messages` is empty")
            .why("There is nothing to train on and nothing to align")
            .fix("Leave the record out, or record its messages"));
    }
    let mut body = Body::default();
    append(&mut body, nodes, sampling, "messages")?;
    body.conversation = (0..body.messages.len() as u32).collect();
    Ok(body)
}

/// Appends entries to the pool. The context of a generation is every message before it.
pub(super) fn append(body: &mut Body, nodes: Vec<Node>, sampling: &Sampling, list: &str) -> Decoded<Placings> {
    let mut placings = Vec::new();
    body.messages.reserve(nodes.len());
    for (position, node) in nodes.into_iter().enumerate() {
        let place = |rejection: super::rejection::Rejection| rejection.inside(format!("{list}[{position}]"));
        let item = node.object("entry").map_err(place)?;
        let entry = Entry::read(item, sampling).map_err(place)?;
        let index = body.messages.len() as u32;
        body.messages.push(entry.message);
        body.unused_choices += entry.unused_choices;
        if let Some(mut generation) = entry.generation {
            body.budget.spend(index as usize)?;
            generation.message = index;
            generation.context = (0..index).collect();
            let before = index.checked_sub(1).map(|before| &body.messages[before as usize]);
            tokens::check(&mut generation, &body.messages[index as usize], before);
            placings.push((body.generations.len(), entry.generation_fields));
            body.generations.push(generation);
        }
    }
    Ok(placings)
}
