"""`train`: a policy, tasks and what is good, put together into a run; `replay`: the same run from its folder alone."""

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tracegrad import metrics
from tracegrad.addresses import place_here
from tracegrad.algebra import Objective
from tracegrad.config import Config, as_dict, update
from tracegrad.config import load as load_config
from tracegrad.errors import ArgumentError
from tracegrad.interrupt import Interrupt
from tracegrad.learner import Run, checkpoint
from tracegrad.learner.adapted import Adapted, load_model
from tracegrad.learner.ranks import Ranks
from tracegrad.metrics import dashboards
from tracegrad.mirror import Mirror
from tracegrad.online import frames
from tracegrad.online.bond import telling
from tracegrad.online.brief import Brief
from tracegrad.online.ledger import Ledger
from tracegrad.online.link import Link
from tracegrad.online.loop import Loop
from tracegrad.online.options import Online, Play
from tracegrad.online.players import Contract, players_of
from tracegrad.online.proof import Proof
from tracegrad.online.serve import served
from tracegrad.online.state import State
from tracegrad.online.ways import sync_of
from tracegrad.recipes.recipe import named
from tracegrad.report import write_card
from tracegrad.tokenizer import Tokenizer
from tracegrad.training import objective_of

SHOWN_OPTIONS = 12


@dataclass(frozen=True)
class Finished:
    """What a run leaves for its caller.

    Args:
        steps: of the ledger.
        stopped: "done", "signal" or "tasks", where these ended first.
        checkpoint: folder of the last one.
        rows: of metrics, one for each step and each evaluation.
        exit_code: 0, or 128 + signal.
    """

    steps: int
    stopped: str
    checkpoint: Path
    rows: list[dict[str, Any]]
    exit_code: int = 0


def train(
    model: str | Path,
    tasks: Iterable[Any] | None,
    *,
    rewards: Any = None,
    weights: Sequence[float] | None = None,
    tools: Any = None,
    environment: Any = None,
    agent: Any = None,
    objective: Objective | None = None,
    config: Config | None = None,
    online: Online | None = None,
    play: Play | None = None,
    evaluation: Sequence[Any] = (),
    servers: Sequence[str] | str = (),
    key: str | None = None,
    python: str | None = None,
    engine: Mapping[str, Any] | None = None,
    out: str | Path = "out/online",
    resume: bool = False,
    sinks: Sequence[metrics.Sink] | None = None,
    say: Callable[[str], None] = print,
) -> Finished:
    """Plays, scores, trains and pushes until the last step; under torchrun every rank calls this alike.

    Args:
        model: folder of a causal language model with its tokenizer and chat template; or of LoRA adapters, which are
            trained further.
        tasks: a list, which comes again in another order, or what can be iterated once. A task is a text, a list of
            messages, or a dict with either as `prompt` and what reward functions take. None: processes of their own
            play into `out`, each by `collect`.
        rewards: functions in TRL's convention, `(prompts, completions, **columns) -> list`; they score whole groups.
        weights: of the reward functions.
        tools: functions that the policy may call, or a function from the task to functions.
        environment: a class of `rollout.Environment`, or one of TRL's environment_factory.
        agent: `async (task, policy) -> float | dict`, which plays and scores, by `policy.chat` or by a client of its
            own for `policy.base_url` and `policy.key`.
        objective: a preset or another value of `Objective`; default that of `config`.
        config: of training; `data.holdout`, `train.epochs` and value are of runs over a file and not read.
        online: what the trainer does.
        play: how a task is played.
        evaluation: tasks that are played before the first step and after the last, and not trained on.
        servers: URLs of vLLM servers, started with the flags of `sync.vllm_arguments`; or "in-process" for `vllm.LLM`
            in this one; default: a server is started.
        key: token of the servers; one that is started asks for it too, or for one that is drawn for the run.
        python: interpreter of an environment that has vLLM, for the server that is started; default this one.
        engine: vLLM's engine arguments by name, for the server that is started.
        out: folder of the run, by its path.
        resume: go on with the run in `out`.
        sinks: where rows go beside metrics.jsonl; default a line each step, and the dashboards of `train.log_to`.
        say: takes the sentences that a user should read.

    Raises:
        ArgumentError: if arguments do not fit together, or `out` holds a run and `resume` is False.
        SyncFault: if the servers do not sample from the policy that is trained.
        TracegradError: if a server, the folder or what plays fails for good.
    """
    told, play, out, model = online or Online(), play or Play(), place_here(out), Path(model)
    if tasks is None and told.sync == "lora":
        raise ArgumentError(
            "tasks is None and online.sync is 'lora'. An adapter could be unloaded while a collector elsewhere asks "
            "for it. Set online.sync to 'file', which merges adapters, or play the tasks here."
        )
    if tasks is None and not servers and key is None:
        raise ArgumentError(
            "tasks is None, and no server is named. One that is started asks for a token on every path, which "
            "collectors in other processes would not have. Pass key= (key_file) here and to them, or name servers."
        )
    contract = None
    if tasks is not None or len(evaluation):
        contract = Contract.of(agent=agent, environment=environment, tools=tools, rewards=rewards, weights=weights)
    config = _config(config or Config())
    if objective is None:
        objective = objective_of(config)
    elif objective_of(config) != objective:  # what is recorded is what is trained
        config = update(replace(config, objective=Config().objective), named(objective))
    tokenizer = Tokenizer.from_pretrained(model)
    ranks, mirror = Ranks.join(), Mirror(out)
    with ExitStack() as stack:
        with ranks.together():
            if ranks.first:
                stack.enter_context(mirror.locked())
        driven = Run(load_model(model), objective, config, out=mirror, tokenizer=model, ranks=ranks, steps=told.steps)
        _take_up(driven, resume)
        ledger = Ledger(out)
        player, evaluate = None, None
        with telling(ranks):
            if ranks.first:
                way, rank, below = sync_of(driven, told), config.train.lora_rank, model
                if (adapted := Adapted.read(model)) is not None:  # a server is started with whole weights
                    rank, below = adapted.rank, adapted.base
                pool, engine_told, ended = stack.enter_context(
                    served(below, servers, key, python, engine or {}, told, play, out, say, rank)
                )
                Brief(str(model), repr(objective), told, play, engine_told).write(out, config)
                link = Link(pool, way, driven.taken, ended=ended, say=say)
                state = State(driven.taken, driven.taken, len(ledger.steps))
                known = {"link": link, "state": state, "config": config, "tokenizer": tokenizer}
                known |= {"options": told, "play": play}
                player, evaluate = players_of(stack, contract, tasks, evaluation, out=out, **known)
                stack.enter_context(link)
        lines = _sinks(driven, told, sinks, say) if ranks.first else []
        for sink in lines:
            stack.callback(sink.close)
        proof = Proof(bf16=str(driven.precision) == "torch.bfloat16")
        more = {"evaluate": evaluate, "apart": tasks is None, "play": play, "first": model}
        loop = Loop(driven, tokenizer, told, ledger, player, lines, say, proof, **more)
        with Interrupt() as interrupt, driven.together(ends=True):
            stopped = loop.run(interrupt)
    return _finished(loop, model, stopped, interrupt)


def replay(
    run: str | Path,
    model: str | Path,
    *,
    objective: Objective | None = None,
    config: Config | None = None,
    out: str | Path,
    say: Callable[[str], None] = print,
) -> Finished:
    """Takes the steps of a run again, from its folder and the model that it began with: no server, nothing played.

    On the same machine the parameters are those of the run, bit for bit. Options that change the order of sums, such as
    `pack.share_prefixes`, change them by rounding; `sync_max` in the rows says by how much.

    Args:
        run: folder of the run.
        model: the one that it had.
        objective: default that of the run; needed for one that has no name and cannot be written as text.
        config: default that of the run.
        out: folder for checkpoints and metrics; the run's is not changed.

    Raises:
        ArgumentError: if `out` is the run's folder or holds another, or the run had another objective.
        ReadError: if the folder holds no run.
        FormatError: if it does not say what the run was told.
    """
    run, out, model = Path(run), place_here(out), Path(model)
    if run.resolve() == out.resolve():
        raise ArgumentError(f"{out} is the run's own folder. The replay would overwrite it. Give another out.")
    before, config_before = Brief.read(run), load_config(run / "config.toml")
    objective = objective_of(config_before) if objective is None else objective
    _check_objective(run, before.objective, repr(objective))
    config = _config(config or config_before)
    with Mirror(out).locked():
        driven = Run(load_model(model), objective, config, out=out, tokenizer=model, steps=before.online.steps)
        driven.begin()
        ledger = Ledger(run)
        lines = [metrics.JsonLines(out / "metrics.jsonl")]
        told = Online(steps=max(len(ledger.steps), 1))
        loop = Loop(driven, Tokenizer.from_pretrained(model), told, ledger, None, lines, say, proof=None)
        loop.folder = run / frames.FOLDER
        with Interrupt() as interrupt:
            stopped = loop.run(interrupt)
        lines[0].close()
        return _finished(loop, model, stopped, interrupt)


def _finished(loop: Loop, model: Path, stopped: str, interrupt: Interrupt) -> Finished:
    driven, last = loop.driven, checkpoint.list_checkpoints(loop.driven.out)[-1]
    if loop.ranks.first:
        groups = [len(step.trained) for step in loop.ledger.steps]
        data = [f"played by the policy itself: {sum(groups):,} groups with unlike rewards in {len(groups):,} steps"]
        about = {"base": model, "objective": driven.objective, "config": driven.config, "rows": loop.rows}
        write_card(last, **about, data=data)
    return Finished(len(loop.ledger.steps), stopped, last, loop.rows, interrupt.code(stopped))


def _check_objective(run: Path, before: str, now: str) -> None:
    """Refuse another objective than the run's, by the options that differ.

    Args:
        before, now: `repr` of the two objectives.
    """
    if before == now:
        return
    old, new = _options(before), _options(now)
    differ = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    said = [f"{name}: {old.get(name, 'none')}, now {new.get(name, 'none')}" for name in differ[:SHOWN_OPTIONS]]
    more = f"; and {len(differ) - SHOWN_OPTIONS} more" if len(differ) > SHOWN_OPTIONS else ""
    raise ArgumentError(
        f"{run}: the run had another objective: {'; '.join(said)}{more}. The replay's parameters would be others. "
        "Leave --objective out, or give that of the run."
    )


def _options(objective: str) -> dict[str, str]:
    """The fields of an objective by their dotted names, from its `repr`; one with a function in it is one text.

    >>> _options("Objective(ratio=Ratio(num='theta'), weights=(Weight(), 2))")
    {'': 'Objective', 'ratio': 'Ratio', 'ratio.num': "'theta'", 'weights.0': 'Weight', 'weights.1': '2'}
    """
    found = dict[str, str]()

    def add(node: ast.expr, at: str) -> None:
        inner = lambda name: f"{at}.{name}" if at else str(name)  # noqa: E731
        if isinstance(node, ast.Call):
            found[at] = ast.unparse(node.func)
            for each in node.keywords:
                add(each.value, inner(each.arg))
        elif isinstance(node, ast.Tuple):
            for number, each in enumerate(node.elts):
                add(each, inner(number))
        else:
            found[at] = ast.unparse(node)

    try:
        add(ast.parse(objective, mode="eval").body, "")
    except SyntaxError:
        return {"objective": objective}
    return found


def _config(config: Config) -> Config:
    """Nothing is held out, as evaluations have tasks of their own; a trace whose whole group failed beside it is 0."""
    told = (config.data.reward_weights, "data.reward_weights"), (config.train.iterations > 1, "train.iterations")
    for is_told, name in told:
        if is_told:
            raise ArgumentError(
                f"{name} is of training from a file, and would do nothing here. Leave it out; `weights` is what "
                "reward functions are weighed by."
            )
    if config.reward_kl.coef:
        raise ArgumentError(
            "reward_kl.coef is of training from a file. A step that is played is compared before anything of it is "
            "measured, and nothing would be charged. Take objective.kl, or train on what was recorded."
        )
    config = replace(config, data=replace(config.data, holdout=0.0))
    if config.advantage.baseline == "none" or config.advantage.singleton != "refuse":
        return config
    return replace(config, advantage=replace(config.advantage, singleton="zero"))


def _take_up(driven: Run, resume: bool) -> None:
    if resume:
        driven.restore()
    elif (driven.out / "steps.jsonl").exists():
        raise ArgumentError(
            f"{driven.out} holds a run. A new one would be mixed with it. Go on with resume=True, or give another out."
        )
    driven.begin()


def _sinks(
    driven: Run, told: Online, sinks: Sequence[metrics.Sink] | None, say: Callable[[str], None]
) -> list[metrics.Sink]:
    lines = metrics.JsonLines(driven.out / "metrics.jsonl", keep_to_step=driven.taken or None)
    if sinks is not None:
        return [lines, *sinks]
    chosen = dashboards.opened(driven.config.train.log_to, driven.out, as_dict(driven.config))
    return [lines, *chosen, Line(told.steps, say)]


class Line:
    """One line for each step and each evaluation."""

    def __init__(self, total: int, say: Callable[[str], None]) -> None:
        self.total, self.say = total, say

    def log(self, row: metrics.Row) -> None:
        """Says the row."""
        if "eval_reward" in row:
            told = ("eval_reward", "eval_low", "eval_high")
            mean, low, high = (float("nan") if row[name] is None else row[name] for name in told)
            self.say(f"evaluation after step {row['step']}: {mean:.1%} [{low:.1%}, {high:.1%}] of {row['eval_tasks']}")
            return
        parts = [f"step {row['step']}/{self.total}", f"reward {row.get('reward') or 0:.3f}"]
        parts += [f"{row['groups']} groups ({row['groups_dull']} dull)"]
        if row.get("sync_terms"):
            parts.append(f"sync within {row['sync_max']:.1e}")
        parts.append(f"waited {row['seconds_waited']:.1f} s, trained {row['seconds_trained']:.1f} s")
        self.say("  ".join(parts))

    def close(self) -> None:
        """Nothing is held back."""
