"""Which ways of running a packed row give a model's own numbers: tried once for each model, on short and long rows.

No list of families, no reading of configurations: a road is compared with each branch run alone. One that differs or
raises is not taken, with the reason. Called by `forward` and, for all ranks together, by the learner.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from tracegrad.errors import ArgumentError
from tracegrad.model.attention import SHARED_FROM, Plan, run
from tracegrad.model.structure import BLOCKS, attention_of, body_of, config_of, without_blocks
from tracegrad.packing import Batch

ALWAYS = 1 << 62
"""A reach that no branch has."""
SHORT = 40
"""Tokens of the longest branch of the first comparison; a later one is as long as the branches that are to be run."""
_PART = 8  # tokens whose difference is taken together: one expert chosen otherwise by rounding is no other road
_ROUNDING = {torch.float64: 2e-4, torch.float32: 2e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
_NOISE = 8.0  # a road may differ by so many times what a batch of two differs from a batch of one


class Road(NamedTuple):
    """A plan, for plain rows or also for those that share prefixes; as a tree "stack" computes a common prefix once."""

    plan: Plan
    tree: bool = False


def whole_row(model: nn.Module) -> Literal["flex", "mask"]:
    """The plan by which a model takes a row in one pass."""
    return "flex" if attention_of(model) in BLOCKS else "mask"


_known: WeakKeyDictionary[nn.Module, dict[tuple[str, Road], tuple[int, str]]] = WeakKeyDictionary()


def why_not(model: nn.Module, road: Road, reach: int = 0) -> str:
    """Why a road is not taken for branches of up to `reach` tokens, in one line; "" where its numbers are the model's.

    The comparison runs a few rows of `reach` and some tokens without gradient, the first time that it is asked for.
    Under FSDP every rank asks alike, within the forward of the root.

    Raises:
        ArgumentError: if the numbers of a token depend on what follows it: there is no road for such a model.
    """
    known = _known.setdefault(model, {})
    attention = attention_of(model)
    together = (Road("stack"), Road("stack", tree=True)) if road.plan == "stack" else (road,)
    most = getattr(config_of(model), "max_position_embeddings", None) or SHORT
    for length in (min(SHORT, most), reach):
        done, why = known.get((attention, road), (0, ""))
        if done < length and not why:
            for each, found in zip(together, _compared(model, together, length), strict=True):
                known[attention, each] = length, known.get((attention, each), (0, ""))[1] or found
    return known[attention, road][1]


def reached(model: nn.Module, road: Road) -> int:
    """Up to how many tokens of a branch `why_not` has answered for already."""
    done, why = _known.get(model, {}).get((attention_of(model), road), (0, ""))
    return ALWAYS if why else done


def settle(model: nn.Module, road: Road, reach: int, why: str) -> None:
    """Sets what `why_not` answers up to a reach: what all ranks together found."""
    _known.setdefault(model, {})[attention_of(model), road] = reach, why


@torch.no_grad()
def _compared(model: nn.Module, roads: tuple[Road, ...], length: int) -> list[str]:
    """Of each road why it is not taken; roads that run the same row are compared with the same branches alone."""
    with at_rest(model):
        try:
            probe = _Probe(model, length)
            with without_blocks(model):
                wanted, allowed = probe.alone()
        except (ArgumentError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            return [cannot(model, error)] * len(roads)
        return [_difference(probe, road, wanted, allowed) for road in roads]


def _difference(probe: "_Probe", road: Road, wanted: list[Tensor], allowed: float) -> str:
    largest, model = 0.0, probe.model
    try:
        for batch in probe.batches(road):
            found = run(model, batch, road.plan, share_prefix=road.tree)
            largest = max(largest, *(apart(found[probe.place(n, batch)], alone) for n, alone in enumerate(wanted)))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return cannot(model, error)
    if largest <= allowed:
        return ""
    return (
        f"hidden states of {type(model).__name__} on branches of {len(probe.branches[-1])} tokens would differ by "
        f"{largest:.2g} from those of each branch alone, of which rounding explains {allowed:.2g}"
    )


def rounding(model: nn.Module) -> float:
    """What may differ between two ways of computing the same hidden states, for the dtypes of a model."""
    return max(_ROUNDING.get(kind, 0.1) for kind in {parameter.dtype for parameter in model.parameters()})


def cannot(model: nn.Module, error: Exception) -> str:
    """Any forward of a stranger's may raise anything: it is no road then."""
    while isinstance(inner := getattr(error, "inner_exception", None), Exception):  # of torch.compile, which wraps it
        error = inner
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(model).__name__} cannot be run so ({type(error).__name__}: {first})"


class _Probe:
    """Three branches over one prefix, in every layout that a road takes.

    The second is a little longer than the first, so that both are padded to one length; the third is as long as asked.
    """

    def __init__(self, model: nn.Module, length: int) -> None:
        self.model, self.device = model, next(model.parameters()).device
        tokens = ordinary_ids(model)
        self.prefix = SHARED_FROM
        ends = (self.prefix + 8, self.prefix + 10, length)
        self.branches = []
        for n, end in enumerate(ends):
            place = np.arange(end)
            own = np.where(place < self.prefix, place * 5, place * (2 * n + 7) + 3 * n + 1)
            self.branches.append(tokens[own % len(tokens)])

    def alone(self) -> tuple[list[Tensor], float]:
        """[S, H] of each branch by itself, and the difference that is rounding."""
        found = [self._states(branch[None])[0] for branch in self.branches]
        twice = apart(self._states(np.stack([self.branches[1]] * 2))[1], found[1])
        kinds = {found[1].dtype, *(parameter.dtype for parameter in self.model.parameters())}
        allowed = max(_NOISE * min(twice, 0.02), *(_ROUNDING.get(kind, 0.1) for kind in kinds))
        cut = len(self.branches[2]) * 3 // 4
        ahead = apart(found[2][:cut], self._states(self.branches[2][None, :cut])[0])
        if ahead > allowed:
            raise ArgumentError(
                f"{type(self.model).__name__}: what follows a token changes its hidden state by {ahead:.2g}. A policy "
                "sees only what stands before: these are no logprobs of one. Pass a causal LM, configured as a decoder."
            )
        return found, allowed

    def _states(self, ids: Any) -> Tensor:
        return body_of(self.model)(input_ids=torch.from_numpy(ids).to(self.device), use_cache=False).last_hidden_state

    def batches(self, road: Road) -> list[Batch]:
        """The rows that a road is tried on."""
        return [self.plain(), self.tree()] if road.tree and road.plan != "stack" else [self.plain()]

    def plain(self) -> Batch:
        """The branches side by side."""
        lengths = [len(branch) for branch in self.branches]
        ends = np.cumsum(lengths)
        positions = np.concatenate([np.arange(length) for length in lengths])
        return self._row(np.concatenate(self.branches), positions, np.repeat(ends, lengths))

    def tree(self) -> Batch:
        """The prefix once, then what is each branch's own."""
        own = [branch[self.prefix :] for branch in self.branches]
        ends = self.prefix + np.cumsum([len(part) for part in own])
        ids = np.concatenate([self.branches[0][: self.prefix], *own])
        positions = np.concatenate([np.arange(self.prefix), *(self.prefix + np.arange(len(part)) for part in own)])
        tree_end = np.concatenate([np.full(self.prefix, ends[-1]), np.repeat(ends, [len(part) for part in own])])
        return self._row(ids, positions, tree_end)

    def _row(self, ids: Any, positions: Any, tree_end: Any) -> Batch:
        read = np.arange(len(ids))
        ones = np.ones(len(ids), np.float32)
        none = np.zeros(0, np.int32)
        return Batch(ids, positions, tree_end, read, np.zeros_like(read), ones, none, none).to(self.device)

    def place(self, branch: int, batch: Batch) -> Tensor:
        """Where the tokens of a branch stand in a row."""
        lengths = [len(each) for each in self.branches]
        if len(batch.ids) == sum(lengths):
            start = sum(lengths[:branch])
            return torch.arange(start, start + lengths[branch])
        start = self.prefix + sum(length - self.prefix for length in lengths[:branch])
        return torch.cat([torch.arange(self.prefix), torch.arange(start, start + lengths[branch] - self.prefix)])


def apart(found: Tensor, wanted: Tensor) -> float:
    """The largest ||a - b|| / ||b|| of a few neighbouring tokens; infinite where a number is not finite."""
    size = len(wanted) // _PART * _PART
    gap, norm = (part[-size:].double().square().sum(-1).view(-1, _PART).sum(-1) for part in (found - wanted, wanted))
    found_ = (gap / norm.clamp(min=1e-30)).sqrt().max().item()
    return found_ if np.isfinite(found_) else float("inf")


def ordinary_ids(model: nn.Module) -> Any:
    """Ids that stand for text: none that the configuration names as special, of a picture or for padding."""
    rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator,union-attr]
    special: set[int] = set()
    for config in (model.config, config_of(model)):
        for name, value in vars(config).items():  # type: ignore[call-overload]
            if "token" in name or name.endswith(("_id", "_ids", "_index")):
                special |= {each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)}
    return np.array([n for n in range(3, min(rows, 1000)) if n not in special] or range(rows))


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Without dropout and without autocast."""
    training = model.training
    model.eval()
    try:
        with torch.autocast(next(model.parameters()).device.type, enabled=False):
            yield
    finally:
        model.train(training)
