"""A real vLLM that takes its sampling from the model's generation_config.json: what requests of ours leave to it."""

import json
import shutil

import pytest

from tracegrad.data.sampling import NEUTRAL
from tracegrad.rollout import run_rollout
from tracegrad.rollout.client import Servers
from tracegrad.rollout.launch import launch

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]
SAMPLES = 12
ASKED = [{"role": "user", "content": "2 × 20?"}]


@pytest.fixture(scope="module")
def greedy(request, example, tmp_path_factory):
    """The URL of a vLLM of its own that takes top_k 1 where a request does not say it."""
    folder = tmp_path_factory.mktemp("greedy")
    model = folder / "model"
    shutil.copytree(example / "model", model)
    (model / "generation_config.json").unlink(missing_ok=True)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "do_sample": True, "top_k": 1}))
    flags = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "512", "--generation-config", "auto"]
    flags += ["--trust-request-chat-template"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "passive"}
    told = {"name": "clerk", "arguments": flags, "environment": environment, "log_path": folder / "server.log"}
    with launch(request.config.getoption("--vllm-python"), model, **told) as launched:
        yield launched.url


async def test_a_server_with_the_models_own_sampling_samples_as_the_record_says(greedy):
    async def ask(task, policy):
        await policy.chat(ASKED, seed=task, max_tokens=16)

    async with Servers([greedy], model="clerk") as servers:
        bare = [
            await servers.chat(
                {"messages": ASKED, "temperature": 1.0, "top_p": 1.0, "seed": seed, "max_tokens": 16},
                session="bare",
            )
            for seed in range(SAMPLES)
        ]
        ours = [await run_rollout(ask, seed, chat=servers.chat) for seed in range(SAMPLES)]
    assert len({each["choices"][0]["message"]["content"] for each in bare}) == 1
    ids = {tuple(each.record["calls"][0]["response"]["choices"][0]["token_ids"]) for each in ours}
    assert len(ids) > SAMPLES // 2
    for each in ours:
        [call] = each.record["calls"]
        assert "sampling_defaults" not in call  # vLLM refuses none of them
        assert {name: call["request"][name] for name in NEUTRAL} == NEUTRAL
