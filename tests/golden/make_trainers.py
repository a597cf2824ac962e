"""Makes tests/golden/trainers: the conversation of tests/golden/dumps, as rows and trials of trainers' own code.

    PYTHONPATH=SOURCE python tests/golden/make_trainers.py NAME [NAME ...]

    atropos   atroposlib==0.4.0: `BaseEnv.handle_send_to_api` writes the group, `ScoredData` has checked it
    harbor    harbor==0.26.0: its Chat collects the details, TrialResult is dumped
    nemo_gym_chat  nemo-gym==0.4.0: NeMoGymChatCompletion, and a log of completions as its agents write them
    nemo_rl   SOURCE is a checkout of NVIDIA-NeMo/RL: `Logger.log_batched_dict_as_jsonl`
    prime_rl  SOURCE is the src of a checkout of PrimeIntellect-ai/prime-rl: `TokenExporter.export`

Packages that the writing code imports but does not call (ray, wandb, mlflow, ...) are replaced by mocks.
"""

import asyncio
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from unittest.mock import MagicMock

from make_dumps import Talk

HERE = Path(__file__).parent / "trainers"
MOCKED = {"ray", "wandb", "mlflow", "swanlab", "matplotlib", "prometheus_client", "pydantic_cli", "orjson", "datasets"}
MOCKED |= {"tensorboard", "markdown", "uvicorn", "starlette", "fastapi", "hydra", "omegaconf", "tomlkit", "devtools"}
MOCKED |= {"gprof2dot", "gunicorn", "yappi", "pydot", "requests", "tqdm", "transformers", "litellm", "jsonlines"}
MOCKED |= {"prime_rl.configs", "prime_rl.trainer.rl.loss"}


class Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Replaces packages of MOCKED that are not installed, and their modules."""

    def find_spec(self, name, path=None, target=None):
        if any(name == each or name.startswith(f"{each}.") for each in MOCKED):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__ = [], spec
        return module

    def exec_module(self, module):
        pass


class Lines(list):
    """Takes the place of a writer of jsonlines."""

    write = list.append


def atropos(talk: Talk):
    """Two members with the same prompt: the whole conversation, and its first answer."""
    from atroposlib.api.server import ScoredData
    from atroposlib.envs.base import BaseEnv

    env = MagicMock(jsonl_writer=Lines(), max_token_len=4096, completion_lengths=[])
    env.config = MagicMock(ensure_scores_are_not_same=True, group_size=2, include_messages=True)

    async def nothing(*given):
        return None

    env.add_rollouts_for_wandb = nothing
    tokens, masks, logprobs = [], [], []
    for turns in (2, 1):
        prompt, ids = talk.prompts[0], talk.response if turns == 2 else talk.sampled[0]
        mask, filled = (talk.mask, talk.filled) if turns == 2 else ([1] * len(ids), talk.logprobs[0])
        tokens.append(prompt + ids)
        masks.append([-100] * len(prompt) + [i if bit else -100 for i, bit in zip(ids, mask, strict=True)])
        # ManagedServer writes 1.0 where nothing was sampled.
        logprobs.append([1.0] * len(prompt) + [p if bit else 1.0 for p, bit in zip(filled, mask, strict=True)])
    group = {"tokens": tokens, "masks": masks, "scores": [1.0, -1.0], "inference_logprobs": logprobs}
    group |= {"messages": [talk.messages, talk.messages[:2]], "generation_params": {"temperature": 0.8}}
    group = ScoredData(**group).model_dump(exclude_none=True)
    asyncio.run(BaseEnv.handle_send_to_api(env, group, do_send_to_api=False))
    [written] = env.jsonl_writer
    yield written, [talk.truth(reward=1.0, temperature=0.8), talk.truth([0], reward=-1.0, temperature=0.8)]


def harbor(talk: Talk):
    """A trial with the main chat of two turns, and one of two steps whose last reward is not valid."""
    from harbor.llms.base import LLMResponse
    from harbor.llms.chat import Chat
    from harbor.models.agent.context import AgentContext
    from harbor.models.trial.config import AgentConfig, TaskConfig, TrialConfig
    from harbor.models.trial.result import AgentInfo, ExceptionInfo, ModelInfo, StepResult, TrialResult
    from harbor.models.verifier.result import VerifierResult

    def context(turns):
        chat = Chat(MagicMock())
        for k in turns:
            ids = {"prompt_token_ids": talk.prompts[k], "completion_token_ids": talk.sampled[k]}
            chat._accumulate_rollout_details(LLMResponse(content="", **ids, logprobs=talk.logprobs[k]))
        return AgentContext(rollout_details=chat.rollout_details)

    def trial(**fields):
        config = TrialConfig(
            task=TaskConfig(path="tasks/add"), agent=AgentConfig(name="terminus-2", kwargs={"temperature": 0.7})
        )
        return TrialResult(
            id="00000000-0000-0000-0000-000000000001",
            task_name="add",
            trial_uri="file:///trials/add__1",
            task_id={"path": "tasks/add"},
            task_checksum="c",
            config=config.model_copy(update={"trial_name": fields["trial_name"]}),
            agent_info=AgentInfo(name="terminus-2", version="2", model_info=ModelInfo(name="policy-7b")),
            **fields,
        )

    def dumped(result):
        return json.loads(result.model_dump_json())

    good = VerifierResult(rewards={"reward": 0.5})
    yield (
        dumped(trial(trial_name="add__1", agent_result=context([0, 1]), verifier_result=good)),
        [talk.truth(id="add__1", group="add", reward=0.5, temperature=0.7)],
    )
    steps = [
        StepResult(
            step_name="one", agent_result=context([0]), verifier_result=VerifierResult(rewards={"a": 1, "b": 0})
        ),
        StepResult(step_name="two", agent_result=context([1]), verifier_result=good),
    ]
    truths = [
        talk.truth([0], id="add__2/one", group="add/one", rewards={"a": 1.0, "b": 0.0}, temperature=0.7),
        talk.truth([1], id="add__2/two", group="add/two", reward=0.5, temperature=0.7),
    ]
    yield dumped(trial(trial_name="add__2", step_results=steps)), truths
    failed = ExceptionInfo(
        exception_type="EnvironmentStartTimeoutError",
        exception_message="x",
        exception_traceback="",
        occurred_at="2026-11-01T00:00:00Z",
    )
    result = trial(trial_name="add__3", agent_result=context([0]), verifier_result=good, exception_info=failed)
    assert result.reward_valid is False
    yield dumped(result), [talk.truth([0], id="add__3", group="add", reward=None, temperature=0.7)]


def nemo_gym_chat(talk: Talk):
    """A chat completion, its message in a conversation, and a log of completions with the fields next to it."""
    from nemo_gym.openai_utils import NeMoGymChatCompletion

    def fields(k):
        names = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
        return dict(zip(names, (talk.prompts[k], talk.sampled[k], talk.logprobs[k]), strict=True))

    def completion(k, **more):
        message = {**talk.messages[2 * k + 1], **more}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        value = {"id": f"c{k}", "object": "chat.completion", "created": 1, "model": "policy-7b", "choices": [choice]}
        return NeMoGymChatCompletion.model_validate(value).model_dump(mode="json", exclude_none=True)

    yield completion(1, **fields(1)), [talk.truth([1], finish_reason="stop")]
    said = [completion(k, **fields(k))["choices"][0]["message"] for k in (0, 1)]
    yield {"messages": [talk.messages[0], said[0], talk.messages[2], said[1]], "reward": 1.0}, [talk.truth(reward=1.0)]
    log = {"messages": talk.messages[:3], "response": completion(1), "provider_specific_fields": fields(1)}
    yield {**log, "kwargs": {"temperature": 0.7, "tools": []}}, [talk.truth([1], temperature=0.7)]


def nemo_rl(talk: Talk):
    """A batch of three: two samples of one prompt, padded, and one whose loss is masked."""
    import torch
    from nemo_rl.utils.logger import Logger

    rows = [talk.prompts[0] + talk.response, talk.prompts[0] + talk.sampled[0], talk.prompts[1] + talk.sampled[1]]
    starts, width = [len(talk.prompts[0])] * 2 + [len(talk.prompts[1])], max(map(len, rows)) + 1
    masks = [talk.mask, [1] * len(talk.sampled[0]), [1] * len(talk.sampled[1])]
    logprobs = [talk.filled, talk.logprobs[0], talk.logprobs[1]]

    def padded(columns):
        return [[0] * n + list(c) + [0] * (width - n - len(c)) for n, c in zip(starts, columns, strict=True)]

    batch = {
        "content": [[m["content"] for m in talk.messages], [m["content"] for m in talk.messages[:2]], ["a", "b"]],
        "rewards": torch.tensor([9.0, 9.0, 9.0]).tolist(),
        "filtered_rewards": torch.tensor([1.0, 0.0, 0.5]).tolist(),
        "input_lengths": torch.tensor(list(map(len, rows))).tolist(),
        "token_ids": torch.tensor([row + [0] * (width - len(row)) for row in rows]).tolist(),
        "token_loss_mask": torch.tensor(padded(masks)).tolist(),
        "sample_loss_mask": torch.tensor([1.0, 1.0, 0.0]).tolist(),
        "advantages": torch.zeros(3, width).tolist(),
        "generation_logprobs": torch.tensor(padded(logprobs)).tolist(),
        "prev_logprobs": torch.full((3, width), -7.0).tolist(),
    }
    with tempfile.TemporaryDirectory() as folder:
        logger = MagicMock(base_log_dir=folder)
        Logger.log_batched_dict_as_jsonl(logger, batch, "train_data_step1.jsonl")
        lines = (Path(folder) / "train_data_step1.jsonl").read_text().splitlines()
    truths = [talk.truth(reward=1.0), talk.truth([0], reward=0.0), talk.truth([], reward=0.5)]
    for line, truth in zip(lines, truths, strict=True):
        yield json.loads(line), [truth]


def prime_rl(talk: Talk):
    """A packed micro batch of two sequences and padding. Two tokens of the second are a frozen model's."""
    import torch
    from prime_rl.trainer.rl.token_export import TokenExporter

    first, second = talk.prompts[0] + talk.response, talk.prompts[0] + talk.sampled[0]
    ids = first + second + [0] * 3
    start = len(talk.prompts[0])
    mask = [0] * start + talk.mask + [0] * start + [1] * len(talk.sampled[0]) + [0] * 3
    logprobs = [0.0] * start + talk.filled + [0.0] * start + talk.logprobs[0] + [0.0] * 3
    rl = [float(bit) for bit in mask]
    frozen = len(first) + start  # the first two answered tokens of the second sequence
    rl[frozen : frozen + 2] = [0.0, 0.0]
    batch = {
        "input_ids": torch.tensor([ids]),
        "position_ids": torch.tensor([[*range(len(first)), *range(len(second)), 0, 1, 2]]),
        "loss_mask": torch.tensor([mask]).bool(),
        "advantages": torch.tensor([[0.5 * bit for bit in mask]]),
        "inference_logprobs": torch.tensor([logprobs]),
        "rl_weights": torch.tensor([rl]),
        "env_names": ["add"] * (len(ids) - 3) + [""] * 3,
    }
    output = {"logprobs": torch.full((1, len(ids)), -7.0), "entropy": torch.zeros(1, len(ids))}
    import prime_rl.trainer.rl.token_export as module

    module.compute_importance_ratio_and_mismatch_kl = lambda a, b: (a - b, (a - b).exp(), a - b)
    module.DefaultLossConfig = type("DefaultLossConfig", (), {})
    with tempfile.TemporaryDirectory() as folder:
        exporter = TokenExporter(Path(folder), rank=0)
        exporter.export(4, 0, batch, output, [len(first), len(second) + 3], None)
        lines = (Path(folder) / "token_exports" / "step_4" / "rank_0.jsonl").read_text().splitlines()
    answer = {
        "prompt": talk.prompts[0] + talk.sampled[0][:2],
        "ids": talk.sampled[0][2:],
        "logprobs": talk.logprobs[0][2:],
    }
    truths = [talk.truth(reward=None, id="4-0-0-0"), {"generations": [answer], "reward": None, "id": "4-0-0-1"}]
    for line, truth in zip(lines, truths, strict=True):
        yield json.loads(line), [truth]


if __name__ == "__main__":
    MOCKED -= {each for each in MOCKED if "." not in each and importlib.util.find_spec(each)}
    sys.meta_path.insert(0, Mocks())
    for name in sys.argv[1:]:
        pairs = list(globals()[name](Talk()))
        lines = "".join(json.dumps(record) + "\n" for record, _ in pairs)
        (HERE / f"{name}.jsonl").write_text(lines)
        truths = [truth for _, each in pairs for truth in each]
        (HERE / f"{name}.truth.json").write_text(json.dumps(truths) + "\n")
        print(name, len(pairs), len(lines), "bytes")
