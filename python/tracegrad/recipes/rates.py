"""Learning rates of other trainers, and their KL in the reward, as options of a run."""

from tracegrad.recipes.peer import Asked
from tracegrad.recipes.recipe import Options

_NAMES = {"linear": "linear", "constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine"}


def rates(
    o: Asked, lr: str, scheduler: str, warmup: str, *, constant_warms: bool = False, per_unit: int = 1
) -> Options:
    """optimizer.lr and schedule.* of the options of these names.

    Args:
        constant_warms: whether the peer's "constant" rises first; transformers' does not.
        per_unit: optimizer steps in one of what the warm-up counts.
    """
    name, steps = o.among(scheduler, _NAMES, of_run=True) or "constant", max(o[warmup], 0) * per_unit
    if steps != int(steps):
        o.no(warmup, "warm-up is in steps here", "schedule.warmup_steps", of_run=True)
    if o[scheduler] == "constant" and not constant_warms:
        steps = 0
    options: list[tuple[str, str | int | float]] = [("optimizer.lr", float(o[lr])), ("schedule.name", name)]
    return (*options, ("schedule.warmup_steps", int(steps))) if steps else tuple(options)


def reward_kl(coef: float, kind: str, target: float | None, horizon: float) -> Options:
    """The section of KL in the reward: k3 is held within 10, the coefficient follows a target where there is one."""
    if not coef:
        return ()
    options: list[tuple[str, str | int | float]] = [("reward_kl.coef", float(coef))]
    options += [("reward_kl.kind", kind)] if kind != "k1" else []
    options += [("reward_kl.cap", 10.0)] if kind == "k3" else []
    if target is not None:
        options += [("reward_kl.target", float(target)), ("reward_kl.horizon", float(horizon))]
    return tuple(options)
