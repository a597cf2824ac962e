//! A call log: `{"calls": [{"request", "response"}, ...]}`, one request with its response, or a bare response.
//!
//! Requests carry whole histories; `history` makes a pool of them. Sampling parameters, tools and template variables are
//! those of the requests.

use super::body::Body;
use super::fields::{Fields, Header, Sampling, count, mapping, number, text, tools};
use super::history::History;
use super::message::{Entry, streamed};
use super::object::{Node, Object};
use super::rejection::{Decoded, Reason, Rejection, reject};
use crate::trace::Message;
use serde_json::Value;

/// Temperature and top-p of a request that names none: the defaults of the chat completions API.
const API_DEFAULTS: Sampling =
    Sampling { temperature: Some(1.0), top_p: Some(1.0), policy_version: None, logprob_kind: None };

/// Reads `calls`.
pub(super) fn decode(record: &mut Object, header: &Header) -> Decoded<Body> {
    let nodes = record.take_list("calls")?.unwrap_or_default();
    if nodes.is_empty() {
        return Err(reject(Reason::Incomplete, "`calls` is empty")
            .why("There is nothing to train on and nothing to align")
            .cure("Leave the record out, or record its calls"));
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

/// Reads a record that is itself one call.
pub(super) fn decode_single(record: Object, header: &Header) -> Decoded<Body> {
    let mut log = Log::new(header, None);
    log.call(record)?;
    log.finish()
}

/// Reads a record that is a response, which must name its prompt ids.
pub(super) fn decode_response(record: Object, header: &Header) -> Decoded<Body> {
    let choice = count(&record.fields, "choice")?;
    let mut log = Log::new(header, choice);
    log.answer(None, record, choice, &header.sampling)?;
    log.finish()
}

/// A call log while it is being read.
struct Log<'a> {
    header: &'a Header,
    choice: Option<i32>,
    history: History,
    body: Body,
    /// What the first request gave the template, and whether another one gave something else.
    scaffold: Option<(Option<Value>, Fields)>,
    scaffold_varies: bool,
}

/// The parts of a request that count.
struct Request {
    messages: Vec<Message>,
    tools: Option<Value>,
    template_kwargs: Fields,
}

impl<'a> Log<'a> {
    fn new(header: &'a Header, choice: Option<i32>) -> Self {
        let (history, body) = (History::default(), Body::default());
        Self { header, choice, history, body, scaffold: None, scaffold_varies: false }
    }

    fn call(&mut self, mut call: Object) -> Decoded<()> {
        let request = call.take_object("request")?;
        let own = Sampling::read(&call.fields)?;
        let (request, sampling) = match request {
            None => (None, own.or(&self.header.sampling)),
            Some(request) => {
                let asked = Sampling::read(&request.fields).map_err(|rejection| rejection.inside("request"))?;
                let sampling = own.or(&asked).or(&self.header.sampling).or(&API_DEFAULTS);
                (Some(self.request(request).map_err(|rejection| rejection.inside("request"))?), sampling)
            }
        };
        let choice = count(&call.fields, "choice")?.or(self.choice);
        let reward = number(&call.fields, "reward")?.map(|reward| reward as f32);
        let response = match call.take("response") {
            Some(Node::List(_)) => return Err(streamed()),
            Some(node) => node.object("response")?,
            None => return Err(no_response("the call has no `response`")),
        };
        let message =
            self.answer(request, response, choice, &sampling).map_err(|rejection| rejection.inside("response"))?;
        let message = &mut self.history.messages[message as usize];
        message.reward = message.reward.or(reward);
        Ok(())
    }

    fn request(&mut self, mut request: Object) -> Decoded<Request> {
        let extra = mapping(&request.fields, "extra_body")?;
        let mut template_kwargs = mapping(&extra, "chat_template_kwargs")?;
        template_kwargs.extend(mapping(&request.fields, "chat_template_kwargs")?);
        if self.body.model.is_none() {
            self.body.model = text(&request.fields, "model")?;
        }
        let nodes = request.take_list("messages")?.ok_or_else(|| {
            reject(Reason::Incomplete, "no `messages`")
                .why("What the policy was asked is not known")
                .cure("Record the request as it was sent")
        })?;
        let mut messages = Vec::with_capacity(nodes.len());
        for (position, node) in nodes.into_iter().enumerate() {
            let entry = node.object("entry").and_then(|item| Entry::read(item, &Sampling::default()));
            messages.push(entry.map_err(|rejection| rejection.inside(format!("messages[{position}]")))?.message);
        }
        Ok(Request { messages, tools: tools(&request.fields)?, template_kwargs })
    }

    /// Adds a response to the log; returns the pool index of the message.
    fn answer(
        &mut self,
        request: Option<Request>,
        response: Object,
        choice: Option<i32>,
        sampling: &Sampling,
    ) -> Decoded<u32> {
        if !response.has("choices") {
            return Err(no_response("the response has no `choices`"));
        }
        if self.body.model.is_none() {
            self.body.model = text(&response.fields, "model")?;
        }
        let entry = Entry::of_response(response, choice, sampling)?;
        let Some(mut generation) = entry.generation else {
            return Err(reject(Reason::Contradiction, "the choice says that it was not sampled")
                .why("A response is what the policy sampled")
                .cure("Leave the call out"));
        };
        if request.is_none() && generation.prompt_ids.is_none() {
            return Err(reject(Reason::Incomplete, "a response without its request and without `prompt_token_ids`")
                .why("What the policy was asked is not known")
                .cure("Record the request as well, or ask the server for return_token_ids"));
        }
        let path = match request {
            None => super::history::Path::default(),
            Some(request) => {
                self.note_scaffold(request.tools, request.template_kwargs);
                self.history.follow(request.messages)
            }
        };
        self.body.unused_choices += entry.unused_choices;
        let index = self.history.produce(&path, entry.message);
        generation.message = index;
        generation.context = path.context;
        self.body.generations.push(generation);
        Ok(index)
    }

    fn note_scaffold(&mut self, tools: Option<Value>, template_kwargs: Fields) {
        let given = (tools, template_kwargs);
        match &self.scaffold {
            None => self.scaffold = Some(given),
            Some(first) => self.scaffold_varies |= *first != given,
        }
    }

    fn finish(mut self) -> Decoded<Body> {
        let (tools, template_kwargs) = self.scaffold.unwrap_or_default();
        let rendered = self.body.generations.iter().position(|generation| generation.prompt_ids.is_none());
        if let (true, Some(turn)) = (self.scaffold_varies, rendered) {
            return Err(varying_scaffold(turn));
        }
        if let Some(last) = self.body.generations.last() {
            self.body.conversation = last.context.iter().copied().chain([last.message]).collect();
        }
        (self.body.tools, self.body.template_kwargs) = (tools, template_kwargs);
        self.body.messages = self.history.messages;
        Ok(self.body)
    }
}

fn varying_scaffold(turn: usize) -> Rejection {
    reject(Reason::Contradiction, "requests of one trace differ in `tools` or `chat_template_kwargs`")
        .why("The prompt of this turn has no recorded ids and would be rendered with those of another request")
        .cure("Record return_token_ids, or write one record for each set of tools")
        .in_turn(turn)
}

fn no_response(what: &str) -> Rejection {
    reject(Reason::Incomplete, what).why("There is no generation to read").cure("Leave out failed calls when recording")
}
