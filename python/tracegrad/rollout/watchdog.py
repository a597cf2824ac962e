"""Keeps one command running as long as its parent lives: a script of the standard library, started by `launch`.

    python watchdog.py PARENT GRACE_S COMMAND...

Ends the command with all it started when it is told to (SIGTERM), or when the process PARENT is gone, even if that was
killed. Gives the command GRACE_S seconds to end by itself.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time


def main(parent: int, grace_s: float, command: "list[str]") -> int:
    """Run the command until it ends, or until it must; the status it ended with."""
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(command, start_new_session=True)
    try:
        while child.poll() is None and not told and os.getppid() == parent:
            time.sleep(0.1)
        if child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(grace_s)
    finally:
        # Its group: engines and workers that did not end with it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    return child.wait()


if __name__ == "__main__":
    status = main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
    sys.exit(status if status >= 0 else 128 - status)
