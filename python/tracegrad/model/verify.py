"""Check which forward modes reproduce the hidden states of a model on packed rows.

A forward mode is a plan, with or without shared prefixes. Each mode is compared with a separate forward pass of every
branch, once for each model, on short and on long rows. A mode that differs or raises is not used, and the reason is
kept. The check needs no list of model families and trusts no configuration.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from tracegrad.errors import ArgumentError
from tracegrad.model.attention import MIN_SHARED_PREFIX, Plan, run
from tracegrad.model.structure import BLOCK_ATTENTION, attention_of, body_of, config_of, without_blocks
from tracegrad.packing import Batch

UNLIMITED_LENGTH = 1 << 62
"""A reach that is longer than any branch."""
FIRST_CHECK_TOKENS = 40
"""Tokens of the longest branch in the first comparison. Later comparisons are as long as the branches to be run."""
# Differences are measured over this many tokens: rounding may change the expert of one token in a correct forward pass.
_WINDOW = 8
_ROUNDING = {torch.float64: 2e-4, torch.float32: 2e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
# Allowed difference of a mode, as a multiple of the difference between a batch of two and a batch of one.
_NOISE = 8.0


class ForwardMode(NamedTuple):
    """A forward mode: a plan, and whether the rows share prefixes.

    The plan "stack" with `tree=True` computes a prefix that all branches share once.
    """

    plan: Plan
    tree: bool = False


def one_pass_plan(model: nn.Module) -> Literal["flex", "mask"]:
    """Return the plan that runs a whole row of this model in one pass."""
    return "flex" if attention_of(model) in BLOCK_ATTENTION else "mask"


_results: WeakKeyDictionary[nn.Module, dict[tuple[str, ForwardMode], tuple[int, str | None]]] = WeakKeyDictionary()


def check_forward_mode(model: nn.Module, mode: ForwardMode, length: int = 0) -> str | None:
    """Return the reason why a mode is not used for branches of up to `length` tokens, or None if it is correct.

    The first call for a mode and a length runs a few rows of slightly more than `length` tokens, without gradient.
    Under FSDP, every rank must make the same calls, within the forward pass of the root.

    Raises:
        ArgumentError: if the hidden state of a token depends on later tokens. No mode is correct for such a model.
    """
    results = _results.setdefault(model, {})
    attention = attention_of(model)
    modes = (ForwardMode("stack"), ForwardMode("stack", tree=True)) if mode.plan == "stack" else (mode,)
    limit = getattr(config_of(model), "max_position_embeddings", None) or FIRST_CHECK_TOKENS
    for tokens in (min(FIRST_CHECK_TOKENS, limit), length):
        checked, reason = results.get((attention, mode), (0, None))
        if checked < tokens and not reason:
            for each, difference in zip(modes, _compare(model, modes, tokens), strict=True):
                results[attention, each] = tokens, results.get((attention, each), (0, None))[1] or difference
    return results[attention, mode][1]


def checked_length(model: nn.Module, mode: ForwardMode) -> int:
    """Return the branch length, in tokens, up to which `check_forward_mode` has a stored answer."""
    checked, reason = _results.get(model, {}).get((attention_of(model), mode), (0, None))
    return UNLIMITED_LENGTH if reason else checked


def set_result(model: nn.Module, mode: ForwardMode, length: int, reason: str | None) -> None:
    """Store the answer of `check_forward_mode` up to a length, for example the one that all ranks agreed on."""
    _results.setdefault(model, {})[attention_of(model), mode] = length, reason


@torch.no_grad()
def _compare(model: nn.Module, modes: tuple[ForwardMode, ...], length: int) -> Sequence[str | None]:
    """Return the reason against each mode, or None. All modes are compared with the same separate forward passes."""
    with inference_mode(model):
        try:
            probe = _Probe(model, length)
            with without_blocks(model):
                expected, allowed = probe.alone()
        except (ArgumentError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            return [failure_reason(model, error)] * len(modes)
        return [_difference(probe, mode, expected, allowed) for mode in modes]


def _difference(probe: "_Probe", mode: ForwardMode, expected: list[Tensor], allowed: float) -> str | None:
    largest, model = 0.0, probe.model
    try:
        for batch in probe.batches(mode):
            hidden = run(model, batch, mode.plan, share_prefix=mode.tree)
            largest = max(
                largest,
                *(relative_difference(hidden[probe.place(n, batch)], alone) for n, alone in enumerate(expected)),
            )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return failure_reason(model, error)
    if largest <= allowed:
        return None
    return (
        f"hidden states of {type(model).__name__} on branches of {len(probe.branches[-1])} tokens would differ by "
        f"{largest:.2g} from those of each branch alone, of which rounding explains {allowed:.2g}"
    )


def rounding_tolerance(model: nn.Module) -> float:
    """Return the relative difference of hidden states that rounding explains, for the parameter dtypes of a model."""
    return max(_ROUNDING.get(dtype, 0.1) for dtype in {parameter.dtype for parameter in model.parameters()})


def failure_reason(model: nn.Module, error: Exception) -> str:
    """Describe an exception of a third-party forward pass, as the reason why a mode is not used."""
    while isinstance(inner := getattr(error, "inner_exception", None), Exception):  # torch.compile wraps exceptions
        error = inner
    message = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(model).__name__} cannot be run so ({type(error).__name__}: {message})"


class _Probe:
    """Three branches with a common prefix, in each layout that a forward mode can run.

    The second branch is slightly longer than the first, so that "stack" pads them to one length.
    The third has `length` tokens.
    """

    def __init__(self, model: nn.Module, length: int) -> None:
        self.model, self.device = model, next(model.parameters()).device
        tokens = ordinary_ids(model)
        self.prefix = MIN_SHARED_PREFIX
        ends = (self.prefix + 8, self.prefix + 10, length)
        self.branches = []
        for n, end in enumerate(ends):
            position = np.arange(end)
            numbers = np.where(position < self.prefix, position * 5, position * (2 * n + 7) + 3 * n + 1)
            self.branches.append(tokens[numbers % len(tokens)])

    def alone(self) -> tuple[list[Tensor], float]:
        """Return the hidden states [S, H] of each branch in its own pass, and the difference that rounding explains."""
        states = [self._states(branch[None])[0] for branch in self.branches]
        noise = relative_difference(self._states(np.stack([self.branches[1]] * 2))[1], states[1])
        dtypes = {states[1].dtype, *(parameter.dtype for parameter in self.model.parameters())}
        allowed = max(_NOISE * min(noise, 0.02), *(_ROUNDING.get(dtype, 0.1) for dtype in dtypes))
        length = len(self.branches[2]) * 3 // 4
        change = relative_difference(states[2][:length], self._states(self.branches[2][None, :length])[0])
        if change > allowed:
            raise ArgumentError(
                f"TG-MODEL-018: {type(self.model).__name__}: what follows a token changes its hidden state by "
                f"{change:.2g}. A policy sees only what stands before: these are no logprobs of one. Pass a causal LM, "
                "configured as a decoder."
            )
        return states, allowed

    def _states(self, ids: Any) -> Tensor:
        return body_of(self.model)(input_ids=torch.from_numpy(ids).to(self.device), use_cache=False).last_hidden_state

    def batches(self, road: ForwardMode) -> list[Batch]:
        """Return the rows on which a mode is compared."""
        return [self.plain(), self.tree()] if road.tree and road.plan != "stack" else [self.plain()]

    def plain(self) -> Batch:
        """Return a row of the branches, one after the other."""
        lengths = [len(branch) for branch in self.branches]
        ends = np.cumsum(lengths)
        positions = np.concatenate([np.arange(length) for length in lengths])
        return self._row(np.concatenate(self.branches), positions, np.repeat(ends, lengths))

    def tree(self) -> Batch:
        """Return a row of the prefix, followed by the remaining tokens of each branch."""
        suffixes = [branch[self.prefix :] for branch in self.branches]
        ends = self.prefix + np.cumsum([len(suffix) for suffix in suffixes])
        ids = np.concatenate([self.branches[0][: self.prefix], *suffixes])
        positions = np.concatenate(
            [np.arange(self.prefix), *(self.prefix + np.arange(len(suffix)) for suffix in suffixes)]
        )
        tree_end = np.concatenate(
            [np.full(self.prefix, ends[-1]), np.repeat(ends, [len(suffix) for suffix in suffixes])]
        )
        return self._row(ids, positions, tree_end)

    def _row(self, ids: Any, positions: Any, tree_end: Any) -> Batch:
        read = np.arange(len(ids))
        ones = np.ones(len(ids), np.float32)
        empty = np.zeros(0, np.int32)
        return Batch(ids, positions, tree_end, read, np.zeros_like(read), ones, empty, empty).to(self.device)

    def place(self, branch: int, batch: Batch) -> Tensor:
        """Return the positions of a branch's tokens in a row."""
        lengths = [len(tokens) for tokens in self.branches]
        if len(batch.ids) == sum(lengths):
            start = sum(lengths[:branch])
            return torch.arange(start, start + lengths[branch])
        start = self.prefix + sum(length - self.prefix for length in lengths[:branch])
        return torch.cat([torch.arange(self.prefix), torch.arange(start, start + lengths[branch] - self.prefix)])


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest ||a - b|| / ||b|| over windows of neighbouring tokens; infinity if it is not finite."""
    size = len(expected) // _WINDOW * _WINDOW
    gap, norm = (
        states[-size:].double().square().sum(-1).view(-1, _WINDOW).sum(-1) for states in (actual - expected, expected)
    )
    largest = (gap / norm.clamp(min=1e-30)).sqrt().max().item()
    return largest if np.isfinite(largest) else float("inf")


def ordinary_ids(model: nn.Module) -> Any:
    """Return token ids of ordinary text, without ids that the configuration names (special, media and padding ids)."""
    rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator,union-attr]
    special: set[int] = set()
    for config in (model.config, config_of(model)):
        for name, value in vars(config).items():  # type: ignore[call-overload]
            if "token" in name or name.endswith(("_id", "_ids", "_index")):
                special |= {
                    number for number in (value if isinstance(value, list) else [value]) if isinstance(number, int)
                }
    return np.array([number for number in range(3, min(rows, 1000)) if number not in special] or range(rows))


@contextmanager
def inference_mode(model: nn.Module) -> Iterator[None]:
    """Run a model in eval mode and without autocast while entered."""
    training = model.training
    model.eval()
    try:
        with torch.autocast(next(model.parameters()).device.type, enabled=False):
            yield
    finally:
        model.train(training)
