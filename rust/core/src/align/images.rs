//! Images in prompts: the ids of each image become keys that no other image has, and become pads again in the output.
//!
//! Ids do not distinguish two images of the same size, and a pad id may be sampled or written by a user. Therefore,
//! before a trace is aligned, the pads of each image are replaced by numbers above every id, one number for each
//! (image, position in it). Code that compares ids then compares images too. The output contains the pads again, and
//! flat lists of the positions of the images.

#[cfg(test)]
mod tests;

use super::branch::Branch;
use super::prompt::Text;
use super::types;
use crate::error::{Error, Kind, Result};
use crate::images::{Image, handles};
use crate::media;
use crate::trace::{Generation, ImagePosition, Prompt, Trace};
use std::collections::HashMap;
use std::sync::Arc;

/// The first key. No model has this many ids.
const FIRST_KEY: u32 = 1 << 31;

/// How the ids of one model represent images.
#[derive(Debug, Default)]
pub struct ImageRule {
    /// The id that is repeated once for each feature of an image.
    pub pad: u32,
    /// Ids that templates and processors write around images.
    pub frames: Vec<u32>,
    /// The ids of an image of (width, height): pads, and the ids that the processor writes between them.
    pub expansions: HashMap<(u32, u32), Vec<u32>>,
}

/// A trace whose prompts contain keys.
#[derive(Debug)]
pub(super) struct Keyed<'r> {
    pub trace: Arc<Trace>,
    rule: &'r ImageRule,
    /// The first key of each image of the trace, minus [`FIRST_KEY`]. The last entry is the end of all keys.
    firsts: Vec<u32>,
    turns: Vec<ImagePlacement>,
}

/// Whether the images of a generation's prompt were located in its ids.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ImagePlacement {
    /// The prompt has no images, or contains other media.
    Nothing,
    /// All images were located. The number is how many ids were added to a prompt that was recorded before expansion.
    All(usize),
    /// They were not located, for this reason.
    Not(String),
}

/// A prompt whose images were located.
struct KeyedPrompt {
    keys: Vec<u32>,
    /// Number of ids added to the recorded ones.
    added: usize,
    /// The recorded ids.
    ids: Vec<u32>,
    images: Vec<usize>,
}

/// Ids with one pad for each image, and the number of original ids that each of them represents.
pub(super) struct Collapsed {
    pub ids: Vec<u32>,
    widths: Vec<usize>,
}

/// An image with its tokens in a branch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Span {
    /// Index into the images of the trace.
    pub image: usize,
    /// The token of each feature of the image.
    pub at: Vec<usize>,
}

impl<'r> Keyed<'r> {
    /// Returns the trace with keys in its prompts, or `None` if it has no image.
    ///
    /// # Errors
    /// `Kind::Alignment` if the images have more features in total than there are keys.
    pub fn of(trace: &Arc<Trace>, rule: &'r ImageRule) -> Result<Option<Self>> {
        if trace.images.is_empty() {
            return Ok(None);
        }
        let mut firsts = vec![0_u32];
        for image in &trace.images {
            let features = rule.expansion(image).map_or(0, |ids| rule.features(ids));
            let end = firsts.last().map_or(0, |&first| u64::from(first)) + features as u64;
            let end = u32::try_from(end).ok().filter(|&end| end < FIRST_KEY);
            firsts.push(end.ok_or_else(|| too_many(trace))?);
        }
        let mut keyed = Self { trace: Arc::clone(trace), rule, firsts, turns: Vec::new() };
        let mut generations = trace.generations.clone();
        let mut wholes: Vec<Option<KeyedPrompt>> = Vec::with_capacity(generations.len());
        for (turn, generation) in generations.iter_mut().enumerate() {
            let (whole, placement) = match keyed.keys_of(turn, &wholes) {
                Ok(Some(whole)) => {
                    let added = whole.added;
                    (Some(whole), ImagePlacement::All(added))
                }
                Ok(None) => (None, ImagePlacement::Nothing),
                Err(why) => (None, ImagePlacement::Not(why)),
            };
            if let Some(whole) = &whole {
                generation.prompt = continued(&generation.prompt, &whole.keys, &wholes, trace);
            }
            wholes.push(whole);
            keyed.turns.push(placement);
        }
        keyed.trace = Arc::new(Trace { generations, ..Trace::clone(trace) });
        Ok(Some(keyed))
    }

    /// Returns true if the prompt of a generation has keys.
    pub fn has_keys(&self, turn: usize) -> bool {
        matches!(self.turns.get(turn), Some(ImagePlacement::All(_)))
    }

    /// Returns the reason why the images of a prompt were not located in its ids, or `None` if they were.
    pub fn reason(&self, turn: usize) -> Option<&str> {
        if let Some(ImagePlacement::Not(why)) = self.turns.get(turn) { Some(why) } else { None }
    }

    /// Returns the number of ids added to a prompt that was recorded before its images were expanded.
    pub fn added(&self, turn: usize) -> usize {
        if let Some(ImagePlacement::All(added)) = self.turns.get(turn) { *added } else { 0 }
    }

    /// Returns true if an id that is not a key is one of those that images are written with.
    pub fn explains(&self, id: u32) -> bool {
        id == self.rule.pad || self.rule.frames.contains(&id)
    }

    /// Returns the ids as a template writes them, with one pad for each image.
    pub fn collapse(&self, ids: &[u32]) -> Collapsed {
        let mut short = Collapsed { ids: Vec::with_capacity(ids.len()), widths: Vec::with_capacity(ids.len()) };
        let mut at = 0;
        while let Some(&id) = ids.get(at) {
            let (image, offset) = match id.checked_sub(FIRST_KEY) {
                None => (None, 0),
                Some(key) => {
                    let image = self.image_of(key);
                    (self.expansion(image).ok(), key - self.firsts[image])
                }
            };
            let prefix = image.and_then(|ids| ids.iter().position(|&id| id == self.rule.pad)).unwrap_or(0);
            let width = image.filter(|_| offset == 0).map_or(1, <[u32]>::len);
            short.cut(prefix);
            short.ids.push(if image.is_some() { self.rule.pad } else { id });
            short.widths.push(width);
            at += width - prefix;
        }
        short
    }

    /// Replaces the keys of a branch with pads, marks these as PROMPT, and returns the tokens of each image.
    pub fn unkey(&self, branch: &mut Branch<'_>) -> Vec<Span> {
        let mut spans: Vec<Span> = Vec::new();
        for (token, id) in branch.ids.iter_mut().enumerate() {
            let Some(key) = id.checked_sub(FIRST_KEY) else { continue };
            *id = self.rule.pad;
            branch.source[token] = types::PROMPT;
            let image = self.image_of(key);
            match spans.last_mut() {
                Some(span) if key != self.firsts[image] => span.at.push(token),
                _ => spans.push(Span { image, at: vec![token] }),
            }
        }
        spans
    }

    /// Returns all ids of a prompt, with keys, or `None` if it has no image.
    fn keys_of(
        &self,
        turn: usize,
        earlier_prompts: &[Option<KeyedPrompt>],
    ) -> std::result::Result<Option<KeyedPrompt>, String> {
        let generation = &self.trace.generations[turn];
        let Some(images) = self.images_of(generation).filter(|images| !images.is_empty()) else {
            return Ok(None);
        };
        let unrecorded = || "the record does not have the ids of its prompt".to_owned();
        let ids = self.trace.prompt_ids(turn).ok_or_else(unrecorded)?;
        if ids.iter().any(|&id| id >= FIRST_KEY) {
            return Ok(None);
        }
        if let Some(places) = &generation.placeholders {
            return self
                .as_recorded(&ids, &images, places)
                .map(|keys| Some(KeyedPrompt { keys, added: 0, ids, images }));
        }
        let sampled = |turn: usize| self.trace.generations[turn].tokens.ids.as_deref();
        let earlier = earlier_prompts.iter().enumerate().rev().find_map(|(turn, earlier)| {
            let (earlier, sampled) = (earlier.as_ref()?, sampled(turn)?);
            let new_pictures = images.strip_prefix(earlier.images.as_slice())?;
            Some((earlier, sampled, ids.strip_prefix(earlier.ids.as_slice())?.strip_prefix(sampled)?, new_pictures))
        });
        // Pads that an earlier turn sampled are not images.
        if let Some((earlier, sampled, tail, new_pictures)) = earlier
            && let Ok((new_keys, added)) = self.placed(tail, new_pictures)
        {
            let keys = [earlier.keys.as_slice(), sampled, new_keys.as_slice()].concat();
            return Ok(Some(KeyedPrompt { keys, added: earlier.added + added, ids, images }));
        }
        self.placed(&ids, &images).map(|(keys, added)| Some(KeyedPrompt { keys, added, ids, images }))
    }

    /// Returns the ids with the keys of these images, and the number of ids added.
    fn placed(&self, ids: &[u32], images: &[usize]) -> std::result::Result<(Vec<u32>, usize), String> {
        match self.by_rule(ids, images) {
            Ok(keys) => Ok((keys, 0)),
            Err(why) => self.expanded(ids, images).ok_or(why),
        }
    }

    /// Returns the images of a prompt, in order, as indices into those of the trace. Returns `None` if the prompt
    /// contains other media.
    fn images_of(&self, generation: &Generation) -> Option<Vec<usize>> {
        let mut indices = Vec::new();
        for &index in &generation.context {
            let message = &self.trace.messages.get(index as usize)?.value;
            if media::media_part_type(message).is_some() {
                return None;
            }
            for digest in handles(message) {
                indices.push(self.trace.images.iter().position(|image| image.digest == digest)?);
            }
        }
        Some(indices)
    }

    /// Returns the image that a key belongs to. If several images start at the key, it is the last one, because the
    /// others have no feature.
    fn image_of(&self, key: u32) -> usize {
        self.firsts.partition_point(|&first| first <= key) - 1
    }

    fn expansion(&self, image: usize) -> std::result::Result<&'r [u32], String> {
        let image = &self.trace.images[image];
        self.rule.expansion(image).ok_or_else(|| {
            let (width, height) = (image.width, image.height);
            format!("the model's image processor does not say how many ids a picture of {width} x {height} has")
        })
    }

    /// Returns the ids of an image, with keys in place of its pads.
    fn keys(&self, image: usize, expansion: &'r [u32]) -> impl Iterator<Item = u32> + use<'r> {
        let (pad, mut next) = (self.rule.pad, FIRST_KEY + self.firsts[image]);
        expansion.iter().map(move |&id| {
            if id == pad {
                next += 1;
                next - 1
            } else {
                id
            }
        })
    }

    /// Places the images at the positions that the server recorded.
    fn as_recorded(
        &self,
        ids: &[u32],
        images: &[usize],
        places: &[ImagePosition],
    ) -> std::result::Result<Vec<u32>, String> {
        if places.len() != images.len() {
            return Err(format!("the server placed {} pictures, the messages have {}", places.len(), images.len()));
        }
        let mut out = Vec::with_capacity(ids.len());
        let mut at = 0;
        for (&image, place) in images.iter().zip(places) {
            let (start, expansion) = (place.offset as usize, self.expansion(image)?);
            let end = start.checked_add(place.length as usize).filter(|&end| end <= ids.len() && start >= at);
            let Some(end) = end else { return Err("the places of pictures are not those of the prompt's ids".into()) };
            if ids[start..end] != *expansion {
                return Err(self.other_length(image, run(&ids[start..], self.rule.pad)));
            }
            out.extend_from_slice(&ids[at..start]);
            out.extend(self.keys(image, expansion));
            at = end;
        }
        out.extend_from_slice(&ids[at..]);
        Ok(out)
    }

    /// Places the images from left to right, each at the next position that fits, as servers do.
    fn by_rule(&self, ids: &[u32], images: &[usize]) -> std::result::Result<Vec<u32>, String> {
        let pad = self.rule.pad;
        let mut out = Vec::with_capacity(ids.len());
        let mut at = 0;
        for (place, &image) in images.iter().enumerate() {
            let expansion = self.expansion(image)?;
            let starts = |&start: &usize| match expansion.first() {
                Some(&first) if first == pad => ids[start] == pad,
                _ => ids[start..].starts_with(expansion),
            };
            let Some(start) = (at..ids.len()).find(starts) else {
                let total = images.len();
                return Err(format!("its ids have a place for {place} of the {total} pictures of its messages"));
            };
            if !ids[start..].starts_with(expansion) {
                return Err(self.other_length(image, run(&ids[start..], pad)));
            }
            out.extend_from_slice(&ids[at..start]);
            out.extend(self.keys(image, expansion));
            at = start + expansion.len();
        }
        out.extend_from_slice(&ids[at..]);
        // A single pad that belongs to no image is an ordinary word. Several of them, or one directly after an image,
        // mean that the server expanded that image to a larger one.
        let stray = |pair: &[u32]| pair[1] == pad && (pair[0] == pad || pair[0] >= FIRST_KEY);
        match out.windows(2).position(stray) {
            None => Ok(out),
            Some(at) => {
                let excess = run(&out[at + 1..], pad) + usize::from(out[at] == pad);
                Err(format!("its prompt has {excess} ids of a picture more than the pictures of its messages have"))
            }
        }
    }

    /// Expands a prompt that was recorded as sent, with one pad per image, to the ids that the server read.
    fn expanded(&self, ids: &[u32], images: &[usize]) -> Option<(Vec<u32>, usize)> {
        let pad = self.rule.pad;
        if ids.iter().filter(|&&id| id == pad).count() != images.len() {
            return None;
        }
        let mut next = images.iter();
        let mut out = Vec::with_capacity(ids.len());
        for &id in ids {
            match if id == pad { next.next() } else { None } {
                Some(&image) => out.extend(self.keys(image, self.expansion(image).ok()?)),
                None => out.push(id),
            }
        }
        let added = out.len().checked_sub(ids.len())?;
        Some((out, added))
    }

    fn other_length(&self, image: usize, found: usize) -> String {
        let Image { width, height, .. } = self.trace.images[image];
        let expected = self.expansion(image).map_or(0, |ids| self.rule.features(ids));
        format!(
            "a picture of {width} x {height} has {expected} ids by the model's image processor, and its prompt has \
             {found} there"
        )
    }
}

impl Collapsed {
    /// Removes the ids that an image has before its first pad.
    fn cut(&mut self, count: usize) {
        let length = self.ids.len().saturating_sub(count);
        self.ids.truncate(length);
        self.widths.truncate(length);
    }

    /// Returns the original ids, with the source of each.
    pub fn restore(&self, ids: &[u32], sources: &[u8]) -> Text {
        let wide = sources.iter().zip(&self.widths).flat_map(|(&source, &width)| std::iter::repeat_n(source, width));
        Text::new(ids.to_vec(), wide.collect())
    }
}

impl ImageRule {
    fn expansion(&self, image: &Image) -> Option<&[u32]> {
        self.expansions.get(&(image.width, image.height)).map(Vec::as_slice)
    }

    fn features(&self, ids: &[u32]) -> usize {
        ids.iter().filter(|&&id| id == self.pad).count()
    }
}

/// Counts the pads at the beginning of the ids.
fn run(ids: &[u32], pad: u32) -> usize {
    ids.iter().take_while(|&&id| id == pad).count()
}

/// Returns a prompt with the keys `keys`. It continues the same turn as before if that turn's keys are a prefix of
/// it.
fn continued(prompt: &Prompt, keys: &[u32], prompts: &[Option<KeyedPrompt>], trace: &Trace) -> Prompt {
    if let Prompt::Follows { turn, .. } = prompt {
        let earlier_keys = prompts.get(*turn as usize).and_then(Option::as_ref).map(|earlier| earlier.keys.clone());
        let earlier = earlier_keys.or_else(|| trace.prompt_ids(*turn as usize));
        let sampled = trace.generations.get(*turn as usize).and_then(|earlier| earlier.tokens.ids.as_deref());
        let suffix = earlier
            .as_deref()
            .zip(sampled)
            .and_then(|(earlier, sampled)| keys.strip_prefix(earlier).and_then(|suffix| suffix.strip_prefix(sampled)));
        if let Some(suffix) = suffix {
            return Prompt::Follows { turn: *turn, ids: suffix.to_vec() };
        }
    }
    Prompt::Ids(keys.to_vec())
}

fn too_many(trace: &Trace) -> Error {
    Error::new(Kind::Alignment, "TG-ALIGN-506", "its pictures have 2^31 features and more")
        .why("Each needs a number of its own among 32 bits")
        .fix("Write the trace as several records")
        .at(&trace.location)
}

/// Positions of images. The shapes are the same as in `images.Images` in Python.
#[derive(Debug, Default)]
pub struct Images {
    /// Number of images in each branch.
    pub counts: Vec<u32>,
    /// Number of features of each image occurrence.
    pub features: Vec<u32>,
    /// The token of each feature, counted in its branch.
    pub at: Vec<i32>,
    /// Row in `digests` of each image occurrence.
    pub image: Vec<i32>,
    /// blake3 digest of each distinct image.
    pub digests: Vec<[u8; 32]>,
    /// Width and height in pixels.
    pub sizes: Vec<[u32; 2]>,
    rows: HashMap<[u8; 32], i32>,
}

impl Images {
    /// Replaces the keys in the branches of a trace and appends the positions of its images.
    pub(super) fn push(&mut self, keyed: Option<&Keyed<'_>>, branches: &mut [Branch<'_>]) {
        for branch in branches {
            let spans = keyed.map(|keyed| keyed.unkey(branch)).unwrap_or_default();
            self.counts.push(spans.len() as u32);
            for (span, image) in spans.iter().filter_map(|span| Some((span, keyed?.trace.images.get(span.image)?))) {
                let next = self.digests.len() as i32;
                let row = *self.rows.entry(image.digest).or_insert(next);
                if row == next {
                    self.digests.push(image.digest);
                    self.sizes.push([image.width, image.height]);
                }
                self.image.push(row);
                self.features.push(span.at.len() as u32);
                self.at.extend(span.at.iter().map(|&token| token as i32));
            }
        }
    }
}
