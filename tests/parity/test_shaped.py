"""What peers do to rewards and advantages outside their estimators: ART's division, verl's overlong penalty.

Statements of functions that take a whole batch of theirs are taken out and executed, as for TRL.
"""

import ast
import inspect
import textwrap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from padded import hard
from tracegrad import advantage as adv


def ran(function: Any, first: tuple[str, ...], scope: dict[str, Any]) -> dict[str, Any]:
    """Executes, in their order, the statements of a function that begin with one of `first`."""
    nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function))))
    found = [each for each in nodes if isinstance(each, ast.stmt) and ast.unparse(each).startswith(first)]
    assert len(found) == len(first)
    found.sort(key=lambda node: node.lineno)
    exec(compile(ast.Module(found, []), "<peer>", "exec"), scope)
    return scope


@pytest.mark.parametrize("balance", [0.0, 0.25, 1.0, -0.5])
@pytest.mark.parametrize("seed", range(4))
def test_advantages_over_their_mean_size_are_arts(close, balance, seed):
    pack = pytest.importorskip("art.preprocessing.pack")
    data = hard(seed)
    mask = data["mask"]
    each = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights = (1.0 / mask.sum(1).clamp(min=1))[:, None].expand(mask.shape).double()
    scope = {
        "torch": torch,
        "pad": lambda values, _: values,
        "weights": torch.where(mask, weights, 0).tolist(),
        "advantages": each.tolist(),
        "assistant_mask_tensor": mask,
        "advantage_balance": balance,
    }
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        names = (
            "weights_tensor = torch.tensor",
            "weights_tensor = torch.where",
            "weights_tensor[assistant_mask_tensor]",
        )
        names += ("advantages_tensor = torch.tensor", "advantages_tensor = torch.where(assistant_mask_tensor")
        names += ("if advantage_balance > 0.0", "advantages_tensor[assistant_mask_tensor] /=")
        theirs = ran(pack.packed_tensors_from_tokenized_results, names, scope)["advantages_tensor"]
    finally:
        torch.set_default_dtype(before)
    own = (each[mask].numpy(), weights[mask].numpy())
    close(
        "ART, advantages by mean size",
        adv.divide_by_mean_abs(own[0], weights=own[1], balance=balance),
        theirs[mask],
        1e-6,
    )


@pytest.mark.parametrize("penalty", [1.0, 0.5])
def test_the_overlong_penalty_is_verls(close, penalty):
    manager = pytest.importorskip("verl.workers.reward_manager.dapo")
    config = SimpleNamespace(enable=True, len=20, penalty_factor=penalty, log=False)
    lengths, theirs = [0, 79, 80, 81, 99, 100], []
    for length in lengths:
        owner = SimpleNamespace(overlong_buffer_cfg=config, max_resp_len=100)
        scope = {"self": owner, "valid_response_length": length, "reward": 0.0}
        start = ("if self.overlong_buffer_cfg is not None and self.overlong_buffer_cfg.enable",)
        theirs.append(float(ran(manager.DAPORewardManager.__call__, start, scope)["reward"]))
    assert min(theirs) == -penalty
    close(
        "verl, overlong penalty", np.array(adv.overlong(lengths, longest=100, buffer=20, penalty=penalty)), theirs, 1e-6
    )
