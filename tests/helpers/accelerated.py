"""A transformers.Trainer on recorded traces as a user would launch it: run by test_accelerated.py, also by accelerate.

`accelerated.py OUT` leaves the parameters that it began with in OUT/start.pt and those it came to in OUT/PROCESSES.pt.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import torch
from transformers import Trainer, TrainingArguments

import tracegrad as tg
from tiny import sampled, tiny_model
from tracegrad.integrations.transformers import TraceLoss


def vector(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def main(out: Path) -> None:
    torch.set_num_threads(1)
    data, model = sampled(tiny_model(), groups=8), tiny_model()
    loss = TraceLoss(data, tg.advantage.group_mean(data.reward, data.group), tg.presets.DAPO_DIRECT)
    told = {
        "max_steps": 3,
        "learning_rate": 1e-2,
        "max_grad_norm": 1.0,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
    }
    told |= {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    arguments = TrainingArguments(str(out / "trainer"), gradient_accumulation_steps=2, **told)
    arguments.per_device_train_batch_size = 8 // arguments.world_size
    start = vector(model).clone()
    given = {"train_dataset": loss.dataset, "data_collator": loss.collate, "compute_loss_func": loss}
    trainer = Trainer(model, arguments, **given)
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save(start, out / "start.pt")
        torch.save(vector(model), out / f"{arguments.world_size}.pt")
        wrapped = {"wrapper": type(trainer.model_wrapped).__name__}
        (out / f"{arguments.world_size}.json").write_text(json.dumps(wrapped))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
