//! A line of a batch's output: `{"custom_id", "response": {"status_code", "body"}, "error"}`.
//!
//! Source: platform.openai.com/docs/guides/batch, docs.claude.com batch results (`"result": {"type", "message"}`). The
//! requests are in another file. If a line contains both, `{**input, **output}`, its request is read too. The body may
//! be a response of any supported server.

use super::helpers::columns::Columns;
use super::helpers::splice;
use super::interface::{Body, Decoded, Form, Header, Outline, Reason, Shape, TrajectoryFormat, reject};
use crate::format::build::calls::no_response;
use crate::format::call::one_call;

pub(super) const DUMP: TrajectoryFormat = TrajectoryFormat {
    form: Form { name: "openai_batch", reason: "it has `custom_id`" },
    signs: &["custom_id"],
    recognizes: |record| record.has("custom_id") && !record.has("messages"),
    decode,
};

fn decode(record: &Outline<'_>) -> Decoded<(Header, Body)> {
    let header = Columns(record).header_without(&["id"], &[("id", &["custom_id"])])?;
    let response = record.object("response")?.unwrap_or_default();
    let result = record.object("result")?.unwrap_or_default();
    if let Some(failure) = failure(record, &response, &result)? {
        let id = header.id.as_deref().unwrap_or_default();
        return Err(no_response(format!("the request {id} of the batch failed: {failure}"))
            .fix("Send it again, or leave it out with on_error=\"skip\""));
    }
    let Some(answer) = response.get("body").or_else(|| result.get("message")) else {
        return Err(reject(Reason::Incomplete, "TG-FORMAT-072", "a request of a batch without its response")
            .why("The answer of the policy is in the batch's output file")
            .fix("Name the output file too: the lines of both are joined by custom_id"));
    };
    let request = match record.object("request")? {
        Some(line) => line.get("body").or_else(|| record.get("request")),
        None => record.get("body").filter(|raw| Shape::of(raw) == Shape::Object),
    };
    let mut parts = vec![("response", answer)];
    parts.extend(request.map(|request| ("request", request)));
    one_call(header, record, &splice(&parts))
}

/// Returns the error of the request, if it failed.
fn failure(record: &Outline<'_>, response: &Outline<'_>, result: &Outline<'_>) -> Decoded<Option<String>> {
    let status =
        response.count("status_code")?.filter(|status| *status >= 400).map(|status| format!("status {status}"));
    let kind = result.text("type")?.filter(|kind| kind != "succeeded");
    let body = response.object("body")?.unwrap_or_default();
    let error = [record, result, &body].into_iter().find_map(|holder| holder.get("error"));
    let message = error.map(|raw| raw.get().chars().take(200).collect::<String>());
    let parts: Vec<String> = status.into_iter().chain(kind).chain(message).collect();
    Ok((!parts.is_empty()).then(|| parts.join(", ")))
}
