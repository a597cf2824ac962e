"""Tokens a second of forward and backward on CPU, by plan: `python benches/forward.py [--threads 2] [--repeat 5]`.

The model of the example's size (hidden 128, 3 layers, vocabulary 515), 128 branches of 150 to 250 tokens, half of them
trained. Seconds are of CPU time over all threads, the best of the repeats, so that a busy machine disturbs them least.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tracegrad import model as policy
from tracegrad.alignment.sequences import Sequences
from tracegrad.model.lm_head import token_logprobs
from tracegrad.packing import Batch, pack


def sequences(shared: int) -> Sequences:
    """128 branches that start with the same `shared` tokens."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(150, 251, 128)
    cu = np.r_[0, lengths.cumsum()]
    ids = rng.integers(0, 515, cu[-1])
    place = np.arange(cu[-1]) - np.repeat(cu[:-1], lengths)
    ids[place < shared] = place[place < shared]
    trainable = place > np.repeat(lengths, lengths) // 2
    return Sequences.from_arrays(ids, cu, np.where(trainable, -1.0, np.nan), trainable)


def one_batch(model: torch.nn.Module, batch: Batch, plan: policy.Plan) -> None:
    """Forward and backward of the sum of a row's logprobs."""
    head = policy.head_of(model)
    hidden = policy.hidden_states(model, batch, plan)[batch.read]
    token_logprobs(hidden, head.weight, batch.target)[0].sum().backward()


def measure(model: torch.nn.Module, s: Sequences, budget: int, plan: policy.Plan, repeat: int) -> float:
    """Tokens of the pack per second of CPU time."""
    [step] = pack(s, np.ones(s.traces), tokens_per_row=budget)
    best = float("inf")
    for _ in range(repeat):
        model.zero_grad()
        began = time.process_time()
        for batch in step.batches:
            one_batch(model, batch.to("cpu"), plan)
        best = min(best, time.process_time() - began)
    return s.tokens / best


def main() -> None:
    """Prints a table of plans and budgets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    told = parser.parse_args()
    torch.set_num_threads(told.threads)
    torch.manual_seed(0)
    sizes = {"vocab_size": 515, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))
    print(f"{'shared prefix':>13} {'row':>6} {'plan':>6} {'tokens per CPU second':>22}")
    for shared in (0, 100):
        for budget, plan in ((256, "stack"), (512, "mask"), (4096, "mask"), (4096, "stack"), (32768, "stack")):
            speed = measure(model, sequences(shared), budget, plan, told.repeat)
            print(f"{shared:13,} {budget:6,} {plan:>6} {speed:22,.0f}", flush=True)


if __name__ == "__main__":
    main()
