"""What runs on two nodes and beside them: `bucket` serves S3, `train` is the command with one rank killed once.

Called by two_nodes.sh. `found OUT` compares the two runs and writes OUT/found.json.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def bucket() -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="10.77.0.1", port=5555, verbose=False)
    server.start()
    signal.pause()


def files() -> Any:
    import s3fs

    return s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)


def ready() -> None:
    """Waits until the bucket answers, and makes it."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with suppress(Exception):
            files().mkdir("runs")
            return
        time.sleep(0.2)
    raise SystemExit("no bucket")


def train(out: Path, run: str, words: list[str]) -> int:
    """The command; in the run called killed the second rank dies in its third step, once."""
    from tracegrad.cli import main
    from tracegrad.trainer import trainer as run_module

    mark, real, count = out / "died", run_module.optimizer_step, [0]

    def step(*given: Any, **how: Any) -> Any:
        count[0] += 1
        if run == "killed" and os.environ["RANK"] == "1" and count[0] == 3 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*given, **how)

    run_module.optimizer_step = step
    return main(["train", *words])


def found(out: Path) -> None:
    system = files()
    runs = ("whole", "killed")
    rows = [system.cat(f"runs/{run}/metrics.jsonl").splitlines() for run in runs]
    steps = [[json.loads(row)["step"] for row in lines] for lines in rows]
    last = [sorted(system.ls(f"runs/{run}/checkpoints"))[-1] for run in runs]
    one, two = (system.cat(f"{path}/model.safetensors") for path in last)
    folders = {name: len(list((out / name).glob("tracegrad-run-*"))) for name in ("a", "b")}
    said = {"steps": steps, "same": one == two, "killed": int((out / "died").exists()), "folders": folders}
    (out / "found.json").write_text(json.dumps(said))


if __name__ == "__main__":
    if sys.argv[1] == "train":
        sys.exit(train(Path(sys.argv[2]), sys.argv[3], sys.argv[4:]))
    {"bucket": bucket, "ready": ready, "found": lambda: found(Path(sys.argv[2]))}[sys.argv[1]]()
