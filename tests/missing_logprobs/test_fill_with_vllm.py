"""`fill` with the prompt_logprobs of a real vLLM: the same logprobs as forward passes here."""

import asyncio
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import rollout
from logs_without_logprobs import records_of, sampled_log, text_only, without_logprobs, write_records
from tracegrad.missing_logprobs import CheckpointRefused, fill
from tracegrad.missing_logprobs.generations import EXCLUDED, NOT_LISTED, NOT_REPORTED, REASONS
from tracegrad.rollout.client import Servers
from tracegrad.weight_sync import File

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def url(served, example, tmp_path_factory):
    """The server with the first weights."""

    async def push():
        async with Servers([served], model="clerk") as servers:
            await File(servers, tmp_path_factory.mktemp("push")).push(example / "model" / "model.safetensors", 0)

    asyncio.run(push())
    return served


def both(example, url, source, **options):
    """Fill by forward passes here and by the server, and return (reports, filled calls of each)."""
    reports, calls = [], []
    for name, server in (("here", None), ("server", url)):
        out = source.with_name(f"{name}.jsonl")
        reports.append(fill(source, example / "model", out=out, logprobs_from=server, accept_undecided=True, **options))
        records = [json.loads(line) for line in out.read_text().splitlines()]
        calls.append(
            [[call for call in record.get("tracegrad_filled", {"calls": []})["calls"] if call] for record in records]
        )
    return reports, calls


def values_of(calls):
    every = [value for record in calls for call in record for value in call["logprobs"]]
    return np.array([np.nan if value is None else value for value in every])


@pytest.mark.parametrize("form", [without_logprobs, text_only])
def test_the_server_returns_the_logprobs_of_forward_passes(example, url, tmp_path, form):
    source = write_records(tmp_path / "in.jsonl", map(form, records_of(example, 48)))
    (here, server), (own, its) = both(example, url, source)
    assert server.filled == here.filled > 500
    assert server.unknown == here.unknown
    assert [[call["ids"] for call in calls] for calls in own] == [[call["ids"] for call in calls] for calls in its]
    np.testing.assert_allclose(values_of(its), values_of(own), atol=1e-4)
    assert server.provenance["engine"].startswith("vllm ")
    assert server.provenance["model"] == here.provenance["model"]
    assert server.test.verdict == here.test.verdict == "accepted"
    assert server.test.tokens == here.test.tokens
    assert abs(server.test.p_value - here.test.p_value) < 0.1


def test_other_temperatures_are_left_out_and_not_tested(example, url, tmp_path):
    loaded = rollout.load(example / "model")
    hot, turns = sampled_log(loaded, 8, temperature=1.5)
    plain, others = sampled_log(loaded, 8, seed=1)
    source = write_records(tmp_path / "in.jsonl", hot + plain)
    report = fill(source, example / "model", out=tmp_path / "out.jsonl", logprobs_from=url, accept_undecided=True)
    assert report.unknown == {REASONS[NOT_REPORTED]: sum(len(turn.ids) for turn in turns)}
    assert report.filled == report.test.tokens == sum(len(turn.ids) for turn in others)


def test_truncated_sampling_is_measured_if_the_server_lists_the_kept_ids(example, url, tmp_path):
    records, _ = sampled_log(rollout.load(example / "model"), 16, top_p=0.9)
    source = write_records(tmp_path / "in.jsonl", records)
    (here, server), (own, its) = both(example, url, source)
    # A server lists 20 ids, and forward passes here 256.
    assert server.filled + server.unknown.get(REASONS[NOT_LISTED], 0) == server.tokens
    assert server.filled > 0.8 * here.filled
    own, its = values_of(own), values_of(its)
    known = ~np.isnan(its)
    np.testing.assert_allclose(its[known], own[known], atol=1e-4)
    assert REASONS[EXCLUDED] not in server.unknown


def test_a_log_of_another_temperature_is_refused(example, url, tmp_path):
    records, _ = sampled_log(rollout.load(example / "model"), 48, temperature=0.5, recorded={"temperature": 1.0})
    source = write_records(tmp_path / "in.jsonl", records)
    with pytest.raises(CheckpointRefused, match="TG-FILL-004"):
        fill(source, example / "model", out=tmp_path / "out.jsonl", logprobs_from=url)
