//! Throughput of `tracegrad_core::template`: a long conversation with tools, in bytes of rendered text.
//!
//! `TEMPLATE=path/to/chat_template.jinja` renders with another template, such as Qwen3's.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use serde_json::{Map, Value, json};
use std::hint::black_box;
use std::sync::Arc;
use tracegrad_core::template::Template;

/// The allocator of the extension.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// ChatML with tools, thoughts and tool calls, of the shape that Qwen's templates have.
const CHATML: &str = include_str!("chatml.jinja");

fn conversation() -> (Vec<Value>, Arc<Value>) {
    let paragraph =
        "The clerk looked at the list, counted the crates twice and wrote 42 on the slip: naïve, but exact. ";
    let mut messages = vec![json!({"role": "system", "content": paragraph})];
    for turn in 0..3 {
        let call = json!({"id": "c", "type": "function",
            "function": {"name": "stock", "arguments": {"item": format!("crate {turn}"), "count": turn}}});
        messages.push(json!({"role": "user", "content": paragraph.repeat(18)}));
        messages.push(json!({"role": "assistant", "content": "", "tool_calls": [call]}));
        messages.push(json!({"role": "tool", "tool_call_id": "c", "content": paragraph.repeat(16)}));
        messages.push(
            json!({"role": "assistant", "content": format!("<think>\nhm\n</think>\n\n{}", paragraph.repeat(14))}),
        );
    }
    let schema = |number: usize| {
        json!({"type": "function", "function": {"name": format!("tool_{number}"), "description": paragraph, "parameters":
            {"type": "object", "properties": {"item": {"type": "string", "description": paragraph}}, "required": ["item"]}}})
    };
    (messages, Arc::new((0..14).map(schema).collect()))
}

fn render(criterion: &mut Criterion) {
    let source = std::env::var("TEMPLATE").map(|path| std::fs::read_to_string(path).expect("the template is there"));
    let template = Template::compile(source.as_deref().unwrap_or(CHATML), &[]).expect("the template compiles");
    let (messages, tools) = conversation();
    let messages: Vec<&Value> = messages.iter().collect();
    let bytes = template.render_text(&messages, Some(&tools), true, &Map::new()).expect("it renders").len();
    let mut group = criterion.benchmark_group("template");
    group.throughput(Throughput::Bytes(bytes as u64));
    group.bench_function("text", |bencher| {
        bencher.iter(|| template.render_text(black_box(&messages), Some(&tools), true, &Map::new()));
    });
    // A variable that no template reads makes every call a new one.
    let mut kwargs = Map::new();
    let mut call = 0_u64;
    group.bench_function("provenance", |bencher| {
        bencher.iter(|| {
            call += 1;
            kwargs.insert("call".to_owned(), Value::from(call));
            template.render(black_box(&messages), Some(&tools), true, &kwargs)
        });
    });
    group.bench_function("provenance, a group of eight with one prompt", |bencher| {
        bencher.iter(|| {
            call += 1;
            kwargs.insert("call".to_owned(), Value::from(call));
            for _ in 0..8 {
                black_box(template.render(black_box(&messages), Some(&tools), true, &kwargs).expect("it renders"));
            }
        });
    });
    group.bench_function("provenance, rendered before", |bencher| {
        bencher.iter(|| template.render(black_box(&messages), Some(&tools), true, &Map::new()));
    });
    group.finish();
}

criterion_group!(benches, render);
criterion_main!(benches);
