"""Truncated sampling of a real vLLM, replayed: the ratio of the policy that sampled is 1 over the sampler's support."""

import asyncio
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tracegrad as tg
from tracegrad.data.sampling import options_on
from tracegrad.model import logprobs
from tracegrad.rollout.client import Servers
from tracegrad.weight_sync import File
from vllm_runs import run

pytestmark = pytest.mark.vllm
TOKENS, REQUESTS, LISTED = 160, 8, 100
SETTINGS: list[dict[str, Any]] = [
    {"top_p": 0.9, "temperature": 0.6},
    {"top_k": 20, "temperature": 1.3},
    {"min_p": 0.05, "temperature": 1.3},
    {"top_p": 0.9, "top_k": 20, "temperature": 1.3},
    {"top_p": 0.9, "top_k": 20, "min_p": 0.05, "temperature": 0.6},
    {"repetition_penalty": 1.1, "temperature": 1.3},
    {"top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "temperature": 0.6},
    {"min_p": 0.05, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2, "temperature": 1.3},
    {"logit_bias": {"40": 4.0, "41": -5.0}, "presence_penalty": 0.5, "temperature": 1.0},
]


def post(url, body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def record(url, name, options, seed):
    """Sample one long answer, and return the record of the call."""
    body = {
        "model": "clerk",
        "messages": [{"role": "user", "content": f"What does item {seed} cost, and is it in stock?"}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "seed": seed,
        "logprobs": True,
        "top_logprobs": LISTED,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **options,
    }
    response = post(f"{url}/v1/chat/completions", body)
    call = {"request": body, "response": response}
    return {
        "id": f"{name}-{seed}",
        "group": name,
        "reward": float(seed % 2),
        "logprob_kind": "processed",
        "calls": [call],
    }


@pytest.fixture(scope="module")
def recorded(served, example, tmp_path_factory):
    """The sequences of all settings, with the first weights."""

    async def push():
        async with Servers([served], model="clerk") as servers:
            await File(servers, tmp_path_factory.mktemp("push")).push(example / "model" / "model.safetensors", 0)

    asyncio.run(push())
    with ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(record, served, f"setting {number}", options, seed)
            for number, options in enumerate(SETTINGS)
            for seed in range(REQUESTS)
        ]
        rows = [job.result() for job in jobs]
    return tg.align(tg.Traces.from_records(rows), tg.Tokenizer.from_pretrained(example / "model"))


def test_the_ratio_is_1_over_the_support(recorded, example):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(example / "model", dtype=torch.float32).eval()
    [step] = tg.pack(recorded, recorded.reward, tokens_per_row=4096)
    with torch.no_grad():
        step = step.with_logprobs(old=[logprobs(model, batch).numpy() for batch in step.batches])
    known = ~np.isnan(step.rollout_logprobs)
    ratio = np.exp(step.old_logprobs[known].astype(np.float64) - step.rollout_logprobs[known])
    assert known.sum() >= 5000
    assert known.mean() > 0.95
    assert np.quantile(np.abs(ratio - 1), 0.999) < 2e-5
    assert np.abs(ratio - 1).max() < 1e-4
    assert recorded.reshaped.tolist() == [0] * recorded.traces
    for number, options in enumerate(SETTINGS):
        assert set(options_on(int(recorded.replayed[number * REQUESTS]))) == {*options} - {"temperature"}
    # Over the whole vocabulary the ratio is the mass that the sampler kept.
    with torch.no_grad():
        whole = step.with_logprobs(
            old=[logprobs(model, replace(batch, support=None)).numpy() for batch in step.batches]
        )
    mass = np.exp(whole.old_logprobs[known] - step.rollout_logprobs[known])
    assert np.quantile(mass, 0.1) < 0.99


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("messages", {"top_p": 0.9, "top_k": 30, "repetition_penalty": 1.1}),
        ("token_ids", {"top_p": 0.9, "top_k": 30}),
        ("token_ids", {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2}),
    ],
    ids=str,
)
def test_rollouts_with_truncated_sampling_or_penalties_are_trained_on(served, example, tmp_path, path, options):
    rollout = {"input": path, "temperature": 1.2, **options, "top_logprobs": 64}
    found = run(example, served, tmp_path / "run", steps=2, rollout=rollout)
    for row in found.rows:
        print(
            {name: value for name, value in row.items() if "ratio" in name or "weight_check" in name or "valid" in name}
        )
    traces = tg.Traces.concatenate(tg.read(path) for path in sorted((tmp_path / "run" / "played").iterdir()))
    sequences = tg.align(traces, tg.Tokenizer.from_pretrained(example / "model"))
    assert set(options_on(int(sequences.replayed[0]))) == {*options}
    assert not sequences.reshaped.any()
    for row in found.rows:
        assert abs(row["old_rollout_ratio_max"] - 1) < 1e-4
        assert abs(row["old_rollout_ratio_min"] - 1) < 1e-4
        assert row["weight_check/max"] < 1e-4
        assert row["tokens_lost"] == 0
