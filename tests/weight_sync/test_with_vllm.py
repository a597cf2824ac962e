"""A real vLLM on loopback: what it reports, what alignment makes of it, and what the trainer computes, agree."""

import asyncio
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

import tracegrad as tg
from tracegrad.rollout.client import Servers
from tracegrad.weight_sync import File
from vllm_logprobs import recomputed

pytestmark = pytest.mark.vllm
GROUPS = 4


@pytest.fixture(scope="module")
def recorded(served, example, tmp_path_factory):
    import record

    folder = tmp_path_factory.mktemp("vllm")

    async def push():
        async with Servers([served], model="clerk") as servers:
            await File(servers, folder).push(example / "model" / "model.safetensors", 0)

    asyncio.run(push())
    records = record.record(served, GROUPS, seed=7, threads=8)
    path = folder / "traces.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


@pytest.fixture(scope="module")
def aligned(recorded, example):
    tokenizer = tg.Tokenizer.from_pretrained(example / "model")
    return tg.read(recorded), tg.align(tg.read(recorded), tokenizer)


def test_every_generation_is_held_with_the_ids_that_were_sampled(aligned):
    traces, sequences = aligned
    owner = np.repeat(sequences.trace, np.diff(sequences.cu_seqlens))
    for row, trace in enumerate(traces):
        if trace.metadata["shape"] != "token_ids":
            continue
        sampled = [i for call in trace.to_dict()["calls"] for i in call["response"]["choices"][0]["token_ids"]]
        assert sequences.ids[(owner == row) & sequences.trainable].tolist() == sampled
    assert sequences.alignment_report.rate < 0.05
    assert len(traces) == 8 * GROUPS


def test_the_trainer_computes_the_logprobs_that_vllm_reported_and_at_no_other_lag(aligned, example):
    _, sequences = aligned
    ours, theirs = recomputed(example, sequences), sequences.rollout_logprobs
    trained = np.flatnonzero(sequences.trainable & ~np.isnan(theirs))
    difference = np.abs(ours[trained] - theirs[trained])
    print(f"\nmean |trainer - vLLM| {difference.mean():.2e}, max {difference.max():.2e}, {len(trained)} tokens")
    assert difference.mean() < 1e-4
    inner = trained[np.isin(trained - 1, trained) & np.isin(trained + 1, trained)]
    gaps = {lag: float(np.abs(ours[inner + lag] - theirs[inner]).mean()) for lag in (-1, 0, 1)}
    print("mean |difference| by lag:", {lag: f"{gap:.2e}" for lag, gap in gaps.items()})
    assert min(gaps, key=gaps.__getitem__) == 0
    assert gaps[0] < 1e-2 * min(gaps[-1], gaps[1])


def test_one_step_trains_on_them(recorded, example, tmp_path):
    from tracegrad.cli import main

    arguments = ["train", str(recorded), "--model", str(example / "model"), "--out", str(tmp_path / "out")]
    options = ["--train.groups_per_step", str(GROUPS), "--data.holdout", "0", "--optimizer.lr", "2e-4"]
    assert main([*arguments, *options]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    last = rows[-1]
    assert last["step"] == 1
    assert last["rollout_logprob_coverage"] > 0.95
    assert abs(last["mean_importance_ratio"] - 1) < 1e-3
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint")


OBJECTS = """
import json
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from tracegrad.integrations.vllm import traces_from_outputs
steps = [{5: Logprob(-0.125, 1, " a")}, {9: Logprob(-0.0625, 1, "b"), 6: Logprob(-2.5, 4, "c")}]
flat = FlatLogprobs()
for step in steps:
    flat.append(step)
outputs = [
    CompletionOutput(i, " ac", [5, 6], -2.625, logprobs, finish_reason="stop", stop_reason=7)
    for i, logprobs in enumerate([steps, flat])
]
request = RequestOutput("r", "p", [1, 2], None, outputs, True)
traces = traces_from_outputs([request], rewards=[[1, 0]], temperature=0.5)
print(json.dumps([
    [trace.id, trace.reward, g.prompt_token_ids.tolist(), g.token_ids.tolist(), g.logprobs.tolist(), g.stop_reason]
    for trace in traces for g in trace.generations
]))
"""


SUPPORT = """
import json, sys
import tracegrad as tg
from vllm.logprobs import FlatLogprobs, Logprob, append_logprobs_for_next_position
from vllm.outputs import CompletionOutput, RequestOutput
from tracegrad.integrations.vllm import traces_from_outputs
hidden = float("-inf")  # an id that top_k 2 excludes; the sampled id is first, then again among the three most probable
columns = [([5, 5, 9, 4], [-0.5, -0.5, -0.93275, hidden], 1), ([6, 7, 6, 3], [-2.0, -0.14541, -2.0, hidden], 2)]
steps, flat = [], FlatLogprobs()
for ids, logprobs, rank in columns:
    for each in (steps, flat):
        append_logprobs_for_next_position(each, ids, logprobs, [None] * 4, rank, 3)
tokenizer = tg.Tokenizer.from_pretrained(sys.argv[1])
text = tokenizer.decode([5, 6])
lists = enumerate([steps, flat])
outputs = [CompletionOutput(i, text, [5, 6], -2.5, each, finish_reason="length") for i, each in lists]
request = RequestOutput("r", "p", [1, 2], None, outputs, True)
options = {"logprob_kind": "processed", "temperature": 0.7, "sampling": {"top_k": 2}}
sequences = tg.align(traces_from_outputs([request], **options), tokenizer)
print(json.dumps([row.tolist() for row in sequences.support.rows(sequences.terms)]))
"""


def printed_in_vllm(request, folder, script, *arguments):
    """Run a script in vLLM's interpreter, and return the JSON of its last line."""
    python = request.config.getoption("--vllm-python")
    # Only tracegrad is put on the path: the packages beside it are another environment's.
    (folder / "tracegrad").symlink_to(Path(tg.__file__).parent, target_is_directory=True)
    told = {**os.environ, "PYTHONPATH": str(folder)}
    command = [python, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=told)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_vllms_own_objects_are_taken_in_its_own_process(request, tmp_path):
    expected = [[1, 2], [5, 6], [-0.125, -2.5], 7]
    assert printed_in_vllm(request, tmp_path, OBJECTS) == [["r-0", 1.0, *expected], ["r-1", 0.0, *expected]]


def test_vllms_own_objects_prove_the_support(request, example, tmp_path):
    found = printed_in_vllm(request, tmp_path, SUPPORT, str(example / "model"))
    assert found == [[5, 9], [6, 7]] * 2
