"""The field's methods as values of `tracegrad.algebra.Objective`, one file per family.

A preset is taken as it is, or with fields changed by name: `override(DAPO, "surrogate.high", "0.3")`. On a command
line its name is an attribute here, or `module:NAME` for a value of your own. There is no registry.
"""

from __future__ import annotations

import difflib
import importlib

from tracegrad.algebra import Objective, with_beta, with_entropy, with_kl
from tracegrad.errors import ArgumentError
from tracegrad.presets.grpo import (
    BNPO,
    DAPO,
    DAPO_DIRECT,
    DR_GRPO,
    DR_GRPO_DIRECT,
    DUAL_CLIP,
    GRPO,
    GRPO_DIRECT,
    LUSPO,
)
from tracegrad.presets.mismatch import (
    A3PO,
    DECOUPLED_PPO,
    GEO_RS,
    ICEPOP,
    M2PO,
    MIS,
    SEQ_MASK_TIS,
    TIS,
)
from tracegrad.presets.offline import OAPL, TOPR_POSITIVE, WEIGHTED_SFT
from tracegrad.presets.peers import (
    ART_467,
    PRIME_RL_DEFAULT,
    SKYRL_849,
    SLIME_MIS,
    TRL_DEFAULT,
    VERL_BYPASS_PG_GEO_RS,
    VERL_BYPASS_PG_GEO_RS_SEQ_TIS,
    VERL_BYPASS_PG_GEO_RS_TOKEN_TIS,
    VERL_BYPASS_PG_IS,
    VERL_BYPASS_PG_TOKEN_ICEPOP,
    VERL_BYPASS_PPO_CLIP,
    VERL_BYPASS_PPO_CLIP_GEO_RS,
    VERL_BYPASS_PPO_CLIP_K3_RS,
    VERL_DECOUPLED_GEO_RS,
    VERL_DECOUPLED_GEO_RS_SEQ_TIS,
    VERL_DECOUPLED_GEO_RS_TOKEN_TIS,
    VERL_DECOUPLED_K3_RS,
    VERL_DECOUPLED_K3_RS_SEQ_TIS,
    VERL_DECOUPLED_K3_RS_TOKEN_TIS,
    VERL_DECOUPLED_SEQ_IS,
    VERL_DECOUPLED_SEQ_IS_RS,
    VERL_DECOUPLED_TOKEN_ICEPOP,
    VERL_DECOUPLED_TOKEN_IS,
    VERL_DEFAULT,
)
from tracegrad.presets.trace_level import GMPO, GSPO, GSPO_TOKEN
from tracegrad.presets.trust_region import (
    CLIP_COV,
    DPPO_KL,
    DPPO_TV,
    KL_COV,
    OPSM,
)
from tracegrad.presets.weighted_gradient import (
    AIPO,
    CISPO,
    DRO,
    GLM5,
    KIMI,
    SAPO,
    TOPR,
    VESPO,
)

__all__ = [
    "A3PO",
    "AIPO",
    "ART_467",
    "BNPO",
    "CISPO",
    "CLIP_COV",
    "DAPO",
    "DAPO_DIRECT",
    "DECOUPLED_PPO",
    "DPPO_KL",
    "DPPO_TV",
    "DRO",
    "DR_GRPO",
    "DR_GRPO_DIRECT",
    "DUAL_CLIP",
    "GEO_RS",
    "GLM5",
    "GMPO",
    "GRPO",
    "GRPO_DIRECT",
    "GSPO",
    "GSPO_TOKEN",
    "ICEPOP",
    "KIMI",
    "KL_COV",
    "LUSPO",
    "M2PO",
    "MIS",
    "OAPL",
    "OPSM",
    "PRIME_RL_DEFAULT",
    "SAPO",
    "SEQ_MASK_TIS",
    "SKYRL_849",
    "SLIME_MIS",
    "TIS",
    "TOPR",
    "TOPR_POSITIVE",
    "TRL_DEFAULT",
    "VERL_BYPASS_PG_GEO_RS",
    "VERL_BYPASS_PG_GEO_RS_SEQ_TIS",
    "VERL_BYPASS_PG_GEO_RS_TOKEN_TIS",
    "VERL_BYPASS_PG_IS",
    "VERL_BYPASS_PG_TOKEN_ICEPOP",
    "VERL_BYPASS_PPO_CLIP",
    "VERL_BYPASS_PPO_CLIP_GEO_RS",
    "VERL_BYPASS_PPO_CLIP_K3_RS",
    "VERL_DECOUPLED_GEO_RS",
    "VERL_DECOUPLED_GEO_RS_SEQ_TIS",
    "VERL_DECOUPLED_GEO_RS_TOKEN_TIS",
    "VERL_DECOUPLED_K3_RS",
    "VERL_DECOUPLED_K3_RS_SEQ_TIS",
    "VERL_DECOUPLED_K3_RS_TOKEN_TIS",
    "VERL_DECOUPLED_SEQ_IS",
    "VERL_DECOUPLED_SEQ_IS_RS",
    "VERL_DECOUPLED_TOKEN_ICEPOP",
    "VERL_DECOUPLED_TOKEN_IS",
    "VERL_DEFAULT",
    "VESPO",
    "WEIGHTED_SFT",
    "find",
    "with_beta",
    "with_entropy",
    "with_kl",
]


def find(name: str) -> Objective:
    """The objective called `name` here, or the value NAME of `module:NAME`.

    Raises:
        ArgumentError: if there is none, with the nearest name; if it is not an Objective.

    >>> find("DAPO").surrogate.high
    0.28
    """
    module, _, attribute = name.rpartition(":")
    try:
        home = importlib.import_module(module) if module else importlib.import_module(__name__)
    except ImportError as error:
        raise ArgumentError(f"objective {name!r}: no module {module!r} ({error}). Write module:NAME.") from error
    value = getattr(home, attribute, None)
    if isinstance(value, Objective):
        return value
    names = [key for key, each in vars(home).items() if isinstance(each, Objective)]
    near = difflib.get_close_matches(attribute, names, 2, 0.6)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ArgumentError(f"no objective is called {name!r}.{hint} There are {', '.join(sorted(names)) or 'none'}.")
