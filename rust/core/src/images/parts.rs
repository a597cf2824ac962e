//! Finds the parts of a message that contain an image's bytes, and replaces the bytes by a digest.

use super::header::{self, Header};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD};
use serde_json::{Map, Value, json};
use std::borrow::Cow;

/// Prefix of a digest that represents an image.
const HANDLE: &str = "blake3:";

/// The file of an image that a record contains.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Image {
    /// Its blake3 digest.
    pub digest: [u8; 32],
    /// Width in pixels, from its header.
    pub width: u32,
    /// Height in pixels, from its header.
    pub height: u32,
    /// Index into [`super::MEDIA_TYPES`], according to its first bytes.
    pub kind: u8,
    /// Number of bytes of the file.
    pub length: usize,
}

/// Removes the images from the content of a message, replaces them with digests, and returns them.
pub fn extract(message: &mut Value) -> Vec<Image> {
    // For few keys, comparing is faster than hashing. Most messages contain only text.
    let fields = message.as_object_mut().into_iter().flatten();
    let parts = fields.filter(|(key, _)| *key == "content").find_map(|(_, content)| content.as_array_mut());
    let mut images = Vec::new();
    for part in parts.into_iter().flatten() {
        if let Some(Ok(image)) = image_data(part).map(|(data, _)| image_of(&data)) {
            let name = format!("{HANDLE}{}", blake3::Hash::from_bytes(image.digest).to_hex());
            *part = json!({"type": "image", "image": name});
            images.push(image);
        }
    }
    images
}

/// Returns true if a part contains the bytes of a supported image.
pub fn holds(part: &Value) -> bool {
    image_data(part).is_some_and(|(data, _)| image_of(&data).is_ok())
}

/// Returns the digests of the images of a message, in order.
pub fn handles(message: &Value) -> Vec<[u8; 32]> {
    let parts = message.get("content").and_then(Value::as_array);
    parts.into_iter().flatten().filter_map(handle).collect()
}

/// Returns true if a part represents an image that the record contains.
pub fn is_handle(part: &Value) -> bool {
    handle(part).is_some()
}

fn handle(part: &Value) -> Option<[u8; 32]> {
    let hex = part.get("image")?.as_str()?.strip_prefix(HANDLE)?;
    blake3::Hash::from_hex(hex).ok().map(|hash| *hash.as_bytes())
}

/// Returns the reason why a part of a message is not an available image, worded to follow "a part". Returns `None` if
/// the part shows no image.
pub fn reason_unavailable(part: &Value) -> Option<String> {
    let fields = part.as_object()?;
    if fields.get("uuid").is_some_and(|uuid| !uuid.is_null()) {
        return Some("with a picture that a server may have taken from its cache by `uuid`".into());
    }
    if let Some((data, _)) = image_data(part) {
        return image_of(&data).err().map(|why| format!("with a picture {why}"));
    }
    let place = places(fields).find_map(|value| value.as_str())?;
    let kind = place.split(':').next().unwrap_or_default();
    if kind.eq_ignore_ascii_case("data") {
        let media_type: String = place.chars().skip(5).take_while(|&sign| sign != ',').take(40).collect();
        return Some(format!("whose data URL says {media_type:?}, which is no picture in base64"));
    }
    let location = if kind.len() < place.len() && kind.len() <= 8 {
        format!("at an address ({kind}:)")
    } else {
        "at a path".into()
    };
    Some(format!("with a picture {location}, whose bytes are not in the record"))
}

/// Returns the file that a part contains, and its declared media type, if any.
fn image_data(part: &Value) -> Option<(Cow<'_, [u8]>, Option<&str>)> {
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
        let media_type = ["media_type", "mimeType", "mime_type"].into_iter().find_map(|key| inner.get(key)?.as_str());
        if media_type.is_some_and(|media_type| !may_be_image(media_type)) {
            return None;
        }
        return Some((decoded(inner.get("data")?.as_str()?)?.into(), media_type));
    }
    let (media_type, data) = places(fields).find_map(|value| data_url(value.as_str()?))?;
    Some((decoded(data)?.into(), media_type))
}

fn kind(fields: &Map<String, Value>) -> &str {
    fields.get("type").and_then(Value::as_str).unwrap_or_default()
}

/// Returns the image locations in a part of type `image`, `image_url` or `input_image`, or without a type.
fn places(fields: &Map<String, Value>) -> impl Iterator<Item = &Value> {
    let is_image = matches!(kind(fields), "" | "image" | "image_url" | "input_image");
    let outer = ["image_url", "image", "url"].into_iter().filter(move |_| is_image);
    outer.filter_map(|key| match fields.get(key)? {
        Value::Object(inner) => inner.get("url"),
        value => Some(value),
    })
}

/// Returns media type and data of `data:image/png;base64,...`.
pub(super) fn data_url(url: &str) -> Option<(Option<&str>, &str)> {
    let (scheme, remainder) = url.split_at_checked(5)?;
    let (head, data) = remainder.split_once(',').filter(|_| scheme.eq_ignore_ascii_case("data:"))?;
    let parameters = head.strip_suffix(";base64")?;
    let media_type = parameters.split(';').next().filter(|name| !name.is_empty());
    media_type.is_none_or(may_be_image).then_some((media_type, data))
}

/// Returns true if the media type is possible for an image. The first bytes decide the actual kind.
fn may_be_image(media_type: &str) -> bool {
    let media_type = media_type.to_ascii_lowercase();
    media_type.starts_with("image/") || media_type == "application/octet-stream"
}

/// Decodes base64 in either alphabet, with or without padding, ignoring white space.
pub(super) fn decoded(data: &str) -> Option<Vec<u8>> {
    let blank = data.bytes().any(|byte| byte.is_ascii_whitespace());
    let data = if blank { data.split_ascii_whitespace().collect::<String>().into() } else { Cow::Borrowed(data) };
    [STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD].iter().find_map(|engine| engine.decode(&*data).ok())
}

/// Returns the facts in the header of a file.
fn image_of(file: &[u8]) -> Result<Image, String> {
    let header = header::read(file)?;
    let Header { width, height, kind } = header;
    Ok(Image { digest: digest(file), width, height, kind, length: file.len() })
}

/// Returns the blake3 digest of a file.
pub fn digest(file: &[u8]) -> [u8; 32] {
    *blake3::hash(file).as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIF: &[u8] = b"GIF89a\x05\0\x07\0\xff\xfe\xfb";

    #[test]
    fn an_image_in_the_format_of_any_api_becomes_its_digest() {
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
            let images = extract(&mut message);
            let digest = *blake3::hash(GIF).as_bytes();
            assert_eq!(images, [Image { digest, width: 5, height: 7, kind: 3, length: GIF.len() }], "{part}");
            assert_eq!(handles(&message), [digest]);
            let content = message["content"].as_array().unwrap();
            assert_eq!(content[1], json!({"type": "image", "image": format!("blake3:{}", blake3::hash(GIF).to_hex())}));
            assert_eq!((&content[0], &content[2]["text"]), (&json!("before"), &json!("behind")));
        }
    }

    #[test]
    fn unavailable_images_stay_and_have_a_reason() {
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
            assert!(extract(&mut message).is_empty() && message == before, "{part}");
            assert!(reason_unavailable(&part).unwrap().contains(word), "{part} {:?}", reason_unavailable(&part));
        }
        for part in [json!({"type": "text", "text": "x"}), json!("x"), json!({"type": "video_url", "video_url": "x"})] {
            assert_eq!(reason_unavailable(&part), None);
        }
        let text = json!({"role": "user", "content": "data:image/png;base64,AAAA"});
        assert!(extract(&mut text.clone()).is_empty());
    }
}
