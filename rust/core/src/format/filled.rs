//! The key `tracegrad_filled` of a record in any form: logprobs that were measured after the recording, with the sampler's
//! checkpoint. Recorded logprobs are elsewhere in the record, and are never changed by it.

use super::json::diagnose;
use super::json::outline::Outline;
use super::rejection::{Decoded, Reason, Rejection, reject};
use super::token_list::{Id, Reading};
use crate::trace::{Extra, ExtraStart, Filled, Generation, LogprobKind};

/// The key. Other records do not have it, so what is under it was written by `tracegrad fill`.
const KEY: &str = "tracegrad_filled";

/// What to do about a filled record that is contradictory.
const FILL_AGAIN: &str = "Fill the record again, or remove its key `tracegrad_filled`";

/// Sets `Generation::filled` of the generations, in the order of the calls.
pub(super) fn read(record: &[u8], generations: &mut [Generation]) -> Decoded<()> {
    if memchr::memmem::find(record, b"\"tracegrad_filled\"").is_none() {
        return Ok(());
    }
    let text = diagnose::text(record)?;
    let outline = Outline::parse(&text)?;
    let Some(filled) = outline.object(KEY)? else { return Ok(()) };
    let calls = filled.list("calls").map_err(|rejection| rejection.inside(KEY))?.unwrap_or_default();
    if calls.len() > generations.len() {
        let (count, expected) = (calls.len(), generations.len());
        return Err(reject(
            Reason::Contradiction,
            "TG-FORMAT-085",
            format!("`{KEY}.calls` has {count} items for {expected} generations"),
        )
        .why("It is ambiguous which generation each item belongs to")
        .fix(FILL_AGAIN));
    }
    for (turn, (raw, generation)) in calls.into_iter().zip(generations).enumerate() {
        if raw.get() != "null" {
            let name = format!("{KEY}.calls[{turn}]");
            let call = Outline::of(raw, &name).map_err(|rejection| rejection.in_turn(turn))?;
            let place = |rejection: Rejection| rejection.inside(&name).in_turn(turn);
            generation.filled = Some(Box::new(read_call(&call).map_err(place)?));
        }
    }
    Ok(())
}

fn read_call(call: &Outline<'_>) -> Decoded<Filled> {
    let ids = call.ids("ids")?.unwrap_or_default();
    let readings: Vec<Reading> = call.typed("logprobs")?.unwrap_or_default();
    if ids.len() != readings.len() {
        let (ids, logprobs) = (ids.len(), readings.len());
        return Err(reject(Reason::Contradiction, "TG-FORMAT-086", format!("{ids} `ids` and {logprobs} `logprobs`"))
            .why("It is ambiguous which token each logprob belongs to")
            .fix(FILL_AGAIN));
    }
    let logprobs = readings.iter().enumerate().map(|(at, reading)| match *reading {
        Reading::Value(value) => Ok(value),
        Reading::Missing => Ok(f32::NAN),
        Reading::Invalid => {
            Err(reject(Reason::WrongType, "TG-FORMAT-087", format!("`logprobs[{at}]` is positive or -9999"))
                .why("It is not the logarithm of a probability")
                .fix("Write null if the logprob of a token was not measured"))
        }
    });
    let logprobs = logprobs.collect::<Decoded<Vec<f32>>>()?;
    let kind = match call.text("kind")?.as_deref() {
        Some("raw") => LogprobKind::Raw,
        Some("processed") => LogprobKind::Processed,
        other => {
            let kind = other.unwrap_or("missing");
            return Err(reject(Reason::WrongType, "TG-FORMAT-088", format!("`kind` is {kind}"))
                .why("A filled logprob would be compared with another distribution")
                .fix("Write raw or processed"));
        }
    };
    let kept = kept(call, ids.len())?;
    Ok(Filled { ids, logprobs, kind, temperature: temperature(call)?, kept, replayed: 0, penalties: None })
}

fn temperature(call: &Outline<'_>) -> Decoded<Option<f32>> {
    match call.number("temperature")?.map(|value| value as f32) {
        Some(value) if value <= 0.0 => {
            Err(reject(Reason::WrongType, "TG-FORMAT-089", format!("`temperature` is {value}, not above 0"))
                .why("Logprobs at this temperature do not exist")
                .fix("Leave it out if the logprobs are those of the generation's own temperature"))
        }
        value => Ok(value),
    }
}

/// Reads the ids from which the sampler would have drawn each token; null stands for the complete vocabulary.
fn kept(call: &Outline<'_>, count: usize) -> Decoded<Option<Extra>> {
    let Some(rows) = call.typed::<Vec<Option<Vec<Id>>>>("kept")? else { return Ok(None) };
    if rows.len() != count {
        let rows = rows.len();
        return Err(reject(Reason::Contradiction, "TG-FORMAT-090", format!("{count} `ids` and {rows} `kept`"))
            .why("It is ambiguous which token each list belongs to")
            .fix(FILL_AGAIN));
    }
    if let Some(at) = rows.iter().position(|row| row.as_ref().is_some_and(Vec::is_empty)) {
        return Err(reject(Reason::Contradiction, "TG-FORMAT-091", format!("`kept[{at}]` is an empty list"))
            .why("No token could have been sampled")
            .fix("Write null for the complete vocabulary"));
    }
    let (mut ends, mut values) = (Vec::with_capacity(count), Vec::new());
    for row in rows {
        values.extend(row.into_iter().flatten().map(|Id(id)| i32::try_from(id).unwrap_or(i32::MAX)));
        ends.push(values.len() as u32);
    }
    Ok(Some(Extra { name: "sampling_mask", first: ExtraStart::Sampled, shape: Vec::new(), ends, values }))
}
