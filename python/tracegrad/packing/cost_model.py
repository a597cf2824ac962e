"""Predict the FLOP of a forward and backward pass from the sizes of a model (`ModelShape`).

The predictions decide whether prefixes are shared and how ranks are balanced. They need neither torch nor a model.
"""

from dataclasses import dataclass, fields
from typing import Any

from tracegrad.errors import ArgumentError

MIN_SHARING_GAIN = 1.05
"""Prefixes are shared if the predicted FLOP ratio is above this."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a causal transformer from which FLOP are counted. The defaults are those of Qwen3-4B.

    A row costs token_flop * tokens + pair_flop * (key, query) pairs + term_flop * terms. A branch of n tokens has
    n (n + 1) / 2 pairs, one that shares its first l tokens with another n (n + 1) / 2 - l (l + 1) / 2 more.

    Args:
        hidden: H.
        layers: number of layers, each with attention and an MLP.
        intermediate: width of the gated MLP; with experts, the total width of the experts of one token.
        heads, kv_heads, head_dim: of attention.
        vocab: V.
        tower_layers, tower_hidden, tower_intermediate, tower_patches: of the vision tower; tower_patches is the number
            of patches per image feature. 0 if there is no tower.

    Source: matrix products count 2 FLOP forward and 4 backward for each weight (Kaplan et al. 2020, arXiv 2001.08361,
    section 2.1); attention 4 * heads * head_dim a pair forward and 2.5 times that backward, which computes the scores
    again (Dao 2023, arXiv 2307.08691, section 4.1). Sliding-window layers are counted as full attention.

    >>> shape = ModelShape()
    >>> f"{shape.token_flop:.3g} {shape.pair_flop:.3g} {shape.term_flop:.3g}"
    '2.18e+10 2.06e+06 2.33e+09'
    """

    hidden: int = 2560
    layers: int = 36
    intermediate: int = 9728
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151936
    tower_layers: int = 0
    tower_hidden: int = 0
    tower_intermediate: int = 0
    tower_patches: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name.startswith("tower_") else 1
            if not isinstance(value, int) or value < least:
                raise ArgumentError(
                    f"TG-PACK-005: ModelShape.{field.name} is {value!r}. It must be an integer of at least {least}."
                )

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """Read the shape from a transformers config.

        Raises:
            ArgumentError: if the config lacks one of the sizes.
        """
        tower = _tower(getattr(config, "vision_config", None), config)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        heads = _required_size(config, "num_attention_heads")
        hidden = _required_size(config, "hidden_size")
        experts = getattr(config, "num_experts_per_tok", None)
        width = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
        return cls(
            hidden=hidden,
            layers=_required_size(config, "num_hidden_layers"),
            intermediate=(width or 4 * hidden) * (experts or 1),
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or hidden // heads,
            vocab=_required_size(config, "vocab_size"),
            **tower,
        )

    @classmethod
    def try_of(cls, config: Any) -> "ModelShape | None":
        """Read the shape as `of` does; return None if the config lacks one of the sizes."""
        try:
            return cls.of(config)
        except ArgumentError:
            return None

    @property
    def token_flop(self) -> float:
        """FLOP of one token in the linear layers of the body, forward and backward."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return 6.0 * self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def pair_flop(self) -> float:
        """FLOP of one key that one query sees, over all layers and heads, forward and backward."""
        return 3.5 * 4.0 * self.layers * self.heads * self.head_dim

    @property
    def term_flop(self) -> float:
        """FLOP of one trained token in the head, forward and backward."""
        return 6.0 * self.hidden * self.vocab

    @property
    def feature_flop(self) -> float:
        """FLOP of one image feature in the tower, forward only, because the tower is frozen by default.

        Only linear layers count: 4 h h of attention and 2 h i of an MLP, 2 FLOP per weight and patch.
        """
        weights = self.tower_hidden * (4 * self.tower_hidden + 2 * self.tower_intermediate)
        return 2.0 * self.tower_patches * self.tower_layers * weights


def _tower(vision: Any, config: Any) -> dict[str, int]:
    """Return the tower fields of `ModelShape`; empty if the config has no vision config with these sizes."""
    layers = getattr(vision, "depth", None) or getattr(vision, "num_hidden_layers", None)
    hidden, width = getattr(vision, "hidden_size", None), getattr(vision, "intermediate_size", None)
    if not (layers and hidden):
        return {}
    patches_per_side = getattr(vision, "spatial_merge_size", None) or getattr(config, "scale_factor", None) or 1
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "intermediate": width or 4 * hidden,
        "patches": int(patches_per_side) ** 2,
    }
    return {f"tower_{name}": int(size) for name, size in sizes.items()}


def _required_size(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if value is None:
        raise ArgumentError(
            f"TG-PACK-006: {type(config).__name__} has no {name}, so the cost of a pass cannot be computed. Pass "
            f"ModelShape(...) by hand."
        )
    return int(value)
