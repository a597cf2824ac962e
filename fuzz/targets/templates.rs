//! A chat template: for any text, compiling and rendering end, and the spans of a render are in order. A session that
//! grows and shrinks renders the same text as a new one.
#![no_main]

mod watched;

use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracegrad_core::template::{Session, Template};

fuzz_target!(|source: &str| watched::within(256, || rendered(source)));

fn rendered(source: &str) {
    let template = match Template::compile(source, &[("bos_token".into(), "<s>".into())]) {
        Ok(template) => template,
        Err(error) => return watched::told(&error),
    };
    let messages = [
        json!({"role": "system", "content": "Be brief."}),
        json!({"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}),
        json!({"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2.5}}}]}),
        json!({"role": "tool", "content": "4.5"}),
        json!({"role": "assistant", "content": "4 1/2", "reasoning_content": "hm"}),
    ];
    let tools = Arc::new(json!([{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]));
    let messages: Vec<_> = messages.iter().collect();
    let began = Instant::now();
    let rendered = match template.render(&messages, Some(&tools), true, &Map::new()) {
        Ok(rendered) => rendered,
        Err(error) => return watched::told(&error),
    };
    let mut end = 0;
    for span in &rendered.spans {
        assert!(end <= span.start && span.start <= span.end, "spans overlap or are out of order");
        assert!(rendered.text.get(span.start..span.end).is_some(), "a span cuts a character or leaves the text");
        end = span.end;
    }
    // A slow template is rendered once.
    if began.elapsed() < Duration::from_millis(5) {
        in_a_session(&template, &messages, &tools);
    }
}

fn in_a_session(template: &Template, messages: &[&Value], tools: &Arc<Value>) {
    let mut session = Session::default();
    for count in [2, 3, 5, 1, 4, 5] {
        let next = template.render_next(&mut session, &messages[..count], Some(tools), true, &Map::new());
        if let Ok(alone) = template.render(&messages[..count], Some(tools), true, &Map::new()) {
            assert_eq!(next.expect("a session renders what can be rendered"), alone);
        }
    }
}
