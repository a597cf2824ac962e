"""A server that is started here ends with whoever started it, and says why where it does not begin."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tracegrad import progress
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.online import OnlineConfig, RolloutConfig, servers
from tracegrad.rollout import launch

# A stand-in for vLLM's module: it starts a child as vLLM does its engine, answers /health, and does not end when told.
FAKE = """
import http.server, os, signal, subprocess, sys
if "--fail" in sys.argv:
    print("ValueError: no such model"); sys.exit(3)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[sys.argv.index("--model") + 1], "w").write(f"{os.getpid()} {engine.pid}")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(FAKE)
    monkeypatch.setattr(launch, "GRACE_S", 0.5)
    return {
        "python": sys.executable,
        "environment": {"PYTHONPATH": str(tmp_path)},
        "log_path": tmp_path / "log",
        "name": "m",
    }


def gone(pids, within_s=60.0):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        alive = [pid for pid in pids if os.path.exists(f"/proc/{pid}") and "Z" not in status(pid)]
        if not alive:
            return True
        time.sleep(0.1)
    return False


def status(pid):
    try:
        with open(f"/proc/{pid}/stat") as line:
            return line.read().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


def test_a_launched_server_is_stopped_with_its_engine_though_it_will_not_end(fake, tmp_path):
    pids = tmp_path / "pids"
    with launch.launch(model=pids, timeout_s=60, **fake) as launched:
        assert launched.url.startswith("http://127.0.0.1:")
        running = pids.read_text().split()
        with pytest.raises(ArgumentError, match="TG-ROLLOUT-024"):
            launch.ServerProcess(model=pids, port=int(launched.url.rsplit(":", 1)[1]), **fake)
    assert gone(running)


def test_a_server_of_a_run_asks_for_a_token_that_only_its_environment_holds(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", fake["environment"]["PYTHONPATH"])
    keys = []
    for given in (None, None, "the user's own"):
        out, pids = tmp_path / f"run-{len(keys)}", tmp_path / f"pids-{len(keys)}"
        told = servers.open_servers(pids, [], given, sys.executable, {}, OnlineConfig(), RolloutConfig(), out, print)
        with told as (pool, _, _):
            keys.append(pool().key)
            [server, _] = pids.read_text().split()
            command, environment = (
                Path(f"/proc/{server}/{name}").read_bytes().split(b"\0") for name in ("cmdline", "environ")
            )
            assert f"VLLM_API_KEY={keys[-1]}".encode() in environment
            assert command[command.index(b"--middleware") + 1] == b"tracegrad.weight_sync.auth.Guard"
            files = [path for path in out.rglob("*") if path.is_file() and "package" not in path.parts]
            assert files
            assert not any(keys[-1].encode() in text for text in [*command, *(path.read_bytes() for path in files)])
    assert len(set(keys)) == 3
    assert min(map(len, keys[:2])) >= 40
    assert keys[2] == "the user's own"


PARENT = """
import sys, time
from tracegrad.rollout import launch
launch.GRACE_S = 0.5
model, log, path = sys.argv[1:]
launch.ServerProcess(sys.executable, model, name="m", log_path=log, environment={"PYTHONPATH": path}).wait(60)
print("up", flush=True)
time.sleep(600)
"""


def test_a_start_that_takes_long_is_reported(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    lines = []
    with launch.launch(model=tmp_path / "pids", timeout_s=60, log=lines.append, **fake):
        pass
    assert re.fullmatch(r"server   vLLM starts: \d+ s, and is waited for \d+ s more; its log ends: nothing", lines[0])


def test_a_launched_server_ends_when_its_parent_is_killed(fake, tmp_path):
    pids = tmp_path / "pids"
    told = [str(pids), str(tmp_path / "log"), fake["environment"]["PYTHONPATH"]]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *told], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "up\n"
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert gone(pids.read_text().split())


def test_a_server_that_ends_before_it_is_healthy_is_an_error_with_its_words(fake, tmp_path):
    server = launch.launch(model=tmp_path / "pids", arguments=["--fail"], timeout_s=60, **fake)
    with pytest.raises(TracegradError, match=r"TG-ROLLOUT-054.*3.*ValueError.*no.*such"), server:
        pass
