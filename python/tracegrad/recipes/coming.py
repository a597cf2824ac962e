"""docs/coming-from.md: what each option of another trainer is here, found by building recipes with and without it.

python -m tracegrad.recipes.coming docs/coming-from.md
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tracegrad.errors import ArgumentError
from tracegrad.recipes.art import ART
from tracegrad.recipes.peer import Peer, Without, changes
from tracegrad.recipes.skyrl import SKYRL
from tracegrad.recipes.trl import TRL
from tracegrad.recipes.verl import VERL

PEERS = (TRL, VERL, SKYRL, ART)
_HEAD = """# Coming from elsewhere

`rollouts/` below is a folder of what was recorded there, in [any of these forms](trace-format.md#trajectory-dumps).

- **TRL**: a `GRPOConfig` in YAML, reward functions, completions in Parquet or the rows of a rollout function.
  `--like trl:grpo.yaml` takes the config; `tg.online.train(model, tasks, rewards=[f])` takes the functions as they are,
  and `environment=` a class that was written for `environment_factory`. To keep GRPOTrainer, take
  [`FromTraces` or `WithObjective`](trainers.md).
- **verl**: a config as verl prints it, rows of `DataProto` or the dump of `rollout_data_dir`.
  `--like verl:resolved.yaml`, and `--logprob-kind processed`, as verl asks vLLM for such. To keep verl, take
  [`correct_batch` and `register`](trainers.md).
- **ART**: trajectories with `messages_and_choices`, a train config, RULER. `--like art:train.json`, and
  `tracegrad score rollouts/ --judge URL --rubric FILE` compares within groups. To keep ART, take [`to_traces` and
  `to_groups`](trainers.md).
- **prime-rl**: rollouts of verifiers, environments of its hub. Its config is not read; its loss is a
  [preset](losses.md#prime_rl_default), `--objective PRIME_RL_DEFAULT`, and
  `tg.online.train(model, tasks, agent=tg.rollout.verifiers("id", python=...))` plays its environments.

What is new to all of them: the recorded logprobs weigh every token, and where they are missing that is said, and
nothing is made up in their place. The doctor says so first.

```bash
tracegrad doctor rollouts/ --model model
tracegrad train rollouts/ --model model --out out/trl --like trl:grpo.yaml
tracegrad train rollouts/ --model model --out out/verl --like verl:resolved.yaml --logprob-kind processed
tracegrad train rollouts/ --model model --out out/art --like art:train.json
tracegrad train rollouts/ --model model --out out/prime --objective PRIME_RL_DEFAULT
```

## Configs

A config of TRL, verl, SkyRL or ART says which loss it trains. Here it becomes a recipe, whose `print` spells each of
its options, and which refuses by name what has no counterpart. On the command line it is `--like PEER:FILE`:

```python
recipe = tg.recipes.from_trl({"epsilon_high": 0.28})  # or a GRPOConfig; from_verl, from_skyrl, from_art
print(recipe)
objective = recipe.objective  # for a loop of your own: extending.md
```

What says how a run goes and has no counterpart (TRL's `max_steps`) is refused by a run; the objective is there without
it. Where the numbers of a config differ from the peer's on purpose, the recipe and `--like` say so, with the size where
it is known.

What is told by hand or by `--config` wins over a recipe, and is said in a line. A YAML file needs pyyaml, which these
trainers install; a JSON file needs nothing. Options are those of a config that has been resolved (verl's and SkyRL's
command lines print it).

Groups in which rewards do not differ: from a file they are left out, or masked, as the config says, and nothing is
played again; `tracegrad online` plays others in their place, up to `online.refill` times the groups of a step.

The tables are made from the code, `python -m tracegrad.recipes.coming docs/coming-from.md`: each row is what changes
when the option is told (beside what it needs, in brackets). `objective.surrogate.high = 0.28` is also
`--objective.surrogate.high 0.28`. That each value gives the peer's own loss and gradient is shown by
`tests/parity/test_recipes.py`; learning rates, optimizer and passes are options of `tracegrad train`, in
[configuration.md](configuration.md). The standard deviation of a group has 1e-4 added, as in TRL; the others add 1e-6.
"""


def describe() -> str:
    """The page as markdown."""
    return "\n".join([_HEAD, *map(_section, PEERS)])


def _section(peer: Peer) -> str:
    whole = peer.recipe({})
    told = "\n".join(f"{name} = {value}" for name, value in whole.options if name != "objective")
    parts = [
        f"## {peer.name}",
        f"`recipes.from_{peer.name}`, against version {peer.version}. With nothing told it is",
        f"```text\n{whole.objective}\n{told}\n```",
        "\n".join(["| option | by default | told | is here |", "|---|---|---|---|", *_rows(peer)]),
        "Where the numbers are not the peer's, on purpose; a recipe prints those of its config:",
        "\n".join(["| difference | how |", "|---|---|", *_differences(peer)]),
        "Without a counterpart, and refused; in italics what only a run refuses, as the objective does not ask for it:",
        "\n".join(["| option | taken | why not otherwise | instead |", "|---|---|---|---|", *_refused(peer)]),
        "Not read, as it says how a run runs and not what it minimises: "
        + ", ".join(f"`{name}`" for name in peer.own.split())
        + ".",
    ]
    return "\n\n".join(parts) + "\n"


def _rows(peer: Peer) -> list[str]:
    defaults = {name: _shown(values[0]) for name, values in peer.options.items()}
    return [
        f"| `{name}` | {defaults[name]} | {_beside(value, beside)} | {_here(peer, name, value, beside)} |"
        for name, value, beside in peer.cases()
    ]


def _beside(value: Any, others: Mapping[str, Any]) -> str:
    more = ", ".join(f"{each.rpartition('.')[2]} {_shown(other)}" for each, other in others.items())
    return _shown(value) + (f" (with {more})" if more else "")


def _here(peer: Peer, name: str, value: Any, beside: Mapping[str, Any]) -> str:
    whole = peer.recipe({**beside, name: value})
    try:
        effect = changes(peer.recipe(beside), whole)
    except ArgumentError:  # it cannot be left out: what it is together with what it needs
        effect = changes(peer.recipe({}), whole)
    return f"`{effect}`" if effect else "the same"


def _refused(peer: Peer) -> list[str]:
    return [
        f"| {_of(name, each)} | {', '.join(map(_shown, each.harmless))} | {each.why} | {each.cure} |"
        for name, each in peer.without.items()
    ]


def _differences(peer: Peer) -> list[str]:
    """Each with the names of its sizes, which a recipe gives."""
    shown = {name: re.sub(r"{([a-z]+)(:g)?}", r"*\1*", how) for name, how in peer.differs.items()}
    return [f"| {name} | {how} |" for name, how in shown.items()]


def _of(name: str, each: Without) -> str:
    return f"*`{name}`*" if each.of_run else f"`{name}`"


def _shown(value: Any) -> str:
    return "none" if value is None else f"`{value}`"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(describe(), encoding="utf-8")
