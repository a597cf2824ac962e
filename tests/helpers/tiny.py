"""A model of 5,000 parameters and traces that it sampled itself, for tests that train."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers

from tracegrad.alignment.sequences import Sequences
from tracegrad.trainer.off_policy_eval import choose_held_out

VOCABULARY = 48
PROMPT = 4
ONE_STEP: dict[str, Any] = {
    "max_steps": 1,
    "max_grad_norm": 0.0,
    "report_to": [],
    "save_strategy": "no",
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "logging_steps": 1,
}
"""Arguments of a trainer of transformers or TRL: one step on the CPU, nothing written."""


def tiny_model(seed: int = 0, **changes: Any) -> Any:
    """A Qwen3 with random weights."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    config = transformers.Qwen3Config(**{"vocab_size": VOCABULARY, **shape, **heads, **changes})
    return transformers.Qwen3ForCausalLM(config).eval()


def sampled(model: Any, groups: int = 24, size: int = 4, seed: int = 0) -> Sequences:
    """Traces of 3 to 8 sampled tokens; the reward is the share of tokens below 24, so there is something to learn."""
    rng = np.random.default_rng(seed)
    prompts = np.repeat(rng.integers(0, VOCABULARY, (groups, PROMPT)), size, axis=0)
    lengths = rng.integers(3, 9, groups * size)
    ids = torch.from_numpy(prompts)
    generator = torch.Generator().manual_seed(seed)
    logprobs = []
    with torch.no_grad():
        for _ in range(lengths.max()):
            scores = model(ids).logits[:, -1].float().log_softmax(-1)
            drawn = torch.multinomial(scores.exp(), 1, generator=generator)
            logprobs.append(scores.gather(1, drawn))
            ids = torch.cat([ids, drawn], 1)
    known = np.concatenate([np.full((len(ids), PROMPT), np.nan), torch.cat(logprobs, 1).numpy()], 1)
    rows = [(ids[i, : PROMPT + n].numpy(), known[i, : PROMPT + n]) for i, n in enumerate(lengths)]
    flat = np.concatenate([row for row, _ in rows])
    trainable = np.concatenate([np.arange(len(row)) >= PROMPT for row, _ in rows])
    return Sequences.from_arrays(
        flat,
        np.concatenate([[0], np.cumsum([len(row) for row, _ in rows])]),
        np.concatenate([lp for _, lp in rows]),
        trainable,
        group=np.repeat(np.arange(groups), size),
        rewards=np.array([(row[PROMPT:] < 24).mean() for row, _ in rows], np.float32),
    )


def spoilt(share: float = 0.3) -> Sequences:
    """Traces of which the held-out ones are rewarded the other way: what trains the others spoils these."""
    found = sampled(tiny_model())
    held = choose_held_out(found.group, share, 0)[:, None]
    return replace(found, rewards=np.where(held, 1 - found.rewards, found.rewards))
