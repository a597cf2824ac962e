//! Chat templates: convert messages to text, with the provenance of every byte.
//!
//! HF templates are rendered as transformers' `apply_chat_template` renders them. Tokenizing happens elsewhere.
//!
//! Before a render, messages are normalized as a server does (`render_served`), or as follows:
//! - Keys whose value is null are dropped. They are kept for a template that tests for none and fails without them.
//! - `tool_calls[].function.arguments` that is a string containing a JSON object becomes that object.
//! - Reasoning under any of `reasoning_content`, `thinking`, `reasoning` is also passed as the first two.

mod cache;
mod content_format;
mod conversation;
mod environment;
mod filters;
mod incremental;
mod json;
mod lexer;
mod limits;
mod marks;
mod preprocess;
mod provenance;
mod python_ops;
mod rendered;
mod rewrite;
mod server_message;
mod server_request;
mod value;
mod watch;

pub use incremental::session::Session;
pub use rendered::{Field, NO_MESSAGE, Rendered, Span};

use crate::catch_panic;
use crate::error::{Error, Kind, Result};
use crate::server::Server;
use cache::{RenderKey, Renders, ToolSets, Tools};
use content_format::WantsParts;
use conversation::Conversation;
use environment::{CLOCK, Clock, ClockValue, GENERATION_MARKS};
use incremental::analyze::Resumable;
use incremental::session::{Slot, Slots};
use limits::Size;
use marks::{Alphabet, Seams, UsedCharacters};
use minijinja::Environment;
use minijinja::value::Value;
use serde_json::{Map, Value as Json};
use server_message::Rules;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

/// Name of a template in error messages.
const WHAT: &str = "the chat template";
/// Stack of the thread that compiles: several times the need of the deepest template within bounds.
const STACK_BYTES: usize = 8 << 20;
/// The number of the next template.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// A compiled chat template.
///
/// ```
/// use serde_json::{Map, json};
/// use tracegrad_core::template::{Field, Template};
///
/// let template = Template::compile("{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}", &[])?;
/// let rendered = template.render(&[&json!({"role": "user", "content": "Hi"})], None, false, &Map::new())?;
/// assert_eq!(&*rendered.text, "<user>Hi\n");
/// let span = rendered.spans[0];
/// assert_eq!((&rendered.text[span.start..span.end], span.field), ("Hi", Field::Content));
/// # Ok::<(), tracegrad_core::Error>(())
/// ```
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts about its source")]
pub struct Template {
    env: Environment<'static>,
    special_tokens: Vec<(String, String)>,
    has_generation: bool,
    /// The template's own strings, sorted: it may compare with these.
    literals: Vec<String>,
    /// The literals at which a string may be split.
    seams: Option<Seams>,
    used: UsedCharacters,
    schemas: ToolSets,
    renders: Renders,
    /// True if the template tests for none: it is written for messages whose null keys are kept.
    asks_for_none: bool,
    /// Where a render may resume an earlier one.
    resumable: Option<Arc<Resumable>>,
    /// Unique among the templates of this process.
    number: u64,
    /// True if the text may depend on the time of the render.
    reads_clock: bool,
    /// The servers that pass this template the parts of a content.
    wants_parts: WantsParts,
    /// True if it mentions the developer role.
    names_developer: bool,
}

/// Options with which a request renders its prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RenderRequest {
    /// The server that renders.
    pub server: Server,
    /// True if the header of the answer is written after the messages.
    pub add_generation_prompt: bool,
    /// True if the last message is the beginning of the answer.
    pub continue_final_message: bool,
    /// True if reasoning is passed under `thinking` too: for models whose prompts servers write without their
    /// template.
    pub thinking: bool,
}

/// Values that the renders of one call share.
struct Call<'c, 'a> {
    conversation: &'c Conversation<'a>,
    tools: Option<Arc<Tools>>,
    context: Vec<(String, Value)>,
    keep_null: bool,
    size: Size,
    /// True if the run is recorded, so that a later one can resume it.
    noted: bool,
}

impl Template {
    /// Compiles `source`. `special_tokens` are its variables `bos_token`, `eos_token`, ...
    ///
    /// # Errors
    /// `Kind::Template` if the source is not Jinja, or is longer or more deeply nested than any template needs.
    pub fn compile(source: &str, special_tokens: &[(String, String)]) -> Result<Self> {
        // The parser is recursive, and the caller's thread may have a small stack.
        thread::scope(|scope| {
            let compiled = || catch_panic(Kind::Template, WHAT, || Self::compile_here(source, special_tokens));
            let thread = thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, compiled);
            let thread = thread.map_err(|error| {
                Error::new(Kind::Io, "TG-TEMPLATE-007", format!("no thread can be started to compile {WHAT}: {error}"))
                    .why("A template is read on a stack of its own")
                    .fix("Raise the limits on threads and memory of this process")
            })?;
            thread.join().unwrap_or_else(|_| {
                Err(Error::new(Kind::Template, "TG-TEMPLATE-008", format!("{WHAT} cannot be compiled")))
            })
        })
    }

    fn compile_here(source: &str, special_tokens: &[(String, String)]) -> Result<Self> {
        let scanned = preprocess::scan(source)?;
        let used =
            special_tokens.iter().fold(UsedCharacters::default().and(source), |used, (_, token)| used.and(token));
        let words: Vec<&String> = scanned.literals.iter().filter(|literal| is_seam(literal)).take(SEAMS + 1).collect();
        let seams = (words.len() <= SEAMS).then(|| Seams::new(&words)).flatten();
        let env = environment::compile(scanned.source, scanned.longest_text)?;
        Ok(Self {
            env,
            special_tokens: special_tokens.to_vec(),
            has_generation: scanned.has_generation,
            literals: scanned.literals,
            seams,
            used,
            schemas: ToolSets::default(),
            renders: Renders::default(),
            asks_for_none: asks_for_none(source),
            resumable: scanned.resumable.map(Arc::new),
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            reads_clock: source.contains("strftime_now"),
            wants_parts: scanned.wants_parts,
            names_developer: ["\"developer\"", "'developer'"].iter().any(|name| source.contains(name)),
        })
    }

    /// Returns true if the template marks the assistant's text with `{% generation %}`.
    pub fn has_generation(&self) -> bool {
        self.has_generation
    }

    /// Returns true if the text may depend on the time of the render.
    pub fn reads_clock(&self) -> bool {
        self.reads_clock
    }

    /// Renders `messages` with provenance. Renders are cached, within bounds.
    ///
    /// `kwargs` are further variables; they override special tokens. A date in `kwargs["strftime_now"]` (ISO) sets the
    /// clock that `strftime_now` reads. Converted `tools` are cached, and the lookup is immediate if the same `Arc` is
    /// passed again.
    ///
    /// # Errors
    /// `Kind::Template` if the template raises an error, fails, or does not end. `Kind::Argument` if a message is not
    /// an object, `tools` is not a list, or `kwargs` names `messages`, `tools` or `add_generation_prompt`.
    pub fn render(
        &self,
        messages: &[&Json],
        tools: Option<&Arc<Json>>,
        add_generation_prompt: bool,
        kwargs: &Map<String, Json>,
    ) -> Result<Rendered> {
        self.render_by(messages, tools, (add_generation_prompt, Rules::default()), kwargs)
    }

    /// Renders like [`Template::render`], by the rules of a server.
    fn render_by(
        &self,
        messages: &[&Json],
        tools: Option<&Arc<Json>>,
        (add_generation_prompt, rules): (bool, Rules),
        kwargs: &Map<String, Json>,
    ) -> Result<Rendered> {
        catch_panic(Kind::Template, WHAT, || {
            let tools = self.tools(tools, rules.server)?;
            let number = tools.as_ref().map(|tools| tools.number);
            let render = || {
                let (conversation, mut slots) = (Conversation::new(messages, rules)?, Slots::default());
                let mut call = self.call(&conversation, tools, add_generation_prompt, kwargs)?;
                self.with_provenance(&mut call, &mut slots)
            };
            if self.is_dated(kwargs) {
                return render();
            }
            self.renders.get(RenderKey { messages, tools: number, add_generation_prompt, rules, kwargs }, render)
        })
    }

    /// Returns true if the text depends on the time of the render.
    fn is_dated(&self, kwargs: &Map<String, Json>) -> bool {
        self.reads_clock && !kwargs.contains_key("strftime_now")
    }

    /// Renders like [`Template::render`], for a conversation that is rendered turn by turn. Messages that `session`
    /// has cached are not rendered again. The result is the same.
    pub fn render_next<'a>(
        &self,
        session: &mut Session<'a>,
        messages: &[&'a Json],
        tools: Option<&Arc<Json>>,
        add_generation_prompt: bool,
        kwargs: &Map<String, Json>,
    ) -> Result<Rendered> {
        self.render_next_by(session, messages, tools, (add_generation_prompt, Rules::default()), kwargs)
    }

    /// Renders like [`Template::render_next`], by the rules of a server.
    fn render_next_by<'a>(
        &self,
        session: &mut Session<'a>,
        messages: &[&'a Json],
        tools: Option<&Arc<Json>>,
        (add_generation_prompt, rules): (bool, Rules),
        kwargs: &Map<String, Json>,
    ) -> Result<Rendered> {
        if self.resumable.is_none() || self.is_dated(kwargs) {
            return self.render_by(messages, tools, (add_generation_prompt, rules), kwargs);
        }
        let rendered = catch_panic(Kind::Template, WHAT, || {
            let tools = self.tools(tools, rules.server)?;
            let number = tools.as_ref().map(|tools| tools.number);
            let asked = RenderKey { messages: &[], tools: number, add_generation_prompt, rules, kwargs };
            let kept_messages = session.follow((self.number, rules), asked.key(), messages)?;
            if let Some(kept) = session.kept() {
                return Ok(kept.clone());
            }
            let render = || {
                let mut call = self.call(&session.conversation, tools, add_generation_prompt, kwargs)?;
                call.noted = true;
                self.with_provenance(&mut call, &mut session.slots)
            };
            // Other conversations may have the same first prompt.
            let rendered = if kept_messages > 1 {
                render()?
            } else {
                self.renders.get(RenderKey { messages, ..asked }, render)?
            };
            session.keep(rendered.clone());
            Ok(rendered)
        });
        if rendered.is_err() {
            *session = Session::default();
        }
        rendered
    }

    /// Renders `messages` to text without provenance, at half the cost. Arguments and errors as for
    /// [`Template::render`].
    pub fn render_text(
        &self,
        messages: &[&Json],
        tools: Option<&Arc<Json>>,
        add_generation_prompt: bool,
        kwargs: &Map<String, Json>,
    ) -> Result<String> {
        catch_panic(Kind::Template, WHAT, || {
            let conversation = Conversation::new(messages, Rules::default())?;
            let mut call = self.call(&conversation, self.tools(tools, None)?, add_generation_prompt, kwargs)?;
            self.plain(&mut call, &mut Slots::default()).map(|text| text.to_string())
        })
    }

    /// Returns the tool schemas, if there are any, as values in the form that a server uses.
    fn tools(&self, tools: Option<&Arc<Json>>, server: Option<Server>) -> Result<Option<Arc<Tools>>> {
        let tools = tools.filter(|tools| !tools.is_null());
        tools.map(|tools| self.schemas.get(tools, server, &self.literals)).transpose()
    }

    /// Creates a call and starts its time.
    fn call<'c, 'a>(
        &self,
        conversation: &'c Conversation<'a>,
        tools: Option<Arc<Tools>>,
        add_generation_prompt: bool,
        kwargs: &Map<String, Json>,
    ) -> Result<Call<'c, 'a>> {
        let bytes = conversation.bytes() + tools.as_ref().map_or(0, |tools| tools.bytes);
        let size = Size { messages: conversation.len(), bytes };
        let context = self.context(add_generation_prompt, kwargs)?;
        limits::open();
        Ok(Call { conversation, tools, context, keep_null: false, size, noted: false })
    }

    /// Renders without marks. Null keys are dropped, or kept if only that succeeds.
    fn plain(&self, call: &mut Call<'_, '_>, slots: &mut Slots) -> Result<Arc<str>> {
        let run = |call: &Call<'_, '_>, slot: &mut Slot| {
            let values = slot.plain(call.conversation, call.keep_null);
            self.run_on(call, slot, values, None, None).map(|run| Arc::from(run.text.as_str()))
        };
        match run(call, slots.plain(false)) {
            Err(error) if call.conversation.has_null() && self.asks_for_none => {
                call.keep_null = true;
                run(call, slots.plain(true)).map_err(|_| error)
            }
            result => result,
        }
    }

    /// Returns the variables other than messages and tools.
    fn context(&self, add_generation_prompt: bool, kwargs: &Map<String, Json>) -> Result<Vec<(String, Value)>> {
        let tokens = self.special_tokens.iter().map(|(name, token)| (name.clone(), Value::from(token.as_str())));
        let mut context: Vec<(String, Value)> = tokens.collect();
        context.push(("add_generation_prompt".into(), Value::from(add_generation_prompt)));
        context.push(("documents".into(), Value::from(())));
        let mut clock = None;
        for (name, value) in kwargs {
            match name.as_str() {
                "messages" | "tools" | "add_generation_prompt" => {
                    return Err(Error::new(
                        Kind::Argument,
                        "TG-TEMPLATE-009",
                        format!("template variable '{name}' is given twice"),
                    )
                    .why("It is an argument of its own")
                    .fix(format!("Take '{name}' out of the template's keyword arguments")));
                }
                "strftime_now" => clock = Some(pinned_clock(value)?),
                _ => context.push((name.clone(), value::plain(value))),
            }
        }
        if self.reads_clock {
            let clock = clock.unwrap_or_else(Clock::now);
            context.push((CLOCK.into(), Value::from_object(ClockValue(clock))));
        }
        Ok(context)
    }
}

impl Call<'_, '_> {
    /// Returns all variables of a run. `tools` replace the plain ones.
    fn variables(&self, messages: Value, tools: Option<Value>, alphabet: Option<&Alphabet>) -> Value {
        let mut context = self.context.clone();
        let tools = tools.or_else(|| self.tools.as_ref().map(|tools| tools.plain.clone()));
        context.push(("messages".into(), messages));
        context.push(("tools".into(), tools.unwrap_or_else(|| Value::from(()))));
        context.extend(alphabet.map(|alphabet| (GENERATION_MARKS.into(), Value::from(alphabet.generation()))));
        value::merged(context.iter().map(|(name, value)| (name.as_str(), value.clone())))
    }
}

/// Returns true if the template compares a value with none.
fn asks_for_none(source: &str) -> bool {
    let operators = ["is ", "is not ", "== ", "!= "];
    operators.iter().any(|operator| ["none", "None"].iter().any(|name| source.contains(&format!("{operator}{name}"))))
}

/// Maximum number of strings at which texts may be split, and maximum bytes of one: a few times the number in real
/// templates. If there are more, marks are tried as if there were none.
const SEAMS: usize = 256;
const SEAM_BYTES: usize = 64;

/// Returns true for strings that split a text into parts: longer than one character, and not a plain word.
fn is_seam(literal: &str) -> bool {
    literal.len() <= SEAM_BYTES
        && literal.chars().nth(1).is_some()
        && !literal.trim().is_empty()
        && !literal.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | ' '))
}

fn pinned_clock(value: &Json) -> Result<Clock> {
    value.as_str().and_then(Clock::pinned).ok_or_else(|| {
        Error::new(Kind::Argument, "TG-TEMPLATE-010", format!("strftime_now is {value}, not a date"))
            .why("It pins the time that the template prints")
            .fix("Pass a date in ISO form, such as 2025-03-07 or 2025-03-07T14:05:00")
    })
}
