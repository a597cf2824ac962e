"""`tracegrad pull`: only what is new or changed, and what changed replaces what was there; against the real servers."""

import base64
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from urllib.error import URLError

import pytest

import tracegrad as tg
from otlp_spans import lines, request, span
from stand_in import free_port
from tracegrad.errors import ServerError
from tracegrad.receive import folder as folders
from tracegrad.receive.folder import TraceFolder, encode
from tracegrad.receive.pull import PulledTrace, fingerprint_of, open_store, pull

SEED = Path(__file__).parents[1] / "helpers" / "trace_stores.py"


class Store:
    """A store whose traces are values by their numbers; it fails before the trace `gone`."""

    name = "a store"

    def __init__(self, **values):
        self.values, self.gone = values, None

    def changed(self, is_known, counts):
        for name, value in self.values.items():
            if name == self.gone:
                raise RuntimeError("the server is gone")
            number = int(name[1:])
            if is_known(f"{number:032x}", fingerprint_of(value)):
                counts["unchanged"] += 1
            elif value is None:
                counts["unfinished"] += 1
            else:
                line = encode(request(span(number, 1, told=value)))
                yield PulledTrace(f"{number:032x}", fingerprint_of(value), line)


def told(out):
    values = {}
    for trace, spans in lines(out).items():
        [value] = [each["value"]["stringValue"] for each in spans[0]["attributes"]]
        values[f"t{int(trace, 16)}"] = value
    return values


def counts(new=0, changed=0, unchanged=0, unfinished=0, unreadable=0):
    names = ("new", "changed", "unchanged", "unfinished", "unreadable")
    return dict(zip(names, (new, changed, unchanged, unfinished, unreadable), strict=True))


def test_only_new_and_changed_traces_are_pulled_and_replace_what_was_there(tmp_path, monkeypatch):
    out, store = tmp_path / "o", Store(t1="a", t2="b", t3=None)
    with TraceFolder(out) as folder:
        assert pull(store, folder) == counts(new=2, unfinished=1)
        assert pull(store, folder) == counts(unchanged=2, unfinished=1)
    store.values |= {"t2": "changed", "t3": "c", "t4": "d"}
    with TraceFolder(out) as folder:
        assert pull(store, folder) == counts(new=2, changed=1, unchanged=1)
    assert told(out) == store.values
    (out / "traces-00001.jsonl").unlink()  # what the user has taken away is pulled again
    with TraceFolder(out) as folder:
        assert pull(store, folder) == counts(new=4)
        other = Store(t1="a", t2="another")
        other.name = "another store"
        assert pull(other, folder) == counts(changed=1, unchanged=1)
        store.values["t1"] = "changed"
        with monkeypatch.context() as patch:
            patch.setattr(folders.files, "replace", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                pull(store, folder)
    with TraceFolder(out) as folder:
        assert told(out) == {**store.values, "t2": "another"}  # the draft was complete
        assert pull(store, folder) == counts(unchanged=4)


def test_a_store_that_fails_leaves_what_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr("tracegrad.receive.pull.BATCH", 2)
    store = Store(**{f"t{n}": str(n) for n in range(1, 6)})
    store.gone = "t4"
    with TraceFolder(tmp_path / "o") as folder:
        with pytest.raises(ServerError, match=r"TG-RECEIVE-009: a store: RuntimeError: the server is gone"):
            pull(store, folder)
        assert len(told(tmp_path / "o")) == 2
        store.gone = None
        assert pull(store, folder) == counts(new=3, unchanged=2)
    assert told(tmp_path / "o") == store.values


class MlflowException(Exception):
    def __init__(self, code):
        super().__init__(code)
        self.error_code = code


class Values(dict):
    """A value of MLflow's client."""

    token = None

    def to_dict(self):
        return self


class MlflowClient:
    """The calls of MLflow's client that are used, with one page of traces."""

    errors: ClassVar = {2: "BAD_REQUEST", 3: "NOT_FOUND"}

    def __init__(self, tracking_uri):
        pass

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id="1")

    def search_traces(self, **_):
        page = [{"trace_id": f"tr-{number:032x}", "state": "OK", "assessments": []} for number in range(1, 6)]
        return type("Page", (list,), {"token": None})(SimpleNamespace(info=Values(info)) for info in page)

    def get_trace(self, name):
        number = int(name.removeprefix("tr-"), 16)
        if number in self.errors:
            raise MlflowException(self.errors[number])
        trace, identity = (base64.b64encode(number.to_bytes(size, "big")).decode() for size in (16, 8))
        made = {"trace_id": trace, "span_id": identity, "name": "a", "start_time_unix_nano": 1, "end_time_unix_nano": 2}
        return Values(data={"spans": [{**made, "attributes": {"told": "\ud800"}}]})


def test_traces_that_mlflow_cannot_load_are_counted_and_the_others_pulled(tmp_path, monkeypatch):
    for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=MlflowClient))
    monkeypatch.setitem(sys.modules, "mlflow.exceptions", SimpleNamespace(MlflowException=MlflowException))
    store = open_store("mlflow", "http://127.0.0.1:1", "shop", None)
    with TraceFolder(tmp_path / "o") as folder:
        assert pull(store, folder) == counts(new=3, unreadable=2)
        assert told(tmp_path / "o") == dict.fromkeys(("t1", "t4", "t5"), "\ud800")
        MlflowClient.errors[3] = "INTERNAL_ERROR"
        with pytest.raises(ServerError, match=r"TG-RECEIVE-009: .*INTERNAL_ERROR"):
            pull(store, folder)


# --- real servers, from PyPI ---


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["phoenix", "mlflow"])
def test_traces_and_scores_of_a_real_server_are_pulled(tmp_path, stores_python, kind):
    """A score of a trace and one of a span are added between two pulls."""
    port, package = free_port(), str(Path(tg.__file__).parents[1])
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, "PHOENIX_WORKING_DIR": str(tmp_path / "phoenix"), "PHOENIX_HOST": "127.0.0.1"}
    environment |= {
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(free_port()),
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    environment |= {"PHOENIX_TELEMETRY_ENABLED": "false", "PYTHONPATH": package}
    environment |= {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    commands = {"phoenix": ["-m", "phoenix.server.main", "serve"]}
    commands["mlflow"] = ["-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    commands["mlflow"] += ["--backend-store-uri", f"sqlite:///{tmp_path}/m.db"]
    commands["mlflow"] += ["--artifacts-destination", str(tmp_path / "artifacts")]

    def run(*words, code=0):
        done = subprocess.run(
            [stores_python, *words], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def pulled():
        words = ["--project", "shop", "--out", str(tmp_path / "o"), "--json"]
        return {**json.loads(run("-m", "tracegrad", "pull", kind, url, *words)), "out": None}

    server = subprocess.Popen(
        [stores_python, *commands[kind]],
        env=environment,
        cwd=tmp_path,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while True:
            try:
                urllib.request.urlopen(url + ("/healthz" if kind == "phoenix" else "/health"), timeout=60).close()
                break
            except URLError:
                assert server.poll() is None
                time.sleep(0.5)
        ids = json.loads(run(str(SEED), kind, url, "begin").splitlines()[-1])
        assert pulled() == {**counts(new=3), "out": None}
        assert {trace: len(spans) for trace, spans in lines(tmp_path / "o").items()} == dict.fromkeys(ids, 2)
        assert pulled() == {**counts(unchanged=3), "out": None}
        run(str(SEED), kind, url, "score", *ids)
        assert pulled() == {**counts(changed=2, unchanged=1), "out": None}
        assert len(lines(tmp_path / "o")) == 3
        words = ["-m", "tracegrad", "pull", kind, url, "--project", "none", "--out", str(tmp_path / "p"), "--json"]
        error = json.loads(run(*words, code=1))["error"]
        assert (error["code"], "shop" in error["message"]) == ("TG-RECEIVE-010", True)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(60)
    error = json.loads(run(*words, code=1))["error"]
    assert (error["code"], url in error["message"]) == ("TG-RECEIVE-009", True)
    traces = {trace.id: trace for trace in tg.read(tmp_path / "o", map={"reward": "scores.correct"})}
    assert {name: traces[name].reward for name in ids} == dict(zip(ids, (1.0, 0.25, None), strict=True))
    for number, name in enumerate(ids):
        assert [message["content"] for message in traces[name].messages] == [f"{number}+2?", "4"]
    spans = Counter(each["name"] for each in lines(tmp_path / "o")[ids[0]])
    assert spans == {"agent": 1, "chat": 1}
