//! Images in prompts: the ids that stand for one become keys, which no other image has, and become pads again in the output.
//!
//! Ids do not tell two images of one size apart, and a pad id may be sampled or written by a user. So before a trace is
//! aligned the pads of each image are replaced by numbers above every id, one for each (image, place in it); whatever
//! compares ids then compares images. The output has the pads again, and flat lists of the places at which they stand.

#[cfg(test)]
mod tests;

use super::branch::Branch;
use super::prompt::Text;
use super::types;
use crate::error::{Error, Kind, Result};
use crate::images::{Picture, handles};
use crate::media;
use crate::trace::{Generation, Placeholder, Prompt, Trace};
use std::collections::HashMap;
use std::sync::Arc;

/// The first key: no model has so many ids.
const FIRST_KEY: u32 = 1 << 31;

/// How one model's ids stand for pictures.
#[derive(Debug, Default)]
pub struct PictureRule {
    /// The id that is repeated, one for each feature of a picture.
    pub pad: u32,
    /// Ids that templates and processors write around pictures.
    pub frames: Vec<u32>,
    /// What stands for a picture of (width, height): pads, and between them what the processor writes.
    pub expansions: HashMap<(u32, u32), Vec<u32>>,
}

/// A trace whose prompts hold keys.
#[derive(Debug)]
pub(super) struct Keyed<'r> {
    pub trace: Arc<Trace>,
    rule: &'r PictureRule,
    /// Of each picture of the trace its first key, less [`FIRST_KEY`]; behind them the end.
    firsts: Vec<u32>,
    turns: Vec<Placed>,
}

/// Whether the pictures of a generation's prompt were found in its ids.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Placed {
    /// It has none, or has something else that is no text.
    Nothing,
    /// All; so many ids were added to a prompt that was recorded as it was sent.
    All(usize),
    /// Not, and why.
    Not(String),
}

/// A prompt whose pictures were found.
struct Whole {
    keys: Vec<u32>,
    /// How many ids were added to those recorded.
    added: usize,
    /// As recorded.
    ids: Vec<u32>,
    pictures: Vec<usize>,
}

/// Ids with one pad for each picture, and how many ids each of them stands for.
pub(super) struct Collapsed {
    pub ids: Vec<u32>,
    widths: Vec<usize>,
}

/// A picture where it stands in a branch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Span {
    /// Index into the pictures of the trace.
    pub picture: usize,
    /// The token of each of its features.
    pub at: Vec<usize>,
}

impl<'r> Keyed<'r> {
    /// The trace with keys in its prompts; `None` where it has no picture.
    ///
    /// # Errors
    /// `Kind::Alignment` for pictures with more features together than there are keys.
    pub fn of(trace: &Arc<Trace>, rule: &'r PictureRule) -> Result<Option<Self>> {
        if trace.pictures.is_empty() {
            return Ok(None);
        }
        let mut firsts = vec![0_u32];
        for picture in &trace.pictures {
            let features = rule.expansion(picture).map_or(0, |ids| rule.features(ids));
            let end = firsts.last().map_or(0, |&first| u64::from(first)) + features as u64;
            let end = u32::try_from(end).ok().filter(|&end| end < FIRST_KEY);
            firsts.push(end.ok_or_else(|| too_many(trace))?);
        }
        let mut keyed = Self { trace: Arc::clone(trace), rule, firsts, turns: Vec::new() };
        let mut generations = trace.generations.clone();
        let mut wholes: Vec<Option<Whole>> = Vec::with_capacity(generations.len());
        for (turn, generation) in generations.iter_mut().enumerate() {
            let (whole, placed) = match keyed.keys_of(turn, &wholes) {
                Ok(Some(whole)) => {
                    let added = whole.added;
                    (Some(whole), Placed::All(added))
                }
                Ok(None) => (None, Placed::Nothing),
                Err(why) => (None, Placed::Not(why)),
            };
            if let Some(whole) = &whole {
                generation.prompt = continued(&generation.prompt, &whole.keys, &wholes, trace);
            }
            wholes.push(whole);
            keyed.turns.push(placed);
        }
        keyed.trace = Arc::new(Trace { generations, ..Trace::clone(trace) });
        Ok(Some(keyed))
    }

    /// Whether the prompt of a generation has keys.
    pub fn has_keys(&self, turn: usize) -> bool {
        matches!(self.turns.get(turn), Some(Placed::All(_)))
    }

    /// Why the pictures of a prompt were not found in its ids, if they were not.
    pub fn why_not(&self, turn: usize) -> Option<&str> {
        if let Some(Placed::Not(why)) = self.turns.get(turn) { Some(why) } else { None }
    }

    /// How many ids were added to a prompt that was recorded as it was sent.
    pub fn added(&self, turn: usize) -> usize {
        if let Some(Placed::All(added)) = self.turns.get(turn) { *added } else { 0 }
    }

    /// Whether an id that is no key belongs to how pictures are written.
    pub fn explains(&self, id: u32) -> bool {
        id == self.rule.pad || self.rule.frames.contains(&id)
    }

    /// Ids as a template writes them, with one pad for each picture.
    pub fn collapse(&self, ids: &[u32]) -> Collapsed {
        let mut short = Collapsed { ids: Vec::with_capacity(ids.len()), widths: Vec::with_capacity(ids.len()) };
        let mut at = 0;
        while let Some(&id) = ids.get(at) {
            let (picture, offset) = match id.checked_sub(FIRST_KEY) {
                None => (None, 0),
                Some(key) => {
                    let picture = self.picture_of(key);
                    (self.expansion(picture).ok(), key - self.firsts[picture])
                }
            };
            let before = picture.and_then(|ids| ids.iter().position(|&id| id == self.rule.pad)).unwrap_or(0);
            let width = picture.filter(|_| offset == 0).map_or(1, <[u32]>::len);
            short.cut(before);
            short.ids.push(if picture.is_some() { self.rule.pad } else { id });
            short.widths.push(width);
            at += width - before;
        }
        short
    }

    /// Takes the keys out of a branch: pads again, which are given, and where each picture stands.
    pub fn unkey(&self, branch: &mut Branch<'_>) -> Vec<Span> {
        let mut spans: Vec<Span> = Vec::new();
        for (token, id) in branch.ids.iter_mut().enumerate() {
            let Some(key) = id.checked_sub(FIRST_KEY) else { continue };
            *id = self.rule.pad;
            branch.source[token] = types::GIVEN;
            let picture = self.picture_of(key);
            match spans.last_mut() {
                Some(span) if key != self.firsts[picture] => span.at.push(token),
                _ => spans.push(Span { picture, at: vec![token] }),
            }
        }
        spans
    }

    /// All ids of a prompt with keys; `None` where it has no picture.
    fn keys_of(&self, turn: usize, before: &[Option<Whole>]) -> std::result::Result<Option<Whole>, String> {
        let generation = &self.trace.generations[turn];
        let Some(pictures) = self.pictures(generation).filter(|pictures| !pictures.is_empty()) else {
            return Ok(None);
        };
        let unrecorded = || "the record does not have the ids of its prompt".to_owned();
        let ids = self.trace.prompt_ids(turn).ok_or_else(unrecorded)?;
        if ids.iter().any(|&id| id >= FIRST_KEY) {
            return Ok(None);
        }
        if let Some(told) = &generation.placeholders {
            return self.as_told(&ids, &pictures, told).map(|keys| Some(Whole { keys, added: 0, ids, pictures }));
        }
        let sampled = |turn: usize| self.trace.generations[turn].tokens.ids.as_deref();
        let earlier = before.iter().enumerate().rev().find_map(|(turn, earlier)| {
            let (earlier, sampled) = (earlier.as_ref()?, sampled(turn)?);
            let rest = pictures.strip_prefix(earlier.pictures.as_slice())?;
            Some((earlier, sampled, ids.strip_prefix(earlier.ids.as_slice())?.strip_prefix(sampled)?, rest))
        });
        // Pads that an earlier turn sampled are no pictures.
        if let Some((earlier, sampled, tail, rest)) = earlier
            && let Ok((behind, added)) = self.placed(tail, rest)
        {
            let keys = [earlier.keys.as_slice(), sampled, behind.as_slice()].concat();
            return Ok(Some(Whole { keys, added: earlier.added + added, ids, pictures }));
        }
        self.placed(&ids, &pictures).map(|(keys, added)| Some(Whole { keys, added, ids, pictures }))
    }

    /// Ids with the keys of these pictures, and how many were added.
    fn placed(&self, ids: &[u32], pictures: &[usize]) -> std::result::Result<(Vec<u32>, usize), String> {
        match self.by_rule(ids, pictures) {
            Ok(keys) => Ok((keys, 0)),
            Err(why) => self.expanded(ids, pictures).ok_or(why),
        }
    }

    /// The pictures of a prompt, in order, as indices into those of the trace; `None` where something else is no text.
    fn pictures(&self, generation: &Generation) -> Option<Vec<usize>> {
        let mut found = Vec::new();
        for &index in &generation.context {
            let message = &self.trace.messages.get(index as usize)?.value;
            if media::part_of(message).is_some() {
                return None;
            }
            for digest in handles(message) {
                found.push(self.trace.pictures.iter().position(|picture| picture.digest == digest)?);
            }
        }
        Some(found)
    }

    /// The picture that a key is of: the last of those that begin there, as others have no feature.
    fn picture_of(&self, key: u32) -> usize {
        self.firsts.partition_point(|&first| first <= key) - 1
    }

    fn expansion(&self, picture: usize) -> std::result::Result<&'r [u32], String> {
        let picture = &self.trace.pictures[picture];
        self.rule.expansion(picture).ok_or_else(|| {
            let (width, height) = (picture.width, picture.height);
            format!("the model's image processor does not say how many ids a picture of {width} x {height} has")
        })
    }

    /// What stands for a picture, with keys in place of its pads.
    fn keys(&self, picture: usize, expansion: &'r [u32]) -> impl Iterator<Item = u32> + use<'r> {
        let (pad, mut next) = (self.rule.pad, FIRST_KEY + self.firsts[picture]);
        expansion.iter().map(move |&id| {
            if id == pad {
                next += 1;
                next - 1
            } else {
                id
            }
        })
    }

    /// Pictures where the server says that they stand.
    fn as_told(&self, ids: &[u32], pictures: &[usize], told: &[Placeholder]) -> std::result::Result<Vec<u32>, String> {
        if told.len() != pictures.len() {
            return Err(format!("the server placed {} pictures, the messages have {}", told.len(), pictures.len()));
        }
        let mut out = Vec::with_capacity(ids.len());
        let mut at = 0;
        for (&picture, place) in pictures.iter().zip(told) {
            let (start, expansion) = (place.offset as usize, self.expansion(picture)?);
            let end = start.checked_add(place.length as usize).filter(|&end| end <= ids.len() && start >= at);
            let Some(end) = end else { return Err("the places of pictures are not those of the prompt's ids".into()) };
            if ids[start..end] != *expansion {
                return Err(self.other_length(picture, run(&ids[start..], self.rule.pad)));
            }
            out.extend_from_slice(&ids[at..start]);
            out.extend(self.keys(picture, expansion));
            at = end;
        }
        out.extend_from_slice(&ids[at..]);
        Ok(out)
    }

    /// From left to right each picture takes the next place that can be its own, as servers do.
    fn by_rule(&self, ids: &[u32], pictures: &[usize]) -> std::result::Result<Vec<u32>, String> {
        let pad = self.rule.pad;
        let mut out = Vec::with_capacity(ids.len());
        let mut at = 0;
        for (place, &picture) in pictures.iter().enumerate() {
            let expansion = self.expansion(picture)?;
            let starts = |&start: &usize| match expansion.first() {
                Some(&first) if first == pad => ids[start] == pad,
                _ => ids[start..].starts_with(expansion),
            };
            let Some(start) = (at..ids.len()).find(starts) else {
                let all = pictures.len();
                return Err(format!("its ids have a place for {place} of the {all} pictures of its messages"));
            };
            if !ids[start..].starts_with(expansion) {
                return Err(self.other_length(picture, run(&ids[start..], pad)));
            }
            out.extend_from_slice(&ids[at..start]);
            out.extend(self.keys(picture, expansion));
            at = start + expansion.len();
        }
        out.extend_from_slice(&ids[at..]);
        // One pad that no picture takes is a word; several, or one behind a picture, would be a picture's that the
        // server took for a larger one.
        let stray = |pair: &[u32]| pair[1] == pad && (pair[0] == pad || pair[0] >= FIRST_KEY);
        match out.windows(2).position(stray) {
            None => Ok(out),
            Some(at) => {
                let more = run(&out[at + 1..], pad) + usize::from(out[at] == pad);
                Err(format!("its prompt has {more} ids of a picture more than the pictures of its messages have"))
            }
        }
    }

    /// A prompt as it was sent, one pad for each picture, as the server read it.
    fn expanded(&self, ids: &[u32], pictures: &[usize]) -> Option<(Vec<u32>, usize)> {
        let pad = self.rule.pad;
        if ids.iter().filter(|&&id| id == pad).count() != pictures.len() {
            return None;
        }
        let mut next = pictures.iter();
        let mut out = Vec::with_capacity(ids.len());
        for &id in ids {
            match if id == pad { next.next() } else { None } {
                Some(&picture) => out.extend(self.keys(picture, self.expansion(picture).ok()?)),
                None => out.push(id),
            }
        }
        let added = out.len().checked_sub(ids.len())?;
        Some((out, added))
    }

    fn other_length(&self, picture: usize, found: usize) -> String {
        let Picture { width, height, .. } = self.trace.pictures[picture];
        let expected = self.expansion(picture).map_or(0, |ids| self.rule.features(ids));
        format!(
            "a picture of {width} x {height} has {expected} ids by the model's image processor, and its prompt has \
             {found} there"
        )
    }
}

impl Collapsed {
    /// Takes back what a picture begins with before its first pad.
    fn cut(&mut self, count: usize) {
        let length = self.ids.len().saturating_sub(count);
        self.ids.truncate(length);
        self.widths.truncate(length);
    }

    /// The ids that it was made from, with the source of each.
    pub fn restore(&self, ids: &[u32], sources: &[u8]) -> Text {
        let wide = sources.iter().zip(&self.widths).flat_map(|(&source, &width)| std::iter::repeat_n(source, width));
        Text::new(ids.to_vec(), wide.collect())
    }
}

impl PictureRule {
    fn expansion(&self, picture: &Picture) -> Option<&[u32]> {
        self.expansions.get(&(picture.width, picture.height)).map(Vec::as_slice)
    }

    fn features(&self, ids: &[u32]) -> usize {
        ids.iter().filter(|&&id| id == self.pad).count()
    }
}

/// How many ids are the pad before the first that is not.
fn run(ids: &[u32], pad: u32) -> usize {
    ids.iter().take_while(|&&id| id == pad).count()
}

/// A prompt whose keys are `whole`: behind the same turn as before, where that stands there with the same keys.
fn continued(prompt: &Prompt, whole: &[u32], wholes: &[Option<Whole>], trace: &Trace) -> Prompt {
    if let Prompt::Follows { turn, .. } = prompt {
        let keyed = wholes.get(*turn as usize).and_then(Option::as_ref).map(|whole| whole.keys.clone());
        let earlier = keyed.or_else(|| trace.prompt_ids(*turn as usize));
        let sampled = trace.generations.get(*turn as usize).and_then(|earlier| earlier.tokens.ids.as_deref());
        let behind = earlier
            .as_deref()
            .zip(sampled)
            .and_then(|(earlier, sampled)| whole.strip_prefix(earlier).and_then(|behind| behind.strip_prefix(sampled)));
        if let Some(behind) = behind {
            return Prompt::Follows { turn: *turn, ids: behind.to_vec() };
        }
    }
    Prompt::Ids(whole.to_vec())
}

fn too_many(trace: &Trace) -> Error {
    Error::new(Kind::Alignment, "its pictures have 2^31 features and more")
        .why("Each needs a number of its own among 32 bits")
        .cure("Write the trace as several records")
        .at(&trace.location)
}

/// Places of pictures: shapes as in `pictures.Images` of Python.
#[derive(Debug, Default)]
pub struct Images {
    /// How many places each branch has.
    pub counts: Vec<u32>,
    /// How many features each place has.
    pub features: Vec<u32>,
    /// The token of each feature, counted in its branch.
    pub at: Vec<i32>,
    /// Row of each place in `digests`.
    pub picture: Vec<i32>,
    /// blake3 of each distinct picture.
    pub digests: Vec<[u8; 32]>,
    /// Pixels from left to right and from top to bottom.
    pub sizes: Vec<[u32; 2]>,
    rows: HashMap<[u8; 32], i32>,
}

impl Images {
    /// Takes the keys out of the branches of a trace.
    pub(super) fn push(&mut self, keyed: Option<&Keyed<'_>>, branches: &mut [Branch<'_>]) {
        for branch in branches {
            let spans = keyed.map(|keyed| keyed.unkey(branch)).unwrap_or_default();
            self.counts.push(spans.len() as u32);
            for (span, picture) in
                spans.iter().filter_map(|span| Some((span, keyed?.trace.pictures.get(span.picture)?)))
            {
                let next = self.digests.len() as i32;
                let row = *self.rows.entry(picture.digest).or_insert(next);
                if row == next {
                    self.digests.push(picture.digest);
                    self.sizes.push([picture.width, picture.height]);
                }
                self.picture.push(row);
                self.features.push(span.at.len() as u32);
                self.at.extend(span.at.iter().map(|&token| token as i32));
            }
        }
    }
}
