"""Traces as ART's TrajectoryGroups and back, and the value of the recorded logprobs for a policy, by ART's metrics.

python examples/trainers/trajectory_groups_and_traces.py traces.jsonl model
"""

import argparse

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import tracegrad as tg
from tracegrad.integrations import art


def policy_logprobs(data, model):
    """[M] of the policy about to be trained. Before ART is imported: it patches another transformers than this one."""
    model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
    (step,) = tg.pack(data, np.zeros(data.traces), tokens_per_row=4096)
    found = np.empty(len(step), np.float32)
    for batch in step.batches:
        with torch.no_grad():
            found[batch.term] = tg.model.logprobs(model, batch.to("cpu")).numpy()
    return found


def run(traces, model, limit=64):
    tokenizer = tg.Tokenizer.from_pretrained(model)
    recorded = tg.read(traces, limit=limit)
    data = tg.align(recorded, tokenizer)
    logprobs = policy_logprobs(data, model)
    groups = art.to_groups(recorded, data)  # for ART's backends: each Choice has the ids that were sampled
    data = tg.align(art.to_traces(groups), tokenizer)  # from ART's rollouts: groups, rewards and logprobs as they were
    advantages = tg.advantage.group_mean(data.reward, data.group, scale="std", ddof=0, eps=1e-6)
    owner = np.repeat(data.trace, np.diff(data.cu_seqlens))[data.terms]
    return groups, art.metrics(data, logprobs, advantages[owner])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("traces"), parser.add_argument("model"), parser.add_argument("--limit", type=int, default=64)
    print(run(**vars(parser.parse_args()))[1])
