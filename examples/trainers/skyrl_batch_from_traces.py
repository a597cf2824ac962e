"""Recorded traces in SkyRL's training batch: its advantages and denominators, our objective as its policy loss.

python examples/trainers/skyrl_batch_from_traces.py traces.jsonl model --steps 4
"""

import argparse

import numpy as np
import torch
from skyrl.backends.skyrl_train.utils import ppo_utils
from skyrl.train.config.config import AlgorithmConfig
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from transformers import AutoModelForCausalLM, AutoTokenizer

import tracegrad as tg
from tracegrad.integrations import skyrl


def generated(data, rows):
    """Branches as SkyRL's generators return them: prompt, response, rewards by token, loss mask, logprobs."""
    for row in rows:
        here = slice(*data.cu_seqlens[row : row + 2])
        first = int(np.argmax(data.trainable[here])) if data.trainable[here].any() else 1
        ids, said = data.ids[here].tolist(), np.nan_to_num(data.rollout_logprobs[here][first:], nan=-9999.0)  # unknown
        rewards = [0.0] * (len(ids) - first - 1) + [float(data.reward[data.trace[row]])]
        yield ids[:first], ids[first:], rewards, data.trainable[here][first:].astype(int).tolist(), said.tolist()


def token_logprobs(model, ids, attention, width, support):
    logits = model(input_ids=ids, attention_mask=attention).logits[:, -width - 1 : -1]
    return tg.model.logprobs_from_logits(logits, ids[:, -width:], support=support)[0]


def train(traces, model, steps, rows_per_step=32, lr=2e-4):
    data, tokenizer = (
        tg.align(tg.read(traces), tg.Tokenizer.from_pretrained(model)),
        AutoTokenizer.from_pretrained(model, trust_remote_code=False),
    )
    model, log = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    skyrl.register(tg.presets.SKYRL_849)  # in SkyRL's own trainer: trainer.algorithm.policy_loss_type=tracegrad
    config = AlgorithmConfig(policy_loss_type="tracegrad", loss_reduction="token_mean")
    for step in range(steps):
        rows = np.arange(step * rows_per_step, (step + 1) * rows_per_step) % data.branches
        batch = convert_prompts_responses_to_batch_tensors(tokenizer, *zip(*generated(data, rows), strict=True))
        ids, attention, _, rewards, mask, rollout, _ = batch
        width, uid = mask.shape[1], data.group[data.trace[rows]]
        advantages, _ = ppo_utils.compute_advantages_and_returns(rewards, mask, uid, config.advantage_estimator, config)
        scaled = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
            advantages, mask, config.loss_reduction, rows_per_step, config.max_seq_len
        )
        # the ids among which the sampler drew each token (top_p, top_k, min_p), where the record shows them
        tokens = np.full(ids.shape, -1)
        tokens[attention.numpy() > 0] = np.concatenate([np.arange(*data.cu_seqlens[row : row + 2]) for row in rows])
        support = tg.model.support_of_tokens(data, tokens[:, -width:])
        with torch.no_grad():
            old = token_logprobs(model, ids, attention, width, support)
        policy_loss = ppo_utils.PolicyLossRegistry.get(config.policy_loss_type)
        now = token_logprobs(model, ids, attention, width, support)
        loss, metrics = policy_loss(now, old, scaled, config=config, loss_mask=mask, rollout_logprobs=rollout)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append(metrics | {"loss": loss.item()})
    return model, log


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("traces"), parser.add_argument("model"), parser.add_argument("--steps", type=int, default=4)
    print(train(**vars(parser.parse_args()))[1])
