//! Finds the file of an image again in the bytes of the record that contained it.
//!
//! Several parsers read records, and some records are JSON to their own parser only. Therefore this module scans the
//! string literals in the bytes, regardless of what is between them.

use super::parts::{Image, data_url, decoded, digest};
use crate::cancel;
use crate::error::Result;
use crate::record_bytes::Raw;
use memchr::{memchr, memchr2};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// Position of the string of an image in its record, by digest: the first byte and the length.
type Places = HashMap<[u8; 32], (usize, usize)>;

/// Positions of recently searched images, of any record. A position is only a hint, which the digest confirms. A
/// record with many images is therefore scanned once, not once per image.
static PLACES: Mutex<Option<Places>> = Mutex::new(None);

/// Maximum number of cached positions, at slightly more than 64 bytes each.
const MOST_PLACES: usize = 1 << 16;

/// Returns the file of an image whose base64 is in a record, or `None` if it is not there.
///
/// # Errors
/// `Kind::Io` if the record cannot be read again.
pub fn find(record: &Raw, wanted: &Image) -> Result<Option<Vec<u8>>> {
    let hint = {
        let places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
        places.as_ref().and_then(|places| places.get(&wanted.digest).copied())
    };
    let file = hint.and_then(|(start, length)| file_of(&record.part(start, length)?));
    if let Some(file) = file.filter(|file| digest(file) == wanted.digest) {
        return Ok(Some(file));
    }
    let bytes = record.bytes()?;
    let (mut result, mut places) = (None, Places::new());
    for text in strings(&bytes) {
        cancel::check();
        let Some(file) = file_of(text) else { continue };
        let name = digest(&file);
        places.insert(name, (text.as_ptr().addr() - bytes.as_ptr().addr(), text.len()));
        if name == wanted.digest {
            result = Some(file);
        }
    }
    let mut cache = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
    let cache = cache.get_or_insert_default();
    if cache.len() + places.len() > MOST_PLACES {
        cache.clear();
    }
    cache.extend(places.into_iter().take(MOST_PLACES));
    Ok(result)
}

/// Decodes the file that a string of a record contains in base64.
fn file_of(text: &[u8]) -> Option<Vec<u8>> {
    decoded(data_of(&unescaped(text)?)?)
}

/// Returns the digests of all image files inside a value.
pub fn digests(value: &Value) -> Vec<[u8; 32]> {
    let mut digests = Vec::new();
    each_file(value, &mut |file| digests.push(digest(&file)));
    digests
}

/// Calls `visit` with each file whose base64 is inside a value.
fn each_file(value: &Value, visit: &mut impl FnMut(Vec<u8>)) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| each_file(item, visit)),
        Value::Object(fields) => fields.values().for_each(|field| each_file(field, visit)),
        Value::String(text) => {
            if let Some(file) = data_of(text).and_then(decoded) {
                visit(file);
            }
        }
        _ => {}
    }
}

/// Returns the text between the quotes of each string.
fn strings(record: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut remaining = record;
    std::iter::from_fn(move || {
        let start = memchr(b'"', remaining)? + 1;
        let mut end = start;
        loop {
            end += memchr2(b'"', b'\\', remaining.get(end..)?)?;
            if remaining[end] == b'"' {
                break;
            }
            end += 2;
        }
        let text = &remaining[start..end];
        remaining = &remaining[end + 1..];
        Some(text)
    })
}

fn unescaped(text: &[u8]) -> Option<Cow<'_, str>> {
    if memchr(b'\\', text).is_none() {
        return std::str::from_utf8(text).ok().map(Cow::Borrowed);
    }
    let quoted = [b"\"", text, b"\""].concat();
    serde_json::from_slice::<String>(&quoted).ok().map(Cow::Owned)
}

/// Returns the base64 of a string that is a data URL, or that starts like the base64 of a PNG, JPEG, WebP or GIF.
fn data_of(text: &str) -> Option<&str> {
    const STARTS: [&str; 5] = ["iVBOR", "/9j/", "_9j_", "UklGR", "R0lGOD"];
    if text.get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("data:")) {
        return Some(data_url(text)?.1);
    }
    STARTS.iter().any(|start| text.trim_start().starts_with(start)).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;
    use serde_json::json;

    fn find_in(record: &[u8], wanted: &Image) -> Option<Vec<u8>> {
        find(&Raw::Memory(record.into()), wanted).unwrap()
    }

    #[test]
    fn a_file_is_found_by_its_digest_alone_whatever_the_record_is() {
        let (first, second) = (b"GIF89a\x05\0\x07\0\xff\xfe\xfb", b"GIF89a\x06\0\x07\0\xff\xfe\xfb");
        let data = |file: &[u8]| STANDARD.encode(file);
        let record =
            json!({"q\"": [{"url": format!("data:image/gif;base64,{}", data(first))}, {"data": data(second)}]});
        let text = serde_json::to_string(&record).unwrap();
        // Numbers that JSON does not have, and strings with escapes.
        let loose = format!("{{\"reward\": NaN, \"x\": \"\\\\\", \"rest\": {text}}}");
        for text in [text.clone(), loose, text.replace('/', "\\/")] {
            for file in [&first[..], second] {
                let wanted = Image { digest: digest(file), length: file.len(), ..Image::default() };
                assert_eq!(find_in(text.as_bytes(), &wanted).as_deref(), Some(file), "{text}");
            }
        }
        let other = Image { digest: digest(b"three"), length: first.len(), ..Image::default() };
        assert_eq!(find_in(text.as_bytes(), &other), None);
        for broken in [&b"\""[..], b"\"\\", b"no JSON"] {
            assert_eq!(find_in(broken, &other), None);
        }
    }
}
