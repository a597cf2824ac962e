"""Several inputs with weights: which of their groups an epoch takes. No tokens, no torch. Called by the feed."""

import numpy as np
from numpy.typing import NDArray

from tracegrad.catalog import Source
from tracegrad.config import Config, split_names
from tracegrad.errors import ArgumentError

_DRAWN = 0x6D6978


def shares(source: Source, config: Config) -> tuple[float, ...]:
    """The weight of each input over the largest; () where no weights are told, or all are equal.

    Raises:
        ArgumentError: for other than one positive number for each of several inputs, or a group that stands in two of
            unlike weights.
    """
    told = config.mixture.weights
    if not told:
        return ()
    if source.inputs < 2:
        raise ArgumentError(
            "mixture.weights has no effect: there is one input. An option that does nothing hides a mistake. Leave it "
            "out, or give several prepared folders."
        )
    try:
        weights = [float(each) for each in split_names(told)]
    except ValueError:
        weights = []
    if len(weights) != source.inputs or not all(0 < weight < float("inf") for weight in weights):
        raise ArgumentError(
            f"mixture.weights is {told!r:.80}, and there are {source.inputs} inputs. How often each is taken is not "
            "known. Give one number above 0 for each, with commas between."
        )
    found = tuple(weight / max(weights) for weight in weights)
    catalog = source.catalog
    of_trace = np.array(found)[catalog.source]
    low, high = np.full(int(catalog.group.max(initial=-1)) + 1, 2.0), np.zeros(int(catalog.group.max(initial=-1)) + 1)
    np.minimum.at(low, catalog.group, of_trace)
    np.maximum.at(high, catalog.group, of_trace)
    if len(both := np.flatnonzero((low < high)[catalog.group])):
        raise ArgumentError(
            f"the group of trace '{source.trace_name(int(both[0]))}' stands in inputs of unlike weights, and a group "
            "is taken whole or not. Give its traces other groups, or the inputs one weight."
        )
    return found if min(found) < 1 else ()


def taken(source: Source, there: NDArray[np.bool_], shares: tuple[float, ...], seed: int) -> NDArray[np.bool_]:
    """[R] bool: of the traces that are there, those of the groups that an epoch takes.

    Of the n groups of an input it takes round(share * n), at least one, drawn anew for each seed.
    """
    if not shares:
        return there
    catalog, out = source.catalog, np.zeros(len(there), bool)
    for number, share in enumerate(shares):
        own = there & (catalog.source == number)
        groups = np.unique(catalog.group[own])
        count = max(round(share * len(groups)), 1)
        drawn = np.random.default_rng([seed, _DRAWN, number]).permutation(len(groups))[:count]
        out |= own & np.isin(catalog.group, groups[drawn])
    return out
