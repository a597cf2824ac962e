"""Keep a command running only while its parent lives: a standard-library script, started by `launch`.

    python watchdog.py PARENT GRACE_S COMMAND...

The script stops the command and all processes that it started on SIGTERM, or when the process PARENT is gone, even if
that was killed. The command has GRACE_S seconds to end by itself.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time


def main(parent: int, grace_s: float, command: "list[str]") -> int:
    """Run the command until it ends or must be stopped; return its exit status."""
    signals = []
    signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(command, start_new_session=True)
    try:
        while child.poll() is None and not signals and os.getppid() == parent:
            time.sleep(0.1)
        if child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(grace_s)
    finally:
        # Also kill its process group: engines and workers that did not end with it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    return child.wait()


if __name__ == "__main__":
    status = main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
    sys.exit(status if status >= 0 else 128 - status)
