"""torch.compile with a limit on the graphs of one function, and an error where torch would run it uncompiled.

torch counts graphs for each function of a process, whatever model calls it. Past `recompile_limit`, 8 by default, it
prints one warning and runs the function uncompiled from then on. `blocks` compiles attention by this, the learner
whole layers.
"""

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from tracegrad.errors import TracegradError

GRAPHS = 64
"""Graphs that one function may have in a process. Gemma3 needs 8 of attention for its checks and the first step."""


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function on its first call, and once more for each input that its graphs do not fit.

    Settings of torch are changed during a call alone.

    Args:
        options: of `torch.compile`.

    Raises:
        TracegradError: from a call that needs another graph where there are as many as the limit allows.
    """
    run = torch.compile(function, **options)
    here = threading.local()  # settings are slow to make, and cannot be entered twice at a time

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        from torch._dynamo import config
        from torch._dynamo.exc import FailOnRecompileLimitHit

        limit = max(GRAPHS, config.recompile_limit)
        if getattr(here, "limit", 0) != limit:
            here.limit, here.settings = limit, _settings(limit, options.get("fullgraph", False))
        try:
            with here.settings:
                return run(*arguments, **named)
        except FailOnRecompileLimitHit as error:
            name = getattr(function, "__qualname__", str(function))
            raise TracegradError(
                f"torch has compiled {name} {limit} times in this process, and a call needs another graph. torch would "
                "run it uncompiled from here on, with float32 tables of [heads, T, T] in attention. Call "
                "torch.compiler.reset() between models that one process trains; TORCH_LOGS=recompiles prints what "
                "differed, and torch._dynamo.config.recompile_limit raises the limit."
            ) from error

    return call


def _settings(limit: int, fullgraph: bool) -> AbstractContextManager[None]:
    """Settings of torch during a call. A function that must be one graph raises an error at the limit by itself."""
    from torch._dynamo import config

    changes: dict[str, Any] = {"recompile_limit": limit}
    changes["specialize_float"] = True  # kernels of flex_attention need the value of a scale
    if not fullgraph:
        changes["fail_on_recompile_limit_hit"] = True
        changes["suppress_errors"] = False  # torch does not take it together with the line above
    return config.patch(**changes)
