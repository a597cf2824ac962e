"""A plain torch loop that uses only tokens, weights and loss of tracegrad.

    python examples/in_your_trainer.py traces.jsonl model --steps 4
Padded [B, S] tensors, as any trainer has them; loop, optimizer and forward pass are your own.
"""

import argparse

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import tracegrad as tg


def padded(values, cu_seqlens, rows, fill):
    """Branches `rows` of a per-token array as [B, S]."""
    tensors = [torch.from_numpy(values[cu_seqlens[row] : cu_seqlens[row + 1]]) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill)


def token_logprobs(model, ids, attention, support):
    """[B, S]: the logprob of each token among those the sampler could draw; the first has none and gets 0."""
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1]
    return torch.nn.functional.pad(tg.model.logprobs_from_logits(logits, ids[:, 1:], support=support)[0], (1, 0))


def train(traces, model, steps, rows_per_step=64, lr=2e-4):
    data = tg.align(tg.read(traces), tg.Tokenizer.from_pretrained(model))
    model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    advantages = torch.from_numpy(tg.advantage.group_mean(data.reward, data.group))
    objective, losses = tg.presets.DAPO, []
    for step in range(steps):
        rows = np.arange(step * rows_per_step, (step + 1) * rows_per_step) % data.branches
        ids = padded(data.ids, data.cu_seqlens, rows, 0).long()
        mask = padded(data.trainable, data.cu_seqlens, rows, False)
        rollout = padded(data.rollout_logprobs, data.cu_seqlens, rows, float("nan"))
        attention = padded(np.ones_like(data.ids), data.cu_seqlens, rows, 0)
        support = tg.model.support_of_tokens(data, padded(np.arange(data.tokens), data.cu_seqlens, rows, -1)[:, 1:])
        with torch.no_grad():
            old = token_logprobs(model, ids, attention, support)
        trace = torch.from_numpy(data.trace[rows])
        fixed = tg.correct(old, rollout, mask=mask, trace=trace, weights=objective.weights, reduce=objective.reduce)
        terms = tg.objective.Terms(
            advantages=advantages[trace][:, None].expand_as(old),
            old=old, weight=fixed.weight, keep=fixed.keep, scale=fixed.scale,
        )  # fmt: skip
        loss = objective(token_logprobs(model, ids, attention, support), None, terms).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("traces"), parser.add_argument("model"), parser.add_argument("--steps", type=int, default=4)
    print(train(**vars(parser.parse_args()))[1])
