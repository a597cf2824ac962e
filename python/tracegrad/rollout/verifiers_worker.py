"""Run episodes of verifiers: a script for the interpreter that has it, started by `verifiers`.

    python verifiers_worker.py CONFIG [COUNT]

CONFIG is the config of the environment as JSON. With COUNT, the script writes that many tasks, one JSON line each, and
ends. Without it, the script reads one request per line and answers each with a line, in any order, until its input
ends. It imports nothing from tracegrad.
"""

import asyncio
import itertools
import json
import os
import sys


def environment(config):
    """Return the environment of a config: the taskset's own, or verifiers' single agent."""
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    return load_environment(resolve_env_config(config))


class Tasks:
    """Tasks by number, created when they are needed."""

    def __init__(self, taskset):
        self.more, self.known = iter(taskset), []

    def __getitem__(self, number):
        while len(self.known) <= number:
            self.known.append(next(self.more))
        return self.known[number]


def task_to_json(task):
    """Return a task as JSON."""
    return json.loads(task.data.model_dump_json(exclude_none=True, exclude_defaults=True))


async def run_episode(environment, tasks, request):
    """Run one episode and return its rewards.

    Raises:
        RuntimeError: if the episode failed, or has more than one agent.
    """
    import verifiers.v1 as vf

    name = f"_POLICY_KEY_{abs(hash(request['key']))}"  # verifiers reads keys only from the environment
    os.environ[name] = request["key"]
    client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var=name)
    episode = await environment.run_episode(tasks[request["task"]], vf.ModelContext(model="policy", client=client))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        raise RuntimeError(f"{errors[0].type}: {errors[0].message}" if errors else "the episode is incomplete")
    if len(episode.traces) != 1:
        raise RuntimeError(f"the episode has {len(episode.traces)} agents; one of them can be trained")
    [trace] = episode.traces
    return {"reward": trace.reward, "rewards": {name: r.value for name, r in trace.rewards.items() if r is not None}}


async def serve(config, answers):
    """Answer requests until the input ends."""
    world = environment(config)
    tasks, running = Tasks(world.taskset), {}
    lines = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)

    def send(value):
        os.write(answers, json.dumps(value).encode() + b"\n")

    async def answer(request):
        try:
            send({"id": request["id"], **await run_episode(world, tasks, request)})
        except Exception as error:
            send({"id": request["id"], "error": f"{type(error).__name__}: {error}"[:4000]})
        finally:
            running.pop(request["id"], None)

    async with world.serving():
        send({"ready": True})
        while line := await lines.readline():
            request = json.loads(line)
            if "cancel" in request:
                if (task := running.get(request["cancel"])) is not None:
                    task.cancel()
                continue
            running[request["id"]] = asyncio.ensure_future(answer(request))
        for task in running.values():
            task.cancel()


def main():
    answers = os.dup(1)
    os.dup2(2, 1)  # output of an environment must not mix with the answers
    config = json.loads(sys.argv[1])
    if len(sys.argv) > 2:
        for task in itertools.islice(environment(config).taskset, int(sys.argv[2])):
            os.write(answers, json.dumps(task_to_json(task)).encode() + b"\n")
        return
    asyncio.run(serve(config, answers))


if __name__ == "__main__":
    main()
