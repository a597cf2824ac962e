"""What sync.Nccl says to servers, by vLLM's own engine and classes; the broadcast itself needs GPUs."""

import json
import os
import subprocess
from pathlib import Path

import pytest

import tracegrad as tg

pytestmark = pytest.mark.vllm

CODE = """
import asyncio, json, sys
import torch
from aiohttp import web
from vllm.distributed.weight_transfer import nccl_engine
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerWeightTransferEngine, NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo)
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/../../examples/quickstart"]
from stand_in import StandIn
from tracegrad.rollout.client import Servers
from tracegrad.weight_sync import Nccl

groups, sent = [], []
nccl_engine.open_trainer_endpoint = lambda info: groups.append((info.master_port, info.world_size))
NCCLTrainerWeightTransferEngine._broadcast = lambda self, source, meta: sent.append([name for name, _ in source])
WEIGHTS = {"a": torch.ones(2, 3, dtype=torch.bfloat16), "tied": torch.zeros(4)}


class Vllm(StandIn):
    def __init__(self, world, broken=False):
        super().__init__(self.reply)
        self.world, self.broken, self.inits, self.updates, self.paths = world, broken, [], [], []

    def reply(self, request, body):
        self.paths.append(request.path)
        if request.path == "/get_world_size":
            return {"world_size": self.world}
        if request.path == "/init_weight_transfer_engine":
            self.inits.append(NCCLWeightTransferInitInfo(**body["init_info"]))
        if request.path == "/update_weights":
            if self.broken:
                return 500
            self.updates.append(NCCLWeightTransferUpdateInfo(**body["update_info"]))
        return {}


async def run():
    first, bad, last = Vllm(2), Vllm(1, broken=True), Vllm(4)
    async with first, bad, last, Servers([first.url, bad.url, last.url], model="m") as servers:
        sync = Nccl(servers, port=29900, timeout_s=5)
        sync.source.weights = WEIGHTS
        evicted = []
        wrong = await sync._once(7, evicted)
        again = await sync._once(7, evicted)
        return {
            "groups": groups, "sent": sent, "wrong": str(wrong), "again": again,
            "evicted": [one.url == bad.url for one in evicted],
            "offsets": [[init.rank_offset for init in each.inits] for each in (first, bad, last)],
            "worlds": [init.world_size for init in last.inits], "packed": last.inits[0].packed,
            "update": [last.updates[0].names, last.updates[0].dtype_names, last.updates[0].shapes],
            "paths": last.paths, "bad": bad.paths, "version": last.asked("/finish_weight_update"),
        }


print(json.dumps(asyncio.run(run())))
"""


def test_the_handshake_is_what_vllms_own_classes_take(request, tmp_path):
    python = request.config.getoption("--vllm-python")
    (tmp_path / "tracegrad").symlink_to(Path(tg.__file__).parent, target_is_directory=True)
    told = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [python, "-c", CODE, str(Path(__file__).parents[1] / "helpers")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=told, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # Trainer 1, servers 2 + 1 + 4 ranks; then without the one that refused.
    assert found["groups"] == [[29900, 8], [29901, 7]]
    assert found["offsets"] == [[1, 1], [3], [4, 3]]
    assert found["worlds"] == [8, 7]
    assert found["packed"] is True
    assert found["update"] == [["a", "tied"], ["bfloat16", "float32"], [[2, 3], [4]]]
    assert "/update_weights 500" in found["wrong"]
    assert found["again"] is None
    assert found["evicted"] == [True]
    assert found["sent"] == [["a", "tied"], ["a", "tied"]]
    assert found["version"][-1] == {"weight_version": "7"}
    assert found["paths"][-5:] == ["/init_weight_transfer_engine", *[f"/{step}" for step in STEPS]]
    assert "/resume" not in found["bad"]


STEPS = ["start_weight_update", "update_weights", "finish_weight_update", "resume"]


async def test_weights_that_are_on_no_gpu_are_refused_by_name(tmp_path):

    import torch

    from tracegrad.errors import ArgumentError
    from tracegrad.rollout.client import Servers
    from tracegrad.weight_sync import Nccl

    async with Servers(["http://127.0.0.1:9"], model="m") as servers:
        with pytest.raises(ArgumentError, match="TG-SYNC-010: embed"):
            await Nccl(servers).push({"embed": torch.ones(2)}, 1)
        with pytest.raises(ArgumentError, match="TG-SYNC-009"):
            await Nccl(servers).push(tmp_path, 1)
