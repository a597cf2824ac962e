"""TRL's own trainers on the tensors of `models.Traces`: GRPOTrainer in full, and its asynchronous trainer's tries.

The traces replace their generations; everything else is TRL's installed code.
"""

from __future__ import annotations

import inspect
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from models import Place, Traces, tree_of_trl
from tracegrad import model as policy


def tensors(traces: Traces, device: str) -> dict[str, torch.Tensor]:
    """All traces as GRPOTrainer's generation step leaves them: padded, prompts left, completions right."""
    flat = [c for group in traces.completions for c in group]
    logps = [r for group in traces.rollout for r in group]
    width = max(map(len, flat))
    ids, mask = torch.zeros(2, len(flat), width, dtype=torch.long)
    old = torch.zeros(len(flat), width)
    for row, (completion, known) in enumerate(zip(flat, logps, strict=True)):
        ids[row, : len(completion)] = torch.from_numpy(completion)
        mask[row, : len(completion)] = 1
        old[row, : len(completion)] = torch.from_numpy(known)
    size = len(traces.completions[0])
    prompt = torch.stack([torch.from_numpy(p) for p in traces.prompts]).repeat_interleave(size, 0)
    found = {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.from_numpy(traces.advantages.reshape(-1)),
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }
    return {name: value.to(device) for name, value in found.items()}


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=known, pad_token="<pad>", eos_token="<eos>")


def trainer_of(
    model: Any, traces: Traces, place: Place, micro: int, steps: int, adapters: Any = None, **config: Any
) -> Any:
    """GRPOTrainer over these traces, `micro` of them in a pass, one optimizer step for all; `adapters` for peft."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    given = tensors(traces, place.device)

    class Recorded(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            return dict(given)

    rows, size = traces.advantages.size, traces.advantages.shape[1]
    known = {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": rows // micro,
        "num_generations": size,
        "max_steps": steps,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "beta": 0.0,
        "loss_type": "dapo",
        "gradient_checkpointing": False,
        "bf16": place.as_cuda,
        "use_cpu": not place.cuda,
        "optim": "adamw_torch_fused" if place.cuda else "adamw_torch",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    args = GRPOConfig(output_dir=tempfile.mkdtemp(), **{**known, **config})
    prompts = Dataset.from_list([{"prompt": "a"} for _ in range(rows)])
    reward = lambda completions, **_: [0.0] * len(completions)  # noqa: E731
    return Recorded(model, reward, args, prompts, processing_class=_tokenizer(), peft_config=adapters)


def train_ms(trainer: Any, place: Place) -> tuple[list[float], list[float]]:
    """Milliseconds of each optimizer step of `trainer.train()`, and the norms of its gradients."""
    from transformers import TrainerCallback
    from transformers.trainer_callback import PrinterCallback

    began, taken = [0.0], []

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if place.cuda:
                torch.cuda.synchronize()
            began[0] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if place.cuda:
                torch.cuda.synchronize()
            taken.append(1000 * (time.perf_counter() - began[0]))

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Watch())
    trainer.train()
    return taken, [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]


def trie_rows(traces: Traces, budget: int) -> list[Any]:
    """The traces as TRL's planner places them: a row that has their group, else a new one, within the budget."""
    from trl.experimental.async_grpo.packing import TreeRow

    rows: list[Any] = []
    for group, prompt in enumerate(traces.prompts):
        for member, completion in enumerate(traces.completions[group]):
            ids = torch.cat([torch.from_numpy(prompt), torch.from_numpy(completion)])
            trained = torch.arange(len(ids)) >= len(prompt)
            old = torch.zeros(len(ids))
            old[len(prompt) :] = torch.from_numpy(traces.rollout[group][member])
            sample = {"input_ids": ids, "completion_mask": trained, "old_log_probs": old, "group_id": group}
            sample["advantage"] = float(traces.advantages[group, member])
            open_ = [row for row in rows if row.fits(sample, budget)]
            if not open_:
                rows.append(TreeRow())
                open_ = rows[-1:]
            max(open_, key=lambda row: group in row.groups).add(sample)
    return rows


def async_passes(model: Any, traces: Traces, budget: int, place: Place, kernel: str) -> Callable[[], None]:
    """Forward and backward of the same step by AsyncGRPOTrainer's `compute_loss` over its tries.

    Args:
        model: gets TRL's fused head.
        kernel: "flex" (or "sdpa" on a CPU): attention as ours, under the mask of TRL's own layout; "varlen": TRL's own
            attention, keys and values gathered along each path, by torch's varlen_attn in place of the hub's kernel.
    """
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
    packed = [row.pack() for row in trie_rows(traces, budget)]
    terms = sum(len(each["token_index"]) for each in packed)
    given = []
    for each in packed:
        inputs = {name: value.unsqueeze(0).to(place.device) for name, value in each.items()}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        for name, value in (("global_n_tokens", terms), ("global_n_forward_tokens", 1), ("mean_seq_len", 1)):
            inputs[name] = torch.full((1,), float(value), device=place.device)
        batch = tree_of_trl(each, place.device)
        mask = None
        if kernel != "varlen":
            mask = policy.block_mask(batch) if kernel == "flex" else policy.dense_mask(batch)
        given.append((inputs, mask))
    one = SimpleNamespace(num_processes=1, reduce=lambda value, reduction: value, gather=lambda value: value)
    trainer = SimpleNamespace(accelerator=one, epsilon_low=0.2, epsilon_high=0.2, aux_loss_enabled=False)
    trainer.current_gradient_accumulation_steps, trainer._metrics = 1, {"train": defaultdict(list)}
    for name in ("forward_tokens", "trained_tokens", "seq_len_weighted", "samples", "forward_s"):
        setattr(trainer, f"_step_{name}", 0.0)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        for inputs, mask in given:

            def forward(mask: Any = mask, **known: Any) -> Any:
                tree = {} if mask is None else {"attention_mask": mask}
                kept = {k: v for k, v in known.items() if mask is None or not k.startswith("tree_")}
                return model(**kept, **tree)

            AsyncGRPOTrainer.compute_loss(trainer, forward, inputs).backward()

    return run


@contextmanager
def varlen_for_the_hub() -> Any:
    """TRL's tree attention with torch's own flash attention, as the hub's kernel is not here."""
    from torch.nn.attention.varlen import varlen_attn
    from trl.experimental.async_grpo import packing

    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch before 2.12 wants equal heads

    def attend(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, **known: Any) -> Any:
        more = {"enable_gqa": True} if grouped else {}
        if not grouped:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scale = known["softmax_scale"]
        return varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=(-1, 0), **more)

    packing.register_tree_attention()
    theirs, packing._flash_attn = packing._flash_attn, lambda: SimpleNamespace(flash_attn_varlen_func=attend)
    try:
        yield packing.TREE_ATTENTION
    finally:
        packing._flash_attn = theirs
