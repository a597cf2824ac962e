"""Adapters in a real vLLM behind the guard: a name for each version is exact, and strangers are sent off."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import tracegrad as tg
from drawn_prompts import ask, drawn
from tracegrad.online import SyncFault
from tracegrad.online import servers as ways
from tracegrad.rollout.client import ServerError, Servers
from tracegrad.rollout.launch import launch
from tracegrad.weight_sync import Lora, vllm_arguments
from vllm_runs import run

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]  # a second server, with adapters
KEY = "a token of this test"


@pytest.fixture(scope="module")
def adapted(request, example, tmp_path_factory):
    python = request.config.getoption("--vllm-python")
    folder = tmp_path_factory.mktemp("adapted")
    flags, environment = vllm_arguments("lora", package_folder=folder / "beside", require_key=True, versions=3, rank=8)
    flags += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "1024", "--generation-config", "vllm"]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "passive", "VLLM_SERVER_DEV_MODE": "1"}
    told = {
        "name": "clerk",
        "arguments": flags,
        "environment": environment,
        "key": KEY,
        "log_path": folder / "server.log",
    }
    with launch(python, example / "model", **told) as launched:
        yield launched.url


@pytest.fixture(scope="module")
def tuned(example):
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(example / "model", dtype=torch.float32)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    return get_peft_model(model, config).eval(), config


def moved(tuned, version):
    """The adapter of a version, in the model too."""
    from peft import get_peft_model_state_dict

    torch.manual_seed(version)
    with torch.no_grad():
        for name, weight in tuned[0].named_parameters():
            if "lora_" in name:
                weight.copy_(0.1 * torch.randn_like(weight))
    return get_peft_model_state_dict(tuned[0])


def off(tuned, said):
    worst = 0.0
    for one in said:
        with torch.no_grad():
            scores = tuned[0](torch.tensor([[*one.prompt_ids, *one.ids]])).logits[0, len(one.prompt_ids) - 1 : -1]
        ours = scores.log_softmax(-1).gather(-1, torch.tensor(one.ids)[:, None])[:, 0]
        worst = max(worst, float((ours - torch.tensor(one.logprobs)).abs().max()))
    return worst


CONFIG = tg.config.update(
    tg.config.Config(), [("train.groups_per_step", 4), ("train.lora_rank", 8), ("optimizer.lr", 1e-2)]
)


def run_adapters(example, url, out, **told):
    return run(example, url, out, config=CONFIG, key=KEY, weight_sync="lora", **told)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_loop_of_adapters_is_proven_at_each_step(adapted, example, tmp_path, steps_ahead):
    found = run_adapters(example, adapted, tmp_path, steps_ahead=steps_ahead)
    for row in found.rows:
        print(
            f"\nstep {row['step']}: {row['weight_check/tokens']} terms, max {row['weight_check/max']:.1e}, "
            f"{row['time/weight_sync']:.3f} s"
        )
        assert row["weight_check/tokens"] > 0
        assert row["weight_check/max"] < 1e-4


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_an_adapter_of_the_step_before_ends_the_run_by_its_name(adapted, example, tmp_path, monkeypatch, steps_ahead):
    class Late(Lora):
        async def push(self, weights, version):
            pushed = await super().push(weights, version)
            self.servers.model = self.loaded[-2 if version > 1 else -1][0]
            return pushed

    monkeypatch.setattr(ways, "Lora", Late)
    with pytest.raises(SyncFault, match=r"TG-ONLINE-020.*version [2-5], .*previous step's adapter") as raised:
        run_adapters(example, adapted, tmp_path, steps=6, steps_ahead=steps_ahead)
    print(f"\n{raised.value}")


CACHED = drawn(range(10, 600), 0, 256)


async def test_each_version_is_exact_under_its_name_and_the_adapter_before_is_seen(adapted, tuned, tmp_path):
    async with Servers([adapted], model="clerk", key=KEY) as servers:
        sync = Lora(servers, tmp_path, config=tuned[1].to_dict(), keep=2)
        for version in (1, 2, 3, 4):
            pushed = await sync.push(moved(tuned, version), version)
            assert (pushed.updated, pushed.repeated) == ((adapted,), 0)
            assert servers.model == f"policy-v{version}"
            said = await ask(servers, CACHED, drawn(range(10, 600), version, 256))
            assert off(tuned, said) < 1e-4
        servers.model = "policy-v3"
        assert off(tuned, await ask(servers, CACHED, CACHED)) > 1e-2
        # Loaded already, by an answer that was lost: unloaded and loaded once more.
        assert (await sync.push(moved(tuned, 4), 4)).repeated == 1
        [models] = await servers.request_all("/v1/models", method="GET")
        names = [model["id"] for model in models.body["data"]]
        assert [name for name in names if name.startswith("policy-v")] == ["policy-v3", "policy-v4"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["policy-v3", "policy-v4"]


async def test_who_has_no_token_is_sent_off_on_every_path_but_health(adapted):
    async with Servers([adapted], model="clerk") as servers:
        for path in ("/is_paused", "/v1/models", "/metrics", "/server_info", "/docs"):
            assert [answer.status for answer in await servers.request_all(path, method="GET")] == [401], path
        for path in ("/pause", "/collective_rpc", "/resume", "/reset_prefix_cache"):
            assert [answer.status for answer in await servers.request_all(path)] == [401], path
        assert (await servers.request_all("/health", method="GET"))[0].ok
        with pytest.raises(ServerError, match=r"TG-ROLLOUT-058.*401"):
            await servers.chat({"messages": []}, session="s")
    async with Servers([adapted], model="clerk", key=KEY) as servers:
        assert (await servers.request_all("/is_paused", method="GET"))[0].body == {"is_paused": False}
