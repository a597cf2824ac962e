//! The parts of a message that hold a picture's bytes: taken out, and a digest put in their place.

use super::header::{self, Header};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD};
use serde_json::{Map, Value, json};
use std::borrow::Cow;

/// What a digest begins with where it stands for a picture.
const HANDLE: &str = "blake3:";

/// The file of a picture that a record holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Picture {
    /// Its blake3.
    pub digest: [u8; 32],
    /// Pixels from left to right, by its header.
    pub width: u32,
    /// Pixels from top to bottom.
    pub height: u32,
    /// Index into [`super::MEDIA_TYPES`], by its first bytes.
    pub kind: u8,
    /// Bytes of the file.
    pub length: usize,
}

/// Takes the pictures out of the content of a message, and puts digests in their places.
pub fn take(message: &mut Value) -> Vec<Picture> {
    // Of few keys one is found faster by comparing than by hashing, and most messages have text alone.
    let fields = message.as_object_mut().into_iter().flatten();
    let parts = fields.filter(|(key, _)| *key == "content").find_map(|(_, content)| content.as_array_mut());
    let mut found = Vec::new();
    for part in parts.into_iter().flatten() {
        if let Some(Ok(picture)) = held(part).map(|(data, _)| picture_of(&data)) {
            let name = format!("{HANDLE}{}", blake3::Hash::from_bytes(picture.digest).to_hex());
            *part = json!({"type": "image", "image": name});
            found.push(picture);
        }
    }
    found
}

/// Whether a part holds the bytes of a picture that is read.
pub fn holds(part: &Value) -> bool {
    held(part).is_some_and(|(data, _)| picture_of(&data).is_ok())
}

/// The digests of the pictures of a message, in order.
pub fn handles(message: &Value) -> Vec<[u8; 32]> {
    let parts = message.get("content").and_then(Value::as_array);
    parts.into_iter().flatten().filter_map(handle).collect()
}

/// Whether a part stands for a picture that the record holds.
pub fn is_handle(part: &Value) -> bool {
    handle(part).is_some()
}

fn handle(part: &Value) -> Option<[u8; 32]> {
    let hex = part.get("image")?.as_str()?.strip_prefix(HANDLE)?;
    blake3::Hash::from_hex(hex).ok().map(|hash| *hash.as_bytes())
}

/// Why a part of a message is no picture that can be seen again, in words that go on after "a part"; `None` where it
/// shows none.
pub fn why_not(part: &Value) -> Option<String> {
    let fields = part.as_object()?;
    if fields.get("uuid").is_some_and(|uuid| !uuid.is_null()) {
        return Some("with a picture that a server may have taken from its cache by `uuid`".into());
    }
    if let Some((data, _)) = held(part) {
        return picture_of(&data).err().map(|why| format!("with a picture {why}"));
    }
    let place = places(fields).find_map(|value| value.as_str())?;
    let kind = place.split(':').next().unwrap_or_default();
    if kind.eq_ignore_ascii_case("data") {
        let said: String = place.chars().skip(5).take_while(|&sign| sign != ',').take(40).collect();
        return Some(format!("whose data URL says {said:?}, which is no picture in base64"));
    }
    let said = if kind.len() < place.len() && kind.len() <= 8 {
        format!("at an address ({kind}:)")
    } else {
        "at a path".into()
    };
    Some(format!("with a picture {said}, whose bytes are not in the record"))
}

/// The file that a part holds, and the media type that it says, if it says one.
fn held(part: &Value) -> Option<(Cow<'_, [u8]>, Option<&str>)> {
    let fields = part.as_object()?;
    if fields.get("uuid").is_some_and(|uuid| !uuid.is_null()) {
        return None;
    }
    // Anthropic: {"type": "image", "source": {"type": "base64", "media_type": ..., "data": ...}}.
    let source = fields.get("source").and_then(Value::as_object).filter(|_| kind(fields) == "image");
    // The Model Context Protocol: {"type": "image", "data": ..., "mimeType": ...}.
    let bare =
        Some(fields).filter(|fields| kind(fields) == "image" && fields.get("data").is_some_and(Value::is_string));
    // Gemini: {"inlineData": {"mimeType": ..., "data": ...}}.
    let inline = fields.get("inlineData").or_else(|| fields.get("inline_data")).and_then(Value::as_object);
    if let Some(inner) = source.or(inline).or(bare) {
        let said = ["media_type", "mimeType", "mime_type"].into_iter().find_map(|key| inner.get(key)?.as_str());
        if said.is_some_and(|said| !may_be_image(said)) {
            return None;
        }
        return Some((decoded(inner.get("data")?.as_str()?)?.into(), said));
    }
    let (said, data) = places(fields).find_map(|value| data_url(value.as_str()?))?;
    Some((decoded(data)?.into(), said))
}

fn kind(fields: &Map<String, Value>) -> &str {
    fields.get("type").and_then(Value::as_str).unwrap_or_default()
}

/// Where a part of kind `image`, `image_url` or `input_image`, or of none, says where its picture is.
fn places(fields: &Map<String, Value>) -> impl Iterator<Item = &Value> {
    let shows = matches!(kind(fields), "" | "image" | "image_url" | "input_image");
    let outer = ["image_url", "image", "url"].into_iter().filter(move |_| shows);
    outer.filter_map(|key| match fields.get(key)? {
        Value::Object(inner) => inner.get("url"),
        value => Some(value),
    })
}

/// Media type and data of `data:image/png;base64,...`.
pub(super) fn data_url(url: &str) -> Option<(Option<&str>, &str)> {
    let (scheme, rest) = url.split_at_checked(5)?;
    let (before, data) = rest.split_once(',').filter(|_| scheme.eq_ignore_ascii_case("data:"))?;
    let said = before.strip_suffix(";base64")?;
    let said = said.split(';').next().filter(|said| !said.is_empty());
    said.is_none_or(may_be_image).then_some((said, data))
}

/// Whether a media type may be said of a picture; its first bytes decide what it is.
fn may_be_image(said: &str) -> bool {
    let said = said.to_ascii_lowercase();
    said.starts_with("image/") || said == "application/octet-stream"
}

/// Base64 in either alphabet, padded or not, line breaks and blanks left out.
pub(super) fn decoded(data: &str) -> Option<Vec<u8>> {
    let blank = data.bytes().any(|byte| byte.is_ascii_whitespace());
    let data = if blank { data.split_ascii_whitespace().collect::<String>().into() } else { Cow::Borrowed(data) };
    [STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD].iter().find_map(|engine| engine.decode(&*data).ok())
}

/// What the header of a file says.
fn picture_of(file: &[u8]) -> Result<Picture, String> {
    let found = header::read(file)?;
    let Header { width, height, kind } = found;
    Ok(Picture { digest: digest(file), width, height, kind, length: file.len() })
}

/// The name of a file: its blake3.
pub fn digest(file: &[u8]) -> [u8; 32] {
    *blake3::hash(file).as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIF: &[u8] = b"GIF89a\x05\0\x07\0\xff\xfe\xfb";

    #[test]
    fn a_picture_in_any_apis_words_becomes_its_digest() {
        let plain = STANDARD.encode(GIF);
        let url = format!("data:image/gif;base64,{plain}");
        let broken = format!("data:image/png;charset=x;base64,{}\n{}", &plain[..8], &plain[8..]);
        let parts = [
            json!({"type": "image_url", "image_url": {"url": url, "detail": "low"}}),
            json!({"type": "image_url", "image_url": url}),
            json!({"type": "input_image", "image_url": url}),
            json!({"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": plain}}),
            json!({"inlineData": {"mimeType": "image/gif", "data": plain}}),
            json!({"inline_data": {"mime_type": "image/gif", "data": URL_SAFE_NO_PAD.encode(GIF)}}),
            json!({"image": url}),
            json!({"type": "image", "image": url}),
            json!({"type": "image", "url": url}),
            json!({"type": "image_url", "image_url": {"url": broken}}),
            json!({"type": "image_url", "image_url": url.replace("data:image/gif", "DATA:IMAGE/GIF")}),
            json!({"type": "image_url", "image_url": url.replace("image/gif", "application/octet-stream")}),
            json!({"type": "image", "data": plain, "mimeType": "image/gif"}),
        ];
        for part in parts {
            let mut message = json!({"role": "user", "content": ["before", part, {"type": "text", "text": "behind"}]});
            let found = take(&mut message);
            let digest = *blake3::hash(GIF).as_bytes();
            assert_eq!(found, [Picture { digest, width: 5, height: 7, kind: 3, length: GIF.len() }], "{part}");
            assert_eq!(handles(&message), [digest]);
            let content = message["content"].as_array().unwrap();
            assert_eq!(content[1], json!({"type": "image", "image": format!("blake3:{}", blake3::hash(GIF).to_hex())}));
            assert_eq!((&content[0], &content[2]["text"]), (&json!("before"), &json!("behind")));
        }
    }

    #[test]
    fn what_is_not_there_stays_and_says_why() {
        let pdf = format!("data:image/png;base64,{}", STANDARD.encode(b"%PDF-1.7"));
        let url = format!("data:image/gif;base64,{}", STANDARD.encode(GIF));
        let cases = [
            (json!({"type": "image_url", "image_url": {"url": "https://x/a.png"}}), "https:"),
            (json!({"type": "image_url", "image_url": null, "uuid": "x"}), "uuid"),
            (json!({"type": "image_url", "image_url": {"url": url}, "uuid": "x"}), "uuid"),
            (json!({"type": "image", "image": "/tmp/a.png"}), "path"),
            (json!({"type": "image_url", "image_url": {"url": pdf}}), "PDF"),
            (json!({"type": "image_url", "image_url": {"url": "data:text/html;base64,AAAA"}}), "text/html"),
        ];
        for (part, word) in cases {
            let mut message = json!({"role": "user", "content": [part]});
            let before = message.clone();
            assert!(take(&mut message).is_empty() && message == before, "{part}");
            assert!(why_not(&part).unwrap().contains(word), "{part} {:?}", why_not(&part));
        }
        for part in [json!({"type": "text", "text": "x"}), json!("x"), json!({"type": "video_url", "video_url": "x"})] {
            assert_eq!(why_not(&part), None);
        }
        let text = json!({"role": "user", "content": "data:image/png;base64,AAAA"});
        assert!(take(&mut text.clone()).is_empty());
    }
}
