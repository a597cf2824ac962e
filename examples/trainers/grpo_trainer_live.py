"""TRL's GRPOTrainer with its own generation, rewards and advantages, and any objective of ours as its loss.

python examples/trainers/grpo_trainer_live.py examples/quickstart/model --steps 4
python examples/trainers/grpo_trainer_live.py MODEL --vllm    # TRL's own vLLM, whose logprobs the objective then weighs
"""

import argparse
from dataclasses import replace

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import tracegrad as tg
from tracegrad.integrations.trl import WithObjective

PROMPTS = ["How many lamps are there?", "Order 3 chairs.", "What does a desk cost?", "Is there a rug?"]
PLAYED_HERE = replace(tg.presets.DAPO, weights=())
"""Without a server there is one policy: nothing mismatches, and no logprob is recorded that could be weighed."""


class Trainer(WithObjective, GRPOTrainer):
    """GRPOTrainer with an objective."""


def short(completion_ids, **_):
    """A reward in TRL's form: the shorter the better."""
    return [-float(len(ids)) for ids in completion_ids]


def train(model, steps=4, vllm=False, out="out/grpo_trainer_live", **config):
    defaults = {"per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 32}
    defaults |= {"learning_rate": 2e-4, "num_iterations": 2, "logging_steps": 1, "report_to": [], "bf16": False}
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(model, dtype="float32", trust_remote_code=False),
        short,
        args=GRPOConfig(out, max_steps=steps, use_vllm=vllm, **(defaults | config)),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=AutoTokenizer.from_pretrained(model, trust_remote_code=False),
        objective=tg.presets.DAPO if vllm else PLAYED_HERE,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model"), parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--vllm", action="store_true")
    print(train(**vars(parser.parse_args())).state.log_history)
