//! A record's own list of pictures, beside its messages: each goes to its place in them.

use crate::pictures::holds;
use crate::trace::Message;
use serde_json::{Value, json};

/// Puts a record's own list of pictures where its messages have a place for one (`{"type": "image"}`), in order; where none
/// has, before the text of the first user's message, as TRL does. Says whether all were put.
pub fn fill(messages: &mut [Message], images: &Value) -> bool {
    let Some(images) = images.as_array().filter(|images| !images.is_empty()) else { return false };
    let shown: Vec<Value> = images.iter().map(shown_as).collect();
    if !shown.iter().all(holds) {
        return false;
    }
    let empty = |part: &Value| *part == json!({"type": "image"});
    let parts = |message: &Message| message.value.get("content").and_then(Value::as_array).cloned().unwrap_or_default();
    let places: usize = messages.iter().map(|message| parts(message).iter().filter(|part| empty(part)).count()).sum();
    let mut next = shown.into_iter();
    if places == 0 {
        let Some(first) = messages.iter_mut().find(|message| message.role() == "user") else { return false };
        let text = match &first.value["content"] {
            Value::String(text) => vec![json!({"type": "text", "text": text})],
            Value::Array(parts) => parts.clone(),
            _ => Vec::new(),
        };
        first.value["content"] = next.chain(text).collect();
        renew(first);
        return true;
    }
    if places != next.len() {
        return false;
    }
    for message in messages.iter_mut().filter(|message| parts(message).iter().any(empty)) {
        let filled =
            parts(message).into_iter().map(|part| if empty(&part) { next.next().unwrap_or(part) } else { part });
        message.value["content"] = filled.collect();
        renew(message);
    }
    true
}

/// Takes the pictures that were put into a message, beside those that it had.
fn renew(message: &mut Message) {
    let before = std::mem::take(&mut message.pictures);
    *message = Message::new(message.value.take(), message.reward);
    message.pictures.extend(before);
}

/// An entry of a list of pictures as a part: a data URL, base64, or `{"bytes": base64}` as Arrow's images are written.
fn shown_as(image: &Value) -> Value {
    let data = image.get("bytes").unwrap_or(image);
    match data.as_str() {
        Some(text) if text.starts_with("data:") => json!({"type": "image", "image": text}),
        Some(text) => json!({"type": "image", "source": {"type": "base64", "data": text}}),
        None => image.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::normal::message::plain;
    use crate::pictures::handles;
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;

    fn images(sizes: &[u8]) -> (Value, Vec<[u8; 32]>) {
        let files: Vec<Vec<u8>> = sizes.iter().map(|&size| [b"GIF89a", &[size, 0, 7, 0][..]].concat()).collect();
        let digests = files.iter().map(|file| *blake3::hash(file).as_bytes()).collect();
        (files.iter().map(|file| json!({"bytes": STANDARD.encode(file), "path": null})).collect(), digests)
    }

    #[test]
    fn pictures_go_to_their_places_or_before_the_first_question() {
        let (two, digests) = images(&[5, 6]);
        let place = json!({"type": "image"});
        let mut placed =
            vec![plain("user", json!([place, {"type": "text", "text": "x"}])), plain("user", json!([place]))];
        assert!(fill(&mut placed, &two));
        let found: Vec<_> = placed.iter().map(|message| handles(&message.value)).collect();
        assert_eq!(found, [vec![digests[0]], vec![digests[1]]]);
        assert_eq!(placed[1].pictures[0].width, 6);

        let mut text = vec![plain("system", "s"), plain("user", "x"), plain("user", "y")];
        assert!(fill(&mut text, &two));
        assert_eq!(handles(&text[1].value), digests);
        assert_eq!(text[1].value["content"][2], json!({"type": "text", "text": "x"}));
    }

    #[test]
    fn a_list_that_does_not_fit_is_left() {
        let (two, _) = images(&[5, 6]);
        let mut one = vec![plain("user", json!([{"type": "image"}]))];
        assert!(!fill(&mut one, &two));
        assert!(!fill(&mut [plain("user", "x")], &json!(["/tmp/a.png"])));
        assert!(!fill(&mut [plain("assistant", "x")], &two));
        assert!(!fill(&mut [plain("user", "x")], &json!([])));
    }
}
