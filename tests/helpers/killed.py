"""Runs that are killed at any moment and resumed: run by test_killed.py as a script, which forks them.

`python killed.py OUT KILLS` writes what each came to beside the run that nobody disturbed.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch

from ranks import told, vector
from tiny import sampled, tiny_model
from tracegrad.objective import presets
from tracegrad.trainer import checkpoint, train


def run(out: Path, traces: Any, resume: bool) -> None:
    """Trains in a child of this process, a checkpoint after every step, and leaves the parameters in `out`."""
    found = resume and checkpoint.list_checkpoints(out)
    model = tiny_model(9 if found else 0)  # what a checkpoint restores does not come from the model given
    changes = told(checkpoint__every_steps=1, train__groups_per_step=8)
    given = {"sinks": (), "log": lambda _: None, "resume": resume}
    train(traces, model, objective=presets.DAPO, out=out, config=changes, **given)
    torch.save(vector(model), out / "parameters.pt")


def child(out: Path, traces: Any, resume: bool) -> int:
    process = os.fork()
    if process == 0:
        try:
            run(out, traces, resume)
            os._exit(0)
        except BaseException as error:
            print(type(error).__name__, error, file=sys.stderr, flush=True)
            os._exit(1)
    return process


def finished(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def main(out: Path, kills: int) -> int:
    torch.set_num_threads(1)
    recorded = out / "traces"
    if os.fork() == 0:  # the parent runs no model: what it forks must find torch as it was imported
        sampled(tiny_model()).save(recorded)
        os._exit(0)
    os.wait()
    from tracegrad.alignment.sequences import Sequences

    traces = Sequences.load(recorded)
    began = time.perf_counter()
    assert finished(child(out / "whole", traces, False)) == 0
    spent = time.perf_counter() - began
    wanted = torch.load(out / "whole" / "parameters.pt")
    found = []
    for number in range(kills):
        here, moment = out / f"killed-{number}", random.Random(number).uniform(0, spent)
        process = child(here, traces, False)
        time.sleep(moment)
        os.kill(process, signal.SIGKILL)
        code = finished(process)
        inside = any((here / "checkpoints").glob(".tmp-*"))
        assert finished(child(here, traces, True)) == 0
        same = bool(torch.equal(torch.load(here / "parameters.pt"), wanted))
        found.append({"at": moment, "code": code, "inside_a_write": inside, "same": same})
    (out / "killed.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
