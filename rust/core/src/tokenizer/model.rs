//! What the model beside a tokenizer says of its ids: how many rows its embedding has, and which ids stand for media.
//!
//! From config.json, and from the texts of added tokens. Nothing of the model's weights is read.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Levels of config.json that are looked through.
const DEEPEST: usize = 4;
/// What the words of a placeholder's text, or of its key in config.json, begin with.
const MEDIA: [&str; 9] = ["image", "img", "video", "vision", "audio", "speech", "sound", "picture", "media"];

/// What a model says of its ids.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Model {
    /// Rows of its embedding; `None` where nothing says.
    pub vocab_size: Option<u32>,
    /// Ids that stand for pictures, sound and video, in order.
    pub placeholders: Vec<u32>,
    /// Whether servers write its prompts in the harmony format, without its template.
    pub speaks_harmony: bool,
}

impl Model {
    /// What config.json says. The part for text decides, where the model has several.
    pub fn of(config: &Map<String, Value>) -> Self {
        let size = |config: &Map<String, Value>| {
            let size = config.get("vocab_size")?.as_u64()?;
            u32::try_from(size).ok().filter(|size| *size > 0)
        };
        let text = config.get("text_config").and_then(Value::as_object).and_then(size);
        let mut placeholders = Vec::new();
        media_ids(config, DEEPEST, &mut placeholders);
        let speaks_harmony = config.get("model_type").is_some_and(|name| name == "gpt_oss");
        Self { vocab_size: text.or_else(|| size(config)), placeholders, speaks_harmony }
    }

    /// With the added tokens whose texts say media; an id that `is_word` is none.
    pub(super) fn with_placeholders<'a>(
        &self,
        added: impl Iterator<Item = (&'a str, u32)>,
        is_word: impl Fn(u32) -> bool,
    ) -> Self {
        let named = added.filter(|(content, _)| says_media(content) || *content == "<|patch|>").map(|(_, id)| id);
        let stated = self.placeholders.iter().copied().filter(|id| !is_word(*id));
        let mut placeholders: Vec<u32> = named.chain(stated).collect();
        placeholders.sort_unstable();
        placeholders.dedup();
        Self { placeholders, ..self.clone() }
    }

    /// The first of `ids` that stands for media.
    pub fn first_placeholder(&self, ids: &[u32]) -> Option<usize> {
        const BLOCK: usize = 64;
        let (first, last) = (*self.placeholders.first()?, *self.placeholders.last()?);
        let near = |id: u32| id.wrapping_sub(first) <= last - first;
        let stands = |id: &u32| near(*id) && self.placeholders.binary_search(id).is_ok();
        let mut blocks = ids.chunks(BLOCK).enumerate();
        blocks.find_map(|(index, block)| {
            // Without a branch for each id.
            let any = block.iter().fold(false, |any, &id| any | near(id));
            let at = if any { block.iter().position(stands) } else { None };
            at.map(|at| index * BLOCK + at)
        })
    }
}

/// Ids under keys such as `image_token_id`, `video_token_index`, `vision_start_token_id`.
fn media_ids(config: &Map<String, Value>, deepest: usize, found: &mut Vec<u32>) {
    for (key, value) in config {
        match value {
            Value::Object(inner) if deepest > 0 => media_ids(inner, deepest - 1, found),
            Value::Number(id) if (key.ends_with("_token_id") || key.ends_with("_token_index")) && says_media(key) => {
                found.extend(id.as_u64().and_then(|id| u32::try_from(id).ok()));
            }
            _ => {}
        }
    }
}

/// Whether a word of the text begins with the name of a medium.
fn says_media(text: &str) -> bool {
    let text = text.to_ascii_lowercase();
    text.split(|sign: char| !sign.is_ascii_alphanumeric())
        .any(|word| MEDIA.iter().any(|medium| word.starts_with(medium)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn model(config: &Value) -> Model {
        Model::of(config.as_object().unwrap())
    }

    #[test]
    fn the_part_for_text_says_how_many_rows_there_are() {
        assert_eq!(model(&json!({"vocab_size": 70})).vocab_size, Some(70));
        assert_eq!(model(&json!({"vocab_size": 70, "text_config": {"vocab_size": 90}})).vocab_size, Some(90));
        assert_eq!(model(&json!({"vocab_size": 70, "text_config": {}})).vocab_size, Some(70));
        for wrong in [json!(0), json!(-1), json!("70"), json!(null), json!(1_u64 << 40)] {
            assert_eq!(model(&json!({"vocab_size": wrong})).vocab_size, None);
        }
    }

    #[test]
    fn placeholders_are_told_by_config_and_by_their_texts() {
        let config = json!({"image_token_id": 200, "eos_token_id": 7, "vision_config": {"video_token_index": 5}});
        let added = [("<|image_pad|>", 9), ("<|im_end|>", 8), ("<img>", 10), ("<|patch|>", 11), ("<imagine", 12)];
        // 5 is a word of the vocabulary, whatever config.json says.
        let found = model(&config).with_placeholders(added.into_iter(), |id| id == 5);
        assert_eq!(found.placeholders, [9, 10, 11, 200]);
    }

    #[test]
    fn the_first_placeholder_is_found_wherever_it_stands() {
        let model = Model { vocab_size: None, placeholders: vec![50, 60], speaks_harmony: false };
        for at in [0, 1, 63, 64, 65, 199] {
            let mut ids: Vec<u32> = (0..200).map(|k| if k % 2 == 0 { 55 } else { 61 }).collect();
            assert_eq!(model.first_placeholder(&ids), None);
            ids[at] = 60;
            assert_eq!(model.first_placeholder(&ids), Some(at));
        }
        assert_eq!(Model::default().first_placeholder(&[0]), None);
    }
}
