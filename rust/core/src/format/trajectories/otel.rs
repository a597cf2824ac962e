//! OpenTelemetry spans of generative AI: one span as the SDK writes it, a list of them, or an OTLP export.
//!
//! Source: OpenTelemetry semantic conventions for generative AI, `gen_ai.input.messages` and `gen_ai.output.messages`;
//! opentelemetry-sdk `ReadableSpan.to_json`. Text only, unless ids were added under Agent Lightning's names.

use super::agent_lightning::follow;
use super::helpers::columns::Columns;
use super::helpers::span_attributes::Attributes;
use super::interface::{Body, Decoded, Form, Header, Outline, Reason, Shape, TrajectoryFormat, reject};
use serde_json::Value;
use std::collections::HashMap;

pub(super) const DUMP: TrajectoryFormat = TrajectoryFormat {
    form: Form { name: "otel", reason: "it has `resourceSpans`, or `spans` or `attributes` with a `gen_ai` name" },
    signs: &["resourceSpans", "spans", "attributes"],
    recognizes: |record| {
        let raw = |key: &str| record.get(key).map(serde_json::value::RawValue::get);
        let speaks = |text: &str| text.contains("\"gen_ai.");
        record.is("resourceSpans", Shape::List)
            || record.is("spans", Shape::List) && raw("spans").is_some_and(speaks)
            || record.has("attributes") && record.has("name") && raw("attributes").is_some_and(speaks)
    },
    decode,
};

fn decode(record: &Outline<'_>) -> Decoded<(Header, Body)> {
    let mut header = Columns(record).header(&[("id", &["id", "trace_id", "traceId"])])?;
    if let (None, Some(context)) = (&header.id, record.object("context")?) {
        header.id = context.text("trace_id")?;
    }
    let mut spans = record.objects("spans")?;
    for resource in record.objects("resourceSpans")? {
        for scope in resource.objects("scopeSpans")? {
            spans.extend(scope.objects("spans")?);
        }
    }
    if spans.is_empty() && record.has("attributes") {
        spans.push(record.clone());
    }
    if header.id.is_none() {
        let traces = traces_of(&spans)?;
        if traces > 1 {
            return Err(reject(Reason::Contradiction, "TG-FORMAT-073", format!("its spans are of {traces} traces"))
                .why("A record must have the spans of one trace")
                .fix(
                    "Read the file with `read`, which takes them apart, or write the spans of each trace as a record",
                ));
        }
        let id = spans.first().map_or(Ok(None), |span| span.value("traceId"))?;
        header.id = id.as_ref().and_then(Value::as_str).map(str::to_owned);
    }
    let body = follow(&spans, &mut header)?;
    Ok((header, body))
}

/// Returns the number of traces to which the spans with calls belong.
fn traces_of(spans: &[Outline<'_>]) -> Decoded<usize> {
    let mut has_calls = HashMap::<String, bool>::new();
    for span in spans {
        let inner = span.is("context", Shape::Object).then(|| span.object("context")).transpose()?.flatten();
        let id = |outline: &Outline<'_>| {
            let keys = ["traceId", "trace_id"];
            keys.iter().find_map(|key| outline.value(key).ok().flatten()?.as_str().map(str::to_owned))
        };
        if let Some(id) = id(span).or_else(|| inner.as_ref().and_then(id)) {
            *has_calls.entry(id).or_default() |= Attributes::of(span)?.is_call();
        }
    }
    Ok(has_calls.values().filter(|calls| **calls).count())
}
