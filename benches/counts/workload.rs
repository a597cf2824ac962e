//! Recordings that are the same bytes everywhere: four shapes of conversations, in three layouts of token lists.

use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::Path;
use tracegrad_core::tokenizer::{Tokenizer, TokenizerConfig};

/// ChatML with tools and tool calls, which drops thoughts from the history.
const TEMPLATE: &str = include_str!("../chatml.jinja");
const END: &str = "<|im_end|>";
const WORDS: &[&str] =
    &["the", "price", "of", "three", "lamps", "is", "42", "€", "so", "we", "call", "`stock`", "\n", "\"x\"", "naïve"];

/// How tokens are written: `token_id:N` as vLLM does on request, text and bytes, or ids next to text and bytes.
pub const LAYOUTS: [&str; 3] = ["names", "texts", "ids"];

/// One kind of conversation.
pub struct Shape {
    pub name: &'static str,
    traces: usize,
    turns: usize,
    given: usize,
    thoughts: usize,
    sampled: usize,
    tools: usize,
}

/// Agents with tools; forty turns with 100 kB of tool outputs; thoughts that the history drops; one long answer.
pub const SHAPES: [Shape; 4] = [
    Shape { name: "agents", traces: 8, turns: 6, given: 120, thoughts: 0, sampled: 60, tools: 14 },
    Shape { name: "outputs", traces: 2, turns: 40, given: 500, thoughts: 0, sampled: 40, tools: 14 },
    Shape { name: "thoughts", traces: 4, turns: 5, given: 30, thoughts: 300, sampled: 60, tools: 0 },
    Shape { name: "maths", traces: 4, turns: 1, given: 60, thoughts: 0, sampled: 3000, tools: 0 },
];

/// The tokenizer of the bundled example with [`TEMPLATE`].
pub fn tokenizer() -> Tokenizer {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/quickstart/model");
    let json = std::fs::read(folder.join("tokenizer.json")).expect("the example is there");
    let mut config = TokenizerConfig::from_dir(&folder).expect("the example is there");
    config.chat_template = Some(TEMPLATE.to_owned());
    Tokenizer::from_json(&json, &config).expect("it loads")
}

/// A small generator of its own, so that every run makes the same bytes.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize
    }

    fn text(&mut self, words: usize) -> String {
        (0..words).map(|_| WORDS[self.next() % WORDS.len()]).collect::<Vec<_>>().join(" ")
    }
}

fn tool(number: usize, dice: &mut Dice) -> Value {
    let parameters = json!({"type": "object", "required": ["item"],
        "properties": {"item": {"type": "string", "description": dice.text(12)}}});
    let function = json!({"name": format!("tool_{number}"), "description": dice.text(20), "parameters": parameters});
    json!({"type": "function", "function": function})
}

/// The choice of a response: its message, and its tokens in a layout.
fn choice(text: &str, layout: &str, tokenizer: &Tokenizer, dice: &mut Dice) -> (Value, Vec<u32>) {
    let ids = tokenizer.encode(&format!("{text}{END}")).expect("it encodes");
    let entry = |&id: &u32| {
        let logprob = -(dice.next() as f64) / f64::from(u32::MAX) * 4.0;
        if layout == "names" {
            return json!({"token": format!("token_id:{id}"), "logprob": logprob, "bytes": null, "top_logprobs": []});
        }
        let bytes = tokenizer.token_bytes(id).expect("it is in the vocabulary");
        json!({"token": String::from_utf8_lossy(bytes), "logprob": logprob, "bytes": bytes, "top_logprobs": []})
    };
    let content: Vec<_> = ids.iter().map(entry).collect();
    let message = json!({"role": "assistant", "content": text});
    let choice = json!({"index": 0, "finish_reason": "stop", "message": message, "logprobs": {"content": content}});
    (choice, ids)
}

/// One trace: a call for each turn, with all earlier messages in its request.
fn record(shape: &Shape, index: usize, layout: &str, tokenizer: &Tokenizer) -> Value {
    // The given part is the same for all traces of a file: they are samples of one prompt.
    let (mut given, mut drawn) = (Dice(1), Dice(index as u64 + 2));
    let tools: Vec<_> = (0..shape.tools).map(|number| tool(number, &mut given)).collect();
    let mut messages = vec![json!({"role": "system", "content": given.text(40)})];
    let mut calls = Vec::new();
    for turn in 0..shape.turns {
        let role = if turn == 0 || shape.tools == 0 { "user" } else { "tool" };
        messages.push(json!({"role": role, "content": given.text(shape.given), "tool_call_id": format!("c{turn}")}));
        let answer = drawn.text(shape.sampled);
        let thought = if shape.thoughts == 0 { String::new() } else { drawn.text(shape.thoughts) };
        let text =
            if thought.is_empty() { answer.clone() } else { format!("<think>\n{thought}\n</think>\n\n{answer}") };
        let (mut choice, ids) = choice(&text, layout, tokenizer, &mut drawn);
        let request = json!({"model": "clerk", "messages": messages, "tools": tools});
        let mut response = json!({"object": "chat.completion", "model": "clerk"});
        if layout == "ids" {
            let borrowed: Vec<_> = messages.iter().collect();
            let tools = (!tools.is_empty()).then(|| std::sync::Arc::new(Value::Array(tools.clone())));
            let template = tokenizer.template().expect("it has one");
            let prompt = template.render_text(&borrowed, tools.as_ref(), true, &serde_json::Map::new());
            response["prompt_token_ids"] = json!(tokenizer.encode(&prompt.expect("it renders")).expect("it encodes"));
            choice["token_ids"] = json!(ids);
        }
        response["choices"] = json!([choice]);
        calls.push(json!({"request": request, "response": response}));
        messages.push(json!({"role": "assistant", "content": text}));
    }
    json!({"id": format!("t{index}"), "group": "g", "reward": index, "logprob_kind": "raw", "calls": calls})
}

/// Writes every shape in every layout, as `SHAPE-LAYOUT.jsonl`, and a text-heavy file as `text.jsonl`.
pub fn make(folder: &Path) {
    let tokenizer = tokenizer();
    for shape in &SHAPES {
        for layout in LAYOUTS {
            let mut lines = String::new();
            for index in 0..shape.traces {
                writeln!(lines, "{}", record(shape, index, layout, &tokenizer)).expect("memory takes it");
            }
            std::fs::write(folder.join(format!("{}-{layout}.jsonl", shape.name)), lines).expect("the folder takes it");
        }
    }
    let (mut dice, mut lines) = (Dice(1), String::new());
    for index in 0..200 {
        let roles = ["user", "assistant", "tool"];
        let messages: Vec<_> = (0..12).map(|at| json!({"role": roles[at % 3], "content": dice.text(300)})).collect();
        let record = json!({"id": format!("t{index}"), "group": index / 8, "reward": 1.0, "messages": messages});
        writeln!(lines, "{record}").expect("memory takes it");
    }
    std::fs::write(folder.join("text.jsonl"), lines).expect("the folder takes it");
}
