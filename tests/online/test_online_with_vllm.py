"""New weights in a real vLLM: what it samples afterwards is the trainer's to the last digit, and a mistake is seen."""

import asyncio
import contextlib
import json
import statistics

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from drawn_prompts import ask, drawn
from tracegrad.rollout.client import Servers
from tracegrad.weight_sync import File

pytestmark = pytest.mark.vllm
EXACT, SEEN = 1e-4, 1e-2
LONG = 700  # tokens of an answer that is still sampled when the push comes


class Trainer:
    """The bundled model, its weights moved a little further at each version."""

    def __init__(self, folder):
        self.base = load_file(folder / "model.safetensors")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def weights(self, version):
        drawn = torch.Generator().manual_seed(version)
        moved = {
            name: tensor * (1 + 0.03 * torch.randn(tensor.shape, generator=drawn)) for name, tensor in self.base.items()
        }
        return moved if version else dict(self.base)

    def logprobs(self, version, prompt, ids):
        self.model.load_state_dict(self.weights(version), strict=False)
        self.model.tie_weights()
        with torch.no_grad():
            scores = self.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return scores.gather(-1, torch.tensor(ids)[:, None])[:, 0]

    def off(self, version, said):
        """How far what servers said lies from what this version gives, at most."""
        return max(
            float((self.logprobs(version, one.prompt_ids, one.ids) - torch.tensor(one.logprobs)).abs().max())
            for one in said
        )


@pytest.fixture(scope="module")
def trainer(example):
    return Trainer(example / "model")


@contextlib.asynccontextmanager
async def opened(url):
    async with Servers([url], model="clerk", timeout_s=120.0) as servers:
        yield servers


CACHED = drawn(range(10, 600), 0, 256)


async def asked(servers, version):
    return await ask(servers, CACHED, drawn(range(10, 600), 1000 + version, 256))


async def test_what_is_sampled_after_a_push_is_the_trainers(served, trainer, tmp_path):
    async with opened(served) as servers:
        sync = File(servers, tmp_path)
        await sync.push(trainer.weights(0), 0)
        seconds, offs = [], []
        for version in range(1, 12):
            before = await asked(servers, version)  # their keys and values are cached now
            pushed = await sync.push(trainer.weights(version), version)
            said = await asked(servers, version)
            assert {tuple(one.prompt_ids) for one in said} == {tuple(one.prompt_ids) for one in before}
            seconds.append(pushed.seconds)
            offs.append(trainer.off(version, said))
            assert trainer.off(version - 1, said) > SEEN
        print(f"\npause to resume, median of {len(seconds)}: {statistics.median(seconds):.3f} s")
        print(f"max |server - trainer| {max(offs):.1e}")
        assert max(offs) < EXACT


async def running(url):
    """How many requests the server samples for, by its own count."""
    async with aiohttp.ClientSession() as client, client.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))


def test_requests_in_flight_survive_a_push_and_each_token_is_of_the_version_it_names(served, trainer, tmp_path):
    body = {"sampling_params": {"temperature": 1.0, "max_tokens": LONG, "ignore_eos": True, "logprobs": 0}}

    async def run(before):
        async with opened(served) as servers:
            sync = File(servers, tmp_path)
            await sync.push(trainer.weights(before), before)
            prompts = [drawn(range(10, 600), 2000 + n, 150) for n in range(6)]
            flying = [
                asyncio.ensure_future(
                    servers.post("/inference/v1/generate", {**body, "token_ids": prompt}, session=str(n))
                )
                for n, prompt in enumerate(prompts)
            ]
            while await running(served) < len(prompts):
                await asyncio.sleep(0.01)
            pushed = await sync.push(trainer.weights(before + 1), before + 1)
            assert pushed.updated == (served,)
            return prompts, await asyncio.gather(*flying)

    for before in (20, 22, 24):  # on a busy machine all may be answered before the push
        crossed = 0
        prompts, answers = asyncio.run(run(before))
        for prompt, answer in zip(prompts, answers, strict=True):
            [choice] = answer["choices"]
            said = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
            assert len(choice["token_ids"]) == len(said) == LONG
            spans = choice["weight_versions"]
            crossed += len(spans) == 2
            for span in spans:
                ours = trainer.logprobs(int(span["version"]), prompt, choice["token_ids"])
                start, end = span["start"], span["end"]
                assert float((ours - said)[start:end].abs().max()) < EXACT
        if crossed:
            break
    print(f"\n{crossed} of {len(prompts)} requests crossed the push")
    assert crossed


async def test_an_old_cache_is_seen_where_it_is_not_cleared(served, trainer, tmp_path):
    async with opened(served) as servers:
        await File(servers, tmp_path).push(trainer.weights(30), 30)
        await asked(servers, 30)
        await File(servers, tmp_path, clear_cache=False).push(trainer.weights(31), 31)
        said = await asked(servers, 31)
        fresh = await ask(servers, CACHED, CACHED, salt="v31")
    cached, new = ([one for one in said if one.number == number] for number in (0, 1))
    print(f"\nstale cache: off by {trainer.off(31, cached):.3f}; with a salt {trainer.off(31, fresh):.1e}")
    assert trainer.off(31, cached) > SEEN
    assert trainer.off(31, new) < EXACT
    assert trainer.off(31, fresh) < EXACT


async def test_an_old_head_is_seen_where_it_is_not_packed_again(served, trainer, example, tmp_path):
    """vLLM's own reload of weights on CPU leaves the packed copy of a tied head as it was."""
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (example / "model" / name).exists():
            (model / name).write_bytes((example / "model" / name).read_bytes())
    save_file(trainer.weights(41), model / "model.safetensors", metadata={"format": "pt"})
    async with opened(served) as servers:
        sync = File(servers, tmp_path / "weights")
        await sync.push(trainer.weights(40), 40)
        told = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
        for path, body in [("/pause?mode=keep", None), ("/collective_rpc", told), ("/resume", None)]:
            [answer] = await servers.request_all(path, body)
            assert answer.ok, answer.words
        old = await asked(servers, 41)
        await sync.push(trainer.weights(41), 41)
        said = await asked(servers, 41)
    print(f"\nold head: off by {trainer.off(41, old):.3f}; packed again {trainer.off(41, said):.1e}")
    assert trainer.off(41, old) > SEEN
    assert trainer.off(41, said) < EXACT


def torn(weights, path):
    save_file(weights, path)
    path.write_bytes(path.read_bytes()[:-1000])


def lacking(weights, path):
    save_file({name: tensor for name, tensor in weights.items() if "layers.2.mlp.down_proj" not in name}, path)


def partly(weights, path):
    save_file({name: tensor for name, tensor in weights.items() if "layers.1.self_attn.v_proj" not in name}, path)


def misshapen(weights, path):
    save_file({**weights, "model.layers.3.mlp.up_proj.weight": torch.zeros(3, 3)}, path)


def unknown(weights, path):
    save_file({**weights, "model.layers.3.mlp.nothing.weight": torch.zeros(3, 3)}, path)


@pytest.mark.parametrize("spoil", [torn, lacking, partly, misshapen, unknown])
async def test_an_update_that_fails_is_said_and_the_next_one_is_exact(served, trainer, tmp_path, spoil):
    """The next request after a half update would end vLLM: the server stays paused, and takes another one."""
    spoil(trainer.weights(51), tmp_path / "spoilt.safetensors")
    from tracegrad.weight_sync import SyncError

    async with opened(served) as servers:
        await File(servers, tmp_path).push(trainer.weights(50), 50)
        with pytest.raises(SyncError) as error:
            await File(servers, tmp_path).push(tmp_path / "spoilt.safetensors", 51)
        print(f"\n{error.value}")
    async with opened(served) as servers:
        [paused] = await servers.request_all("/is_paused", method="GET")
        assert paused.body == {"is_paused": True}
        pushed = await File(servers, tmp_path).push(trainer.weights(52), 52)
        said = await asked(servers, 52)
    assert pushed.updated == (served,)
    assert trainer.off(52, said) < EXACT


class Failing(Servers):
    """Servers whose first update names a file that is not there."""

    failed = False

    async def request(self, url, path, body=None, **options):
        if path == "/update_weights" and not self.failed:
            self.failed = True
            body = {"update_info": {"path": "/nowhere"}}
        return await super().request(url, path, body, **options)


async def test_a_failed_update_is_sent_once_more_while_requests_wait(served, trainer, tmp_path):
    async with Failing([served], model="clerk") as servers:
        sync = File(servers, tmp_path)
        servers.failed = True
        await sync.push(trainer.weights(60), 60)
        servers.failed = False
        waiting = asyncio.ensure_future(servers.chat({"messages": [{"role": "user", "content": "hi"}]}, session="s"))
        pushed = await sync.push(trainer.weights(61), 61)
        await waiting
        said = await asked(servers, 61)
    assert (pushed.updated, pushed.repeated) == ((served,), 1)
    assert trainer.off(61, said) < EXACT


async def test_an_update_that_a_dead_trainer_left_open_is_closed_first(served, trainer, tmp_path):
    save_file(trainer.weights(71), tmp_path / "half.safetensors")
    async with opened(served) as servers:
        for path, body in [("/pause?mode=keep", None), ("/start_weight_update", None)]:
            assert (await servers.request_all(path, body))[0].ok
        told = {"update_info": {"path": str(tmp_path / "half.safetensors")}}
        assert (await servers.request_all("/update_weights", told))[0].ok
    async with opened(served) as servers:
        pushed = await File(servers, tmp_path).push(trainer.weights(72), 72)
        assert pushed.updated == (served,)
        assert trainer.off(72, await asked(servers, 72)) < EXACT


def test_the_canary_samples_as_the_run_does(served, trainer, tmp_path):
    async def run():
        async with opened(served) as servers:
            await File(servers, tmp_path).push(trainer.weights(0), 0)
            return await ask(servers, CACHED, CACHED[::-1], max_tokens=5, temperature=0.0)

    said = asyncio.run(run())
    assert [(one.number, len(one.ids)) for one in said] == [(0, 5), (1, 5)]
    assert json.dumps([one.ids for one in said]) == json.dumps([one.ids for one in asyncio.run(run())])
