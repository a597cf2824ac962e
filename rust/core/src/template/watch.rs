//! Detects whether a run could distinguish marked strings from plain ones.
//!
//! A run with marks behaves like the run without them if each operation gives the same result for its arguments
//! without marks. Both runs then have the same text except for the marks, and no other run is needed. Operations that
//! print, join or store strings always satisfy this. Operations that look into strings report here, repeat their work
//! without marks, or set the notice.

use memchr::memmem::Finder;
use minijinja::Error;
use minijinja::value::{Value, ValueKind};
use std::borrow::Cow;
use std::cell::Cell;
use std::sync::LazyLock;

/// First two bytes of U+FDD0 to U+FDEF in UTF-8, the noncharacters that marks consist of. The third byte starts at
/// [`THIRD`].
pub(super) const LEAD: [u8; 2] = [0xEF, 0xB7];
pub(super) const THIRD: u8 = 0x90;
pub(super) static FINDER: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(&LEAD));
/// Maximum number of values inside an argument that are checked. An argument with more sets the notice.
const NODES: usize = 4096;

thread_local! {
    /// One bit for each noncharacter of the marks; 0 while no run is watched.
    static MARKS: Cell<u32> = const { Cell::new(0) };
    static NOTICED: Cell<bool> = const { Cell::new(false) };
}

/// The marks in its arguments that an operation can detect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DetectableMarks {
    /// None: the operation stores or joins strings, or reports here itself.
    Nothing,
    /// Those of strings among its arguments, but not of strings inside these.
    Strings,
    /// All.
    All,
}

/// Operations that detect no marks, including tests that compare.
const NOTHING: &str = "__add __compare __concat __generation __held __in __loop __mapping __multiply __sized d default dict \
    namespace replace safe string tojson trim in == eq equalto != ne < lt lessthan > gt greaterthan <= le >= ge";
/// Operations that detect marks only in strings that are arguments themselves.
const STRINGS: &str = "__each __item __slice __splat __turns attr batch count filter first items iterable join last length \
    list map reject rejectattr reverse select selectattr slice test";

/// Returns the marks that the operation of that name can detect.
pub(super) fn tells(name: &str) -> DetectableMarks {
    let is_in = |names: &str| names.split_whitespace().any(|word| word == name);
    match (is_in(NOTHING), is_in(STRINGS)) {
        (true, _) => DetectableMarks::Nothing,
        (_, true) => DetectableMarks::Strings,
        _ => DetectableMarks::All,
    }
}

/// Starts to watch a run whose marks consist of these noncharacters.
pub(super) fn begin(marks: u32) {
    MARKS.set(marks);
    NOTICED.set(false);
}

/// Stops watching, and returns true if the run could detect marks.
pub(super) fn end() -> bool {
    MARKS.set(0);
    NOTICED.take()
}

/// Returns true if a run is watched.
#[inline]
pub(super) fn is_on() -> bool {
    MARKS.get() != 0
}

/// Records that the run may have distinguished a marked string from a plain one.
#[cold]
pub(super) fn notice() {
    NOTICED.set(true);
}

/// Checks the arguments of an operation.
#[inline]
pub(super) fn look(arguments: &[Value], tells: DetectableMarks) {
    if tells != DetectableMarks::Nothing && is_on() && !NOTICED.get() {
        look_at(arguments, tells);
    }
}

fn look_at(arguments: &[Value], tells: DetectableMarks) {
    let mut budget = NODES;
    let check_inside = |value: &Value| tells == DetectableMarks::All || value.is_kwargs();
    if arguments.iter().any(|value| if check_inside(value) { has_marks(value, &mut budget) } else { is_marked(value) })
    {
        notice();
    }
}

fn is_marked(value: &Value) -> bool {
    value.as_str().is_some_and(|text| without(text).is_some())
}

/// Returns true if a value contains a marked string, or more values than are checked.
fn has_marks(value: &Value, budget: &mut usize) -> bool {
    let Some(remaining) = budget.checked_sub(1) else { return true };
    *budget = remaining;
    if value.as_str().is_some() {
        return is_marked(value);
    }
    let Some(object) = value.as_object() else { return false };
    match value.kind() {
        ValueKind::Seq | ValueKind::Map => {
            let pairs = object.try_iter_pairs();
            pairs.into_iter().flatten().any(|(key, item)| is_marked(&key) || has_marks(&item, budget))
        }
        // Its items may be consumable only once.
        ValueKind::Iterable => true,
        _ => false,
    }
}

/// Returns the text without its marks, or `None` if it has none.
pub(super) fn without(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let marks = MARKS.get();
    let is_mark = |at: usize| {
        bytes
            .get(at + 2)
            .is_some_and(|&third| (THIRD..THIRD + 32).contains(&third) && marks & (1 << (third - THIRD)) != 0)
    };
    let mut marks_at = FINDER.find_iter(bytes).filter(|&at| is_mark(at));
    let first = marks_at.next()?;
    let mut out = String::with_capacity(text.len());
    out.push_str(&text[..first]);
    let mut from = first + 3;
    for at in marks_at {
        out.push_str(&text[from..at]);
        from = at + 3;
    }
    out.push_str(&text[from..]);
    Some(out)
}

fn plain(text: &str) -> Cow<'_, str> {
    without(text).map_or(Cow::Borrowed(text), Cow::Owned)
}

/// Sets the notice if `holds` differs from the result for the texts without marks.
pub(super) fn pair(left: &str, right: &str, holds: bool, without_marks: impl FnOnce(&str, &str) -> bool) {
    if is_on() && !NOTICED.get() {
        let (left, right) = (plain(left), plain(right));
        let any_marked = matches!(left, Cow::Owned(_)) || matches!(right, Cow::Owned(_));
        if any_marked && without_marks(&left, &right) != holds {
            notice();
        }
    }
}

/// Sets the notice if `result` differs from the result of `operation` for the arguments without marks.
pub(super) fn repeat(
    arguments: &[&Value],
    result: &Value,
    operation: impl FnOnce(&[Value]) -> Result<Value, Error>,
) -> Result<(), Error> {
    if !is_on() || NOTICED.get() {
        return Ok(());
    }
    let texts: Vec<Option<String>> = arguments.iter().map(|value| value.as_str().and_then(without)).collect();
    let mut budget = NODES;
    if arguments.iter().any(|value| value.as_str().is_none() && has_marks(value, &mut budget)) {
        notice();
    } else if texts.iter().any(Option::is_some) {
        let plain = |(value, text): (&&Value, Option<String>)| text.map_or_else(|| (*value).clone(), Value::from);
        let plain: Vec<Value> = arguments.iter().zip(texts).map(plain).collect();
        if !same(result, &operation(&plain)?) {
            notice();
        }
    }
    Ok(())
}

/// Returns true if `other` is `value` without marks.
fn same(value: &Value, other: &Value) -> bool {
    match (value.as_str(), other.as_str()) {
        (Some(text), Some(other)) => plain(text) == other,
        (None, None) if value.kind() == ValueKind::Seq && other.kind() == ValueKind::Seq => {
            let items = |value: &Value| value.try_iter().map(Iterator::collect::<Vec<Value>>).unwrap_or_default();
            let (items, others) = (items(value), items(other));
            items.len() == others.len() && items.iter().zip(&others).all(|(item, other)| same(item, other))
        }
        (None, None) => value.as_object().is_none() && value == other,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use crate::template::Template;
    use serde_json::{Map, json};

    /// Expressions that a template can apply to `c`, a string of the conversation.
    const LOOKS: [&str; 69] = [
        "{{ c[0] }}",
        "{{ c.0 }}",
        "{{ c[-1] }}",
        "{{ c[1:] }}",
        "{{ c[::-1] }}",
        "{{ c|length }}",
        "{{ c|count > 3 }}",
        "{% for x in c %}{{ x }},{% endfor %}",
        "{{ c|upper }}",
        "{{ c|title }}",
        "{{ c|capitalize }}",
        "{% if c == 'yes' %}same{% endif %}",
        "{% if 'yes' != c %}other{% endif %}",
        "{% set x %}{{ c }}{% endset %}{% if x == 'yes' %}same{% endif %}",
        "{% macro f(x) %}{{ x|trim }}{% endmacro %}{% if f(c) == 'yes' %}same{% endif %}",
        "{{ c is eq('yes') }}{{ c is ne 'yes' }}{{ c is lt 'z' }}",
        "{{ c is in ['yes', ' yes '] }}",
        "{{ c in 'yes or no' }}",
        "{{ 'e' in c }}",
        "{{ 'es' not in c }}",
        "{{ [c] == ['yes'] }}",
        "{{ {'a': c} == {'a': 'yes'} }}",
        "{{ (c, 1) < ('yet', 0) }}",
        "{{ c < 'z' }}",
        "{{ 'a' < c < 'z' }}",
        "{{ c|tojson(ensure_ascii=true) }}",
        "{{ [c]|tojson(indent=2) }}",
        "{{ [c] }}",
        "{{ {'a': c} }}",
        "{{ {c: 1} }}",
        "{{ {'yes': 1}[c] }}",
        "{{ c in {'yes': 1} }}",
        "{{ [c, 'b'].count('yes') }}",
        "{{ 'yesterday'|trim(c) }}{{ c|trim(c) }}{{ 'yesterday'.strip(c) }}",
        "{{ [1, 2]|tojson(separators=(c, c)) }}{{ [1]|tojson(indent=c) }}",
        "{{ namespace(a=c) }}{{ {'a': c}.items() }}{{ {'a': [c]}|dictsort }}",
        "{{ {'yes': 1}.get(c) }}",
        "{{ c.strip('y') }}",
        "{{ c|trim('y') }}",
        "{{ c|trim }}|{{ c.strip() }}|{{ c.lstrip() }}|{{ c.rstrip() }}",
        "{{ c.split('e') }}",
        "{{ c.split()[0] }}",
        "{{ c.rsplit('e', 1)[-1] }}",
        "{{ c.partition('e')[2] }}",
        "{{ c.splitlines()|join('|') }}",
        "{{ c.replace('e', 'x') }}",
        "{{ c|replace('ye', 'x') }}",
        "{{ c.removeprefix('y') }}",
        "{{ c|int + 1 }}",
        "{{ '%5s' % c }}",
        "{{ '{:>9}'.format(c) }}",
        "{{ c.zfill(9) }}",
        "{{ c.ljust(9) }}|",
        "{{ c|reverse }}",
        "{{ c|first }}{{ c|last }}",
        "{{ c|list|length }}",
        "{{ [c, 'yes']|unique|list|length }}",
        "{{ [c, 'b']|sort|join }}",
        "{{ messages|selectattr('content', 'equalto', 'yes')|list|length }}",
        "{{ messages|map(attribute='content')|map('upper')|join }}",
        "{{ messages|groupby('content')|length }}",
        "{% for m in messages %}{{ loop.changed(m.content) }}{% endfor %}",
        "{{ c is lower }}",
        "{{ c|indent(2, true) }}",
        "{{ c.startswith('ye') }}{{ c.endswith('s') }}",
        "{{ c.count('e') }}{{ c.find('s') }}{{ c.index('s') }}",
        "{{ c.isdigit() }}{{ c.isspace() }}",
        "{{ c|batch(2)|list }}",
        "{% for call in messages[-1].tool_calls %}{% if call.function.arguments.role == 'yes' %}same{% endif %}{% endfor %}",
    ];

    #[test]
    fn a_template_that_looks_into_strings_gives_what_it_gives_without_marks() {
        for look in LOOKS {
            let source = format!("{{% set c = messages[0].content %}}{look}.{{{{ c }}}}");
            let template = Template::compile(&source, &[]).unwrap();
            for content in
                ["yes", " yes ", "y es\nno", "41", "<x>yes", "", "ye", "no", "\n yes", "is, yes", "\u{301}yes"]
            {
                let key = if look.contains("role") { "role" } else { "n" };
                let call = json!({"type": "function", "function": {"name": "f", "arguments": {key: content}}});
                let last = json!({"role": "assistant", "content": "yes", "tool_calls": [call]});
                let first = json!({"role": "user", "content": content});
                let render = |again: bool| {
                    let messages = [&first, &last];
                    let text = |rendered: crate::template::Rendered| rendered.text.to_string();
                    let rendered = if again {
                        template.render_text(&messages, None, false, &Map::new())
                    } else {
                        template.render(&messages, None, false, &Map::new()).map(text)
                    };
                    rendered.map_err(|error| error.to_string())
                };
                assert_eq!(render(false), render(true), "{look} {content:?}");
            }
        }
    }
}
