"""Run `tracegrad proxy` in a process of its own, without torch."""

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request

from shop_files import folder, played, server  # noqa: F401

BARE = "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers'])); "

BARE += "from tracegrad.cli import main; sys.exit(main(sys.argv[1:]))"

WITHOUT_TORCH = [sys.executable, "-c", BARE]
"""The command line where neither torch nor transformers can be imported: recording needs none."""


def read_to(process, words, timeout_s=90.0):
    """Read the lines of a process up to one with these words, and return them.

    A process that ends or takes longer than `timeout_s` without such a line is killed, and the test fails with what it
    printed.
    """
    lines, timer = [], threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        while not (lines and words in lines[-1]):
            line = process.stdout.readline()
            assert line, f"no line with {words!r} within {timeout_s:g} s:\n{''.join(lines)}"
            lines.append(line)
    finally:
        timer.cancel()
    return lines


class Running:
    """`tracegrad proxy` in a process of its own."""

    def __init__(self, out, url, *more):
        self.out = out
        command = [*WITHOUT_TORCH, "proxy", "--server", url, "--out", str(out), *more]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.said = read_to(self.process, "to end a trajectory")
        self.url = re.search(r"OPENAI_BASE_URL=(http://\S+?)/s/NAME/v1", "".join(self.said))[1]
        self.key = (out / "key").read_text().strip()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        self.process.stdout.close()

    def ask(self, path, body, key=None, **headers):
        sent = {"Authorization": f"Bearer {key or self.key}", **{k.replace("_", "-"): v for k, v in headers.items()}}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), sent)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def stop(self, number=signal.SIGINT):
        self.process.send_signal(number)
        return self.process.wait(60), self.process.stdout.read()
