//! A session must render the same text as a separate render, regardless of earlier renders.

use super::Session;
use crate::template::conversation::Conversation;
use crate::template::incremental::messages;
use crate::template::limits::{self, Size};
use crate::template::server_message::Rules;
use crate::template::{Field, Rendered, Template, environment, provenance};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A generator of pseudo-random numbers.
struct Draw(u64);

impl Draw {
    fn below(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % count
    }

    fn text(&mut self) -> String {
        const PARTS: [&str; 12] = [
            "price",
            " of ",
            "two lamps\n",
            "<think>",
            "</think>",
            " ",
            "\n\n",
            "12 €",
            "<tool_call>",
            "",
            "naïve",
            "'\"",
        ];
        (0..self.below(6)).map(|_| PARTS[self.below(PARTS.len())]).collect()
    }

    fn message(&mut self, at: usize, alternates: bool) -> Value {
        let text = self.text();
        if alternates {
            let role = if at.is_multiple_of(2) { "user" } else { "assistant" };
            return json!({"role": role, "content": text});
        }
        match (at, self.below(10)) {
            (0, 0..5) => json!({"role": "system", "content": text}),
            (_, 0..3) => json!({"role": "user", "content": text}),
            (_, 3) => json!({"role": "user", "content": [{"type": "text", "text": text}]}),
            (_, 4) => json!({"role": "tool", "content": text, "tool_call_id": "call_1", "name": "price"}),
            (_, 5) => {
                let call = json!({"id": "call_1", "type": "function", "function": {"name": "price", "arguments": "{\"item\": \"lamp\"}"}});
                json!({"role": "assistant", "content": if self.below(2) == 0 { Value::Null } else { text.into() }, "tool_calls": [call]})
            }
            (_, 6) => json!({"role": "assistant", "reasoning_content": self.text(), "content": text}),
            _ => json!({"role": "assistant", "content": text}),
        }
    }
}

fn shown(result: crate::error::Result<Rendered>) -> Result<Rendered, String> {
    result.map_err(|error| error.to_string())
}

/// Renders a conversation that grows, is truncated and rewritten, in a session and separately. Returns the number of
/// skipped items.
fn law(source: &str, seed: u64, tokens: &[(String, String)]) -> usize {
    let Ok(template) = Template::compile(source, tokens) else { return 0 };
    let separate = Template::compile(source, tokens).unwrap();
    let mut draw = Draw(seed);
    let tools = [
        None,
        Some(Arc::new(json!([{"type": "function", "function": {"name": "price", "description": "What it costs",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}}}]))),
    ];
    let tools = tools[draw.below(2)].clone();
    let kwargs = Map::from_iter([("strftime_now".to_owned(), json!("2025-03-07"))]);
    // Versions of the conversation, which must all live as long as the session.
    let mut versions: Vec<Vec<Value>> = vec![Vec::new()];
    for _ in 0..12 {
        let mut next = versions.last().unwrap().clone();
        if draw.below(5) == 0 {
            next.truncate(draw.below(next.len() + 1));
        }
        if draw.below(8) == 0 && !next.is_empty() {
            let at = draw.below(next.len());
            next[at] = draw.message(at, seed.is_multiple_of(3));
        }
        let added = draw.below(4).max(usize::from(next.is_empty()));
        (0..added).for_each(|_| next.push(draw.message(next.len(), seed.is_multiple_of(3))));
        versions.push(next);
    }
    let mut session = Session::default();
    let mut skipped = 0;
    for messages in &versions[1..] {
        let messages: Vec<&Value> = messages.iter().collect();
        let prompt = draw.below(6) > 0;
        let result = shown(template.render_next(&mut session, &messages, tools.as_ref(), prompt, &kwargs));
        let expected = shown(separate.render(&messages, tools.as_ref(), prompt, &kwargs));
        assert_eq!(result, expected, "seed {seed}\n{source}\n{messages:?}");
        skipped += messages::skipped();
    }
    skipped
}

/// Templates in which a run can resume although the text for a message may depend on earlier messages.
const GONE_ON: [&str; 18] = [
    "{% for m in messages[::-1] %}J{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% set n = namespace(rest=messages[1:], a=0) %}{% for m in messages %}{% set n.a = n.a + 1 %}{{ n.a }}{{ m.role }}{% endfor %}",
    "{% for m in messages[messages|length - 2:] %}{{ m.role }}{% endfor %}",
    "{% set n = namespace(a=0) %}{% for m in messages %}{% set n.a = n.a + 1 %}{{ m.role }}{% endfor %}{{ n.a }}{% if messages[0].content %}{% set n = 5 %}{% endif %}{{ n }}",
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    "{%- for m in messages -%}\n  <{{ m.role }}>\n  {{- m.content }}\n {%- endfor -%}\n end",
    "{% for m in messages %}\n  {% if loop.first %}first{% endif %}{{ loop.index }}{{ m.content }}{{ (loop.previtem or {}).role }}\n{% endfor %}\ntail",
    "{% for m in messages %}{{ m.role }}{% if loop.last %}!{% endif %}{% endfor %}",
    "{% for m in messages %}{{ m.role }}{{ (loop.nextitem or {}).role }},{% endfor %}",
    "{% for m in messages %}{{ m.role }}{{ (messages[loop.index0 + 2] or {}).role }}{% endfor %}",
    "{% set n = namespace(users=0, last='') %}{% for m in messages %}{% if m.role == 'user' %}{% set n.users = n.users + 1 %}{% endif %}{{ n.users }}{{ n.last }}{% set n.last = m.role %}{% endfor %}{{ n.users }}{{ n.last }}",
    "{% set n = namespace(at=0) %}{% for m in messages[::-1] %}{% if m.role == 'user' and not n.at %}{% set n.at = messages|length - loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{{ m.role }}{% if loop.index0 > n.at %}{{ m.reasoning_content }}{% endif %}{% endfor %}",
    "{% set count = messages|length %}{% for m in messages %}{{ m.role }}{% if count > 3 %}long{% endif %}{% endfor %}",
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}S{{ messages[0].content }}{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}{{ m.role }}{{ m.content }}{% endfor %}",
    "{% set n = namespace() %}{% for m in messages %}{% if m.role == 'tool' %}{% set n.tools = m.content %}{% endif %}{{ n.tools }}{{ m.role }}{% endfor %}{{ n.tools is defined }}",
    "{% macro show(m) %}{% set c.value = c.value + 1 %}{{ c.value }}{{ m.content }}{% endmacro %}{% set c = namespace(value=0) %}{% for m in messages %}{{ show(m) }}{% endfor %}{{ c.value }}",
    "{% set all %}{% for m in messages %}{{ m.role }}{% endfor %}{% endset %}{{ all|upper }}{% for m in messages %}{{ m.content|trim }}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% for k in m %}{{ k }}{{ loop.last }}{% endfor %}{% endfor %}{{ raise_exception('tool') if messages[-1].role == 'tool' }}",
];

/// Templates in which a run cannot resume: the text for a message may depend on later messages or on something
/// unknown.
const WHOLE: [&str; 8] = [
    "{% for m in messages %}{{ m.role }}{{ loop.length }}{% endfor %}",
    "{% for m in messages %}{{ m.role }}{{ messages|length }}{% endfor %}",
    "{% for m in messages %}{{ m.role }}{{ messages[-1].role }}{% endfor %}",
    "{% for m in messages %}{{ m.role }}{{ messages[loop.index0 - 1].content }}{% endfor %}",
    "{% set n = namespace(a=0) %}{% set other = n %}{% for m in messages %}{% set other.a = other.a + 1 %}{{ n.a }}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}{{ m.role }}{% endfor %}.",
    "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{{ m.role }}{% else %}none{% endfor %}.",
    "{% for m in messages %}{% if loop.changed(m.role) %}{{ m.role }}{% endif %}{{ loop.cycle('a', 'b') }}{% endfor %}",
];

#[test]
fn a_session_renders_what_a_render_of_its_own_does() {
    let mut wrong = Vec::new();
    let templates = GONE_ON.map(|source| (source, true)).into_iter().chain(WHOLE.map(|source| (source, false)));
    for (source, resumes) in templates {
        let skipped: usize = (0..40).map(|seed| law(source, seed, &[])).sum();
        wrong.extend(((skipped > 0) != resumes).then(|| format!("{skipped}: {source}")));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Collects the files below `folder` with this ending.
fn files(folder: &Path, ending: &str, matches: &mut Vec<PathBuf>) {
    for path in std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            files(&path, ending, matches);
        } else if path.to_string_lossy().ends_with(ending) {
            matches.push(path);
        }
    }
}

#[test]
fn real_templates_render_in_a_session_what_they_render_alone() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
    let mut templates = Vec::new();
    for up in [root.clone(), root.join("..")] {
        files(&up.join("shared/data/templates"), ".jinja", &mut templates);
    }
    let tokens = ["bos_token", "eos_token"].map(|name| (name.to_owned(), format!("<{name}>")));
    let resumes = |path: &&PathBuf| {
        let source = std::fs::read_to_string(path).unwrap();
        (0..4).map(|seed| law(&source, seed, &tokens)).sum::<usize>() > 0
    };
    let resumed = templates.iter().filter(resumes).count();
    println!("{resumed} of {} templates go on", templates.len());
    assert!(templates.is_empty() || 2 * resumed > templates.len());
}

#[test]
fn what_closes_or_parts_no_block_is_refused_by_the_engine() {
    for source in ["{% else %}", "{% elif a %}", "{% endfor %}", "{% endif %}{% for m in messages %}{% endfor %}"] {
        let message = Template::compile(source, &[]).unwrap_err().to_string();
        assert!(!message.contains("fault"), "{message}");
    }
}

#[test]
fn a_run_that_did_not_end_is_forgotten() {
    let source = "{% for m in messages %}{{ m.content }}{{ raise_exception('b') if m.content == 'b' }}{% endfor %}";
    let template = Template::compile(source, &[]).unwrap();
    let message = |content: &str| json!({"role": "user", "content": content});
    let (a, b) = (message("a"), message("b"));
    // Simulates a panic: the run is inside the loop and did not end.
    messages::begin(template.resumable.as_ref().unwrap(), None, 0, 2);
    let values = Conversation::new(&[&a, &b], Rules::default()).unwrap();
    let values: Vec<_> = (0..2).map(|at| values.value(at, false, None)).collect();
    let context = minijinja::context! { messages => messages::Messages::value(values.into()) };
    environment::render_noted(&template.env, context, Size { messages: 2, bytes: 2 }).unwrap_err();
    assert_eq!(&*template.render(&[&a, &a], None, false, &Map::new()).unwrap().text, "aa");
    assert!(messages::end().ran.is_empty());
}

#[test]
fn values_are_tested_and_written_as_python_does() {
    let message = json!({"role": "user", "x": {"k": "longer"}});
    for (source, expected) in [
        ("{{ 9007199254740993 > 9007199254740992 }}", "True"), // equal as floats
        ("{{ (1e308 * 10 - 1e308 * 10)|tojson }}", "NaN"),
        ("{{ 'a' is sequence }}{{ [] is sequence }}{{ 1 is sequence }}", "TrueTrueFalse"),
        ("{{ 1 is ne 2 }}{{ 1 is ne 1 }}", "TrueFalse"),
        ("{{ messages[0].x.k }}", "longer"),
        (
            "{{ ('<'|safe + '>'|safe) is escaped }}{{ ('<'|safe + 'a') is escaped }}{{ ('a' + 'b') is escaped }}",
            "TrueTrueFalse",
        ),
    ] {
        let template = Template::compile(source, &[]).unwrap();
        assert_eq!(&*template.render(&[&message], None, false, &Map::new()).unwrap().text, expected, "{source}");
    }
}

#[test]
fn spans_are_exact_where_a_string_comes_back_whole() {
    let message = json!({"role": "assistant", "reasoning": "ab", "content": "ab"});
    for (source, expected) in [
        (
            "{{ messages[0].reasoning }}|{{ messages[0].content }}",
            vec![(0, 2, Field::Reasoning), (3, 5, Field::Content)],
        ),
        ("ab{{ messages[0].content.split('z')[0] }}", vec![(2, 4, Field::Content)]),
    ] {
        let rendered = Template::compile(source, &[]).unwrap().render(&[&message], None, false, &Map::new()).unwrap();
        let spans: Vec<_> = rendered.spans.iter().map(|span| (span.start, span.end, span.field)).collect();
        assert_eq!((spans, rendered.exact_provenance), (expected, true), "{source}");
    }
}

#[test]
fn work_is_charged_for_values_and_for_every_sixteen_bytes_searched() {
    limits::open();
    limits::start(Size { messages: 1, bytes: 0 });
    assert_eq!(limits::text_bytes(&vec![1, 2].into()).unwrap(), 8 * 3); // the list and its items
    let search = || assert!(provenance::search(&"a".repeat(160), &[(0, Field::Content, "b")], &[]).unwrap().is_empty());
    assert_eq!(limits::paid_by(search), 4 + 160 / 16);
}

#[test]
fn a_call_that_had_no_time_for_a_run_has_none_left() {
    limits::open();
    limits::start(Size { messages: 1, bytes: 0 });
    limits::in_time().unwrap();
    limits::work(usize::MAX >> 16).unwrap_err();
    limits::in_time().unwrap_err();
    limits::open();
    limits::in_time().unwrap();
}

#[test]
fn the_first_and_the_last_render_are_kept_until_one_of_their_messages_changes() {
    let [first, answer, next, other] =
        ["price?", "12", "and two?", "and three?"].map(|text| json!({"role": "user", "content": text}));
    let mut session = Session::default();
    let follow = |session: &mut Session<'_>, messages: &[&'static Value]| -> Option<String> {
        session.follow((1, Rules::default()), Vec::new(), messages).unwrap();
        session.kept().map(|rendered| rendered.text.to_string())
    };
    let [first, answer, next, other]: [&'static Value; 4] =
        [first, answer, next, other].map(|m| &*Box::leak(Box::new(m)));
    let keep =
        |session: &mut Session<'_>, text: &str| session.keep(Rendered { text: text.into(), ..Rendered::default() });
    assert_eq!(follow(&mut session, &[first]), None);
    keep(&mut session, "1");
    assert_eq!(follow(&mut session, &[first, answer, next]), None);
    keep(&mut session, "3");
    assert_eq!(follow(&mut session, &[first, answer, next]).as_deref(), Some("3"));
    assert_eq!(follow(&mut session, &[first, answer, other]), None);
    keep(&mut session, "other 3");
    // The next conversation has the same first prompt.
    assert_eq!(follow(&mut session, &[first]).as_deref(), Some("1"));
    assert_eq!(follow(&mut session, &[first, answer, other]), None);
    assert_eq!(follow(&mut session, &[answer]), None);
    assert_eq!(follow(&mut session, &[first]), None);
}
