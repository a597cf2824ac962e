"""Records calls with pictures from a real vLLM on loopback: run by `test_pictures_with_vllm`, or by hand.

python tests/helpers/record_pictures.py http://127.0.0.1:8000 MODEL OUT.jsonl
"""

import base64
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

import vlm

PAD = 642
FILES = [
    vlm.picture(56, 56, 1),
    vlm.picture(84, 56, 2, kind="JPEG"),
    vlm.picture(56, 56, 3, kind="WEBP"),
    vlm.picture(40, 100, 4),
    vlm.picture(56, 56, 5, "RGBA"),
    vlm.picture(61, 47, 6, "L"),
]
KINDS = ["png", "jpeg", "webp", "png", "png", "png"]


def part(each):
    """A text, or the number of a file."""
    if isinstance(each, str):
        return {"type": "text", "text": each}
    url = f"data:image/{KINDS[each]};base64,{base64.b64encode(FILES[each]).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts):
    return {"role": "user", "content": [part(each) for each in parts]}


def tool(*parts):
    return {"role": "tool", "tool_call_id": "c", "content": [part(each) for each in parts]}


CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
}
PROMPTS = {
    "one": [user("look", 0, "what?")],
    "two": [user(0, "and", 1)],
    "three_mixed": [user(3, 1, "then", 0)],
    "four": [user(0, 1, 2, 3)],
    "adjacent": [user(0, 2)],
    "twice": [user(0, "again", 0)],
    "same_size": [user(2, "again", 0)],
    "tool": [user("q", 0), CALLED, tool("seen", 1)],
    "literal": [user("the word <|image_pad|> first", 0)],
    "alpha": [user(4)],
    "grey": [user(5, "grey")],
}


class Server:
    def __init__(self, url, model):
        self.url, self.model = url, model

    def post(self, path, body):
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.read()[:400]!r}") from error

    def chat(self, messages, **more):
        body = {"model": self.model, "messages": messages, "max_tokens": 8, "temperature": 1.0, "logprobs": True}
        body |= {"return_token_ids": True, "ignore_eos": True, **more}
        return {"request": body, "response": self.post("/v1/chat/completions", body)}

    def generate(self, ids, parts):
        sampling = {"max_tokens": 8, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
        body = {"model": self.model, "token_ids": ids, "sampling_params": sampling, "return_token_ids": True}
        body["content_parts"] = parts
        return {"request": body, "response": self.post("/inference/v1/generate", body)}


def record(server, tokenizer):
    """Records by the names of their cases."""
    found = {name: server.chat(messages) for name, messages in PROMPTS.items()}
    found["sampled_pads"] = server.chat(PROMPTS["one"], logit_bias={str(PAD): 100.0}, max_tokens=4)
    first = server.chat(PROMPTS["one"])
    said = first["response"]["choices"][0]["message"]["content"]
    second = server.chat([*PROMPTS["one"], {"role": "assistant", "content": said}, user("more", 1)])
    found["turns"] = {"calls": [first, second]}
    unexpanded = tokenizer.render_ids(PROMPTS["two"], add_generation_prompt=True).tolist()
    parts = [{"type": "image_url", **part(each)["image_url"]} for each in (0, 1)]
    found["generate"] = server.generate(unexpanded, parts)
    expanded = found["two"]["response"]["prompt_token_ids"]
    found["doubled"] = server.generate(expanded, parts)
    return {name: {"id": name, **each} for name, each in found.items()}


if __name__ == "__main__":
    import tracegrad as tg

    url, model, out = sys.argv[1:]
    rows = record(Server(url, model), tg.Tokenizer.from_pretrained(model))
    Path(out).write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
