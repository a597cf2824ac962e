//! Further integers per token: routed experts, sampling masks, and the weight versions of sampled tokens.
//!
//! Sources: vLLM `token_in_token_out/protocol.py` (base64 of a `.npy`), sglang `tokenizer_manager.py` (base64 of int32
//! rows).

use crate::format::json::outline::{Outline, Shape};
use crate::format::rejection::{Decoded, Reason, Rejection, reject};
use crate::trace::{Extra, ExtraStart, VersionSpan};
use base64::alphabet;
use base64::engine::{DecodePaddingMode, Engine, GeneralPurpose, GeneralPurposeConfig};
use serde::Deserialize;
use serde_json::Value;

/// Reads `routed_experts` in vLLM's encoding: base64 of a numpy file, shape `[prompt + sampled - 1, layers, experts]`.
pub fn routed_experts(outline: &Outline<'_>) -> Decoded<Option<Extra>> {
    if !outline.is("routed_experts", Shape::Text) {
        return Ok(None);
    }
    let text = outline.text("routed_experts")?.unwrap_or_default();
    let experts = || {
        let array = npy(&base64(&text)?)?;
        let (rows, shape) = array.shape.split_first()?;
        rows_of(*rows, shape, array.values)
    };
    experts().map(Some).ok_or_else(broken_experts)
}

/// Reads `routed_experts` in SGLang's encoding: base64 of int32, one row for each of `rows` tokens.
pub fn raw_experts(outline: &Outline<'_>, rows: usize) -> Decoded<Option<Extra>> {
    if !outline.is("routed_experts", Shape::Text) || rows == 0 {
        return Ok(None);
    }
    let text = outline.text("routed_experts")?.unwrap_or_default();
    let experts = || {
        let values = integers(&base64(&text)?, 4, true).filter(|values| values.len().is_multiple_of(rows))?;
        let width = u32::try_from(values.len() / rows).ok()?;
        rows_of(u32::try_from(rows).ok()?, &[width], values)
    };
    experts().map(Some).ok_or_else(broken_experts)
}

fn rows_of(rows: u32, shape: &[u32], values: Vec<i32>) -> Option<Extra> {
    let width = shape.iter().try_fold(1_u32, |width, size| width.checked_mul(*size))?;
    let ends: Vec<u32> = (1..=rows).map(|row| row.checked_mul(width)).collect::<Option<_>>()?;
    let fits = ends.last().copied().unwrap_or(0) as usize == values.len();
    fits.then(|| Extra { name: "routed_experts", first: ExtraStart::Prompt, shape: shape.to_vec(), ends, values })
}

fn broken_experts() -> Rejection {
    reject(Reason::WrongType, "TG-FORMAT-006", "`routed_experts` is not the base64 of an integer array of its tokens")
        .why("Replaying other experts than the sampler's would train another model")
        .fix("Record the field as the server sent it, or leave it out")
}

/// Reads the tokens that could be sampled at each step: `[[5, 9], [6]]`, or an object with these lists under
/// `token_ids`.
pub fn sampling_mask(outline: &Outline<'_>, key: &str) -> Decoded<Option<Extra>> {
    let lists: Option<Vec<Vec<u32>>> = match outline.get(key).map(Shape::of) {
        Some(Shape::Object) => outline.object(key)?.unwrap_or_default().typed("token_ids")?,
        _ => outline.typed(key)?,
    };
    let Some(lists) = lists else { return Ok(None) };
    let (mut ends, mut values) = (Vec::with_capacity(lists.len()), Vec::new());
    for list in lists {
        values.extend(list.into_iter().map(|id| i32::try_from(id).unwrap_or(i32::MAX)));
        ends.push(values.len() as u32);
    }
    Ok(Some(Extra { name: "sampling_mask", first: ExtraStart::Sampled, shape: Vec::new(), ends, values }))
}

/// A range of sampled tokens and the version label of their weights.
#[derive(Deserialize)]
struct Span {
    version: Value,
    start: u32,
    end: u32,
}

/// Reads `weight_versions`: `[{"version", "start", "end"}]` over the sampled tokens.
pub fn version_spans(outline: &Outline<'_>) -> Decoded<Vec<VersionSpan>> {
    outline.value("weight_versions")?.map_or(Ok(Vec::new()), spans)
}

/// Reads `weight_versions` from a JSON value.
pub fn spans(value: Value) -> Decoded<Vec<VersionSpan>> {
    let spans: Vec<Span> = serde_json::from_value(value).map_err(|error| {
        reject(Reason::WrongType, "TG-FORMAT-007", format!("`weight_versions`: {error}"))
            .why("The policy that sampled each token is unknown")
            .fix("Record the field as the server sent it, or leave it out")
    })?;
    let span = |span: Span| VersionSpan { start: span.start, end: span.end, version: version(&span.version) };
    Ok(spans.into_iter().map(span).collect())
}

/// Returns the number of a version label: `7`, `"7"`, `"v7"`; -1 for any other label.
pub fn version(label: &Value) -> i32 {
    let number = match label {
        Value::Number(number) => number.as_i64(),
        Value::String(text) => text.strip_prefix('v').unwrap_or(text).parse().ok(),
        _ => None,
    };
    number.and_then(|number| i32::try_from(number).ok()).filter(|number| *number >= 0).unwrap_or(-1)
}

/// An integer array from a numpy file.
struct Array {
    shape: Vec<u32>,
    values: Vec<i32>,
}

/// Reads a `.npy` file of integers in C order.
fn npy(bytes: &[u8]) -> Option<Array> {
    let rest = bytes.strip_prefix(b"\x93NUMPY")?;
    let (&major, rest) = rest.split_first()?;
    let (length, rest) = rest.get(1..)?.split_at_checked(if major == 1 { 2 } else { 4 })?;
    let length = length.iter().rev().fold(0, |length, &byte| length << 8 | usize::from(byte));
    let header = std::str::from_utf8(rest.get(..length)?).ok()?;
    let data = rest.get(length..)?;
    if !header.contains("'fortran_order': False") {
        return None;
    }
    let kind = header.split("'descr': '").nth(1)?.split('\'').next()?;
    let shape = header.split("'shape': (").nth(1)?.split(')').next()?;
    let sizes = shape.split(',').map(str::trim).filter(|size| !size.is_empty());
    let shape = sizes.map(|size| size.parse().ok()).collect::<Option<Vec<u32>>>()?;
    let kind = kind.strip_prefix(['<', '|'])?;
    let (sign, size) = kind.split_at_checked(1)?;
    let values = integers(data, size.parse().ok()?, sign == "i")?;
    Some(Array { shape, values }).filter(|_| matches!(sign, "i" | "u"))
}

/// Reads little-endian integers of 1, 2, 4 or 8 bytes. Their values must fit an i32.
fn integers(data: &[u8], size: usize, signed: bool) -> Option<Vec<i32>> {
    if !matches!(size, 1 | 2 | 4 | 8) || !data.len().is_multiple_of(size) {
        return None;
    }
    let number = |chunk: &[u8]| {
        let negative = signed && chunk.last().is_some_and(|byte| byte & 0x80 != 0);
        let mut wide = if negative { [0xff; 8] } else { [0; 8] };
        wide[..chunk.len()].copy_from_slice(chunk);
        if size == 8 && !signed {
            u64::from_le_bytes(wide).try_into().ok()
        } else {
            i64::from_le_bytes(wide).try_into().ok()
        }
    };
    data.chunks_exact(size).map(number).collect()
}

/// Decodes standard base64, with or without padding.
fn base64(text: &str) -> Option<Vec<u8>> {
    const ANY: GeneralPurposeConfig =
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    GeneralPurpose::new(&alphabet::STANDARD, ANY).decode(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_read_padded_or_not() {
        for text in ["Zm9vYg==", "Zm9vYg"] {
            assert_eq!(base64(text).as_deref(), Some(b"foob".as_slice()), "{text}");
        }
        assert!(base64("Zm9*").is_none());
    }

    #[test]
    fn a_label_is_a_version_where_it_is_a_number() {
        let labels = [("7", 7), ("v7", 7), ("default", -1), ("-3", -1), ("99999999999", -1)];
        for (label, number) in labels {
            assert_eq!(version(&Value::from(label)), number, "{label}");
        }
        assert_eq!(version(&Value::from(4)), 4);
    }

    #[test]
    fn a_numpy_header_may_be_longer_than_a_byte_counts() {
        let header = format!("{:300}", "{'descr': '|u1', 'fortran_order': False, 'shape': (2, 1), }");
        let file = [b"\x93NUMPY\x01\x00".as_slice(), &300_u16.to_le_bytes(), header.as_bytes(), &[7, 9]].concat();
        let array = npy(&file).expect("a file");
        assert_eq!((array.shape, array.values), (vec![2, 1], vec![7, 9]));
    }

    #[test]
    fn integers_keep_their_sign() {
        assert_eq!(integers(&[0xff, 0xff, 1, 0], 2, true), Some(vec![-1, 1]));
        assert_eq!(integers(&[0xff, 0xff], 2, false), Some(vec![65535]));
        assert_eq!(integers(&[0xff; 8], 8, false), None);
        assert_eq!(integers(&[1, 2, 3], 2, false), None);
    }
}
