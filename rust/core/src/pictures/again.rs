//! The file of a picture, found again in the bytes of the record that held it.

use super::parts::{data_url, decoded};
use serde_json::Value;

/// The name of a file: its blake3.
pub fn digest(file: &[u8]) -> [u8; 32] {
    *blake3::hash(file).as_bytes()
}

/// The file with this digest, wherever in a record its base64 stands.
pub fn find(record: &[u8], wanted: &[u8; 32]) -> Option<Vec<u8>> {
    let whole: Value = serde_json::from_slice(record).ok()?;
    each(&whole, &mut |file| (digest(&file) == *wanted).then_some(file))
}

/// The digests of all files of pictures below a value.
pub fn digests(value: &Value) -> Vec<[u8; 32]> {
    let mut found = Vec::new();
    each(value, &mut |file| {
        found.push(digest(&file));
        None::<()>
    });
    found
}

/// Calls `found` with each file whose base64 stands below a value, until it gives something.
fn each<T>(value: &Value, found: &mut impl FnMut(Vec<u8>) -> Option<T>) -> Option<T> {
    match value {
        Value::Array(items) => items.iter().find_map(|item| each(item, found)),
        Value::Object(fields) => fields.values().find_map(|field| each(field, found)),
        Value::String(text) => {
            let data = if text.starts_with("data:") { data_url(text)?.1 } else { may_be_file(text)? };
            decoded(data).and_then(found)
        }
        _ => None,
    }
}

/// A text that begins as the base64 of a picture does.
fn may_be_file(text: &str) -> Option<&str> {
    // The first bytes of PNG, JPEG, WebP and GIF.
    ["iVBOR", "/9j/", "UklGR", "R0lGOD", "_9j_"]
        .iter()
        .any(|start| text.trim_start().starts_with(start))
        .then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;
    use serde_json::json;

    #[test]
    fn a_file_is_found_by_its_digest_alone() {
        let (one, two) = (b"GIF89a\x05\0\x07\0", b"GIF89a\x06\0\x07\0");
        let data = |file: &[u8]| STANDARD.encode(file);
        let record = json!({"a": [{"url": format!("data:image/gif;base64,{}", data(one))}, {"data": data(two)}]});
        let bytes = serde_json::to_vec(&record).unwrap();
        for file in [&one[..], two] {
            assert_eq!(find(&bytes, &digest(file)).as_deref(), Some(file));
        }
        assert_eq!(find(&bytes, &digest(b"three")), None);
        assert_eq!(find(b"no JSON", &digest(one)), None);
    }
}
