"""What a real vLLM 0.32 answered to calls with pictures: each term has the logprob that the server gave.

tests/helpers/record_pictures.py asked it. The model is made again from its seed, so that the recording is of the same
weights.
"""

import numpy as np
import pytest
import torch

import tracegrad as tg
from picture_pages import GOLDEN
from record_pictures import PROMPTS
from tracegrad.model import logprobs
from tracegrad.rollout.launch import launch
from tracegrad.trainer.load_model import load_full_model

CASES = [*PROMPTS, "sampled_pads", "turns", "generate", "doubled"]


@pytest.fixture(scope="module")
def policy(folder):
    return load_full_model(folder)


@pytest.fixture(scope="module")
def recorded(folder):
    return tg.align(tg.read(GOLDEN), tg.Tokenizer.from_pretrained(folder))


def gaps(policy, sequences, **how):
    """[M] |logprob of the policy - logprob of the server|."""
    [step] = tg.pack(sequences, np.ones(sequences.traces), tokens_per_row=4096, **how)
    out = np.full(len(step), np.nan)
    with torch.no_grad():
        for batch in step.batches:
            out[batch.term] = np.abs(logprobs(policy, batch).numpy() - step.rollout_logprobs[batch.term])
    return out, step


@pytest.mark.parametrize("share", [False, True], ids=["packed", "shared"])
def test_every_term_has_the_logprob_that_the_server_gave(policy, recorded, share):
    assert list(recorded.trace_ids) == CASES
    assert not recorded.has_unknown_media.any()
    found, step = gaps(policy, recorded, share_prefixes=share)
    assert len(found) == 8 * len(CASES) + 8 - 4  # two turns of one, and four pads that were sampled
    assert set(step.trace.tolist()) == set(range(len(CASES)))
    assert found.max() < 1e-5
    if share:
        assert sum(len(batch.ids) for batch in step.batches) < recorded.tokens


def test_pillows_pixels_differ_by_a_level_and_it_says_which(policy, recorded, folder, monkeypatch):
    processor = recorded.images.rule.processor
    assert processor.backend == "torchvision"
    own = gaps(policy, recorded)[0].max()
    from transformers import AutoImageProcessor

    monkeypatch.setattr(processor, "image_processor", AutoImageProcessor.from_pretrained(folder, backend="pil"))
    monkeypatch.setattr(processor, "_kept", type(processor._kept)())
    assert processor.backend == "pil"
    assert 3 * own < gaps(policy, recorded)[0].max() < 2e-3


@pytest.mark.nightly
@pytest.mark.vllm
def test_a_server_of_today_gives_the_same(request, folder, policy, tmp_path):
    from record_pictures import Server, record

    python = request.config.getoption("--vllm-python")
    flags = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "400", "--enable-scale-out"]
    flags += ["--limit-mm-per-prompt", '{"image":4,"video":0}', "--generation-config", "vllm"]
    told = {"name": "vlm", "arguments": flags, "log_path": tmp_path / "log"}
    tokenizer = tg.Tokenizer.from_pretrained(folder)
    with launch(python, folder, environment={"VLLM_CPU_KVCACHE_SPACE": "1"}, **told) as server:
        rows = record(Server(server.url.removesuffix("/v1"), "vlm"), tokenizer)
    found = tg.align(tg.Traces.from_records(list(rows.values())), tokenizer)
    assert gaps(policy, found)[0].max() < 1e-5
