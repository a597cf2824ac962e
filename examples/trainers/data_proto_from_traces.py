"""Recorded traces in verl's DataProto: our weights and rejections correct it, our objective is its policy loss.

python examples/trainers/data_proto_from_traces.py traces.jsonl model --steps 4
"""

import argparse

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import get_policy_loss_fn

import tracegrad as tg
from tracegrad.integrations import verl

OBJECTIVE = tg.recipes.find("VERL_DECOUPLED_K3_RS_TOKEN_TIS").objective


def rows_of(values, data, rows, fill):
    parts = [torch.from_numpy(values[data.cu_seqlens[row] : data.cu_seqlens[row + 1]]) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=fill)


def token_logprobs(model, ids, attention, support):
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1]
    logprobs, _ = tg.model.logprobs_from_logits(logits, ids[:, 1:], support=support)
    return torch.nn.functional.pad(logprobs, (1, 0))


def train(traces, model, steps, rows_per_step=32, lr=2e-4):
    data = tg.align(tg.read(traces), tg.Tokenizer.from_pretrained(model))
    model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    advantages = tg.advantage.group_mean(data.reward, data.group)
    verl.register(OBJECTIVE)  # in verl's own trainer: actor.policy_loss.loss_mode=tracegrad
    policy_loss, log = get_policy_loss_fn("tracegrad"), []
    for step in range(steps):
        rows = np.arange(step * rows_per_step, (step + 1) * rows_per_step) % data.branches
        ids = rows_of(data.ids, data, rows, 0).long()
        attention = rows_of(np.ones_like(data.ids), data, rows, 0)
        # the ids among which the sampler drew each token (top_p, top_k, min_p), where the record shows them
        support = tg.model.support_of_tokens(data, rows_of(np.arange(data.tokens), data, rows, -1)[:, 1:])
        with torch.no_grad():
            tensors = {"old_log_probs": token_logprobs(model, ids, attention, support)}
        tensors["rollout_log_probs"] = rows_of(data.rollout_logprobs, data, rows, float("nan"))
        tensors["response_mask"] = rows_of(data.trainable, data, rows, False).long()
        tensors["advantages"] = torch.from_numpy(advantages[data.trace[rows]])[:, None].expand_as(ids)
        uid = np.array(data.group_names, object)[data.group[data.trace[rows]]]
        batch = DataProto.from_dict(tensors=tensors, non_tensors={"uid": uid})
        batch, metrics = verl.correct_batch(batch, OBJECTIVE)
        loss, figures = policy_loss(
            old_log_prob=batch.batch["old_log_probs"], log_prob=token_logprobs(model, ids, attention, support),
            advantages=batch.batch["advantages"], response_mask=batch.batch["response_mask"],
            rollout_is_weights=batch.batch["rollout_is_weights"], loss_agg_mode="token-mean",
        )  # fmt: skip
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append(metrics | figures | {"loss": loss.item()})
    return model, log


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("traces"), parser.add_argument("model"), parser.add_argument("--steps", type=int, default=4)
    print(train(**vars(parser.parse_args()))[1])
