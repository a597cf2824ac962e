//! The file of a picture, found again in the bytes of the record that held it.
//!
//! Records are read by more than one parser, and some are not JSON to any but theirs; so what is looked through here are
//! the strings of the bytes, whatever stands between them.

use super::parts::{Picture, data_url, decoded, digest};
use crate::cancel;
use crate::error::Result;
use crate::record_bytes::Raw;
use memchr::{memchr, memchr2};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// Where in its record the string of a picture stands, by digest: the first byte and the length.
type Places = HashMap<[u8; 32], (usize, usize)>;

/// Places of pictures that were looked for lately, of any record: a place is a hint, and the digest tells whether it is
/// right. So a record of many pictures is looked through once, not once for each.
static PLACES: Mutex<Option<Places>> = Mutex::new(None);

/// Places that are kept, of 64 bytes each or a little more.
const MOST_PLACES: usize = 1 << 16;

/// The file of a picture, wherever in a record its base64 stands; `None` where it is not there.
///
/// # Errors
/// `Kind::Io` where the record cannot be read again.
pub fn find(record: &Raw, wanted: &Picture) -> Result<Option<Vec<u8>>> {
    let hint = {
        let places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
        places.as_ref().and_then(|places| places.get(&wanted.digest).copied())
    };
    let file = hint.and_then(|(start, length)| file_of(&record.part(start, length)?));
    if let Some(file) = file.filter(|file| digest(file) == wanted.digest) {
        return Ok(Some(file));
    }
    let bytes = record.bytes()?;
    let (mut found, mut places) = (None, Places::new());
    for text in strings(&bytes) {
        cancel::check();
        let Some(file) = file_of(text) else { continue };
        let name = digest(&file);
        places.insert(name, (text.as_ptr().addr() - bytes.as_ptr().addr(), text.len()));
        if name == wanted.digest {
            found = Some(file);
        }
    }
    let mut kept = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
    let kept = kept.get_or_insert_default();
    if kept.len() + places.len() > MOST_PLACES {
        kept.clear();
    }
    kept.extend(places.into_iter().take(MOST_PLACES));
    Ok(found)
}

/// The file that a string of a record holds in base64.
fn file_of(text: &[u8]) -> Option<Vec<u8>> {
    decoded(data_of(&unescaped(text)?)?)
}

/// The digests of all files of pictures below a value.
pub fn digests(value: &Value) -> Vec<[u8; 32]> {
    let mut found = Vec::new();
    each(value, &mut |file| found.push(digest(&file)));
    found
}

/// Calls `found` with each file whose base64 stands below a value.
fn each(value: &Value, found: &mut impl FnMut(Vec<u8>)) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| each(item, found)),
        Value::Object(fields) => fields.values().for_each(|field| each(field, found)),
        Value::String(text) => {
            if let Some(file) = data_of(text).and_then(decoded) {
                found(file);
            }
        }
        _ => {}
    }
}

/// What stands between the quotes of each string.
fn strings(record: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = record;
    std::iter::from_fn(move || {
        let start = memchr(b'"', rest)? + 1;
        let mut end = start;
        loop {
            end += memchr2(b'"', b'\\', rest.get(end..)?)?;
            if rest[end] == b'"' {
                break;
            }
            end += 2;
        }
        let text = &rest[start..end];
        rest = &rest[end + 1..];
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

/// The base64 of a string that is a data URL, or begins as the base64 of a PNG, JPEG, WebP or GIF does.
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

    fn find_in(record: &[u8], wanted: &Picture) -> Option<Vec<u8>> {
        find(&Raw::Held(record.into()), wanted).unwrap()
    }

    #[test]
    fn a_file_is_found_by_its_digest_alone_whatever_the_record_is() {
        let (one, two) = (b"GIF89a\x05\0\x07\0\xff\xfe\xfb", b"GIF89a\x06\0\x07\0\xff\xfe\xfb");
        let data = |file: &[u8]| STANDARD.encode(file);
        let record = json!({"q\"": [{"url": format!("data:image/gif;base64,{}", data(one))}, {"data": data(two)}]});
        let text = serde_json::to_string(&record).unwrap();
        // Numbers that JSON does not have, and strings with escapes.
        let loose = format!("{{\"reward\": NaN, \"x\": \"\\\\\", \"rest\": {text}}}");
        for text in [text.clone(), loose, text.replace('/', "\\/")] {
            for file in [&one[..], two] {
                let wanted = Picture { digest: digest(file), length: file.len(), ..Picture::default() };
                assert_eq!(find_in(text.as_bytes(), &wanted).as_deref(), Some(file), "{text}");
            }
        }
        let other = Picture { digest: digest(b"three"), length: one.len(), ..Picture::default() };
        assert_eq!(find_in(text.as_bytes(), &other), None);
        for broken in [&b"\""[..], b"\"\\", b"no JSON"] {
            assert_eq!(find_in(broken, &other), None);
        }
    }
}
