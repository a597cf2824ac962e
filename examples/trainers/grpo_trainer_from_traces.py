"""TRL's GRPOTrainer on recorded traces: its loop, optimizer, logging and checkpoints; our weights and objective.

python examples/trainers/grpo_trainer_from_traces.py traces.jsonl model --steps 4
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import tracegrad as tg
from tracegrad.integrations.trl import FromTraces


class Trainer(FromTraces, GRPOTrainer):
    """GRPOTrainer that trains from traces."""


def train(traces, model, steps, out="out/grpo_trainer", **config):
    data = tg.align(tg.read(traces), tg.Tokenizer.from_pretrained(model))
    defaults = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "learning_rate": 2e-4}
    args = GRPOConfig(out, max_steps=steps, logging_steps=1, report_to=[], bf16=False, **(defaults | config))
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(model, dtype="float32", trust_remote_code=False),
        args,
        data,
        tg.advantage.group_mean(data.reward, data.group),
        objective=tg.presets.DAPO,
        processing_class=AutoTokenizer.from_pretrained(model, trust_remote_code=False),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("traces"), parser.add_argument("model"), parser.add_argument("--steps", type=int, default=4)
    print(train(**vars(parser.parse_args())).state.log_history)
