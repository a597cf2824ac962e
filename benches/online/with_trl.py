"""The clerk trained by TRL's GRPOTrainer: its generation by transformers, its tools, its loop. An arm of `peer.py`.

Prompts, tools, rewards, groups and updates come from `with_ours.py`. The model reads the same text: TRL makes schemas
from docstrings, so the template writes the task's own in their place.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import machine
import rollout
import task

# A completion of TRL is all turns and the tool results between them; a turn is truncated by `max_new_tokens`.
LONGEST = 512


class Shop:
    """The tools of one customer, as `environment_factory` needs them."""

    def reset(self, **row: Any) -> None:
        """Another customer."""
        self._prompt = prompt_of(row)

    def price(self, item: str) -> str:
        """Price of one item in €.

        Args:
            item: its name.
        """
        return task.execute(self._prompt, "price", {"item": item})

    def stock(self, item: str) -> str:
        """How many of an item are left.

        Args:
            item: its name.
        """
        return task.execute(self._prompt, "stock", {"item": item})


def prompt_of(row: dict[str, Any]) -> task.Prompt:
    """The customer of a row of the data set."""
    return task.Prompt(**{name: row[name] for name in ("kind", "name", "item", "quantity", "offer", "text")})


def main() -> None:
    """Trains, and writes CPU seconds and the model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=4e-4)
    options = parser.parse_args()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    warnings.filterwarnings("ignore")
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    torch.set_num_threads(1)
    model, tokenizer = rollout.load(machine.MODEL)
    written = "".join("\\n" + json.dumps(tool, ensure_ascii=False) for tool in task.TOOLS)
    loop = "{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}"
    assert loop in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(loop, "{{ '" + written + "' }}")
    tokenizer.response_template = qwen3_template

    def correct(completions: list[list[dict]], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        prompts = [prompt_of(row) for row in rows]
        whole = [ids[-1] == tokenizer.eos_token_id for ids in completion_ids]
        return [
            task.check(prompt, [*prompt.messages(), *said]) if ended else 0.0
            for prompt, said, ended in zip(prompts, completions, whole, strict=True)
        ]

    def reward(prompts: Any, completions: Any, completion_ids: Any, **told: Any) -> list[float]:
        names = ("kind", "name", "item", "quantity", "offer", "text")
        return correct(completions, completion_ids, **{name: told[name] for name in names})

    prompts = itertools.islice(task.prompts("traces", options.seed), 16 * options.steps)
    config = GRPOConfig(
        str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=128,
        num_generations=8,
        max_completion_length=LONGEST,
        generation_kwargs={"max_new_tokens": rollout.MAX_NEW_TOKENS},
        max_tool_calling_iterations=rollout.MAX_TURNS - 1,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        epsilon_high=0.28,
        shuffle_dataset=False,
        bf16=False,
        use_cpu=True,
        seed=options.seed,
        logging_steps=1,
        save_strategy="no",
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model,
        [reward],
        config,
        Dataset.from_list([{"prompt": prompt.messages(), **vars(prompt)} for prompt in prompts]),
        processing_class=tokenizer,
        environment_factory=Shop,
    )
    cpu, wall = time.process_time(), time.perf_counter()
    trainer.train()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    trainer.model.save_pretrained(options.out / "model")
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    found = {"trainer_s": cpu, "server_s": 0.0, "wall_s": wall, "rewards": rewards}
    (options.out / "found.json").write_text(json.dumps(found))
    (options.out / "history.json").write_text(json.dumps(trainer.state.log_history, indent=1))


if __name__ == "__main__":
    main()
