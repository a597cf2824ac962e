"""A recorder that mismatches: the policy that plays has its weights rounded, the one that is trained has not.

    python benches/online/mismatch.py --bits 3 --seeds 3 --out benches/results/online.json

FlashRL's case, coarser than its int8: every linear layer of the blocks is rounded to nearest, symmetric, one scale for
each output channel, before each step's playing; trainer and evaluation stay float32. The clerk is played by
transformers with the rounded copy, its logprobs recorded as by a server. Three arms:

- corrected: `presets.DAPO`, whose weight is min(old/rollout, 2) at each token, truncated importance sampling;
- uncorrected: the same without that weight, as if the trained policy had sampled the rollout;
- by trace: the same with one weight for a complete trace, min(product of old/rollout over its tokens, 2).

Success is of the policy that is trained, one sample of fresh prompts at temperature 1. There is no server, therefore no
proof, which would stop such a run at its first step.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

import machine
import rollout
import task
import tracegrad as tg
from tracegrad import trainer
from tracegrad.config import Config, Optimizer
from tracegrad.objective import Aggregation, Ratio, Truncate, Weight, presets

COMMAND = "python benches/online/mismatch.py --bits 3 --seeds 3 --out benches/results/online.json"
BY_TRACE = Weight(Ratio("old", "rollout"), Aggregation("trace", "sum"), Truncate(0.0, 2.0))
ARMS = {
    "corrected": presets.DAPO,
    "uncorrected": replace(presets.DAPO, weights=()),
    "by trace": replace(presets.DAPO, weights=(BY_TRACE,)),
}


@torch.no_grad()
def rounded(model: Any, bits: int) -> Any:
    """A copy whose blocks' linear layers are rounded to this number of bits."""
    copied = copy.deepcopy(model).eval()
    most = 2 ** (bits - 1) - 1
    for name, layer in copied.named_modules():
        if isinstance(layer, torch.nn.Linear) and "lm_head" not in name:
            scale = layer.weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / most
            layer.weight.copy_((layer.weight / scale).round() * scale)
    return copied


@torch.no_grad()
def sampled(model: Any, prompts: list[list[int]], stop: int, generator: torch.Generator) -> list[tuple[list, list]]:
    """Ids and logprobs of one continuation of each prompt, the stop token among them."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(each)) + each for each in prompts])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts])
    rows, cache = torch.arange(len(prompts)), DynamicCache()
    found: list[tuple[list, list]] = [([], []) for _ in prompts]
    for _ in range(rollout.MAX_NEW_TOKENS):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        told = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache, "use_cache": True}
        logprobs = model(ids, **told, logits_to_keep=1).logits[:, -1].log_softmax(-1)
        chosen = torch.multinomial(logprobs.exp(), 1, generator=generator)
        known = logprobs.gather(1, chosen)[:, 0].tolist()
        for row, token, logprob in zip(rows.tolist(), chosen[:, 0].tolist(), known, strict=True):
            found[row][0].append(token)
            found[row][1].append(logprob)
        going = chosen[:, 0] != stop
        if not going.any():
            break
        kept = going.nonzero()[:, 0]
        if len(kept) < len(rows):
            cache.batch_select_indices(kept)
        rows, ids = rows[kept], chosen[kept]
        mask = torch.cat([mask[kept], mask.new_ones(len(kept), 1)], dim=1)
    return found


def played(model: Any, tokenizer: Any, prompts: list[task.Prompt], version: int, generator: torch.Generator) -> list:
    """Records of one trajectory of each prompt, in the shape in which a server's answers are kept."""
    worlds = [(prompt, prompt.messages(), []) for prompt in prompts]
    going = list(worlds)
    for turn in range(rollout.MAX_TURNS):
        told = [tokenizer(rollout.render(tokenizer, each[1]), add_special_tokens=False)["input_ids"] for each in going]
        answers = sampled(model, told, tokenizer.eos_token_id, generator)
        onward = []
        for world, ids, (said, logprobs) in zip(going, told, answers, strict=True):
            prompt, messages, calls = world
            ended = said[-1] == tokenizer.eos_token_id
            message = rollout.assistant_message(tokenizer.decode(said[:-1] if ended else said), ended, turn)
            entries = [
                {"token": f"token_id:{one}", "logprob": known} for one, known in zip(said, logprobs, strict=True)
            ]
            choice = {"index": 0, "token_ids": said, "logprobs": {"content": entries}}
            choice |= {"message": {**message}, "finish_reason": message["finish_reason"]}
            request = {"messages": list(messages), "tools": list(task.TOOLS), "temperature": 1.0}
            response = {"prompt_token_ids": ids, "choices": [choice]}
            calls.append({"request": request, "response": response, "policy_version": version})
            messages.append(message)
            if message.get("tool_calls") and ended and turn + 1 < rollout.MAX_TURNS:
                messages += rollout.tool_messages(prompt, message)
                onward.append(world)
        if not onward:
            break
        going = onward
    return [{"reward": task.check(prompt, messages), "calls": calls} for prompt, messages, calls in worlds]


def run(arm: str, seed: int, options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """One run: reward of each step, the measured mismatch, and success in the end."""
    torch.manual_seed(seed)
    model, hf = rollout.load(machine.MODEL)
    tokenizer, generator = tg.Tokenizer.from_pretrained(machine.MODEL), torch.Generator().manual_seed(seed)
    config = Config(optimizer=Optimizer(lr=options.lr))
    driven = trainer.Trainer(model, ARMS[arm], config, out=out)
    prompts = task.prompts("traces", seed)
    rewards, mismatch, tested = [], [], {}
    for number in range(options.steps):
        version = driven.steps_done
        taken = [prompt for prompt in itertools.islice(prompts, options.groups) for _ in range(options.samples)]
        records = played(rounded(driven.model, options.bits), hf, taken, version, generator)
        for index, record in enumerate(records):
            record |= {
                "id": f"{number}-{index}",
                "group": f"{number}-{index // options.samples}",
                "logprob_kind": "raw",
            }
        sequences = tg.align(tg.Traces.from_records(records), tokenizer)
        rewards.append(float(np.mean([record["reward"] for record in records])))
        advantages = tg.advantage.group_mean(sequences.reward, sequences.group, scale="std", ddof=1)
        cut = {"tokens_per_row": 8192, "groups_per_step": options.groups, "share_prefixes": True}
        [step] = tg.pack(sequences, advantages, skip_zero_advantage=True, requirements=ARMS[arm].requirements, **cut)
        if len(step.trace):
            step = driven.add_logprobs(step)
            mismatch.append(float(np.nanmean(np.abs(step.old_logprobs - step.rollout_logprobs))))
            for _ in range(options.updates):
                driven.step(step, version)
        if options.every and (number + 1) % options.every == 0 and number + 1 < options.steps:
            tested[number + 1] = rollout.success(driven.model.eval(), hf, options.prompts, seed=100)[0]
            print(f"  {arm}, seed {seed}, step {number + 1}: {tested[number + 1]:.1%}", flush=True)
    tested[options.steps] = rollout.success(driven.model.eval(), hf, options.prompts, seed=100)[0]
    plays = rollout.success(rounded(driven.model, options.bits), hf, options.prompts, seed=100)[0]
    return {"success": tested, "success_rounded": plays, "rewards": rewards, "mismatch": mismatch}


def main() -> None:
    """Prints and writes the figures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--updates", type=int, default=1, help="optimizer steps on each batch, `old` kept")
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--every", type=int, default=0, help="steps between tests of success")
    parser.add_argument("--arm", choices=ARMS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, hf = rollout.load(machine.MODEL)
    starts = rollout.success(rounded(model, options.bits), hf, options.prompts, seed=100)[0]
    before = {"success": rollout.success(model, hf, options.prompts, seed=100)[0], "rounded": starts}
    print(f"before: float32 {before['success']:.1%}, rounded {before['rounded']:.1%}")
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ([options.arm] if options.arm else ARMS)}
    about = {name: getattr(options, name) for name in ("bits", "steps", "lr", "updates", "groups", "samples")}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for arm, found in runs.items():
            with tempfile.TemporaryDirectory() as name:
                found.append(last := {"seed": seed, **run(arm, seed, options, Path(name))})
            told = ", ".join(f"{step}: {rate:.1%}" for step, rate in last["success"].items())
            print(
                f"{arm}, seed {seed}: success {told}; rounded {last['success_rounded']:.1%}; "
                f"|old - rollout| {last['mismatch'][0]:.3f} -> {last['mismatch'][-1]:.3f} nats",
                flush=True,
            )
            title = f"rounded to {options.bits} bits, lr {options.lr:g}, {options.updates} updates, {arm}"
            machine.keep(options.out, [machine.row(title, COMMAND, **about, before=before, runs=found)])


if __name__ == "__main__":
    main()
