"""LoRA by peft: adapters on a model, and the model without them as its own reference.

peft is imported on use. Called by the loop and the command line.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from tracegrad.errors import ArgumentError


def with_adapters(model: Any, rank: int, *, without: Sequence[nn.Module] = ()) -> Any:
    """A peft model with LoRA on all linear layers but the head: alpha = 2 * rank, no dropout; made in place.

    Args:
        model: of transformers.
        rank: of each adapter.
        without: parts of the model that get none.
    """
    peft = imported_peft("train.lora_rank")
    if has_adapters(model):
        raise ArgumentError(
            f"train.lora_rank is {rank}, and the model has adapters already. Two would stand on a layer. Leave it "
            "out to go on with them, or merge them first: tracegrad merge CHECKPOINT --out DIR."
        )
    kept = {id(module) for part in without for module in part.modules()}
    names = [name for name, module in model.named_modules() if id(module) in kept and isinstance(module, nn.Linear)]
    how = {"r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    lora = peft.LoraConfig(**how, **({"exclude_modules": names} if names else {}))
    adapted = peft.get_peft_model(model, lora)
    name_base(adapted)
    return adapted


def name_base(model: Any) -> None:
    """Lets adapters name the folder of their model so that it is found from any working directory."""
    folder = model.name_or_path
    if folder and Path(folder).is_dir():
        model.peft_config[model.active_adapter].base_model_name_or_path = str(Path(folder).resolve())


def imported_peft(what: str) -> Any:
    """peft, or an error that says what needs it."""
    try:
        import peft
    except ImportError as error:
        raise ArgumentError(
            f"{what} needs peft, which is not installed. Without it there are no adapters. "
            "pip install 'tracegrad[lora]'"
        ) from error
    return peft


def has_adapters(model: nn.Module) -> bool:
    """Whether peft put adapters on the model."""
    return bool(_adapted(model))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model without its adapters while entered; which parameters are trained does not change.

    peft's own switch turns their `requires_grad` off and on, which FSDP2 reads once, when it first gathers a layer.
    """
    before = [(module, module._disable_adapters) for module in _adapted(model)]
    for module, _ in before:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module, was in before:
            module._disable_adapters = was


def _adapted(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "_disable_adapters")]
