"""Convert spans of model calls to a request and a response, and tell them from spans of agents, tools and retrievers.

The spans are those of `span_containers`. Conventions: OpenTelemetry's for generative AI (messages as attributes, in
events or in log records), the older numbered attributes of OpenLLMetry, OpenInference, MLflow, and the names that Agent
Lightning adds. Token ids and logprobs have the names that open-telemetry/semantic-conventions-genai#75 proposes, as
alibaba/loongsuite-semantic-conventions-genai defines them: at each position, the sampled token is the first candidate.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tracegrad.data import chat, json_path
from tracegrad.data.field_map import BadValueError
from tracegrad.data.formats import generic, record_fields
from tracegrad.data.formats.span_containers import unfold

CALL, AGENT, TOOL, STEP, BARE, FAILED = "call", "agent", "tool", "step", "bare", "failed"
"""Kinds of spans. STEP: a part of an agent's run. BARE: a model call whose messages are not recorded."""
_KINDS = {
    **dict.fromkeys(("llm", "chat", "text_completion", "generate_content", "chat_model", "completion"), CALL),
    **dict.fromkeys(("agent", "invoke_agent"), AGENT),
    **dict.fromkeys(("tool", "execute_tool", "evaluator", "guardrail", "retriever", "reranker", "embedding"), TOOL),
    **dict.fromkeys(("retrieval", "embeddings", "rerank"), TOOL),
}
_KIND_NAMES = (
    *("openinference.span.kind", "gen_ai.operation.name", "traceloop.span.kind", "mlflow.spanType"),
    "llm.request.type",
)
PER_POSITION = "gen_ai.response.candidate.per_position_"
PROMPT_IDS = "prompt_token_ids"
PREFIX = "tracegrad."
"""Attributes of `to_otlp` without a name in any convention: logprob kind, policy version."""
_PROMPT_IDS = (*(PROMPT_IDS, "agentlightning.operation.output.prompt_token_ids", "llm.hosted_vllm.prompt_token_ids"),)
_SAMPLED_IDS = (
    *("response_token_ids", "agentlightning.operation.output.response_token_ids"),
    *("agentlightning.operation.output.response_token_ids.0", "agentlightning.operation.output.choices.0.token_ids"),
    "agentlightning.operation.output.choices.0.provider_specific_fields.token_ids",
    "llm.hosted_vllm.response_token_ids",
)
_INPUTS = ("gen_ai.input.messages", "gen_ai.prompt", "agentlightning.operation.input.messages", "llm.input_messages")
_OUTPUTS = (
    *("gen_ai.output.messages", "gen_ai.completion", "agentlightning.operation.output.choices"),
    "llm.output_messages",
)
_CONTENT_EVENTS = ("gen_ai.content.prompt", "gen_ai.content.completion", "gen_ai.client.inference.operation.details")
_MESSAGE_EVENTS = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
_CHOICE, _GENERATED = "gen_ai.choice", "gen_ai.token.generated"
MESSAGE_NAMES = frozenset((*_MESSAGE_EVENTS, _CHOICE))
"""Names of events with one message each. As log records, those of one span are its call."""
_REQUEST = ("gen_ai.request", "gen_ai.openai.request", "agentlightning.operation.input")
_MODELS = ("gen_ai.request.model", "llm.request.model_name", "llm.model_name", "gen_ai.response.model")
_SYSTEM = ("system", "developer")
_REDACTED = "__REDACTED__"
"""Text that OpenInference writes in place of what its options hide."""


def convert(span: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the kind of a span, and the span; a CALL has its `request` and `response` instead of their attributes.

    Without a name of its kind, a span is a call if it has an answer and a prompt or the name of a model, or if a search
    of its attributes finds a call.

    Raises:
        BadValueError: if the messages, ids or logprobs of a call are not what their names say.
    """
    with record_fields.refuse_on_error("the span of a model call"):
        attributes = _gathered(span)
        names = [attributes[name] for name in _KIND_NAMES if isinstance(attributes.get(name), str)]
        kinds = [kind for name in names if (kind := _KINDS.get(name.strip('"').lower()))]
        answers, inputs = _answers(attributes), _inputs(attributes)
        is_model_call = bool(inputs) or any(attributes.get(name) for name in _MODELS)
        kind = kinds[0] if kinds else CALL if answers and is_model_call and not names else STEP
        if kind == STEP and not names and (call := _structural_call(span)) is not None:
            return CALL, call
        if kind != CALL:
            return kind, {**span, **_reward(attributes)}
        raw = _raw_call(attributes)
        if raw is None and (unread := _unread_kind(attributes, span["status"], inputs, answers)):
            return unread, dict(span)
        is_numbered = not any(name in attributes for name in _INPUTS)
        if (
            raw is None
            and is_numbered
            and (span.get("dropped_attributes") or isinstance(_value(attributes, _INPUTS), dict))
        ):
            raise ValueError(
                "attributes of its messages were dropped: raise OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT, which is 128"
            )
        if span.get("is_cut"):
            raise ValueError("a value has 128 characters, to which Zipkin's exporters cut values by default")
        return CALL, _call(span, attributes, raw)


def _reward(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reward of a span of Agent Lightning or AgentOps as {"reward": number}, {} without one."""
    for name in ("agentlightning.reward.0.value", "reward"):
        if attributes.get(name) is not None:
            return {"reward": attributes[name]}
    for name in ("agentops.task.output", "agentops.entity.output"):
        value = chat.as_mapping(unfold(attributes, name))
        if value.get("type") == "reward":
            return chat.pick({"reward": value.get("value")}, ["reward"])
    return {}


def _call(span: Mapping[str, Any], attributes: Mapping[str, Any], raw: Any) -> dict[str, Any]:
    request, response = raw or _of_text(attributes) or (_request(attributes), _response(attributes))
    partial = {} if raw and "model" in request else chat.PARTIAL
    if raw:
        request = {**_options(attributes), **_tools(attributes), **request} if partial else request
        _add_tokens(attributes, response)
    own = {
        name: attributes[PREFIX + name] for name in ("logprob_kind", "policy_version") if PREFIX + name in attributes
    }
    kept = {name: value for name, value in span["attributes"].items() if not name.startswith(_HEAVY)}
    return {**_without_name(span), "attributes": kept, **partial, **own, "request": request, "response": response}


def _without_name(span: Mapping[str, Any]) -> dict[str, Any]:
    """Return a span that is not read as a span of the core's `otel` form once it has a request and a response."""
    return chat.without(span, "name", "events", "status", "is_cut", "dropped_attributes")


_HEAVY = (
    *("input.", "output.", "llm.input_messages", "llm.output_messages", "llm.tools", "llm.invocation_parameters"),
    *("gen_ai.input.", "gen_ai.output.", "gen_ai.prompt", "gen_ai.completion", "gen_ai.tool.definitions"),
    *("gen_ai.response.candidate.", "gen_ai.system_instructions", "mlflow.span", "mlflow.chat", "logprobs."),
    *(
        "llm.request.functions",
        "agentlightning.operation.",
        "llm.hosted_vllm.",
        "prompt_token_ids",
        "response_token_ids",
    ),
)
"""Starts of the names of attributes that contain messages, tools or tokens."""


def bare_refusal(span: str) -> BadValueError:
    """Return the refusal of a model call whose messages are not recorded. `span` is its id."""
    return BadValueError(
        (
            f"the span {span} is a model call without the content of its messages",
            "Instrumentations leave it out by default",
            "Set OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true (the newest ones: span_and_event), or the "
            "option of your instrumentation, before you record",
        )
    )


def failed_call(span: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record that the core refuses as a failed call, with the message of the span."""
    texts = [each["attributes"].get("exception.message") for each in span["events"] if each["name"] == "exception"]
    texts += [span["status"].get("error"), "its span has a prompt and no answer"]
    return record_fields.failed_call({}, str(next(text for text in texts if text)))


def _gathered(span: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a span with those of the events that repeat its content."""
    attributes: dict[str, Any] = {}
    inputs: list[Any] = []
    outputs: list[Any] = []
    generated: list[Mapping[str, Any]] = []
    own = json_path.parse_json_string(span["attributes"].get("events"))
    listed = [{"name": each.get("event.name"), "attributes": each} for each in own or () if isinstance(own, list)]
    for event in (*span["events"], *listed):
        name, fields = event["name"], event["attributes"]
        if name in _CONTENT_EVENTS:
            attributes |= fields
        elif name == _GENERATED:
            generated.append(fields)
        elif name in _MESSAGE_EVENTS or name == _CHOICE:
            body = chat.as_mapping(json_path.parse_json_string(fields.get("gen_ai.event.content"))) or unfold(
                {"": fields}, ""
            )
            (outputs if name == _CHOICE else inputs).append(_of_event(name, body))
    if generated:
        for kind in ("token_ids", "logprobs", "decoded_tokens"):
            values = [json_path.parse_json_string(each.get(f"gen_ai.response.candidate.{kind}")) for each in generated]
            if all(values):
                attributes[PER_POSITION + kind] = values
    if outputs:
        converse = [_of_converse(each) for each in (*inputs, *outputs)]
        if all(each is not None for each in converse):
            inputs, outputs = converse[: len(inputs)], converse[len(inputs) :]
        attributes |= {_INPUTS[0]: inputs, _OUTPUTS[0]: outputs}
    return {**attributes, **span["attributes"]}


def _of_event(name: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message of an event such as `gen_ai.user.message`, or of `gen_ai.choice`."""
    inner = json_path.parse_json_string(body.get("message"))
    fields = {**chat.as_mapping(inner), **chat.pick(body, ["finish_reason"])} if inner else dict(body)
    if isinstance(inner, (str, list)):
        fields["content"] = inner
    role = fields.get("role") if isinstance(fields.get("role"), str) else _MESSAGE_EVENTS.get(name, "assistant")
    message = {"role": role, **chat.pick(fields, ["content", "tool_calls", "tool_call_id", "finish_reason", "parts"])}
    if role == "tool" and "tool_call_id" not in message:
        message["tool_call_id"] = fields.get("id")
    return {key: json_path.parse_json_string(each) if key == "tool_calls" else each for key, each in message.items()}


def _of_converse(message: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a message with parts, if its content is a list of blocks of Bedrock's Converse API; None otherwise.

    Strands Agents writes such a list, as JSON, in every event of a message.
    """
    blocks = json_path.parse_json_string(message.get("content"))
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) and len(block) == 1 for block in blocks):
        return None
    parts = []
    for kind, value in (next(iter(block.items())) for block in blocks):
        fields = chat.as_mapping(value)
        if kind == "text" and isinstance(value, str):
            parts.append({"type": "text", "content": value})
        elif kind == "toolUse":
            arguments = fields.get("input", {})
            parts.append(
                {"type": "tool_call", "id": fields["toolUseId"], "name": fields["name"], "arguments": arguments}
            )
        elif kind == "toolResult":
            results = [chat.as_mapping(each) for each in fields.get("content") or ()]
            texts = [each["text"] if "text" in each else chat.arguments_json(each["json"]) for each in results]
            parts.append({"type": "tool_call_response", "id": fields.get("toolUseId"), "response": "".join(texts)})
        elif kind == "reasoningContent":
            text = chat.as_mapping(fields.get("reasoningText")).get("text")
            parts.append({"type": "reasoning", "content": text})
        else:
            return None
    return {**chat.without(message, "content", "tool_call_id"), "parts": parts}


def _value(attributes: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Return the first value under one of these names that is not empty."""
    return next((value for name in names if (value := unfold(attributes, name))), None)


def _inputs(attributes: Mapping[str, Any]) -> Any:
    """Return the messages of the request; a text is a message of the user. None without any."""
    inputs = _value(attributes, _INPUTS)
    if inputs is None and (texts := _texts(attributes, _PROMPTS)):
        return [{"role": "user", "content": text} for text in texts]
    return [{"role": "user", "content": inputs}] if isinstance(inputs, str) else inputs


def _answers(attributes: Mapping[str, Any]) -> list[Any]:
    """Return the answers of a call, [] if the content of none of them is recorded."""
    answers = _value(attributes, _OUTPUTS)
    if answers is None and (texts := _texts(attributes, _COMPLETIONS)):
        return [{"role": "assistant", "content": text} for text in texts]
    if answers is None and _value(attributes, _SAMPLED_IDS) is not None:
        return [{"role": "assistant", "content": None}]
    if not isinstance(answers, list):
        return [{"role": "assistant", "content": answers}] if isinstance(answers, str) else []
    return answers if any(value is not None for each in answers for value in _contents(each, attributes)) else []


def _contents(message: Any, attributes: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the texts, arguments and other contents of a message. None is one that was not recorded.

    Recorders leave out results of tools that are empty, and arguments of tools without parameters.
    """
    fields = chat.as_mapping(message)
    fields = {**fields, **chat.as_mapping(fields.get("message"))}
    calls = [chat.as_mapping(each) for each in record_fields.require_list(fields.get("tool_calls"), "tool_calls")]
    if name := fields.get("function_call_name"):
        calls.append({"name": name, "arguments": fields.get("function_call_arguments_json")})
    parts = fields["parts"] if isinstance(fields.get("parts"), list) else []
    for part in map(chat.as_mapping, parts):
        if part.get("type") == "tool_call":
            calls.append(part)
        elif part.get("type") in ("text", "reasoning", "thinking"):
            yield part.get("content")
        elif part.get("type") != "tool_call_response":
            yield part
        elif (result := _result(part)) is not None:
            yield result
    for call in calls:
        inner = chat.as_mapping(call.get("tool_call", call))
        function = {**inner, **chat.as_mapping(inner.get("function"))}
        if function.get("arguments") is not None or function.get("name") not in _tools_without_parameters(attributes):
            yield function.get("arguments")
    contents = [fields.get(key) for key in ("content", "contents")]
    yield from (each for each in contents if each is not None)
    yield from chat.pick(fields, ["reasoning_content", "reasoning", "refusal"]).values()
    if fields.get("role") in (*_SYSTEM, "user") and not parts and contents == [None, None]:
        yield None


def _tools_without_parameters(attributes: Mapping[str, Any]) -> set[Any]:
    """Return the names of the tools of the request whose recorded schema has no parameters."""
    functions = [chat.as_mapping(each.get("function")) for each in _tools(attributes).get("tools", ())]
    schemas = [(each.get("name"), each.get("parameters")) for each in functions]
    return {name for name, schema in schemas if isinstance(schema, Mapping) and not schema.get("properties")}


def _are_hidden(messages: Any, attributes: Mapping[str, Any]) -> bool:
    """Return whether the content of one of the messages is not recorded."""
    if not isinstance(messages, list) or _REDACTED in chat.arguments_json(messages):
        return True
    contents = [value for each in messages for value in _contents(each, attributes)]
    return not contents or any(value is None for value in contents)


def _unread_kind(attributes: Mapping[str, Any], status: Any, inputs: Any, answers: list[Any]) -> str | None:
    """Return FAILED for a call without an answer, BARE for one that lacks the content of a message; None for others.

    A call had an answer that is not recorded if it has an empty one, the reason of its end or a number of sampled
    tokens.
    """
    if isinstance(inputs, dict):
        return None  # Attributes were dropped, which is refused with another reason.
    is_empty = all(value in ("", []) for each in inputs or () for value in _contents(each, attributes))
    has_only_ids = inputs is None and _value(attributes, _PROMPT_IDS) is not None
    lacks_prompt = (is_empty or _are_hidden(inputs, attributes)) and not has_only_ids
    if not answers:
        reasons = unfold(attributes, "gen_ai.response.finish_reasons") or [attributes.get("llm.finish_reason")]
        has_ended = any(map(json_path.number, (attributes.get(name) for name in _SAMPLED_COUNTS)))
        has_ended = has_ended or bool(_value(attributes, _OUTPUTS)) or not {None, "", "error"}.issuperset(reasons)
        return FAILED if status or not (lacks_prompt or has_ended) else BARE
    has_only_ids = _value(attributes, _OUTPUTS) is None and _value(attributes, _SAMPLED_IDS) is not None
    return BARE if lacks_prompt or (_are_hidden(answers, attributes) and not has_only_ids) else None


_SAMPLED_COUNTS = (
    *("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.usage.completion_tokens"),
    "llm.token_count.completion",
)


def _raw_call(attributes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the request and the response as they were sent, if the span has both as JSON (OpenInference, MLflow).

    They have what messages as attributes lack: logprobs, ids and all options.
    """
    for names in (("input.value", "output.value"), ("mlflow.spanInputs", "mlflow.spanOutputs")):
        request, response = (json_path.parse_json_string(attributes.get(name)) for name in names)
        if not isinstance(request, dict) or not isinstance(response, dict):
            continue
        if isinstance(request.get("input"), (str, list)) and response.get("object") == "response":
            return dict(request), dict(response)
        messages, choices = request.get("messages"), response.get("choices")
        if not isinstance(choices, list) or not choices:
            continue
        if isinstance(request.get("prompt"), str) and all(isinstance(each.get("text"), str) for each in choices):
            return dict(request), dict(response)
        if not isinstance(messages, list):
            continue
        if not all(isinstance(chat.as_mapping(each).get("message"), Mapping) for each in choices):
            continue
        listed = unfold(attributes, "llm.input_messages")
        if all(map(chat.role, messages)) and (not isinstance(listed, list) or len(listed) == len(messages)):
            return dict(request), dict(response)
    return None


def _of_text(attributes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the request and the response of a completion of a text without roles; None for other calls.

    As messages, the text would be read as if it had been rendered by a chat template.
    """
    names = (attributes.get("gen_ai.operation.name"), attributes.get("llm.request.type"))
    prompts, answers = _texts(attributes, _PROMPTS), _texts(attributes, _COMPLETIONS)
    if not prompts and not {"text_completion", "completion"}.isdisjoint(names):
        request, response = _request(attributes), _response(attributes)
        prompts = [each["content"] for each in request["messages"]] if _are_plain(request["messages"], "user") else []
        said = [each["message"] for each in response["choices"]]
        answers = [each["content"] for each in said] if _are_plain(said, "assistant") else []
    if len(prompts) != 1 or not answers:
        return None
    request = {**chat.without(_request(attributes), "messages"), "prompt": prompts[0]}
    reasons = [each["finish_reason"] for each in _response(attributes)["choices"]]
    choices = [
        {"index": index, "text": text, "finish_reason": reasons[index] if index < len(reasons) else None}
        for index, text in enumerate(answers)
    ]
    response = {"choices": choices}
    _add_tokens(attributes, response)
    return request, response


_PROMPTS, _COMPLETIONS = ("llm.prompts", "prompt"), ("llm.choices", "completion")


def _texts(attributes: Mapping[str, Any], name: tuple[str, str]) -> list[Any]:
    """Return the texts of OpenInference's list of prompts or choices: each is an object with a `text`."""
    listed = unfold(attributes, name[0])
    rows = listed if isinstance(listed, list) else []
    texts = [chat.as_mapping(chat.as_mapping(row).get(name[1])).get("text") for row in rows]
    return texts if all(isinstance(text, str) for text in texts) else []


def _are_plain(messages: list[dict[str, Any]], role: str) -> bool:
    """Return whether messages have only this role, and only text."""
    return all(each["role"] == role and isinstance(each["content"], str) and len(each) == 2 for each in messages)


def _request(attributes: Mapping[str, Any]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for each in record_fields.require_list(_inputs(attributes), "the messages of the request"):
        messages += _messages(each)
    if instructions := unfold(attributes, "gen_ai.system_instructions"):
        messages = _with_instructions(instructions, messages)
    request: dict[str, Any] = {**_options(attributes), "messages": messages, **_tools(attributes)}
    model = next((attributes[name] for name in _MODELS if isinstance(attributes.get(name), str)), None)
    return request if model is None else {**request, "model": model}


def _with_instructions(instructions: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a request after its instructions, unless the system messages among them are the same.

    By the convention, `gen_ai.system_instructions` are sent separately from the chat history, and system messages of
    the history are only in `gen_ai.input.messages`. So both were sent if they differ. Some instrumentations record the
    same prompt in both.

    Raises:
        ValueError: if some of the system messages repeat a part of the instructions.
    """
    parts = instructions if isinstance(instructions, list) else [{"type": "text", "content": instructions}]
    separate = _messages({"role": "system", "parts": parts})
    texts = [str(chat.as_mapping(each).get("content") or "").strip() for each in parts]
    listed = [
        each["content"].strip() for each in messages if each["role"] in _SYSTEM and isinstance(each["content"], str)
    ]
    if "".join(texts) == "".join(listed):
        return messages
    if not {*texts, "".join(texts)}.isdisjoint(listed):
        raise ValueError("gen_ai.system_instructions repeats a part of the system messages in gen_ai.input.messages")
    return [*separate, *messages]


def _options(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling options. Tables of text store numbers as text."""
    sources = [chat.as_mapping(unfold(attributes, name)) for name in ("llm.invocation_parameters", *_REQUEST)]
    sources.append({key[4:]: value for key, value in attributes.items() if key.startswith("llm.")})
    options: dict[str, Any] = {}
    for source in sources:
        for name, value in chat.pick(source, chat.SAMPLING).items():
            number = (
                json_path.number(value) if isinstance(value, (str, float)) and not isinstance(value, bool) else None
            )
            if number is not None:
                value = int(number) if number.is_integer() and name not in chat.SAMPLING[:2] else number
            options.setdefault(name, value)
    return options


def _tools(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"tools": schemas} of the request, or {}."""
    listed = _value(attributes, ("gen_ai.tool.definitions", "llm.tools", "llm.request.functions"))
    schemas = []
    for each in listed if isinstance(listed, list) else ():
        schema = json_path.parse_json_string(each)
        schema = chat.as_mapping(schema).get("tool", schema)
        schema = json_path.parse_json_string(chat.as_mapping(schema).get("json_schema", schema))
        if not isinstance(schema, Mapping):
            raise TypeError(f"a tool is {json_path.describe_type(schema)}")
        schemas.append(
            {key: json_path.parse_json_string(value) if key == "parameters" else value for key, value in schema.items()}
        )
    return chat.tools(schemas)


def _response(attributes: Mapping[str, Any]) -> dict[str, Any]:
    choices = []
    answers = _answers(attributes)
    reasons = unfold(attributes, "gen_ai.response.finish_reasons") or [attributes.get("llm.finish_reason")]
    for index, answer in enumerate(answers):
        inner = chat.as_mapping(answer).get("message")
        fields = {**answer, **inner} if isinstance(inner, Mapping) else dict(answer)
        message, *others = _messages({**fields, "role": "assistant"})
        if others:
            raise ValueError("an answer has results of tools")
        reason = fields.get("finish_reason") or (reasons[index] if index < len(reasons) else None)
        choices.append({"index": index, "message": message, "finish_reason": _REASONS.get(str(reason), reason)})
    response: dict[str, Any] = {"choices": choices}
    if isinstance(name := attributes.get("gen_ai.response.id"), str):
        response["id"] = name
    _add_tokens(attributes, response)
    return response


_REASONS = {
    "tool_call": "tool_calls",
    "tool_use": "tool_calls",
    "end_turn": "stop",
    "max_tokens": "length",
    "": None,
    "unknown": None,
    "None": None,
}


def _add_tokens(attributes: Mapping[str, Any], response: dict[str, Any]) -> None:
    """Add the ids and logprobs that attributes have to the first choice, which is the only one that they describe."""
    choices = response.get("choices")
    if (ids := _numbers(attributes, _PROMPT_IDS)) is not None:
        response["prompt_token_ids"] = ids
    if not isinstance(choices, list) or not choices:
        return
    entries = unfold(attributes, "logprobs.content") or unfold(attributes, "logprobs.refusal")
    positions = {kind: unfold(attributes, PER_POSITION + kind) for kind in ("token_ids", "logprobs", "decoded_tokens")}
    first = {kind: _sampled(kind, rows) for kind, rows in positions.items() if rows is not None}
    ids = _numbers(attributes, _SAMPLED_IDS)
    ids = first.get("token_ids") if ids is None else ids
    tokens: dict[str, Any] = {} if ids is None else {"token_ids": ids}
    if entries is not None:
        tokens["logprobs"] = {"content": entries}
    elif "logprobs" in first:
        has_texts = len(first.get("decoded_tokens", ())) == len(first["logprobs"])
        tokens["logprobs"] = {
            "logprobs": first["logprobs"],
            **({"tokens": first["decoded_tokens"]} if has_texts else {}),
        }
    if tokens and len(choices) > 1:
        raise ValueError(f"it has token ids or logprobs of one answer, and {len(choices)} answers")
    if tokens:
        response["choices"] = [{**choices[0], **tokens}]


def _sampled(kind: str, rows: Any) -> list[Any]:
    """Return the first candidate of each position."""
    if not isinstance(rows, list) or not all(isinstance(row, list) and row for row in rows):
        raise TypeError(f"`{PER_POSITION}{kind}` is not a list of the candidates at each position")
    return [row[0] for row in rows]


def _numbers(attributes: Mapping[str, Any], names: tuple[str, ...]) -> list[Any] | None:
    """Return the ids under the first of these names; of a list of lists the first."""
    value = _value(attributes, names)
    if isinstance(value, list) and value and isinstance(value[0], list):
        value = value[0]
    return value if isinstance(value, list) and value else None


_ROLES = {"model": "assistant", "ai": "assistant", "human": "user"}
"""Names of Google's API and of LangChain."""


def _messages(value: Any) -> list[dict[str, Any]]:
    """Return a message of any convention in the form of the chat completions API; results of tools are one each."""
    fields = chat.as_mapping(value).get("message", value)
    if not isinstance(fields, Mapping):
        raise TypeError(f"a message is {json_path.describe_type(fields)}")
    role = str(fields.get("role") or "user")
    role = _ROLES.get(role, role)
    if isinstance(fields.get("parts"), list):
        return list(_of_parts(role, fields["parts"]))
    message: dict[str, Any] = {"role": role, "content": fields.get("content")}
    if contents := fields.get("contents"):
        message["content"] = [_openinference_part(each) for each in contents]
    calls = [_tool_call(each) for each in record_fields.require_list(fields.get("tool_calls"), "tool_calls")]
    if name := fields.get("function_call_name"):
        calls.append(chat.tool_call(name, None, fields.get("function_call_arguments_json") or "{}"))
    optional = chat.pick(fields, ["tool_call_id", "name", "reasoning_content", "reasoning", "refusal"])
    return [{**message, **({"tool_calls": calls} if calls else {}), **optional}]


def _tool_call(value: Any) -> dict[str, Any]:
    """Return a tool call in the form of the chat completions API. OpenInference has it under `tool_call`."""
    fields = chat.as_mapping(value).get("tool_call", value)
    function = {**fields, **chat.as_mapping(fields.get("function"))}
    return chat.tool_call(function["name"], fields.get("id"), function.get("arguments", "{}"))


def _openinference_part(value: Any) -> dict[str, Any]:
    part = chat.as_mapping(value).get("message_content", value)
    if part.get("type") == "image" or "image" in part:
        return {
            "type": "image_url",
            "image_url": {"url": chat.as_mapping(part["image"]).get("image", part["image"])["url"]},
        }
    if not isinstance(part.get("text"), str):
        raise ValueError(f"a part of a message is of the type {part.get('type')!r:.40}")
    return {"type": "text", "text": part["text"]}


def _of_parts(role: str, parts: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the message of OpenTelemetry's parts: results of tools first, one message for each."""
    content: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results = 0
    for part in parts:
        kind, text = part.get("type"), part.get("content")
        if kind == "text":
            content.append({"type": "text", "text": text or ""})
        elif kind in ("reasoning", "thinking"):
            thoughts.append(text or "")
        elif kind == "tool_call":
            calls.append(_tool_call(part))
        elif kind == "tool_call_response":
            result = _result(part)
            result = result if result is None or isinstance(result, str) else chat.arguments_json(result)
            results += 1
            yield {"role": "tool", "content": result, "tool_call_id": part.get("id")}
        elif kind in ("blob", "uri") and str(part.get("modality")) == "image":
            data = f"data:{part.get('mime_type') or 'image/png'};base64,{text}"
            content.append({"type": "image_url", "image_url": {"url": part.get("uri") or data}})
        else:
            raise ValueError(f"a part of a message is of the type {kind!r:.40}")
    if not (content or thoughts or calls) and results:
        return
    texts = [part["text"] for part in content if part["type"] == "text"]
    is_text = len(texts) == len(content)
    message: dict[str, Any] = {"role": role, "content": ("".join(texts) if texts else None) if is_text else content}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    yield {**message, "tool_calls": calls} if calls else message


def _result(part: Mapping[str, Any]) -> Any:
    """Return the result in a part of the type `tool_call_response`; None without one."""
    return next((part[key] for key in ("response", "result") if part.get(key) is not None), None)


def _structural_call(span: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the span with the call that its attributes contain under other names; None without one."""
    if not generic.has_call(span["attributes"]):
        return None
    records = generic.of_record(span["attributes"])
    call = records[0] if records and len(records) == 1 else {}
    return (
        {**_without_name(span), **chat.pick(call, ["sampling_defaults", "request", "response"])}
        if "request" in call
        else None
    )
