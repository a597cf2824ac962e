"""How far a bf16 trainer and a bf16 vLLM differ after a clean push, and how far after one that was missed.

    python benches/online/sync_noise.py --vllm-python .venv-vllm/bin/python --out benches/results/sync_noise.json

Five tiny models of different families play one-turn tasks; each makes steps at two learning rates. At each step the
servers get the requests of the weight-sync check. Their logprobs are compared with the policy that was pushed (clean)
and, after the next update, with the policy that they would have missed (missed). After a clean push every cause is
tried as well: the shares of the difference that the nearest one explains, and how close the servers are to the previous
version. The bounds in `online/logprob_gap.py` are from the table that this prints. A check that ends
a clean run is counted as a false alarm.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT / "examples" / "quickstart"), str(Path(__file__).parent)]

import make_model  # noqa: E402
import online  # noqa: E402
import task  # noqa: E402
import tracegrad as tg  # noqa: E402
from machine import keep, row  # noqa: E402
from tracegrad.online import OnlineConfig, RolloutConfig, logprob_gap  # noqa: E402
from tracegrad.online.logprob_gap import SyncFault, WeightSyncBounds, explained_share, slope_of  # noqa: E402  # noqa: E402
from tracegrad.online.mismatch_causes import causes, previous_logprobs  # noqa: E402
from tracegrad.online.weight_sample import ProbeSampler, Sample  # noqa: E402  # noqa: E402
from tracegrad.rollout.launch import launch  # noqa: E402
from tracegrad.weight_sync import vllm_arguments  # noqa: E402

BUNDLED = ROOT / "examples" / "quickstart" / "model"
FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral", "olmo2": "Olmo2"}
RATES = (4e-4, 1e-5)
COMMAND = (
    "python benches/online/sync_noise.py --vllm-python .venv-vllm/bin/python --out benches/results/sync_noise.json"
)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}


def make(family: str, folder: Path, steps: int) -> Path:
    """A small model of a family, trained on the clerk's demonstrations for some steps."""
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUNDLED, trust_remote_code=False)
    kinds = {"vocab_size": make_model.VOCABULARY, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.06}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = getattr(transformers, f"{FAMILIES[family]}Config")(
        **SIZES, **kinds, **ids, max_position_embeddings=make_model.CONTEXT, tie_word_embeddings=False
    )
    trainer = make_model.Trainer(getattr(transformers, f"{FAMILIES[family]}ForCausalLM")(config), tokenizer)
    for batch, _ in zip(make_model.batches(make_model.dialogues(0, 0.3), 0), range(steps)):  # noqa: B905
        trainer.step(trainer.dialogue_loss(batch), make_model.LEARNING_RATE)
    trainer.network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Watch:
    """The measurement of each check, and what it would have measured without the push."""

    def __init__(self, first: Path) -> None:
        self.first = first
        self.false_alarms: list[str] = []
        self.clean: list[dict[str, float]] = []
        self.missed: list[dict[str, float]] = []
        self._kept: Sample | None = None
        self._proof = WeightSyncBounds(bf16=True)

    def __call__(self, canary: ProbeSampler, sample: Sample) -> Sample:
        driven = canary.trainer
        if self._kept is not None:
            late = Sample.of(driven, self._kept.rows)
            self.missed.append(
                self._row(late, self._proof.slope_to_previous(late.logprobs, self._kept.logprobs, late.rollout))
            )
        before = previous_logprobs(driven, OnlineConfig(), sample) if driven.steps_done else None
        lean = 0.0 if before is None else self._proof.slope_to_previous(sample.logprobs, before, sample.rollout)
        tried = [cause.logprobs() for cause in causes(driven, sample, OnlineConfig(), self.first)]
        shares = np.array([explained_share(sample.logprobs, each, sample.rollout) for each in tried])
        back = 0.0 if before is None else slope_of(sample.logprobs, before, sample.rollout)[0]
        nearest = dict(zip(("given", "given_without_outliers"), np.nanmax(shares, 0), strict=True))
        self.clean.append({**self._row(sample, lean), **nearest, "back": back})
        self._proof.record_noise(sample.gap())
        self._kept = sample
        return sample

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """A check that ends the run is a false alarm."""
        try:
            yield
        except SyncFault as fault:
            self.false_alarms.append(str(fault))

    @staticmethod
    def _row(sample: Sample, lean: float) -> dict[str, float]:
        gap = sample.gap()
        return {"terms": gap.terms, "p50": gap.p50, "p99": gap.p99, "max": gap.max, "lean": lean}


@contextlib.contextmanager
def watched(watch: Watch):
    """No bound ends the run during this time."""
    ask, bounds = ProbeSampler.ask, (logprob_gap.BF16_MEDIAN, logprob_gap.BF16_P99)
    try:
        ProbeSampler.ask = lambda self, salt=None: watch(self, ask(self, salt))
        logprob_gap.BF16_MEDIAN = logprob_gap.BF16_P99 = float("inf")
        yield
    finally:
        ProbeSampler.ask = ask
        logprob_gap.BF16_MEDIAN, logprob_gap.BF16_P99 = bounds


def steps(model: Path, url: str, out: Path, rate: float, count: int) -> Watch:
    """A run whose servers are checked at each step."""
    watch = Watch(model)
    config = tg.config.Config(
        optimizer=tg.config.Optimizer(lr=rate), train=tg.config.Train(groups_per_step=4, dtype="bf16")
    )

    async def agent(told, policy):
        said = [{"role": "system", "content": task.SYSTEM}, {"role": "user", "content": told["text"]}]
        message = await policy.chat(said, tools=task.TOOLS)
        return -float(len(message["content"] or "") + len(str(message.get("tool_calls") or ""))) / 10

    with watched(watch), watch.noted():
        tg.online.train(
            model, online.tasks("traces", 0), agent=agent, objective=tg.presets.DAPO_DIRECT, config=config,
            servers=[url], out=out, online=OnlineConfig(steps=count, steps_ahead=0),
            rollout=RolloutConfig(group_size=4, max_tokens=24, max_turns=1), sinks=(),
        )  # fmt: skip
    return watch


def main() -> None:
    """Play, train, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run")
    parser.add_argument("--pretrain", type=int, default=200, help="steps that the small models are made in")
    parser.add_argument("--models", nargs="*", default=["qwen3", *FAMILIES])
    parser.add_argument("--out", type=Path)
    told = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for name in told.models:
            folder = Path(place) / name
            folder.mkdir()
            model = BUNDLED if name == "qwen3" else make(name, folder / "model", told.pretrain)
            flags, environment = vllm_arguments("file", package_folder=folder / "beside")
            flags += [
                "--enforce-eager",
                "--dtype",
                "bfloat16",
                "--max-model-len",
                "1024",
                "--generation-config",
                "vllm",
            ]
            flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
            environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "passive"}
            more = {"name": "clerk", "arguments": flags, "environment": environment, "log_path": folder / "server.log"}
            with launch(told.vllm_python, model, **more) as server:
                for rate in RATES:
                    watch = steps(model, server.url, folder / f"run-{rate:g}", rate, told.steps)
                    for kind, found in (("clean", watch.clean), ("missed", watch.missed)):
                        alarms = {"false_alarms": watch.false_alarms} if kind == "clean" else {}
                        about = summary(found) | alarms
                        rows.append(row(f"sync noise: {name}, lr {rate:g}, {kind}", COMMAND, **about))
                        print(json.dumps(rows[-1]), flush=True)
    keep(told.out, rows)


def summary(found: list[dict[str, float]]) -> dict[str, object]:
    """Of one run: the range of each figure over its steps, and the alarms by bound."""
    bound = [row["p50"] > logprob_gap.BF16_MEDIAN or row["p99"] > logprob_gap.BF16_P99 for row in found]
    lean = [row["lean"] > 0 for row in found]
    ranges = {
        name: [round(float(f([row[name] for row in found])), 4) for f in (np.min, np.median, np.max)]
        for name in ("p50", "p99", "max", "given", "given_without_outliers", "back")
        if name in found[0]
    }
    terms = min(row["terms"] for row in found)
    return {"checks": len(found), "terms": terms, **ranges, "by_bound": sum(bound), "by_leaning": sum(lean),
            "alarms": sum(map(any, zip(bound, lean, strict=True)))}  # fmt: skip


if __name__ == "__main__":
    main()
