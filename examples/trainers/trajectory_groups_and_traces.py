"""ART's TrajectoryGroups as traces: aligned, measured by pull request 467's metrics, and back with exact token ids.

python examples/trainers/trajectory_groups_and_traces.py traces.jsonl model
"""

import argparse

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import tracegrad as tg
from tracegrad.integrations import art, art_groups


def measure(groups, model):
    """Groups from ART's rollouts; the policy about to be trained; what the recorded logprobs are worth to it."""
    tokenizer = tg.Tokenizer.from_pretrained(model)
    model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    traces = art.to_traces(groups)
    data = tg.align(traces, tokenizer)
    advantages = tg.advantage.group_mean(data.reward, data.group, scale="std", ddof=0, eps=1e-6)
    (step,) = tg.pack(data, advantages, token_budget=4096)
    logprobs = np.empty(len(step), np.float32)
    for batch in step.batches:
        with torch.no_grad():
            logprobs[batch.term] = tg.policy.logprobs(model, batch.to("cpu")).numpy()
    found = art.metrics(data, logprobs, step.advantages)
    return art_groups.to_groups(traces, data), found  # each Choice now has the ids that were sampled


def run(traces, model, limit=64):
    recorded = tg.read(traces, limit=limit)
    groups = art_groups.to_groups(recorded, tg.align(recorded, tg.Tokenizer.from_pretrained(model)))
    return measure(groups, model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("traces"), parser.add_argument("model"), parser.add_argument("--limit", type=int, default=64)
    print(run(**vars(parser.parse_args()))[1])
