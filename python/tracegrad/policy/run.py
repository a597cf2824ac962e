"""The ways to run a model over a packed row, each as it is asked for.

Which of them gives a model's own numbers is the business of `roads`, which and `forward` call this.
"""

from typing import Any, Literal

from torch import Tensor, nn

from tracegrad.batch import Batch
from tracegrad.kernels.stack import stacked
from tracegrad.policy.blocks import own_blocks
from tracegrad.policy.masks import block_mask, dense_mask
from tracegrad.policy.model import attention_of, body_of, config_of

Plan = Literal["flex", "stack", "alone", "mask"]


def run(model: nn.Module, batch: Batch, plan: Plan, *, share_prefix: bool = False) -> Tensor:
    """Hidden states of a row, [T, H] in the order of `batch.ids`; zeros in branches where nothing is read."""
    if plan in ("stack", "alone"):
        how = {"share_prefix": share_prefix, "padded": plan == "stack"}
        return stacked(body_of(model), batch.ids, batch.positions, batch.read, **how)

    if plan == "flex":
        own_blocks(model)

    def build(window: int | None) -> Any:
        return block_mask(batch, window=window) if plan == "flex" else dense_mask(batch, window=window, dtype=additive)

    additive = None if attention_of(model) == "sdpa" else next(model.parameters()).dtype
    out = body_of(model)(
        input_ids=batch.ids[None],
        attention_mask=_masks_by_kind(model, build),
        position_ids=batch.positions[None],
        use_cache=False,
    )
    return out.last_hidden_state[0]


def _masks_by_kind(model: nn.Module, build: Any) -> Any:
    """One mask, or one for each kind of layer, as the model's forward takes it."""
    config = config_of(model)
    kinds, window = set(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
    if not kinds:
        return build(window)
    if kinds == {"full_attention"}:
        return build(None)
    return _Masks(full_attention=build(None), sliding_attention=build(window))


class _Masks(dict[str, Any]):
    """A mask for each kind of layer that attends, as transformers hands them to its layers."""

    def __missing__(self, kind: str) -> Any:
        raise LookupError(f"no mask keeps branches apart in layers of {kind}")
