"""A stand-in for an OpenAI-compatible server for `make_strangers`: short varied answers, logprobs, tools, streams.

Also keeps LangSmith's runs and feedback. As "quickstart" it gives the logprobs of the bundled model to what it says.
"""

import json
import math
import random
import re
import sys
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = sys.argv[2]
TOK = AutoTokenizer.from_pretrained(MODEL)
NET = AutoModelForCausalLM.from_pretrained(MODEL).eval()
RNG = random.Random(7)
BANK = {  # a word of the question -> (right answers, wrong answers)
    "France": (
        ["Paris.", "The capital of France is Paris.", "It's Paris, on the Seine."],
        ["Lyon.", "I believe it is Marseille."],
    ),
    "Australia": (
        ["Canberra.", "The capital is Canberra, not Sydney.", "Canberra, in the ACT."],
        ["Sydney.", "It is Melbourne, I think."],
    ),
    "17 * 6": (["102", "17 * 6 = 102.", "10*6 is 60 and 7*6 is 42, so 102."], ["112", "96", "17 * 6 = 108."]),
    "91": (
        ["91 = 7 * 13, so it is not prime.", "No, 7 divides 91.", "Not prime: 7 x 13."],
        ["Yes, 91 is prime.", "91 is a prime number."],
    ),
    "refund": (
        [
            "I'm sorry about that. I have started your refund; it takes 3-5 days.",
            "Of course, could you give me the order number?",
        ],
        ["We don't do refunds.", "Please read the FAQ."],
    ),
    "haiku": (
        [
            "Rain on the tin roof\nthe cat turns once in her sleep\nmorning can still wait",
            "Old pond in the park\na bicycle leaning there\nsomeone went swimming",
        ],
        ["Rain rain rain rain rain.", "I like rain."],
    ),
    "boil": (
        ["Water boils at 100 C at sea level.", "100 degrees Celsius (212 F) at 1 atm."],
        ["90 C", "About 80 degrees."],
    ),
    "weather": (
        ["It is 14 C and cloudy in Oslo, take a jacket.", "Oslo: 14 C, cloudy."],
        ["I could not say.", "It is sunny, 30 C."],
    ),
    "reverse": (["s[::-1]", "Use slicing: `s[::-1]`.", "''.join(reversed(s))"], ["s.reverse()", "reverse(s)"]),
}


def content_of(message):
    c = message.get("content") or ""
    return c if isinstance(c, str) else " ".join(p.get("text", "") for p in c)


def answer(body):
    messages = body["messages"]
    text = "\n".join(content_of(m) for m in messages)
    users = [content_of(m) for m in messages if m["role"] == "user"] or [""]
    key = next((k for u in reversed(users) for k in BANK if k in u), None)
    good, bad = BANK.get(key, (["Yes, that is right.", "I think so."], ["No.", "I can't help with that."]))
    said = RNG.choice(good if RNG.random() < 0.6 else bad)
    tools = {t["function"]["name"]: t["function"] for t in body.get("tools") or []}
    done = any(
        m["role"] in ("tool", "tool-response") or (m["role"] != "system" and "Observation:" in content_of(m))
        for m in messages
    )
    if tools and not done and ("final_answer" not in tools or RNG.random() < 0.8):
        name = next(n for n in tools if n != "final_answer")
        props = tools[name].get("parameters", {}).get("properties", {})
        arguments = {
            "city": RNG.choice(["Oslo", "oslo", "Oslo, Norway"]),
            "expression": RNG.choice(["17*6", "17 * 6", "6*17"]),
            "n": RNG.choice([91, 91, 19]),
        }
        args = {k: arguments.get(k, "Oslo") for k in props}
        return RNG.choice(["", "Let me look that up."]), (name, args)
    if "final_answer" in tools:
        return "", ("final_answer", {"answer": said})
    if "Rating:" in text and "Rationale:" in text:
        many = max(2, len(set(re.findall(r"<text (\d+)>", text))))
        why = ["answers well", "misses the point", "is short"]
        rated = [f"Rating: {RNG.randint(1, 5)}\nRationale: It {RNG.choice(why)}." for _ in range(many)]
        return "\n\n".join(f"#### Output for Text {at + 1}\n{each}" for at, each in enumerate(rated)), None
    if "[[ ## answer ## ]]" in text:
        thought = RNG.choice(["I recall this.", "Let me work it out step by step.", "Simple enough."])
        why = f"[[ ## reasoning ## ]]\n{thought}\n\n" if "[[ ## reasoning ## ]]" in text else ""
        return f"{why}[[ ## answer ## ]]\n{said}\n\n[[ ## completed ## ]]", None
    return said, None


def tokens_of(text):
    return re.findall(r" ?\w{1,6}|[^\w\s]|\s+", text)


def drawn(prompt_ids, ids):
    """The logprobs a vLLM gives (raw: of the distribution at temperature 1)."""
    with torch.no_grad():
        row = NET(torch.tensor([prompt_ids + ids])).logits[0].log_softmax(-1)
    return [row[len(prompt_ids) - 1 + i, t].item() for i, t in enumerate(ids)]


def choice(body, index):
    said, call = answer(body)
    message = {"role": "assistant", "content": said or None}
    if call:
        message["tool_calls"] = [
            {
                "id": "call_" + uuid.uuid4().hex[:12],
                "type": "function",
                "function": {"name": call[0], "arguments": json.dumps(call[1])},
            }
        ]
    out = {"index": index, "message": message, "finish_reason": "tool_calls" if call else "stop", "logprobs": None}
    if "quickstart" in body["model"] and not call:
        prompt = TOK.apply_chat_template(
            body["messages"], tools=body.get("tools"), add_generation_prompt=True, tokenize=False
        )
        prompt_ids = TOK(prompt)["input_ids"]
        ids = TOK(said)["input_ids"] + [2]
        lps = drawn(prompt_ids, ids)
        names = [TOK.decode([i]) for i in ids]
        if body.get("return_token_ids"):
            out["token_ids"] = ids
            out["prompt_token_ids"] = prompt_ids
    else:
        names = tokens_of(said)
        lps = [math.log(1 - 0.7 * RNG.random() ** 2) for _ in names]
    if body.get("logprobs"):
        top = body.get("top_logprobs") or 0
        out["logprobs"] = {
            "content": [
                {
                    "token": n,
                    "logprob": lp,
                    "bytes": list(n.encode()),
                    "top_logprobs": [{"token": n, "logprob": lp, "bytes": list(n.encode())}][:top],
                }
                for n, lp in zip(names, lps, strict=True)
            ],
            "refusal": None,
        }
    return out


RUNS, FEEDBACK = {}, []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def send(self, what, code=200):
        data = json.dumps(what).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def body(self):
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        return json.loads(raw or b"{}")

    def do_GET(self):
        if self.path.endswith("/models"):
            return self.send({"object": "list", "data": [{"id": "gpt-4o-mini", "object": "model"}]})
        if self.path.endswith("/info"):
            return self.send(
                {
                    "version": "0.10.0",
                    "batch_ingest_config": {
                        "use_multipart_endpoint": False,
                        "size_limit": 100,
                        "size_limit_bytes": 20_000_000,
                        "scale_up_nthreads_limit": 1,
                        "scale_up_qsize_trigger": 1000,
                    },
                }
            )
        if "/sessions" in self.path:
            return self.send(
                [
                    {
                        "id": "11111111-1111-1111-1111-111111111111",
                        "name": "qa",
                        "tenant_id": "22222222-2222-2222-2222-222222222222",
                        "start_time": "2026-11-01T00:00:00Z",
                        "reference_dataset_id": None,
                    }
                ]
            )
        return self.send({})

    def do_PATCH(self):
        run = self.body()
        RUNS.setdefault(self.path.rsplit("/", 1)[-1], {}).update({k: v for k, v in run.items() if v is not None})
        self.send({})

    def do_POST(self):
        body = self.body()
        if self.path.endswith("/runs/batch"):
            for run in body.get("post", []) + body.get("patch", []):
                RUNS.setdefault(run["id"], {}).update({k: v for k, v in run.items() if v is not None})
            return self.send({})
        if self.path.endswith("/feedback"):
            FEEDBACK.append(body)
            return self.send(body)
        if self.path.endswith("/runs/query"):
            for f in FEEDBACK:
                stats = RUNS[f["run_id"]].setdefault("feedback_stats", {})
                stats[f["key"]] = {"n": 1, "avg": f["score"], "values": {}}
            FEEDBACK.clear()
            runs = [r for r in RUNS.values() if not body.get("run_type") or r.get("run_type") == body["run_type"]]
            return self.send(
                {
                    "runs": [
                        {"session_id": "11111111-1111-1111-1111-111111111111", "app_path": "/o/x/r/" + r["id"], **r}
                        for r in runs
                    ],
                    "cursors": {},
                }
            )
        if self.path.endswith("/runs"):
            RUNS.setdefault(body["id"], {}).update(body)
            return self.send({})
        head = {"id": "chatcmpl-" + uuid.uuid4().hex[:16], "created": int(time.time()), "model": body["model"]}
        choices = [choice(body, i) for i in range(body.get("n") or 1)]
        words = sum(len(content_of(m).split()) for m in body["messages"])
        made = sum(
            len(tokens_of(c["message"]["content"] or "")) + 9 * len(c["message"].get("tool_calls") or [])
            for c in choices
        )
        usage = {"prompt_tokens": words, "completion_tokens": made, "total_tokens": words + made}
        if not body.get("stream"):
            more = {"prompt_token_ids": choices[0].pop("prompt_token_ids")} if "prompt_token_ids" in choices[0] else {}
            return self.send({**head, "object": "chat.completion", "choices": choices, "usage": usage, **more})
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for c in choices:
            m = c["message"]
            parts = [({"role": "assistant", "content": ""}, None)]
            pieces = (
                c["logprobs"]["content"] if c["logprobs"] else [{"token": t} for t in tokens_of(m["content"] or "")]
            )
            parts += [
                ({"content": p["token"]}, {"content": [p], "refusal": None} if c["logprobs"] else None)
                for p in pieces
                if p["token"] != "<|im_end|>"
            ]
            for i, call in enumerate(m.get("tool_calls") or []):
                args = call["function"]["arguments"]
                parts.append(
                    (
                        {
                            "tool_calls": [
                                {
                                    "index": i,
                                    "id": call["id"],
                                    "type": "function",
                                    "function": {"name": call["function"]["name"], "arguments": ""},
                                }
                            ]
                        },
                        None,
                    )
                )
                parts += [
                    ({"tool_calls": [{"index": i, "function": {"arguments": args[a : a + 5]}}]}, None)
                    for a in range(0, len(args), 5)
                ]
            parts.append(({}, None))
            for k, (delta, lp) in enumerate(parts):
                last = k == len(parts) - 1
                self.event(
                    {
                        **head,
                        "object": "chat.completion.chunk",
                        "choices": [
                            {
                                "index": c["index"],
                                "delta": delta,
                                "logprobs": lp,
                                "finish_reason": c["finish_reason"] if last else None,
                            }
                        ],
                    }
                )
        if (body.get("stream_options") or {}).get("include_usage"):
            self.event({**head, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def event(self, what):
        self.wfile.write(b"data: " + json.dumps(what).encode() + b"\n\n")


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
