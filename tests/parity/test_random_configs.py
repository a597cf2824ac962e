"""Random combined configs of each peer: loss and gradients are the peer's own, or a difference that the recipe names.

What a name may excuse is said here, with its size where it has one; all else must be equal to 1e-6.
"""

import random
from collections import Counter
from collections.abc import Callable
from time import process_time
from typing import Any

import pytest

import whole_configs
from padded import hard
from tracegrad import recipes
from tracegrad.errors import ArgumentError
from tracegrad.recipes.art import ART
from tracegrad.recipes.import_config import Peer
from tracegrad.recipes.skyrl import SKYRL
from tracegrad.recipes.trl import TRL
from tracegrad.recipes.verl import VERL
from whole_configs import Numbers, drawn, ours, without_empty, without_last

CONFIGS = 220
# Options that say nothing of the loss, and the adaptive coefficient, whose state is in test_entropy.py.
ALONE = {
    "trl": "use_adaptive_entropy entropy_coef_* entropy_target scale_rewards mask_* sync_* ref_* steps_per_* "
    "learning_rate lr_* warmup_* adam_* weight_decay max_grad_norm num_*",
    "verl": "*.optim.* *.grad_clip *batch_size algorithm.adv* algorithm.norm* algorithm.use_* algorithm.kl_* "
    "algorithm.filter*",
    "skyrl": "*optimizer_config* *batch_size *zero_variance* *dynamic_sampling* *fully_async* generator* *advantage_* "
    "*grpo_* *use_kl_in_reward *kl_ctrl*",
    "art": "scale_rewards normalize_advantages learning_rate",
}
EXCUSED = {
    "bonus of a quantile": ("loss", "of_entropy"),
    "tokens of a rejected row": ("loss", "gradient"),
    "weights of geo_mean": ("loss", "gradient"),
    "rejection within geo_mean": ("loss", "gradient"),
    "rejected rows": ("loss", "gradient", "of_entropy"),
}
"""What each named difference may change on one micro-batch without a missing logprob; the others change nothing."""


PEERS: dict[str, tuple[Peer, Callable[..., Numbers], Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "trl": (TRL, whole_configs.trl, recipes.from_trl, dict, lambda _: {"rows": True}),
    "verl": (VERL, whole_configs.verl, recipes.from_verl, without_empty, lambda _: {}),
    "skyrl": (SKYRL, whole_configs.skyrl, recipes.from_skyrl, dict, whole_configs.skyrl_totals),
    "art": (ART, whole_configs.art, recipes.from_art, without_last, lambda _: {}),
}
"""A peer's options, its numbers, our recipe of a config, the data that both take, and how ours counts them."""


def apart(found: Numbers, wanted: Numbers) -> dict[str, float]:
    """The largest difference of each, as a share of the largest number of theirs (of 0.1 at least in a loss)."""
    floors = {"loss": 0.1, "gradient": 1e-4, "of_entropy": 1e-6}
    return {
        name: ((mine - theirs).abs().max() / theirs.abs().max().clamp(min=floors[name])).item()
        for name, mine, theirs in zip(Numbers._fields, found, wanted, strict=True)
    }


@pytest.mark.parametrize("name", PEERS)
def test_a_random_config_gives_the_peers_numbers_or_names_the_difference(name):
    peer, theirs, from_peer, shaped, counted = PEERS[name]
    draw, seen, data = random.Random(f"{name} 1"), Counter(), [shaped(hard(seed)) for seed in range(7)]
    seen_values, began = set(), process_time()
    while seen["equal"] + seen["named"] < CONFIGS:
        case = drawn(peer, draw, ALONE[name])
        try:
            recipe = from_peer(case)
        except ArgumentError:
            seen["refused"] += 1
            assert seen["refused"] < 4 * CONFIGS
            continue
        given = data[seen["equal"] % len(data)]
        try:
            wanted = theirs(case, given)
        except (RuntimeError, ValueError, ZeroDivisionError):  # such as TRL's truncation without a bound
            seen["refused there"] += 1
            assert seen["refused there"] < CONFIGS / 4, case
            continue
        found = ours(recipe.objective, given, **counted(given))
        excused = {part for each, _ in recipe.differences for part in EXCUSED.get(each, ())}
        wrong = {part for part, share in apart(found, wanted).items() if not share <= 1e-6}
        assert not wrong - excused, (case, apart(found, wanted))
        seen["named" if wrong else "equal"] += 1
        seen_values |= {f"{option} = {value}" for option, value in case.items()}
    assert seen["equal"] > 0.7 * CONFIGS, seen
    print(f"{name}: {dict(seen)}, {len(seen_values)} values of options, {process_time() - began:.0f} CPU seconds")
