//! The native format `tracegrad/1`: a list of messages with their generations, and a list of messages from rewritten
//! histories.
//!
//! It accepts everything that `chat` accepts. In addition a `generation` may name its `context` by message indices and
//! its number among the calls. The indices count through `messages` and then `extra_messages`.

use super::build::Body;
use super::chat::{Placings, append};
use super::fields::{Fields, Sampling, count};
use super::json::object::Object;
use super::rejection::{Decoded, Reason, Rejection, reject};
use crate::trace::Generation;
use serde_json::Value;

/// The value of the key `format`.
pub(super) const NAME: &str = "tracegrad/1";

pub(super) fn decode(record: &mut Object, sampling: &Sampling) -> Decoded<Body> {
    let mut body = Body::default();
    let nodes = record.take_list("messages")?.ok_or_else(|| {
        reject(Reason::Incomplete, "TG-FORMAT-045", "no `messages`")
            .why("A trace consists of messages, some of them sampled")
            .fix("Write the messages as a list under `messages`")
    })?;
    let mut placings = append(&mut body, nodes, sampling, "messages")?;
    body.conversation = (0..body.messages.len() as u32).collect();
    let main = body.messages.len() as u32;
    if let Some(extra) = record.take_list("extra_messages")? {
        placings.extend(append(&mut body, extra, sampling, "extra_messages")?);
    }
    for (turn, placing) in &placings {
        place(&mut body, *turn, placing, main).map_err(|rejection| rejection.in_turn(*turn))?;
    }
    body.generations = in_call_order(body.generations, &placings)?;
    Ok(body)
}

fn place(body: &mut Body, turn: usize, placing: &Fields, main: u32) -> Decoded<()> {
    let pool = body.messages.len();
    let generation = &mut body.generations[turn];
    match placing.get("context") {
        Some(Value::Array(list)) => {
            generation.context = list.iter().map(|index| message_index(index, pool)).collect::<Decoded<_>>()?;
        }
        None | Some(Value::Null) if generation.message < main => {}
        None | Some(Value::Null) => {
            return Err(reject(
                Reason::Incomplete,
                "TG-FORMAT-046",
                "a generation in `extra_messages` names no `context`",
            )
            .why("Its prompt is unknown")
            .fix("Give the indices of the messages it saw, counted through messages and then extra_messages"));
        }
        Some(other) => return Err(bad_context(&other.to_string())),
    }
    if generation.context.contains(&generation.message) {
        return Err(bad_context("a list that holds the message itself"));
    }
    Ok(())
}

fn message_index(index: &Value, pool: usize) -> Decoded<u32> {
    match index.as_u64() {
        Some(index) if index < pool as u64 => Ok(index as u32),
        _ => Err(bad_context(&format!("a list with {index}, and there are {pool} messages"))),
    }
}

fn bad_context(description: &str) -> Rejection {
    reject(Reason::WrongType, "TG-FORMAT-047", format!("`context` is {description}"))
        .why("It must be a list of the indices of other messages of the record")
        .fix("Count through messages and then extra_messages, from 0")
}

/// Sorts generations by their `call` numbers, if they have any.
fn in_call_order(generations: Vec<Generation>, placings: &Placings) -> Decoded<Vec<Generation>> {
    let number = |(turn, placing): &(usize, Fields)| count(placing, "call").map_err(|r| r.in_turn(*turn));
    let numbers = placings.iter().map(number).collect::<Decoded<Vec<_>>>()?;
    if numbers.iter().all(Option::is_none) {
        return Ok(generations);
    }
    if let Some(turn) = numbers.iter().position(Option::is_none) {
        return Err(reject(Reason::Incomplete, "TG-FORMAT-048", "a generation names no `call`, but others do")
            .why("The order of the calls is unknown")
            .fix("Number all generations of the record, or none")
            .in_turn(turn));
    }
    let mut numbered: Vec<_> = numbers.into_iter().zip(generations).collect();
    numbered.sort_by_key(|(number, _)| *number);
    Ok(numbered.into_iter().map(|(_, generation)| generation).collect())
}
