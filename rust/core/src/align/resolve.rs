//! Determines the ids of recorded tokens, by alignment level.
//!
//! T0 and T1 have ids. T2 has the bytes of every token. T3 has text, or bytes that several tokens share. Ids that a
//! record determines are recovered. Any other id stays unknown, with a reason. A token that shows its own bytes is
//! looked up; `hidden_tokens` resolves hidden and mangled ones. The way a recorder writes tokens (special tokens
//! hidden, leading spaces kept) is inferred from all its token lists on first use.

#[cfg(test)]
mod tests;

use super::hidden_tokens::{self, Choice, CompleteText, RecorderFacts, ShownToken};
use super::types;
use crate::findings::{Finding, Reason};
use crate::pool;
use crate::tokenizer::{REPLACEMENT, Spelling, Tokenizer};
use crate::trace::{Generation, Pieces, Stop, Tokens, Trace};
use serde_json::Value;
use std::borrow::Cow;
use std::cell::OnceCell;
use std::ops::Range;
use std::sync::Arc;

/// The text that vLLM writes before an id in place of a token's text.
const PLACEHOLDER: &[u8] = b"token_id:";

/// Resolves the tokens that a generation lists. `Tokens` with logprobs only, or with nothing, resolve to no token.
pub fn resolve<'a>(
    generation: &'a Generation,
    content: Option<&str>,
    recorder: &Recorder<'_>,
    lookup: &mut Lookup,
) -> Resolution<'a> {
    let (tokens, tokenizer) = (&generation.tokens, recorder.tokenizer);
    let listing = Listing { generation, content: generation.text.as_deref().or(content), tokenizer, recorder };
    let mut resolution = Resolution::default();
    if let Some(ids) = &tokens.ids {
        let level = if generation.prompt.ids().is_some() { types::IDS_AND_PROMPT } else { types::IDS };
        from_ids(listing, ids, level, &mut resolution);
    } else if tokens.bytes.is_some() || tokens.texts.is_some() {
        from_pieces(listing, lookup, &mut resolution);
        if tokenizer.vocab_size() > tokenizer.model_vocab_size()
            && let Some(at) = tokenizer.first_outside(&resolution.ids)
        {
            outside(at, &mut resolution, tokenizer);
        }
    }
    attach_logprobs(generation, &mut resolution);
    resolution
}

fn from_ids<'a>(listing: Listing<'a, '_>, ids: &'a [u32], level: u8, resolution: &mut Resolution<'a>) {
    let (tokens, content, tokenizer) = (&listing.generation.tokens, listing.content, listing.tokenizer);
    if let Some(at) = tokenizer.first_outside(ids) {
        resolution.take(Cow::Borrowed(ids), level);
        return outside(at, resolution, tokenizer);
    }
    let bare = content.filter(|_| tokens.bytes.is_none() && tokens.texts.is_none());
    let match_of_text = bare.and_then(|content| begin_with(ids.iter(), content.as_bytes(), tokenizer));
    resolution.text_ids = match_of_text.and_then(|(count, ends)| ends.then_some(count));
    if match_of_text.is_none()
        && let Some(detail) = contradiction(ids, tokens, content, tokenizer)
    {
        resolution.report(Reason::TokenizerMismatch, 0, ids.len(), detail);
        resolution.foreign = true;
        return;
    }
    resolution.take(Cow::Borrowed(ids), level);
}

/// Handles a record of another vocabulary. All its tokens are lost, because nothing can follow the one at `at`.
fn outside(at: usize, resolution: &mut Resolution<'_>, tokenizer: &Tokenizer) {
    let ids = std::mem::take(&mut resolution.ids);
    let (id, size, count) = (ids[at], tokenizer.model_vocab_size(), ids.len());
    let detail =
        format!("id {id} of token {at} is not in the model's vocabulary of {size}; {count} tokens are left out");
    resolution.report(Reason::VocabOutOfRange, 0, ids.len(), detail);
    resolution.foreign = true;
}

/// Describes how the record contradicts these ids, or returns `None` if it does not.
fn contradiction(ids: &[u32], tokens: &Tokens, content: Option<&str>, tokenizer: &Tokenizer) -> Option<String> {
    let mut after_hidden = false;
    let plain = tokens.bytes.as_ref().filter(|pieces| is_plain(&pieces.data));
    // Without pieces the record shows nothing.
    let listed = if tokens.bytes.is_some() || tokens.texts.is_some() { ids } else { &[] };
    let matching = plain.map_or(0, |pieces| count_matching(listed, pieces, tokenizer));
    let mut shown = matching > 0;
    for (index, &id) in listed.iter().enumerate().skip(matching) {
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        if !bytes.is_empty() && plain.and_then(|pieces| pieces.get(index)) == Some(bytes) {
            (shown, after_hidden) = (true, false);
            continue;
        }
        // vLLM itself writes the placeholder if it has no entry for the token.
        let shown_bytes = own_bytes(tokens, index, tokenizer)
            .map(|(shown_bytes, _)| shown_bytes)
            .filter(|shown_bytes| !shown_bytes.starts_with(PLACEHOLDER));
        shown |= shown_bytes.is_some();
        if let Some(shown_bytes) = shown_bytes.as_deref().filter(|shown_bytes| !after_hidden && *shown_bytes != bytes) {
            return Some(format!("id {id} spells {} where the record shows {}", excerpt(bytes), excerpt(shown_bytes)));
        }
        after_hidden = shown_bytes.is_none();
    }
    let content = content.filter(|_| !shown)?;
    let plain = ids.iter().filter(|&&id| !is_special(id, tokenizer));
    if begin_with(plain, content.as_bytes(), tokenizer).is_some() {
        return None;
    }
    describe_missing(ids, content, tokenizer)
}

/// Counts the leading ids whose bytes equal the listed ones and are not empty.
fn count_matching(ids: &[u32], pieces: &Pieces, tokenizer: &Tokenizer) -> usize {
    let (mut start, mut count) = (0, 0);
    for ((&id, &end), &is_known) in ids.iter().zip(&pieces.ends).zip(&pieces.known) {
        let piece = pieces.data.get(start..end as usize).filter(|piece| is_known && !piece.is_empty());
        if piece.is_none() || tokenizer.token_bytes(id) != piece {
            break;
        }
        (start, count) = (end as usize, count + 1);
    }
    count
}

/// Returns true if every piece of these bytes is literal: it contains no placeholder of an id and no replacement
/// character.
fn is_plain(data: &[u8]) -> bool {
    let contains_pattern = |pattern: &[u8]| memchr::memmem::find(data, pattern).is_some();
    !contains_pattern(REPLACEMENT) && !contains_pattern(PLACEHOLDER)
}

/// Describes the content if the ids do not decode to it, with or without their special tokens.
fn describe_missing(ids: &[u32], content: &str, tokenizer: &Tokenizer) -> Option<String> {
    let content = Some(content.trim()).filter(|text| !text.is_empty() && !text.contains('\u{FFFD}'))?;
    let (plain, with_specials) = (decode_text(ids, tokenizer), decode_all(ids, tokenizer));
    // A server may have written the reasoning into the content, between its own tags.
    let mut parts = content.split("<reasoning>").flat_map(|part| part.split("</reasoning>")).map(str::trim);
    if contains(&plain, content.as_bytes()) || parts.all(|part| contains(&with_specials, part.as_bytes())) {
        return None;
    }
    Some(format!("the ids spell {} where the record says {}", excerpt(&plain), excerpt(content.as_bytes())))
}

/// Counts the leading `ids` that decode to `text`, including ids without bytes after it. Also returns whether the text
/// ends at the end of a token. Returns `None` if the ids do not start with the text.
fn begin_with<'i>(ids: impl Iterator<Item = &'i u32>, text: &[u8], tokenizer: &Tokenizer) -> Option<(usize, bool)> {
    let (mut remaining, mut count) = (text, 0);
    for &id in ids {
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        match remaining.strip_prefix(bytes) {
            Some(suffix) => remaining = suffix,
            None if remaining.is_empty() => break,
            None => return bytes.starts_with(remaining).then_some((count + 1, false)),
        }
        count += 1;
    }
    remaining.is_empty().then_some((count, true))
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    part.is_empty() || memchr::memmem::find(text, part).is_some()
}

fn attach_logprobs<'a>(generation: &'a Generation, resolution: &mut Resolution<'a>) {
    let tokens = &generation.tokens;
    let count = resolution.ids.len();
    let Some(logprobs) = &tokens.logprobs else {
        if count > 0 {
            resolution.report(Reason::MissingLogprob, 0, count, "no logprobs were read".into());
        }
        return;
    };
    if resolution.foreign || count == 0 {
        return; // logprobs without tokens are used later, with a text
    }
    if logprobs.len() > count && count > 0 && matches!(generation.stop, Stop::Text(_)) {
        // TensorRT-LLM removes the stop string's tokens from the ids but keeps their logprobs.
        let extra = logprobs.len() - count;
        resolution.report(
            Reason::StopStringTruncated,
            count,
            extra,
            format!("{extra} logprobs belong to the stop string"),
        );
    } else if logprobs.len() != count {
        let detail = format!("{count} tokens but {} logprobs", logprobs.len());
        resolution.report(Reason::CountMismatch, 0, count, detail);
        return;
    }
    resolution.logprobs = Some(Cow::Borrowed(&logprobs[..count]));
    if tokens.missing > 0 {
        let detail = format!("{} logprobs are null, NaN or -inf", tokens.missing);
        resolution.report(Reason::MissingLogprob, usize::MAX, tokens.missing as usize, detail);
    }
    if tokens.invalid > 0 {
        let detail = format!("{} logprobs are positive or the -9999 sentinel", tokens.invalid);
        resolution.report(Reason::InvalidLogprob, usize::MAX, tokens.invalid as usize, detail);
    }
}

/// The sampled tokens of one generation, as far as they are known.
#[derive(Debug, Default)]
pub struct Resolution<'a> {
    /// Ids; 0 if unknown.
    pub ids: Cow<'a, [u32]>,
    /// Whether each id is known; empty if all are.
    known: Vec<bool>,
    /// Level of each token; empty if all tokens have `level`.
    levels: Vec<u8>,
    level: u8,
    /// Logprobs, NaN if unknown; `None` if all are unknown.
    pub logprobs: Option<Cow<'a, [f32]>>,
    /// Whether each logprob was measured after the recording; empty if none was.
    filled: Vec<bool>,
    /// Findings of the resolution.
    pub findings: Vec<Finding>,
    /// Number of ids that decode to the text, if they match it from start to end and this was checked.
    pub text_ids: Option<usize>,
    /// True if the record is of another vocabulary. Nothing of it can be used.
    pub foreign: bool,
    /// Runs of unknown ids with known text, in order.
    pub runs: Vec<Run>,
    /// First token of each run of unknown ids, and the reason; in order.
    pub unknown: Vec<(usize, Reason)>,
}

/// Tokens `first..end` with unknown ids and known bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    pub first: usize,
    pub end: usize,
    /// The bytes to which they decode together.
    pub bytes: Vec<u8>,
    /// For a single token: the ordinary entry among those with these bytes.
    pub entry: Option<u32>,
}

impl<'a> Resolution<'a> {
    /// Sets ids that are all known and all of one level.
    pub(super) fn take(&mut self, ids: Cow<'a, [u32]>, level: u8) {
        (self.ids, self.level) = (ids, level);
    }

    /// Appends one id with its own level. Do not mix with [`Resolution::take`].
    pub(super) fn push(&mut self, id: Option<u32>, level: u8) {
        self.ids.to_mut().push(id.unwrap_or(0));
        self.known.push(id.is_some());
        self.levels.push(level);
    }

    /// Marks the ids of these tokens as unknown, because other entries may show the same text.
    pub(super) fn doubt(&mut self, tokens: &[usize], reason: Reason, tokenizer: &Tokenizer) {
        self.known.resize(self.ids.len(), true);
        for &first in tokens {
            let id = std::mem::take(&mut self.ids.to_mut()[first]);
            self.known[first] = false;
            self.unknown.push((first, reason));
            let bytes = tokenizer.token_bytes(id).unwrap_or_default().to_vec();
            let entry = tokenizer.id_of_bytes(&bytes).or(Some(id));
            self.runs.push(Run { first, end: first + 1, bytes, entry });
        }
        self.unknown.sort_by_key(|(first, _)| *first);
        self.runs.sort_by_key(|run| run.first);
    }

    /// Returns the run that starts at token `first`.
    pub fn run_at(&self, first: usize) -> Option<&Run> {
        self.runs.binary_search_by_key(&first, |run| run.first).ok().map(|at| &self.runs[at])
    }

    pub fn is_known(&self, index: usize) -> bool {
        self.known.get(index).copied().unwrap_or(index < self.ids.len())
    }

    pub fn all_known(&self) -> bool {
        !self.known.contains(&false)
    }

    /// Counts the tokens before the first one with an unknown id.
    pub fn known_first(&self) -> usize {
        self.known.iter().position(|known| !known).unwrap_or(self.ids.len())
    }

    pub fn level(&self, index: usize) -> u8 {
        if self.filled.get(index) == Some(&true) {
            return types::FILLED;
        }
        self.levels.get(index).copied().unwrap_or(self.level)
    }

    /// Returns the logprob of token `index`, or NaN if it is unknown.
    pub fn logprob(&self, index: usize) -> f32 {
        self.logprobs.as_ref().map_or(f32::NAN, |logprobs| logprobs[index])
    }

    /// Returns the logprobs of some tokens, or `None` if all of the generation are unknown.
    pub fn logprobs_of(&self, tokens: Range<usize>) -> Option<Cow<'a, [f32]>> {
        self.logprobs.as_ref().map(|logprobs| match logprobs {
            Cow::Borrowed(all) => Cow::Borrowed(&all[tokens]),
            Cow::Owned(all) => Cow::Owned(all[tokens].to_vec()),
        })
    }

    /// Returns whether a logprob was measured after the recording.
    pub fn is_filled(&self) -> bool {
        !self.filled.is_empty()
    }

    /// Sets the logprobs of tokens without one, and counts only the others as missing. All ids must be known.
    pub fn fill(&mut self, measured: &[f32]) {
        let mut logprobs = self.logprobs.take().map_or_else(|| vec![f32::NAN; measured.len()], Cow::into_owned);
        self.filled = logprobs.iter().zip(measured).map(|(own, filled)| own.is_nan() && !filled.is_nan()).collect();
        for ((own, &filled), _) in logprobs.iter_mut().zip(measured).zip(&self.filled).filter(|(_, takes)| **takes) {
            *own = filled;
        }
        let missing = logprobs.iter().filter(|logprob| logprob.is_nan()).count();
        let count = self.filled.iter().filter(|filled| **filled).count();
        for finding in &mut self.findings {
            if matches!(finding.reason, Reason::MissingLogprob | Reason::CountMismatch) {
                finding.count = finding.count.min(missing as i32);
                finding.detail = format!("{}; {count} were filled", finding.detail);
            }
        }
        let concerns = |finding: &Finding| matches!(finding.reason, Reason::MissingLogprob | Reason::CountMismatch);
        self.findings.retain(|finding| finding.count > 0 || !concerns(finding));
        self.logprobs = Some(Cow::Owned(logprobs));
    }

    /// Returns the end of the run of known tokens from `start` (at most `end`) that have the level of the first.
    pub fn alike(&self, start: usize, end: usize) -> usize {
        let level = self.levels.get(start).copied().unwrap_or(self.level);
        let known_count = self
            .known
            .get(start..end)
            .map_or(end - start, |flags| flags.iter().take_while(|is_known| **is_known).count());
        let levels = self.levels.get(start..end);
        let same_level_count =
            levels.map_or(end - start, |levels| levels.iter().take_while(|other| **other == level).count());
        let filled = self.filled.get(start..end);
        let same_source_count =
            filled.map_or(end - start, |flags| flags.iter().take_while(|flag| **flag == flags[0]).count());
        start + known_count.min(same_level_count).min(same_source_count)
    }

    /// Returns the reason why the id of token `index` is unknown.
    pub fn why_unknown(&self, index: usize) -> Reason {
        let count = self.unknown.partition_point(|(first, _)| *first <= index);
        self.unknown[..count].last().map_or(Reason::PartialUtf8, |(_, reason)| *reason)
    }

    pub(super) fn report(&mut self, reason: Reason, token: usize, count: usize, detail: String) {
        let finding = Finding { reason, turn: 0, token: token as i32, count: count as i32, detail };
        self.findings.push(finding);
    }
}

/// Prefix of a byte written in hexadecimal.
const ESCAPE: &[u8] = br"\x";

/// A generation with listed tokens, and the context needed to identify them.
#[derive(Clone, Copy)]
pub struct Listing<'a, 'r> {
    pub generation: &'a Generation,
    /// The text to which the tokens decode, if the record has it.
    pub content: Option<&'r str>,
    pub tokenizer: &'r Tokenizer,
    /// Facts about how the trace's recorder writes tokens.
    pub recorder: &'r Recorder<'r>,
}

/// Resolves a list of tokens with texts or bytes.
pub fn from_pieces(listing: Listing<'_, '_>, lookup: &mut Lookup, resolution: &mut Resolution<'_>) {
    let Listing { generation, tokenizer, .. } = listing;
    let stop = stop_token(generation, tokenizer, generation.tokens.len());
    by_pieces(listing, stop, lookup, resolution);
    if resolution.foreign {
        return;
    }
    // The stop token is identified by its id.
    let listed = resolution.ids.len() - usize::from(stop.is_some());
    doubt_spaces(listing, listed, resolution);
    if tokenizer.has_shared() {
        doubt_shared(tokenizer, listed, resolution);
    }
}

/// Marks tokens as unknown if the recorder may have removed their leading space: `Hello` may then be either of two
/// entries, with and without the space.
///
/// Servers that decode tokens one by one remove the space of each token; others remove only the first one's.
fn doubt_spaces(listing: Listing<'_, '_>, listed: usize, resolution: &mut Resolution<'_>) {
    let Listing { generation, content, tokenizer, recorder } = listing;
    if !tokenizer.drops_first_space() {
        return;
    }
    let spells_content = || {
        resolution.all_known() && content.is_some_and(|text| decode_text(&resolution.ids, tokenizer) == text.as_bytes())
    };
    let keeps = recorder.keeps_spaces() || (listed > 1 && spells_content());
    let has_spaced = |bytes: &[u8]| tokenizer.id_of_bytes(&[b" ", bytes].concat()).is_some();
    let doubtful = |index: &usize| {
        let (index, id) = (*index, resolution.ids[*index]);
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        match resolution.is_known(index) {
            true if keeps => index == 0 && !tokenizer.is_special(id) && !bytes.starts_with(b" ") && has_spaced(bytes),
            // A token that shows nothing may be a single space.
            true if tokenizer.is_special(id) => shows_nothing(&generation.tokens, index) && has_spaced(b""),
            is_known => is_known && has_spaced(bytes),
        }
    };
    let tokens: Vec<usize> = (0..if keeps { listed.min(1) } else { listed }).filter(doubtful).collect();
    if let Some(&first) = tokens.first() {
        let bytes = excerpt(tokenizer.token_bytes(resolution.ids[first]).unwrap_or_default());
        let detail =
            format!("{bytes} is two tokens, with a space before it and without; so are {} in all", tokens.len());
        resolution.report(Reason::NormalizerChanged, first, tokens.len(), detail);
        resolution.doubt(&tokens, Reason::NormalizerChanged, tokenizer);
    }
}

/// Marks tokens as unknown if another entry shows the same text: `<0x20>` and `▁` are both a space.
fn doubt_shared(tokenizer: &Tokenizer, listed: usize, resolution: &mut Resolution<'_>) {
    let is_ambiguous = |index: &usize| resolution.is_known(*index) && tokenizer.is_shared(resolution.ids[*index]);
    let tokens: Vec<usize> = (0..listed).filter(is_ambiguous).collect();
    if let Some(&first) = tokens.first() {
        let bytes = excerpt(tokenizer.token_bytes(resolution.ids[first]).unwrap_or_default());
        let detail = format!("two entries of the vocabulary are {bytes}; so it is with {} tokens in all", tokens.len());
        resolution.report(Reason::SharedBytes, first, tokens.len(), detail);
        resolution.doubt(&tokens, Reason::SharedBytes, tokenizer);
    }
}

fn shows_nothing(tokens: &Tokens, index: usize) -> bool {
    let empty = |pieces: &Option<Pieces>| pieces.as_ref().and_then(|p| p.get(index)).is_none_or(<[u8]>::is_empty);
    empty(&tokens.bytes) && empty(&tokens.texts)
}

fn by_pieces(listing: Listing<'_, '_>, stop: Option<u32>, lookup: &mut Lookup, resolution: &mut Resolution<'_>) {
    let Listing { generation, content, tokenizer, recorder } = listing;
    let tokens = &generation.tokens;
    let count = tokens.len();
    let listed = count - usize::from(stop.is_some());
    let level = if tokens.bytes.is_some() { types::BYTES } else { types::TEXT };
    if let Some(mut ids) = all_by_own_bytes(tokens, listed, tokenizer, lookup) {
        ids.extend(stop);
        return resolution.take(Cow::Owned(ids), level);
    }
    let mut seen: Vec<ShownToken<'_>> = Vec::with_capacity(count);
    let mut glyphs = 0;
    for index in 0..listed {
        let after_hidden = matches!(seen.last(), Some(ShownToken::Nothing));
        match see(tokens, index, after_hidden, tokenizer, &mut glyphs) {
            Ok(piece) => seen.push(piece),
            Err(bytes) => {
                let shown = excerpt(&bytes);
                let detail = format!("token {index}, {shown}, is not in the vocabulary; {count} tokens are left out");
                resolution.report(Reason::TokenizerMismatch, 0, count, detail);
                resolution.foreign = true;
                return;
            }
        }
    }
    if glyphs > 0 {
        let detail = format!("{glyphs} tokens are written in the byte-level alphabet");
        resolution.report(Reason::GlyphText, 0, glyphs, detail);
    }
    seen.extend(stop.map(ShownToken::Id));
    let id = |piece: &ShownToken<'_>| if let ShownToken::Id(id) = piece { Some(*id) } else { None };
    if let Some(ids) = seen.iter().map(id).collect::<Option<Vec<u32>>>() {
        return ids.into_iter().for_each(|id| resolution.push(Some(id), level));
    }
    let facts = RecorderFacts { tokenizer, hides_specials: recorder.hides_specials() };
    if !by_whole(listing, &seen, facts, level, resolution) {
        let broken = content.is_some_and(|text| text.contains('\u{FFFD}'));
        by_runs(&seen, facts, level, broken, resolution);
    }
}

/// Returns the ids of the first `listed` tokens if each shows its own bytes and an entry has them. The result agrees
/// with [`see`].
fn all_by_own_bytes(tokens: &Tokens, listed: usize, tokenizer: &Tokenizer, lookup: &mut Lookup) -> Option<Vec<u32>> {
    let pieces = tokens.bytes.as_ref().or(tokens.texts.as_ref())?;
    let data = pieces.data.as_slice();
    let contains_pattern = |pattern: &[u8]| memchr::memmem::find(data, pattern).is_some();
    let is_text = tokens.bytes.is_none();
    if contains_pattern(REPLACEMENT)
        || (is_text && contains_pattern(ESCAPE))
        || pieces.known.get(..listed)?.contains(&false)
    {
        return None;
    }
    let mut ids = Vec::with_capacity(listed + 1);
    let mut start = 0;
    for end in pieces.ends.get(..listed)?.iter().map(|&end| end as usize) {
        let piece = data.get(start..end).filter(|piece| !piece.is_empty())?;
        let written = || std::str::from_utf8(piece).ok();
        let id = match lookup.id(data, (start, end), tokenizer) {
            Some(id) if !is_text || written().is_some() => id,
            // A text may also be written in the byte-level alphabet.
            None if !is_text || piece.is_ascii() => tokenizer.id_of_added(written()?)?,
            _ => return None,
        };
        ids.push(id);
        start = end;
    }
    Some(ids)
}

/// Returns the recorded text of token `index`. Returns its bytes as the error if the vocabulary lacks them.
fn see<'a>(
    tokens: &'a Tokens,
    index: usize,
    after_hidden: bool,
    tokenizer: &Tokenizer,
    glyphs: &mut usize,
) -> Result<ShownToken<'a>, Vec<u8>> {
    // A recorder that writes glyphs hides nothing. After a hidden token, a text is therefore literal.
    let own = own_bytes(tokens, index, tokenizer).filter(|(_, written)| !after_hidden || *written != Written::Glyphs);
    let shown = |pieces: &'a Option<Pieces>| std::str::from_utf8(pieces.as_ref()?.get(index)?).ok();
    let Some((bytes, written)) = own else {
        let text = |pieces| shown(pieces).filter(|text| !text.is_empty());
        let shown = text(&tokens.texts).or_else(|| text(&tokens.bytes));
        return Ok(shown.map_or(ShownToken::Nothing, ShownToken::Text));
    };
    *glyphs += usize::from(written == Written::Glyphs);
    let text = || std::str::from_utf8(&bytes).ok();
    let id = tokenizer.id_of_bytes(&bytes).or_else(|| tokenizer.id_of_added(text()?));
    // After hidden tokens, a text may belong to them too if its last character is not ASCII and can be split.
    let may_be_joint = after_hidden && text().is_some_and(|text| !text.ends_with(|last: char| last.is_ascii()));
    match id {
        Some(id) if !may_be_joint || tokenizer.is_special(id) => Ok(ShownToken::Id(id)),
        _ if !may_be_joint => Err(bytes.into_owned()),
        _ => {
            let same = |text: &&str| text.as_bytes() == &*bytes;
            let text = shown(&tokens.bytes).filter(same).or_else(|| shown(&tokens.texts).filter(same));
            text.map_or_else(
                || id.map(ShownToken::Id).ok_or_else(|| bytes.into_owned()),
                |text| Ok(ShownToken::Text(text)),
            )
        }
    }
}

/// Determines the ids by the complete text of the generation. Returns false if these tokens have another text.
fn by_whole(
    Listing { generation, content, .. }: Listing<'_, '_>,
    seen: &[ShownToken<'_>],
    facts: RecorderFacts<'_>,
    level: u8,
    resolution: &mut Resolution<'_>,
) -> bool {
    let Some(text) = content.filter(|text| !text.is_empty()) else { return false };
    let may_go_on = !matches!(generation.finish_reason.as_deref(), Some("length"));
    let with_stop = match &generation.stop {
        Stop::Text(string) => Some(format!("{text}{string}")),
        _ => None,
    };
    let texts = with_stop.iter().map(String::as_str).chain([text]);
    let wholes = texts.flat_map(|text| {
        [false, true].map(|with_specials| CompleteText { text, may_continue: may_go_on, with_specials })
    });
    for text_option in wholes {
        let Some(solution) = hidden_tokens::solve(seen, text_option, facts) else { continue };
        let broken = |index: usize| {
            let start = solution.starts[..=index].iter().rev().find_map(|start| *start).unwrap_or(0) as usize;
            let end = solution.starts[index + 1..]
                .iter()
                .find_map(|start| *start)
                .map_or(text_option.text.len(), |end| end as usize);
            text_option.text.get(start..end).is_some_and(|text| text.contains('\u{FFFD}'))
        };
        push(seen, &solution.choices, level, &broken, resolution);
        let mut at = 0;
        while let Some(first) = (at..seen.len()).find(|&index| !resolution.is_known(index)) {
            let end = (first..seen.len()).find(|&index| resolution.is_known(index)).unwrap_or(seen.len());
            if let (Some(start), Some(end_byte)) = (solution.starts[first], solution.starts[end]) {
                let text = text_option.text.as_bytes()[start as usize..end_byte as usize].to_vec();
                resolution.runs.push(Run { first, end, bytes: text, entry: None });
            }
            at = end;
        }
        return true;
    }
    false
}

/// Determines the ids run by run, from what the token after hidden ones shows. Used if the complete text is not known.
fn by_runs(
    seen: &[ShownToken<'_>],
    facts: RecorderFacts<'_>,
    level: u8,
    broken: bool,
    resolution: &mut Resolution<'_>,
) {
    let mut choices = Vec::with_capacity(seen.len());
    let mut runs = Vec::new();
    while choices.len() < seen.len() {
        let at = choices.len();
        let hidden = seen[at..].iter().take_while(|piece| matches!(piece, ShownToken::Nothing)).count();
        match seen.get(at + hidden) {
            Some(ShownToken::Text(text)) => {
                choices.extend(hidden_tokens::solve_run(hidden, Some(text), facts));
                if !text.contains('\u{FFFD}') && choices[at].id().is_none() {
                    runs.push(Run { first: at, end: choices.len(), bytes: text.as_bytes().to_vec(), entry: None });
                }
            }
            Some(ShownToken::Id(id)) => {
                choices.extend(hidden_tokens::solve_run(hidden, None, facts));
                choices.push(Choice::One(*id));
            }
            Some(ShownToken::Nothing) | None => choices.extend(hidden_tokens::solve_run(hidden, None, facts)),
        }
    }
    push(seen, &choices, level, &|_| broken, resolution);
    resolution.runs.extend(runs);
}

/// Stores the resolved ids and adds a finding for each run of unknown ids.
fn push(
    seen: &[ShownToken<'_>],
    choices: &[Choice],
    level: u8,
    broken: &dyn Fn(usize) -> bool,
    resolution: &mut Resolution<'_>,
) {
    for (piece, choice) in seen.iter().zip(choices) {
        resolution.push(choice.id(), if matches!(piece, ShownToken::Id(_)) { level } else { types::TEXT });
    }
    let mut at = 0;
    while let Some(first) = (at..seen.len()).find(|&index| !resolution.is_known(index)) {
        let end = (first..seen.len()).find(|&index| resolution.is_known(index)).unwrap_or(seen.len());
        let lossy = |index: usize| matches!(seen[index], ShownToken::Text(text) if text.contains('\u{FFFD}'));
        let mangled = (first..end).any(|index| lossy(index) || broken(index));
        let reason = if mangled { Reason::LossyText } else { Reason::PartialUtf8 };
        let shown: Vec<&str> =
            (first..end).filter_map(|i| if let ShownToken::Text(t) = seen[i] { Some(t) } else { None }).collect();
        let shown = if shown.is_empty() { "nothing".to_owned() } else { excerpt(shown.concat().as_bytes()) };
        let ways = if choices[first..end].contains(&Choice::None) { "no" } else { "more than one" };
        let detail = format!("{} tokens show {shown}: {ways} way to spell it", end - first);
        resolution.report(reason, first, end - first, detail);
        resolution.unknown.push((first, reason));
        at = end;
    }
}

/// The notation in which the bytes of a token were written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// Literally.
    Plainly,
    /// As `\x` escapes.
    Escaped,
    /// In the byte-level alphabet.
    Glyphs,
}

/// Returns the bytes of token `index`, or `None` if the record does not contain them.
pub fn own_bytes<'a>(tokens: &'a Tokens, index: usize, tokenizer: &Tokenizer) -> Option<(Cow<'a, [u8]>, Written)> {
    let has = |bytes: &&[u8]| !bytes.is_empty() && memchr::memmem::find(bytes, REPLACEMENT).is_none();
    if let Some(bytes) = tokens.bytes.as_ref().and_then(|pieces| pieces.get(index)) {
        return Some((Cow::Borrowed(bytes), Written::Plainly)).filter(|(bytes, _)| has(&&**bytes));
    }
    let shown = tokens.texts.as_ref().and_then(|pieces| pieces.get(index)).filter(has)?;
    let text = std::str::from_utf8(shown).ok()?;
    let escaped = escaped_bytes(text).map(|bytes| (Cow::Owned(bytes), Written::Escaped));
    let glyphs = || glyph_bytes(text, tokenizer).map(|bytes| (Cow::Owned(bytes), Written::Glyphs));
    Some(escaped.or_else(glyphs).unwrap_or((Cow::Borrowed(shown), Written::Plainly)))
}

/// Decodes a token that consists of `\x` escapes, optionally after `bytes:` (`bytes:\xe2\x80`). Such a token is bytes,
/// not text.
fn escaped_bytes(text: &str) -> Option<Vec<u8>> {
    let escapes = text.strip_prefix("bytes:").unwrap_or(text);
    if escapes.is_empty() || !escapes.len().is_multiple_of(4) || !escapes.is_ascii() {
        return None;
    }
    let byte = |chunk: &[u8]| {
        let digits = std::str::from_utf8(chunk.strip_prefix(b"\\x")?).ok()?;
        u8::from_str_radix(digits, 16).ok()
    };
    escapes.as_bytes().chunks(4).map(byte).collect()
}

/// Decodes the byte-level alphabet (`Ġthat`) if the text itself is not a vocabulary entry.
fn glyph_bytes(text: &str, tokenizer: &Tokenizer) -> Option<Vec<u8>> {
    let spells = tokenizer.spelling() == Spelling::ByteLevel;
    if !spells || text.is_ascii() || tokenizer.id_of_bytes(text.as_bytes()).is_some() {
        return None;
    }
    tokenizer.glyphs_to_bytes(text).filter(|bytes| tokenizer.id_of_bytes(bytes).is_some())
}

/// Returns the stop token if the last listed piece is empty and the record names the cause of the stop.
fn stop_token(generation: &Generation, tokenizer: &Tokenizer, count: usize) -> Option<u32> {
    let last = count.checked_sub(1)?;
    let tokens = &generation.tokens;
    if !shows_nothing(tokens, last) {
        return None;
    }
    if matches!(generation.finish_reason.as_deref(), None | Some("length" | "abort" | "content_filter")) {
        return None;
    }
    match generation.stop {
        Stop::Id(id) => Some(id).filter(|&id| tokenizer.first_outside(&[id]).is_none()),
        Stop::Unknown => tokenizer.stop_id(),
        Stop::Text(_) => None,
    }
}

pub struct Recorder<'a> {
    trace: &'a Trace,
    pub tokenizer: &'a Tokenizer,
    hides_specials: OnceCell<bool>,
    keeps_spaces: OnceCell<bool>,
}

impl<'a> Recorder<'a> {
    pub fn new(trace: &'a Trace, tokenizer: &'a Tokenizer) -> Self {
        Self { trace, tokenizer, hides_specials: OnceCell::new(), keeps_spaces: OnceCell::new() }
    }

    /// Returns true if a special token may show nothing: no token list of the trace shows one by its text.
    pub fn hides_specials(&self) -> bool {
        let special = |piece: &[u8]| {
            let id = std::str::from_utf8(piece).ok().and_then(|text| self.tokenizer.id_of_added(text));
            id.is_some_and(|id| self.tokenizer.is_special(id))
        };
        *self.hides_specials.get_or_init(|| !self.lists().any(|pieces| listed(pieces, 0).any(special)))
    }

    /// Returns true if tokens after the first keep their leading space: one shows a space before which no further
    /// space can have been removed.
    pub fn keeps_spaces(&self) -> bool {
        let id = |bytes: &[u8]| self.tokenizer.id_of_bytes(bytes);
        let shows = |piece: &[u8]| {
            piece.len() > 1 && piece.starts_with(b" ") && id(piece).is_some() && id(&[b" ", piece].concat()).is_none()
        };
        *self.keeps_spaces.get_or_init(|| self.lists().any(|pieces| listed(pieces, 1).any(shows)))
    }

    fn lists(&self) -> impl Iterator<Item = &'a Pieces> {
        let lists =
            self.trace.generations.iter().flat_map(|generation| [&generation.tokens.bytes, &generation.tokens.texts]);
        lists.flatten()
    }
}

fn listed(pieces: &Pieces, first: usize) -> impl Iterator<Item = &[u8]> {
    (first..pieces.len()).filter_map(|index| pieces.get(index))
}

/// Returns true if `text` equals the bytes of `ids`, including special tokens.
pub fn spells(ids: &[u32], text: &[u8], tokenizer: &Tokenizer) -> bool {
    let mut remaining = text;
    let mut consume = |bytes: &[u8]| remaining.strip_prefix(bytes).map(|suffix| remaining = suffix).is_some();
    ids.iter().filter_map(|&id| tokenizer.token_bytes(id)).all(&mut consume) && remaining.is_empty()
}

/// Returns true if `id` is a special token. Two comparisons decide for most ids.
pub fn is_special(id: u32, tokenizer: &Tokenizer) -> bool {
    let special = tokenizer.special_ids();
    let in_range = special.first().is_some_and(|first| *first <= id) && special.last().is_some_and(|last| id <= *last);
    in_range && special.binary_search(&id).is_ok()
}

/// Returns the bytes of the ids without special tokens, as in a server's text.
pub fn decode_text(ids: &[u32], tokenizer: &Tokenizer) -> Vec<u8> {
    spelled(ids.iter().filter(|&&id| !is_special(id, tokenizer)), tokenizer)
}

/// Returns the bytes of the ids, including special tokens.
pub fn decode_all(ids: &[u32], tokenizer: &Tokenizer) -> Vec<u8> {
    spelled(ids.iter(), tokenizer)
}

fn spelled<'i>(ids: impl Iterator<Item = &'i u32>, tokenizer: &Tokenizer) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(ids.size_hint().1.unwrap_or(0) * 5);
    ids.filter_map(|&id| tokenizer.token_bytes(id)).for_each(|piece| bytes.extend_from_slice(piece));
    bytes
}

/// Returns at most 40 characters of possibly invalid text, quoted.
pub fn excerpt(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(200)]).into_owned();
    let mut short: String = text.chars().take(40).collect();
    if short.len() < text.len() || bytes.len() > 200 {
        short.push('…');
    }
    format!("{short:?}")
}

/// Number of slots, a power of two.
const PLACES: usize = 1 << 13;
/// Length in bytes of the longest string that is cached.
const LONGEST: usize = 16;

#[derive(Debug, Default)]
pub struct Lookup {
    /// Empty until the first lookup.
    places: Vec<Place>,
}

/// A cached string as two words with its length, and its id. An empty slot has length 0.
#[derive(Debug, Clone, Copy, Default)]
struct Place {
    low: u64,
    high: u64,
    length: u32,
    id: u32,
}

impl Lookup {
    /// Returns the same as [`Tokenizer::id_of_bytes`] for bytes `start..end` of `data`.
    #[inline]
    pub fn id(&mut self, data: &[u8], (start, end): (usize, usize), tokenizer: &Tokenizer) -> Option<u32> {
        let length = end - start;
        if length == 0 || length > LONGEST {
            return tokenizer.id_of_bytes(&data[start..end]);
        }
        if self.places.is_empty() {
            self.places = vec![Place::default(); PLACES];
        }
        let (low, high) = words(data, start, length);
        let place = &mut self.places[place_of(low, high, length)];
        if (place.low, place.high, place.length) == (low, high, length as u32) {
            return Some(place.id);
        }
        let id = tokenizer.id_of_bytes(&data[start..end])?;
        *place = Place { low, high, length: length as u32, id };
        Some(id)
    }
}

/// Returns the bytes as two little-endian words, padded with zeros.
#[inline]
fn words(data: &[u8], start: usize, length: usize) -> (u64, u64) {
    let bytes = if let Some(bytes) = data[start..].first_chunk::<LONGEST>() {
        *bytes
    } else {
        let mut bytes = [0; LONGEST];
        bytes[..length].copy_from_slice(&data[start..start + length]);
        bytes
    };
    let word = u128::from_le_bytes(bytes) & (u128::MAX >> (8 * (LONGEST - length)));
    (word as u64, (word >> 64) as u64)
}

#[inline]
fn place_of(low: u64, high: u64, length: usize) -> usize {
    let hash = (low ^ high.rotate_left(23) ^ length as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (hash >> (64 - PLACES.trailing_zeros())) as usize
}

/// The sampled tokens of G generations, concatenated. The shapes are those of Python's `Recovered`.
#[derive(Debug, Default)]
#[allow(missing_docs, reason = "documented once, at Recovered in Python")]
pub struct RecoveredTokens {
    pub ids: Vec<i32>,
    pub level: Vec<u8>,
    pub logprobs: Vec<f32>,
    pub cu_tokens: Vec<i64>,
    pub trace: Vec<i32>,
    pub turn: Vec<i32>,
    pub reason: Vec<u8>,
}

/// Returns the ids that each generation's record determines, and -1 for every other token.
pub fn recover(traces: &[Arc<Trace>], tokenizer: &Tokenizer) -> RecoveredTokens {
    let parts = pool::map(traces, Lookup::default, |lookup, trace| recover_one(trace, tokenizer, lookup));
    let mut recovered = RecoveredTokens { cu_tokens: vec![0], ..RecoveredTokens::default() };
    for (row, part) in parts.into_iter().enumerate() {
        let base = recovered.ids.len() as i64;
        recovered.cu_tokens.extend(part.cu_tokens.iter().map(|end| base + end));
        recovered.trace.extend(std::iter::repeat_n(row as i32, part.turn.len()));
        recovered.ids.extend(part.ids);
        recovered.level.extend(part.level);
        recovered.logprobs.extend(part.logprobs);
        recovered.turn.extend(part.turn);
        recovered.reason.extend(part.reason);
    }
    recovered
}

fn recover_one(trace: &Trace, tokenizer: &Tokenizer, lookup: &mut Lookup) -> RecoveredTokens {
    let mut recovered = RecoveredTokens::default();
    let recorder = Recorder::new(trace, tokenizer);
    for (turn, generation) in trace.generations.iter().enumerate() {
        let message = trace.messages.get(generation.message as usize).map(|message| &message.value);
        let content = message.and_then(|message| message.get("content")).and_then(Value::as_str);
        let resolution = resolve(generation, content, &recorder, lookup);
        if !resolution.foreign {
            let is_known = |index: usize| resolution.is_known(index);
            let ids = resolution.ids.iter().enumerate();
            recovered.ids.extend(ids.map(|(index, &id)| if is_known(index) { id as i32 } else { -1 }));
            let count = resolution.ids.len();
            let reason = |index: usize| if is_known(index) { 0 } else { resolution.why_unknown(index) as u8 };
            recovered.reason.extend((0..count).map(reason));
            recovered.level.extend((0..count).map(|index| resolution.level(index)));
            recovered.logprobs.extend((0..count).map(|index| resolution.logprob(index)));
        }
        recovered.cu_tokens.push(recovered.ids.len() as i64);
        recovered.turn.push(turn as i32);
    }
    recovered
}

#[cfg(test)]
mod resolve_tests {
    use super::*;
    use crate::tokenizer::example;

    #[test]
    fn leading_ids_that_match_a_text_or_listed_bytes_are_counted() {
        let tokenizer = example();
        let stop = tokenizer.special_ids()[0];
        let ids = [tokenizer.encode("the price is 42").unwrap(), vec![stop]].concat();
        let spelled = |count: usize| decode_all(&ids[..count], &tokenizer);
        let text_count = ids.len() - 1;
        let match_start = |text: &[u8]| begin_with(ids.iter(), text, &tokenizer);
        assert_eq!(match_start(&spelled(text_count)), Some((text_count, true)));
        assert_eq!(match_start(&spelled(2)), Some((2, true)));
        assert_eq!(match_start(b""), Some((0, true)));
        let inside = ids[..text_count].iter().position(|&id| decode_all(&[id], &tokenizer).len() > 1).unwrap();
        assert_eq!(match_start(&spelled(text_count)[..=spelled(inside).len()]), Some((inside + 1, false)));
        assert_eq!(match_start(b"another text"), None);
        assert_eq!(match_start(&[&spelled(text_count + 1)[..], b"!"].concat()), None);

        let listed = |shown: &dyn Fn(usize) -> Option<Vec<u8>>| {
            let mut pieces = Pieces::default();
            (0..ids.len()).for_each(|at| pieces.push(shown(at).as_deref()));
            count_matching(&ids, &pieces, &tokenizer)
        };
        let bytes_at = |at: usize| Some(decode_all(&ids[at..=at], &tokenizer));
        assert_eq!(listed(&bytes_at), ids.len());
        assert_eq!(listed(&|at| bytes_at(at).filter(|_| at != 1)), 1);
        assert_eq!(listed(&|at| if at == text_count { Some(Vec::new()) } else { bytes_at(at) }), text_count);
        assert_eq!(listed(&|at| if at == 2 { Some(b"?".to_vec()) } else { bytes_at(at) }), 2);
        assert_eq!(listed(&|_| None), 0);
    }
}

#[cfg(test)]
mod lookup_tests {
    use super::*;
    use crate::tokenizer::example;

    #[test]
    fn bytes_have_the_id_that_the_tokenizer_gives() {
        let (tokenizer, mut lookup) = (example(), Lookup::default());
        for _ in 0..2 {
            for bytes in (0..tokenizer.vocab_size()).filter_map(|id| tokenizer.token_bytes(id)) {
                // Each string completely, with text after it, and its beginning. Zeros may occur in the bytes and
                // after them.
                let data = [bytes, b"\0and what stands behind"].concat();
                for end in [bytes.len(), bytes.len() + 1, bytes.len() / 2] {
                    let expected = tokenizer.id_of_bytes(&data[..end]);
                    assert_eq!(lookup.id(&data, (0, end), &tokenizer), expected);
                    assert_eq!(lookup.id(&data[..end], (0, end), &tokenizer), expected);
                }
            }
        }
    }
}
