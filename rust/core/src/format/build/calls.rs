//! Reads a call log: `{"calls": [{"request", "response"}, ...]}`, one request with its response, or a bare response.
//!
//! Requests contain complete histories; `history` merges them into a pool of messages. Sampling parameters, tools and
//! template variables come from the requests. This file reads chat completions; calls of other servers come from
//! `call`.

use super::history::{History, Path};
use super::message::{Entry, streamed};
use super::{Body, tokens};
use crate::format::fields::{Fields, Header, Sampling, count, is_partial, mapping, number, present, text, tools};
use crate::format::json::diagnose;
use crate::format::json::object::{Kind, Node, Object};
use crate::format::json::outline::Outline;
use crate::format::rejection::{Decoded, Reason, Rejection, reject};
use crate::sampling::omitted;
use crate::trace::{Message, Prompt, Schemas};

/// Temperature and top-p of a request that omits them: the defaults of the chat completions API.
pub const API_DEFAULTS: Sampling = Sampling {
    temperature: Some(1.0),
    top_p: Some(1.0),
    left_out: omitted::TEMPERATURE | omitted::TOP_P | omitted::REQUEST,
    ..Sampling::UNKNOWN
};

pub fn decode(record: &mut Object, header: &Header) -> Decoded<Body> {
    let nodes = record.take_list("calls")?.unwrap_or_default();
    if nodes.is_empty() {
        return Err(reject(Reason::Incomplete, "TG-FORMAT-001", "`calls` is empty")
            .why("There is nothing to train on and nothing to align")
            .fix("Leave the record out, or record its calls"));
    }
    let choice = count(&record.fields, "choice")?;
    let mut log = Log::new(header, choice);
    for (turn, node) in nodes.into_iter().enumerate() {
        node.object("call")
            .and_then(|call| log.call(call))
            .map_err(|rejection| rejection.inside(format!("calls[{turn}]")).in_turn(turn))?;
    }
    log.finish()
}

/// Reads a record that is one call.
pub fn decode_single(record: Object, header: &Header) -> Decoded<Body> {
    let mut log = Log::new(header, None);
    log.call(record)?;
    log.finish()
}

/// Reads a record that is a response. Without prompt ids its prompt is unknown.
pub fn decode_response(record: Object, header: &Header) -> Decoded<Body> {
    let choice = count(&record.fields, "choice")?;
    let mut log = Log::new(header, choice);
    log.answer(None, record, choice, &header.sampling, None)?;
    log.finish()
}

/// A call log while it is read.
pub struct Log<'a> {
    header: &'a Header,
    choice: Option<i32>,
    history: History,
    body: Body,
    /// Tools and template variables of the first request. `scaffold_varies`: another request has different ones.
    scaffold: Option<(Option<Schemas>, Fields)>,
    scaffold_varies: bool,
}

/// The relevant parts of a request.
#[derive(Debug, Default)]
pub struct Request {
    pub messages: Vec<Message>,
    pub tools: Option<Schemas>,
    pub template_kwargs: Fields,
    pub model: Option<String>,
    /// Fields of the request, other than the messages, that affect the prompt.
    pub prompt_fields: Fields,
    /// `Rendered` if there are messages, else `Unknown`; the sent text or ids if no chat template is used.
    pub prompt: Prompt,
    pub sampling: Sampling,
}

impl Request {
    /// Creates a request from messages and their rendered ids, if these are known.
    pub fn of(messages: Vec<Message>, ids: Option<Vec<u32>>) -> Self {
        Self { messages, prompt: ids.map_or(Prompt::Rendered, Prompt::Ids), ..Self::default() }
    }
}

/// One call to any server.
pub struct Call {
    pub request: Option<Request>,
    pub entry: Entry,
    /// Model named by the response.
    pub model: Option<String>,
    pub reward: Option<f32>,
}

impl<'a> Log<'a> {
    pub fn new(header: &'a Header, choice: Option<i32>) -> Self {
        let (history, body) = (History::default(), Body::default());
        Self { header, choice, history, body, scaffold: None, scaffold_varies: false }
    }

    pub fn of(header: &'a Header, calls: impl IntoIterator<Item = Decoded<Call>>) -> Decoded<Body> {
        let mut log = Self::new(header, None);
        for call in calls {
            log.add(call?)?;
        }
        log.finish()
    }

    fn call(&mut self, mut call: Object) -> Decoded<()> {
        let call_sampling = Sampling::read(&call.fields)?;
        let request = call.take_object("request")?;
        let request = request.map(read_request).transpose().map_err(|rejection| rejection.inside("request"))?;
        let defaults = if is_partial(&call.fields)? { &Sampling::UNKNOWN } else { &API_DEFAULTS };
        let sampling = call_sampling.or(&self.sampling(request.as_ref(), defaults));
        let choice = count(&call.fields, "choice")?.or(self.choice);
        let reward = number(&call.fields, "reward")?.map(|reward| reward as f32);
        let response = match call.take("response") {
            Some(Node::List(_)) => return Err(streamed()),
            Some(node) => node.object("response")?,
            None => return Err(no_response("the call has no `response`")),
        };
        self.answer(request, response, choice, &sampling, reward).map_err(|rejection| rejection.inside("response"))
    }

    /// Returns the sampling parameters of a call, without those in the call itself. `defaults` apply to parameters that
    /// the request omits.
    pub fn sampling(&self, request: Option<&Request>, defaults: &Sampling) -> Sampling {
        match request {
            None => self.header.sampling.clone(),
            Some(request) => {
                let sampling = request.sampling.clone().or(&self.header.sampling);
                if self.header.partial_requests { sampling } else { sampling.or(defaults) }
            }
        }
    }

    fn answer(
        &mut self,
        request: Option<Request>,
        response: Object,
        choice: Option<i32>,
        sampling: &Sampling,
        reward: Option<f32>,
    ) -> Decoded<()> {
        if !response.has("choices") {
            return Err(no_response("the response has no `choices`"));
        }
        let model = text(&response.fields, "model")?;
        let entry = Entry::of_response(response, choice, sampling)?;
        self.add(Call { request, entry, model, reward })
    }

    pub fn add(&mut self, call: Call) -> Decoded<()> {
        let Some(mut generation) = call.entry.generation else {
            return Err(reject(Reason::Contradiction, "TG-FORMAT-002", "the choice is marked as not sampled")
                .why("A response must be sampled by the policy")
                .fix("Leave the call out"));
        };
        let requested_model = call.request.as_ref().and_then(|request| request.model.clone());
        let model = &mut self.body.model;
        *model = model.take().or(requested_model).or(call.model);
        let path = match call.request {
            None => Path::default(),
            Some(request) => {
                if generation.prompt == Prompt::Rendered {
                    generation.prompt = request.prompt;
                }
                if !request.prompt_fields.is_empty() {
                    generation.request = Some(Box::new(request.prompt_fields));
                }
                self.note_scaffold(request.tools, request.template_kwargs);
                self.history.follow(request.messages)
            }
        };
        if path.context.is_empty() && generation.prompt == Prompt::Rendered {
            generation.prompt = Prompt::Unknown;
        }
        self.body.unused_choices += call.entry.unused_choices;
        let before = path.context.last().map(|index| &self.history.messages[*index as usize]);
        tokens::check(&mut generation, &call.entry.message, before);
        let index = self.history.produce(&path, call.entry.message);
        generation.message = index;
        generation.context = path.context;
        self.body.generations.push(generation);
        let message = &mut self.history.messages[index as usize];
        message.reward = message.reward.or(call.reward);
        Ok(())
    }

    fn note_scaffold(&mut self, tools: Option<Schemas>, template_kwargs: Fields) {
        let scaffold = (tools, template_kwargs);
        match &self.scaffold {
            None => self.scaffold = Some(scaffold),
            Some(first) => self.scaffold_varies |= *first != scaffold,
        }
    }

    pub fn finish(mut self) -> Decoded<Body> {
        let (tools, template_kwargs) = self.scaffold.unwrap_or_default();
        let rendered = self.body.generations.iter().position(|generation| generation.prompt == Prompt::Rendered);
        if let (true, Some(turn)) = (self.scaffold_varies, rendered) {
            let what = "requests of one trace differ in `tools` or `chat_template_kwargs`";
            return Err(reject(Reason::Contradiction, "TG-FORMAT-003", what)
                .why(
                    "The prompt of this turn has no recorded ids and would be rendered with the ids of another request",
                )
                .fix("Record return_token_ids, or write one record for each set of tools")
                .in_turn(turn));
        }
        if let Some(last) = self.body.generations.last() {
            self.body.conversation = last.context.iter().copied().chain([last.message]).collect();
        }
        (self.body.tools, self.body.template_kwargs) = (tools, template_kwargs);
        self.body.messages = self.history.messages;
        Ok(self.body)
    }
}

/// Keys of a request, other than its messages, that affect its prompt.
const PROMPT_KEYS: [&str; 5] =
    ["reasoning_effort", "enable_thinking", "add_generation_prompt", "continue_final_message", "documents"];

/// Template variables that a request cannot set through `chat_template_kwargs`.
const FIXED: [&str; 2] = ["add_generation_prompt", "continue_final_message"];

/// Reads the relevant parts of a chat completions request.
fn read_request(mut request: Object) -> Decoded<Request> {
    let extra = mapping(&request.fields, "extra_body")?;
    // Used by the clients of vLLM's and SGLang's own APIs.
    let inner = mapping(&request.fields, "sampling_params")?;
    let mut template_kwargs = mapping(&extra, "chat_template_kwargs")?;
    template_kwargs.extend(mapping(&request.fields, "chat_template_kwargs")?);
    // Servers read these from the request itself, and pass their own values to the template.
    template_kwargs.retain(|key, _| !FIXED.contains(&key.as_str()));
    let value_of = |key: &str| present(&request.fields, key).or_else(|| present(&extra, key)).cloned();
    let asked = PROMPT_KEYS.into_iter().filter_map(|key| Some((key.to_owned(), value_of(key)?))).collect();
    let nodes = request.take_list("messages")?.ok_or_else(|| {
        reject(Reason::Incomplete, "TG-FORMAT-004", "no `messages`")
            .why("The prompt of the policy is unknown")
            .fix("Record the request as it was sent")
    })?;
    let mut messages = Vec::with_capacity(nodes.len());
    for (position, node) in nodes.into_iter().enumerate() {
        let entry = node.object("entry").and_then(|item| Entry::read(item, &Sampling::UNKNOWN));
        messages.push(entry.map_err(|rejection| rejection.inside(format!("messages[{position}]")))?.message);
    }
    Ok(Request {
        messages,
        tools: tools(request.tools)?,
        template_kwargs,
        model: text(&request.fields, "model")?,
        prompt_fields: asked,
        prompt: Prompt::Rendered,
        sampling: Sampling::read(&request.fields)?.or(&Sampling::read(&extra)?).or(&Sampling::read(&inner)?),
    })
}

/// Reads a request in the format of the chat completions API.
pub fn chat_request(request: &Outline<'_>) -> Decoded<Request> {
    let text = serde_json::Value::Object(request.fields_without(&[])?).to_string();
    diagnose::object(&text, Kind::Request).and_then(read_request).map_err(|rejection| rejection.inside("request"))
}

/// Creates the rejection of a call without a response.
pub fn no_response(what: impl Into<String>) -> Rejection {
    reject(Reason::FailedCall, "TG-FORMAT-005", what)
        .why("No generation can be read")
        .fix("Leave out failed calls when recording")
}
