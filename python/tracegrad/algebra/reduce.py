"""How terms become one number: the denominators, which are integers counted over the whole step.

The core counts, in `tracegrad.correction`.
"""

from dataclasses import dataclass
from typing import Any, Literal

from tracegrad.algebra.refuse import no_effect, one_of, positive
from tracegrad.errors import ArgumentError


@dataclass(frozen=True)
class Reduce:
    """How terms become one number: gives the `scale` of each term.

    | per | inner "mean" | inner "sum" |
    |---|---|---|
    | token | 1 / terms (inner is None) | |
    | trace | 1 / (traces * terms of the trace) | 1 / (traces * norm) |
    | group | 1 / (groups * traces of the group * terms of the trace) | 1 / (groups * traces of the group * norm) |
    | prompt | 1 / (groups * terms of the group) | 1 / (groups * norm) |
    | constant | | 1 / norm (inner is None) |

    Args:
        per: "token", "trace", "group" (its traces count alike), "prompt" (its terms count alike) or "constant".
        inner: "mean" or "sum" within a trace, or within a prompt; None where `per` is "token" or "constant".
        norm: constant that divides an inner sum, 1 where None; required where `per` is "constant".
        denominator: "all" counts every term of the step, "kept" those left by the detached gates and by
            `missing="mask"`.

    >>> print(Reduce("trace", "mean"))
    1 / (traces * terms of the trace)
    """

    per: Literal["token", "trace", "group", "prompt", "constant"] = "token"
    inner: Literal["mean", "sum"] | None = None
    norm: float | None = None
    denominator: Literal["all", "kept"] = "all"

    def __post_init__(self) -> None:
        one_of("Reduce.per", self.per, ("token", "trace", "group", "prompt", "constant"))
        one_of("Reduce.denominator", self.denominator, ("all", "kept"))
        if self.per in ("token", "constant"):
            no_effect(self.inner is not None, "Reduce.inner", f"per='{self.per}' has one sum over the step")
        else:
            one_of("Reduce.inner", self.inner, ("mean", "sum"))
        if self.per == "constant":
            no_effect(self.denominator == "kept", "Reduce.denominator", "a constant counts nothing")
            if self.norm is None:
                raise ArgumentError("Reduce(per='constant') without norm. Say the constant; 1.0 is a plain sum.")
        else:
            no_effect(self.norm is not None and self.inner != "sum", "Reduce.norm", "it divides an inner sum")
        if self.norm is not None:
            positive("Reduce.norm", self.norm)

    def core(self) -> tuple[Any, ...]:
        """(per, mean, norm, kept)."""
        norm = 1.0 if self.norm is None else self.norm
        return (self.per, self.inner == "mean", norm, self.denominator == "kept")

    def __str__(self) -> str:
        kept = "kept " if self.denominator == "kept" else ""
        inner = f"{kept}terms of the {'prompt' if self.per == 'prompt' else 'trace'}"
        if self.inner == "sum":
            inner = f"{self.norm or 1:g}"
        return {
            "token": f"1 / {kept}terms",
            "trace": f"1 / (traces * {inner})",
            "group": f"1 / (groups * traces of the group * {inner})",
            "prompt": f"1 / (prompts * {inner})",
            "constant": f"1 / {self.norm or 1:g}",
        }[self.per]


PER_TOKEN = Reduce()
"""The mean over all terms."""
