"""Write the parts of docs/ that are made from the code: how-to/coming-from.md, and in reference/ losses.md,
imported-configs.md, errors.md, the findings of findings.md, the verbs of cli.md, and the tables of metrics.md and
configuration.md.

    python tools/generate_docs.py
"""

import argparse
import ast
import inspect
import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import error_codes
from tracegrad import config
from tracegrad.cli import build_parser
from tracegrad.cli.args import Parser
from tracegrad.doctor.examination import CHECKS
from tracegrad.doctor.finding import Check
from tracegrad.errors import ArgumentError
from tracegrad.integrations.metrics import PEERS as METRICS_OF_PEERS
from tracegrad.metrics import COMPLETIONS, OFF_POLICY, REWARDS, TOOLS, TRAINING, Metric, table
from tracegrad.objective import Objective, presets
from tracegrad.objective.serialize import to_source
from tracegrad.recipes import recipe
from tracegrad.recipes.art import ART
from tracegrad.recipes.import_config import LISTED_IDS, Peer, UnsupportedOption, changes
from tracegrad.recipes.recipe import Recipe
from tracegrad.recipes.skyrl import SKYRL
from tracegrad.recipes.trl import TRL
from tracegrad.recipes.verl import VERL

DOCS = Path(__file__).parent.parent / "docs"
PEERS = (TRL, VERL, SKYRL, ART)
SAMPLED = (*COMPLETIONS, *TOOLS)
TABLES = {"learner": TRAINING, "rewards": REWARDS, "completions": SAMPLED, "off-policy": OFF_POLICY, **METRICS_OF_PEERS}
_T = TypeVar("_T")

_COMING_FROM = """# Coming from TRL, verl, SkyRL, ART or prime-rl

`rollouts/` below is a folder of recorded trajectories, in any form of
[a producer that is read](../reference/producers.md).

- **TRL**: tracegrad reads a `GRPOConfig` in YAML, reward functions, completions in Parquet, and the rows of a
  rollout function. Pass the config with `--from-config trl:grpo.yaml`. `tg.online.train(model, tasks, rewards=[f])`
  accepts reward functions unchanged, and `environment=` a class that was written for `environment_factory`. To keep
  GRPOTrainer, use [`FromTraces`](trl.md) or [`WithObjective`](trl-rollouts.md).
- **verl**: tracegrad reads a config as verl prints it, rows of `DataProto`, and the dump of `rollout_data_dir`.
  Pass `--from-config verl:resolved.yaml` and `--logprob-kind processed`, because verl requests processed logprobs
  from vLLM. To keep verl, use [`correct_batch` and `register`](verl.md).
- **ART**: tracegrad reads trajectories with `messages_and_choices` and a train config. Pass `--from-config
  art:train.json`. `tracegrad score rollouts/ --judge URL --rubric FILE` compares within groups, like RULER. To keep
  ART, use [`to_traces` and `to_groups`](art.md).
- **prime-rl**: tracegrad reads rollouts of verifiers, and runs environments of its hub. It does not read the
  config. The loss is a [preset](../reference/losses.md#prime_rl_default), `--objective PRIME_RL_DEFAULT`, and
  `tg.online.train(model, tasks, agent=tg.rollout.verifiers("id", python=...))` runs its environments.

A config decides whether the recorded logprobs are used. **A `GRPOConfig` without `use_vllm: true` does not use them**:
TRL then assumes that its own model sampled the tokens. A run prints a warning if the loss does not use them. For
recorded traces set `use_vllm: true` in the file (in Python, `from_trl(config, rollout_logprobs=True)`), or leave the
config out and use tracegrad's default, DAPO. With `use_vllm: true` you also get TRL's defaults for it: a mask on the
product of a trace's ratios, and a ratio of 1 for missing logprobs. `vllm_importance_sampling_mode: token_truncate`
weights each token instead.

The size of a step is not imported, and the line `batch` compares both: set `--train.groups_per_step`.
`--logprob-kind` says what your records contain: `processed` for rows of TRL and verl, `raw` for vLLM's own default.

Try it first: add `--dry-run`, which prints the plan without training, then `--train.max_steps 2`, which trains two
steps. The first step of a warm-up has a learning rate of 0.

Missing logprobs are reported. Their tokens are masked, unless the config says otherwise. The doctor reports them
first, and its line `next` has the `--map` flags that your logs need. Add them to the command:

```bash
tracegrad doctor rollouts/ --model model
tracegrad train rollouts/ --model model --out out/trl --from-config trl:grpo.yaml
tracegrad train rollouts/ --model model --out out/verl --from-config verl:resolved.yaml --logprob-kind processed
tracegrad train rollouts/ --model model --out out/art --from-config art:train.json
tracegrad train rollouts/ --model model --out out/prime --objective PRIME_RL_DEFAULT
```

## Configs

A config of TRL, verl, SkyRL or ART defines a loss. Here it becomes a recipe. `print` shows each of its options
under its tracegrad name. Options without a counterpart are refused by name. On the command line, use `--from-config
PEER:FILE`:

```python
options = {"epsilon_high": 0.28}  # or a GRPOConfig
recipe = tg.recipes.from_trl(options, rollout_logprobs=True)  # from_verl, from_skyrl, from_art
print(recipe)
objective = recipe.objective  # for your own loop: extend.md
```

[Options of imported configs](../reference/imported-configs.md) lists each option with its effect, the options that are
refused, and the numbers that differ from the peer's on purpose.

Options on the command line or in `--config` override a recipe, and a line reports it. A YAML file needs pyyaml,
which these trainers install; a JSON file needs nothing. Use the options of a resolved config (verl's and SkyRL's
command lines print it).
"""

_IMPORTED_CONFIGS = """# Options of imported configs

This page lists the counterpart of each option of TRL, verl, SkyRL and ART. [Coming from TRL, verl, SkyRL, ART or
prime-rl](../how-to/coming-from.md) shows how to import a config.

Some options control only the run and have no counterpart. A run refuses them; the objective is available without it.
Options for batches on a device (`per_device_*`) are not read: set the groups of a step with
`--train.groups_per_step`, and LoRA with `--train.lora_rank`.

If the numbers of a config differ from the peer's on purpose, the recipe and `--from-config` report it, with the size
if it is known.

Groups with equal rewards in all traces: from a file they are left out, or masked, as the config sets, and no new
rollouts replace them. `tracegrad online` replaces them with new groups, up to `online.max_resample_factor` times
the groups of a step.

`python tools/generate_docs.py` makes the tables from the code. Each row is the effect of one option (with the
options that it needs, in brackets). `objective.surrogate.high = 0.28` is also `--objective.surrogate.high 0.28`.
Tests check that each value reproduces the peer's own loss and gradient. All options of
`tracegrad train` are in [Configuration](configuration.md). The standard deviation of a group
has 1e-4 added, as in TRL; the others add 1e-6.
"""


def coming_from_page() -> str:
    """Return docs/how-to/coming-from.md: how to use configs and records of other trainers."""
    return _COMING_FROM


def imported_configs_page() -> str:
    """Return docs/reference/imported-configs.md: the counterpart of each option of other trainers."""
    return "\n".join([_IMPORTED_CONFIGS, *map(_peer_section, PEERS)])


def _instead(peer: Peer) -> list[str]:
    pairs = ", ".join(f"`{name}` ({here})" for name, here in peer.instead.items())
    return [f"These options are not read. A run sets them in another way: {pairs}."] if pairs else []


def _peer_section(peer: Peer) -> str:
    whole = peer.recipe({})
    told = "\n".join(f"{name} = {value}" for name, value in whole.options if name != "objective")
    parts = [
        f"## {peer.name}",
        f"`recipes.from_{peer.name}`, compared with version {peer.version}. The defaults are",
        f"```text\n{whole.objective}\n{told}\n```",
        "\n".join(["| option | default | value | here |", "|---|---|---|---|", *_rows(peer)]),
        "Some numbers differ from the peer's on purpose. A recipe prints those that apply to its config:",
        "\n".join(["| difference | details |", "|---|---|", *_differences(peer)]),
        "These options have no counterpart and are refused. Only a run refuses those in italics, because they do not "
        "affect the objective:",
        "\n".join(["| option | accepted | reason | instead |", "|---|---|---|---|", *_refused(peer)]),
        *_truncation(peer),
        *_instead(peer),
        "These options are not read, because they affect how a run works and not the loss: "
        + ", ".join(f"`{name}`" for name in peer.ignored.split())
        + ".",
    ]
    return "\n\n".join(parts) + "\n"


def _truncation(peer: Peer) -> list[str]:
    """Return a sentence about the sampling options of rollouts, if the peer has some."""
    if not peer.truncation:
        return []
    names = ", ".join(f"`{name}` (`rollout.{counterpart}`)" for name, (counterpart, _) in peer.truncation.items())
    return [
        f"These options truncate what rollouts sample, and set those of `tracegrad online`: {names}. They also set "
        f"`rollout.top_logprobs`, to one more than top_k, or to {LISTED_IDS} without it. From recorded traces, tokens "
        "sampled with them are compared over their support if the record shows it."
    ]


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
        f"| {_of(name, each)} | {', '.join(map(_shown, each.harmless))} | {each.why} | {each.fix} |"
        for name, each in peer.unsupported.items()
    ]


def _differences(peer: Peer) -> list[str]:
    """Return each difference with the names of its sizes; a recipe fills in the sizes."""
    shown = {name: re.sub(r"{([a-z]+)(:g)?}", r"*\1*", how) for name, how in peer.differs.items()}
    return [f"| {name} | {how} |" for name, how in shown.items()]


def _of(name: str, each: UnsupportedOption) -> str:
    return f"*`{name}`*" if each.run_only else f"`{name}`"


def _shown(value: Any) -> str:
    return "none" if value is None else f"`{value}`"


_LOSSES = """# Losses

This page lists every recipe of `tracegrad.recipes` and every preset of `tracegrad.objective.presets`. Each preset
has a description, its formula as `print(preset)` shows it, its value as code, its paper, and the differences from
peers' conventions. To choose one, see [Choose an objective](../how-to/choose-an-objective.md).
[Parity](../../PARITY.md) lists the third-party
code with equal numbers. `python tools/generate_docs.py` makes this page from the code.

In the formulas *theta* is the policy in training, *old* is recomputed before the step, *rollout* is recorded, and
*ref* is the reference model. A is the advantage, a *trace* is called a sequence in papers, and *scale* is computed
from integer counts over the full step. Weights and rejections carry no gradient. Change a preset by the names of
its fields: `override(presets.DAPO, "surrogate.high", 0.3)`, or `--objective DAPO --objective.surrogate.high 0.3`.

BAPO (arXiv 2510.18927) is not available. At every step it searches its bounds, from [0.6, 1.2] up to [0.9, 3],
until good tokens make up a set share of the loss of the full batch. Here the policy in training only processes one
micro-batch at a time ([Design](../../DESIGN.md)). `--objective.surrogate.low 0.4 --objective.surrogate.high 0.2`
are its initial bounds.
"""


def losses_page() -> str:
    """Return docs/reference/losses.md: every recipe, and every preset with its formula, its code and its paper."""
    parts = [_LOSSES, _recipes(), _preset_index()]
    for title, rest, names in families():
        parts.append(f"## {title.rstrip('.')}\n" + (f"\n{rest}\n" if rest else ""))
        parts += [_preset_section(name, *PRESETS[name]) for name in names]
    return "\n".join(parts)


def documented(module: ModuleType, kind: type[_T]) -> list[tuple[str, _T, str]]:
    """Return name, value and docstring of each value of a kind in a module, in the order of the source."""
    body = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")).body
    found = []
    for here, after in itertools.pairwise([*body, ast.Pass()]):
        if not (isinstance(here, ast.Assign) and isinstance(here.targets[0], ast.Name)):
            continue
        name = here.targets[0].id
        value = getattr(module, name)
        if name.startswith("_") or not isinstance(value, kind):
            continue
        if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
            raise ValueError(f"{module.__name__}: {name} without a docstring")
        found.append((name, value, str(after.value.value)))
    return found


PRESETS = {name: (value, text) for name, value, text in documented(presets, Objective)}
"""Name of a preset to its value and its docstring."""


def families() -> list[tuple[str, str, list[str]]]:
    """Return title, text and presets of each part of presets.py, which begins with a comment `# --- title`."""
    found: list[tuple[str, str, list[str]]] = []
    for part in Path(str(presets.__file__)).read_text(encoding="utf-8").split("\n# --- ")[1:]:
        title, *lines = part.split("\n")
        text = "\n".join(line[2:] for line in itertools.takewhile(lambda line: line.startswith("#"), lines)).strip()
        found.append((title, text, [name for name in re.findall(r"^([A-Z]\w+) = ", part, re.M) if name in PRESETS]))
    return found


_RECIPES = """## Recipes

A preset is only a loss. A recipe also sets the other options that its paper specifies, and no others: `tracegrad
train --recipe DAPO`, or `tracegrad.recipes.DAPO`, whose `print` shows all of them. Options on the command line or
in a file override a recipe, and a line reports it.
"""


def _recipes() -> str:
    rows = [_RECIPES, "| recipe | description | options |", "|---|---|---|"]
    for name, value, text in documented(recipe, Recipe):
        sets = ", ".join(f"`{option} = {told}`" for option, told in value.options)
        first, *rest = _paragraphs(text)
        rows.append(f"| {name} | {first} {_linked(' '.join(rest))} | {sets} |")
    return "\n".join(rows) + "\n"


def _preset_index() -> str:
    rows = ["## Presets\n"]
    rows += ["| preset | description | requires |", "|---|---|---|"]
    for _, _, names in families():
        for name in names:
            value, text = PRESETS[name]
            needs = value.requirements
            wanted = [each for each in ("old", "rollout", "ref", "proximal") if getattr(needs, each)]
            whole = ["complete traces in a batch"] if needs.trace_ratio else []
            told = ", ".join([*wanted, *whole]) or "nothing"
            first = _paragraphs(text)[0].replace("|", "\\|")
            rows.append(f"| [{name}](#{name.lower()}) | {first} | {told} |")
    return "\n".join(rows) + "\n"


def _preset_section(name: str, value: Objective, text: str) -> str:
    first, *rest = _paragraphs(text)
    parts = [f"### {name}", _linked(first), f"```text\n{value}\n```", f"```python\n{_wrapped(to_source(value))}\n```"]
    return "\n\n".join([*parts, *map(_linked, rest)]) + "\n"


def _paragraphs(text: str) -> list[str]:
    return [" ".join(each.split()) for each in text.strip().split("\n\n")]


def _linked(text: str) -> str:
    return re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def _wrapped(code: str, indent: str = "") -> str:
    """Return the code with one argument per line if a call or a tuple is long, as a formatter would."""
    if len(indent) + len(code) <= 100 or not code.endswith(")"):
        return indent + code
    opening = code.index("(") + 1
    parts = [_wrapped(part, indent + "    ") for part in _arguments(code[opening:-1])]
    return "\n".join([indent + code[:opening], *(f"{part}," for part in parts), f"{indent})"])


def _arguments(inner: str) -> list[str]:
    """Return the arguments of a call, split at its own commas."""
    depth, parts = 0, [""]
    for character in inner:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def with_findings(page: str) -> str:
    """Return the page with new findings between their two marks."""
    return _between_marks(page, "findings", f"{_check_index()}\n{''.join(_check_section(check) for check in CHECKS)}")


def _between_marks(page: str, name: str, text: str) -> str:
    begin, end = f"<!-- {name}: python tools/generate_docs.py -->", f"<!-- end of {name} -->"
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{text}{end}{rest.split(end)[1]}"


def _check_index() -> str:
    rows = ["| finding | meaning | note from | costs from | wrong from |", "|---|---|---|---|---|"]
    for check in CHECKS:
        given = {level.name: share for level, share in check.levels.items()}
        cells = [_share(given.get(name), check.unit) for name in ("NOTE", "COSTS", "WRONG")]
        rows.append(f"| [{check.name}](#{check.name}) | {check.title} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _share(share: float | None, unit: str) -> str:
    if share is None:
        return ""
    if share == 0:
        return "any"
    return f"all {unit}" if share == 1 else f"{share:.0%} of {unit}"


def _check_section(check: Check) -> str:
    sees, threshold = (" ".join(part.split()) for part in inspect.cleandoc(check.run.__doc__ or "").split("\n\n"))
    return f"\n### {check.name}\n\n{sees}\n\n- {threshold}\n- Impact: {check.impact}\n- Fix: {check.fix}\n"


def with_verbs(page: str) -> str:
    """Return the page with a new table of verbs, and of the flags of each, between its two marks."""
    parsers = verb_parsers()
    index = ["| verb | purpose |", "|---|---|"]
    index += [f"| [`{name}`](#{name}) | {_help_cell(text)} |" for name, (text, _) in parsers.items()]
    sections = itertools.starmap(_verb_section, parsers.items())
    return _between_marks(page, "verbs", "\n".join([*index, "", *sections, ""]))


def verb_parsers() -> dict[str, tuple[str, Parser]]:
    """Return the purpose and the parser of each verb."""
    [commands] = [each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction)]
    texts = {each.dest: each.help or "" for each in commands._choices_actions}
    return {name: (texts[name], parser) for name, parser in commands.choices.items()}


def _verb_section(name: str, verb: tuple[str, Parser]) -> str:
    parser = verb[1]
    formatter = parser._get_formatter()
    rows = ["| argument | meaning |", "|---|---|"]
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction):
            value = formatter._format_args(action, action.dest.upper()) if action.nargs != 0 else ""
            argument = " ".join([*action.option_strings, value]).strip()
            needed = " (required)" if action.required and action.option_strings else ""
            rows.append(f"| `{argument}`{needed} | {_help_cell(formatter._expand_help(action))} |")
    return f"### {name}\n\n{_help_cell(parser.description or '')}\n\n" + "\n".join(rows) + "\n"


def _help_cell(text: str) -> str:
    """Return a text of --help as one line of Markdown, with its flags as code."""
    plain = re.sub(r"(?<![`\w-])--[a-z][\w.-]*\w", r"`\g<0>`", " ".join(text.split()))
    parts = re.split(r"(`[^`]*`)", plain)
    return "".join(part if part[:1] == "`" else re.sub(r"[\\*_<>\[\]|#~]", r"\\\g<0>", part) for part in parts)


def with_options(page: str) -> str:
    """Return the page of options with a new table."""
    return re.sub(r"\| option \| default \| meaning \|\n(\|.*\n)+", lambda _: config.describe() + "\n", page)


def with_tables(page: str, tables: Mapping[str, Iterable[Metric]]) -> str:
    """Return the page with a new table between every `<!-- table: NAME -->` and `<!-- end -->`.

    Raises:
        ArgumentError: if the page lacks a table, or names an unknown one.
    """
    shown = re.findall(r"<!-- table: (.+?) -->", page)
    if sorted(shown) != sorted(tables):
        raise ArgumentError(
            f"the page shows {', '.join(shown)}; there are {', '.join(tables)}. Each is shown once, so that no metric "
            "is without a definition. Add <!-- table: NAME --> and <!-- end -->."
        )

    def anew(found: re.Match[str]) -> str:
        return f"<!-- table: {found[1]} -->\n\n{table(tables[found[1]])}\n\n<!-- end -->"

    return re.sub(r"<!-- table: (.+?) -->.*?<!-- end -->", anew, page, flags=re.DOTALL)


def main() -> None:
    """Write the pages."""
    (DOCS / "reference" / "losses.md").write_text(losses_page(), encoding="utf-8")
    (DOCS / "how-to" / "coming-from.md").write_text(coming_from_page(), encoding="utf-8")
    (DOCS / "reference" / "imported-configs.md").write_text(imported_configs_page(), encoding="utf-8")
    (DOCS / "reference" / "errors.md").write_text(error_codes.page(), encoding="utf-8")
    for name, change in (
        ("reference/findings.md", with_findings),
        ("reference/cli.md", with_verbs),
        ("reference/metrics.md", lambda page: with_tables(page, TABLES)),
        ("reference/configuration.md", with_options),
    ):
        page = DOCS / name
        page.write_text(change(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
