"""A plain transformers.Trainer on recorded traces, with our loss for its `compute_loss_func`.

python examples/trainers/plain_trainer_from_traces.py traces.jsonl model --steps 4
"""

import argparse

from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import tracegrad as tg
from tracegrad.integrations.transformers import TraceLoss


def train(traces, model, steps, out="out/plain_trainer", **config):
    data = tg.align(tg.read(traces), tg.Tokenizer.from_pretrained(model))
    loss = TraceLoss(data, tg.advantage.group_mean(data.reward, data.group), tg.presets.DAPO_DIRECT)
    defaults = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "learning_rate": 2e-4}
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(model, dtype="float32", trust_remote_code=False),
        TrainingArguments(out, max_steps=steps, logging_steps=1, report_to=[], **(defaults | config)),
        train_dataset=loss.dataset,
        data_collator=loss.collate,
        compute_loss_func=loss,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("traces"), parser.add_argument("model"), parser.add_argument("--steps", type=int, default=4)
    print(train(**vars(parser.parse_args())).state.log_history)
