"""The online loop with `vllm.LLM` in its own process: run by test_inside_with_vllm.py in vLLM's interpreter.

`python inside_run.py MODEL OUT` writes `found.json` into OUT.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "quickstart"))


def main(model, out):
    import torch

    import online
    import tracegrad as tg
    from tracegrad import weight_sync
    from tracegrad.online import OnlineConfig, RolloutConfig, SyncFault
    from tracegrad.online import servers as serve
    from tracegrad.online import servers as ways
    from tracegrad.rollout import in_process

    torch.set_num_threads(1)
    found = {}
    config = tg.config.Config(train=tg.config.Train(groups_per_step=4), optimizer=tg.config.Optimizer(lr=4e-4))

    def run(name, ids="messages", **told):
        return tg.online.train(
            model,
            online.tasks("traces", 0),
            environment=online.Shop,
            objective=tg.presets.DAPO_DIRECT,
            config=config,
            online=OnlineConfig(**{"steps": 3, **told}),
            rollout=RolloutConfig(group_size=4, max_tokens=64, max_turns=4, input=ids),
            servers="in-process",
            engine=online.ENGINE,
            out=out / name,
            sinks=(),
        )

    real, made = in_process.Engine, []

    def once(model, arguments):
        """One engine for all runs: it takes a minute to start."""
        if not made:
            made.append(real(model, arguments))
            made[0].close = lambda: None
        return made[0]

    in_process.Engine = once
    for steps_ahead, ids in ((0, "chat"), (1, "chat"), (0, "tokens")):
        rows = run(f"quiet-{steps_ahead}-{ids}", ids, steps_ahead=steps_ahead).rows
        keys = (
            "weight_check/tokens",
            "weight_check/max",
            "time/sync_pause",
            "tokens_lost",
            "trajectories_failed",
            "reward",
        )
        found[f"quiet {steps_ahead} {ids}"] = [{key: row[key] for key in keys} for row in rows]
    ways.File = lambda servers, folder: weight_sync.File(servers, folder, clear_cache=False)
    try:
        found["stale"] = [row["weight_check/max"] for row in run("stale", steps_ahead=0, steps=6).rows]
    except SyncFault as error:
        found["stale"] = str(error)

    async def asked():
        async with in_process.InProcessServers(made[0], model=serve.NAME) as servers:
            for name, work in (("sleep", servers.sleep()), ("wake", servers.wake()), ("where", servers.where("s"))):
                found[name] = str((await asyncio.gather(work, return_exceptions=True))[0])
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            tasks = [asyncio.ensure_future(servers.chat({**body, "max_tokens": 900}, session="s")) for _ in range(3)]
            await asyncio.sleep(0.3)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(1.0)
            found["left"] = len(made[0]._answers)
            found["after"] = (await servers.chat(body, session="s"))["choices"][0]["finish_reason"]
            wrong = await servers.request(
                in_process.PLACEHOLDER_URL, "/v1/chat/completions", {"messages": 3, "model": "policy"}
            )
            found["wrong"] = [wrong.status, wrong.words]
            other = await servers.request(
                in_process.PLACEHOLDER_URL, "/v1/chat/completions", {**body, "model": "another"}
            )
            found["other"] = [other.status, other.words]

    asyncio.run(asked())
    found["manifest"] = json.loads((out / "quiet-0-chat" / "run.json").read_text())["engine"]
    config = made[0].model_config
    found["engine"] = [config.max_model_len, str(config.dtype), config.enforce_eager]
    (out / "found.json").write_text(json.dumps(found))
    real.close(made[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
