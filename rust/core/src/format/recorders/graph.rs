//! verifiers' message graph: each node holds one message and the ids it adds to those of its parents.
//!
//! The ids of a path, end to end, are what the model saw. A node with several children is where a history was rewritten or
//! sampled again; each sampled node is one generation, whatever the number of paths through it.

use super::contract::{Body, Decoded, Header, Outline, Reason, Shape, either, reject};
use super::kits::columns::{Columns, tokens_of};
use super::kits::masked::{all_zero, lengths};
use super::kits::openai::{openai, tools};
use super::kits::talk::message;
use crate::format::json::fields::Fields;
use crate::sampling::Options;
use crate::trace::{Generation, Message, Prompt};
use serde_json::Value;

/// What is kept of a node for its children.
struct Node {
    parent: Option<usize>,
    /// Ids after the last sampled one of the path, in this node.
    tail: Vec<u32>,
    /// The generation that this node is, where it has sampled ids.
    turn: Option<u32>,
    /// Messages on the way to it, itself included.
    depth: usize,
}

pub(super) fn decode(record: &Outline<'_>) -> Decoded<(Header, Body)> {
    let header = header(record)?;
    let nodes = record.objects("nodes")?;
    let calls = said(record)?;
    let trains = !record.object("agent")?.is_some_and(|agent| matches!(agent.typed("trainable"), Ok(Some(false))));
    let mut graph = Graph { header: &header, calls, body: Body::default(), nodes: Vec::new() };
    for (index, node) in nodes.iter().enumerate() {
        graph.add(node, trains).map_err(|rejection| rejection.inside(format!("nodes[{index}]")))?;
    }
    if let Some(last) = graph.nodes.len().checked_sub(1) {
        graph.body.conversation = graph.path(last);
    }
    let mut body = graph.body;
    let own = nodes.first().map(|root| root.value("tools")).transpose()?.flatten();
    body.tools = tools(either(own, || record.value("tools"))?);
    body.model = graph.calls.iter().find_map(|(_, call)| call.get("model")?.as_str().map(str::to_owned));
    Ok((header, body))
}

struct Graph<'h> {
    header: &'h Header,
    /// What `calls` say of the calls that committed nodes, sorted by node.
    calls: Vec<(usize, Fields)>,
    body: Body,
    nodes: Vec<Node>,
}

impl Graph<'_> {
    fn add(&mut self, node: &Outline<'_>, trains: bool) -> Decoded<()> {
        let index = self.nodes.len();
        let parent = node.count("parent")?.map(|parent| parent as usize);
        if let Some(parent) = parent.filter(|&parent| parent >= index) {
            let what = format!("its parent is node {parent}, which does not stand before it");
            return Err(reject(Reason::Contradiction, what)
                .why("The path to it cannot be walked")
                .cure("Write the trace as verifiers' to_record makes it"));
        }
        self.body.messages.push(message_of(node)?);
        let columns = Columns(node);
        let ids = columns.ids("token_ids")?.unwrap_or_default();
        let is_sampled = trains && node.typed::<bool>("sampled")? == Some(true);
        let mask = columns.mask("mask")?.unwrap_or_default();
        if (is_sampled || !mask.is_empty()) && mask.len() != ids.len() {
            return Err(lengths("mask", mask.len(), ids.len()));
        }
        let depth = parent.map_or(1, |parent| self.nodes[parent].depth + 1);
        let mut kept = Node { parent, tail: Vec::new(), turn: None, depth };
        if is_sampled {
            self.sample(node, ids, &mask, &mut kept)?;
        } else {
            kept.tail = ids;
        }
        self.nodes.push(kept);
        Ok(())
    }

    fn sample(&mut self, node: &Outline<'_>, ids: Vec<u32>, mask: &[bool], kept: &mut Node) -> Decoded<()> {
        let index = self.nodes.len();
        let start = mask.iter().position(|&bit| bit).unwrap_or(mask.len());
        let end = start + mask[start..].iter().take_while(|&&bit| bit).count();
        if mask.get(end..).is_some_and(|rest| rest.contains(&true)) {
            return Err(reject(Reason::Contradiction, "its mask has several runs of sampled ids")
                .why("A node is one call of the model")
                .cure("Write the trace as verifiers' to_record makes it"));
        }
        let mut generation = self.header.sampling.generation();
        self.describe(index, &mut generation);
        generation.message = index as u32;
        generation.prompt = self.prompt(kept.parent, &ids[..start])?;
        self.body.budget.spend(kept.depth)?;
        generation.context = kept.parent.map_or_else(Vec::new, |parent| self.path(parent));
        let logprobs = Columns(node).logprobs("logprobs")?.filter(|logprobs| !logprobs.is_empty());
        if start < end || logprobs.is_some() {
            generation.tokens = tokens_of((start < end).then(|| ids[start..end].to_vec()), logprobs);
            generation.notes.extend(all_zero(&generation.tokens));
        }
        (kept.tail, kept.turn) =
            if start < end { (ids[end..].to_vec(), Some(self.body.generations.len() as u32)) } else { (ids, None) };
        self.body.generations.push(generation);
        Ok(())
    }

    /// What stood before the first sampled id of a node: all ids of its parents back to the last sampled one, and `lead`.
    fn prompt(&mut self, parent: Option<usize>, lead: &[u32]) -> Decoded<Prompt> {
        let (mut at, mut parts, mut turn) = (parent, Vec::new(), None);
        while let Some(index) = at {
            let node = &self.nodes[index];
            parts.push(index);
            turn = node.turn;
            at = node.parent.filter(|_| turn.is_none());
        }
        let count = lead.len() + parts.iter().map(|&part| self.nodes[part].tail.len() + 1).sum::<usize>();
        self.body.budget.spend(count)?;
        let mut ids = Vec::with_capacity(count);
        for &part in parts.iter().rev() {
            ids.extend_from_slice(&self.nodes[part].tail);
        }
        ids.extend_from_slice(lead);
        Ok(match turn {
            Some(turn) => Prompt::Follows { turn, ids },
            None if ids.is_empty() => Prompt::Rendered,
            None => Prompt::Ids(ids),
        })
    }

    /// Messages on the way to a node, itself included.
    fn path(&self, index: usize) -> Vec<u32> {
        let mut path = Vec::with_capacity(self.nodes[index].depth);
        let mut at = Some(index);
        while let Some(index) = at {
            path.push(index as u32);
            at = self.nodes[index].parent;
        }
        path.reverse();
        path
    }

    /// How the call that committed a node sampled.
    fn describe(&self, node: usize, generation: &mut Generation) {
        let Ok(found) = self.calls.binary_search_by_key(&node, |(node, _)| *node) else { return };
        let fields = &self.calls[found].1;
        let sampling = fields.get("sampling").and_then(Value::as_object);
        let number = |key: &str| sampling?.get(key)?.as_f64().map(|value| value as f32);
        generation.temperature = generation.temperature.or(number("temperature"));
        generation.top_p = generation.top_p.or(number("top_p"));
        generation.options = std::mem::take(&mut generation.options).or(&sampling.map_or(Options::NONE, Options::read));
        generation.finish_reason = fields.get("finish_reason").and_then(Value::as_str).map(str::to_owned);
    }
}

fn message_of(node: &Outline<'_>) -> Decoded<Message> {
    match node.value("message")? {
        Some(Value::Object(mut fields)) => {
            fields.remove("provider_state");
            message(Value::Object(openai(fields)))
        }
        _ => Err(reject(Reason::Incomplete, "no `message`")
            .why("What the node says is not known")
            .cure("Write the trace as verifiers' to_record makes it")),
    }
}

fn said(record: &Outline<'_>) -> Decoded<Vec<(usize, Fields)>> {
    let mut calls = Vec::new();
    for (position, call) in record.objects("calls")?.iter().enumerate() {
        let node = call.count("node").map_err(|rejection| rejection.inside(format!("calls[{position}]")))?;
        if let Some(node) = node {
            calls.push((node as usize, call.fields_without(&["usage", "time", "acp"])?));
        }
    }
    calls.sort_by_key(|(node, _)| *node);
    Ok(calls)
}

/// Weighted rewards by name, and their sum as verifiers' `Trace.reward` has it; the task is the group.
fn header(record: &Outline<'_>) -> Decoded<Header> {
    let mut header = Columns(record).header_without(&["rewards", "tools"], &[])?;
    if let Some(rewards) = record.object("rewards")? {
        let mut sum = None;
        for name in rewards.keys() {
            let value = match rewards.get(name).map(Shape::of) {
                Some(Shape::Object) => {
                    let reward = rewards.object(name)?.unwrap_or_default();
                    let weight = reward.number("weight")?.unwrap_or(1.0);
                    reward.number("score")?.map(|score| score * weight)
                }
                _ => rewards.number(name)?,
            };
            sum = value.map(|value| sum.unwrap_or(0.0) + value).or(sum);
            header.rewards.push((name.to_owned(), value.map_or(f32::NAN, |value| value as f32)));
        }
        header.reward = header.reward.or(sum.map(|sum| sum as f32));
    }
    if let Some(task) = record.object("task")?.filter(|_| header.group.is_none()) {
        header.group = either(task.name("key")?, || task.name("hash"))?;
    }
    Ok(header)
}
