"""Ctrl-C is answered soon on every road, whatever the input: by KeyboardInterrupt, in a process that goes on."""

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
# Sends SIGINT when ROAD has used `after` seconds of CPU, and prints how many it used from there.
CODE = """
import os, resource, signal, sys, threading, time
import numpy as np
import tracegrad as tg
from tracegrad.objective import Truncate, Ratio, Reduce, Weight
path, model = sys.argv[1:]
at = [0.0]
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may have it ignored

def interrupt(after, waits):
    begin = time.process_time()
    while not waits and time.process_time() - begin < after:
        time.sleep(0.01)
    time.sleep(after)
    at[0] = time.process_time()
    os.kill(os.getpid(), signal.SIGINT)

{prepare}
threading.Thread(target=interrupt, args=({after}, {waits}), daemon=True).start()
try:
    {road}
    print("it ended")
except KeyboardInterrupt:
    print(time.process_time() - at[0])
print(len(tg.Tokenizer.from_pretrained(model).encode("still alive")))
"""
TERMS = """
n = 6_000_000
old = -np.random.default_rng(0).random(n).astype('f4')
owner = np.random.default_rng(1).integers(0, n // 3, n)
weights = [Weight(Ratio('old', 'rollout'), transform=Truncate(0.0, 2.0))]
"""
MANY = """
record = {'messages': [{'role': 'user', 'content': 'hi %d'}, {'role': 'assistant', 'content': 'four %d ' * 40}]}
import json
text = json.dumps(record)
traces = tg.Traces.from_records([json.loads(text.replace('%d', str(n))) for n in range(4000)])
tokenizer = tg.Tokenizer.from_pretrained(model)
"""
FILE = (
    MANY
    + """
import tempfile
from pathlib import Path
from tracegrad import doctor, prepare
from tracegrad.config import Data
out = Path(tempfile.mkdtemp())
with open(path, "w") as file:
    file.writelines(text.replace("%d", str(n)) + "\\n" for n in range(30_000))
"""
)
# The signal comes while the rows are placed.
PLACING = """
from tracegrad import _core
place = _core.pack_place
def placing(*arguments):
    threading.Thread(target=interrupt, args=(0.2, False), daemon=True).start()
    return place(*arguments)
_core.pack_place = placing
s = tg.Sequences.from_arrays(np.arange(8_000_000) % 999, np.arange(0, 8_000_001, 2),
                             np.full(8_000_000, -1.0), np.arange(8_000_000) % 2 > 0)
"""
RECORD = """
with open(path, "w") as file:
    file.write('{"messages": [{"role": "user", "content": "hi"}], "metadata": [')
    file.write('{"a": 1}, ' * 25_000_000 + '1]}')
"""
GIANT = """
text = 'the price of two lamps ' * 8_000_000
said = [{'role': 'user', 'content': text}, {'role': 'assistant', 'content': 'four'}]
tokenizer = tg.Tokenizer.from_pretrained(model)
"""
ROADS = {
    "one long record": (RECORD, "tg.read(path)", 0.2, False),
    "one long text": (
        "tokenizer = tg.Tokenizer.from_pretrained(model); text = 'the price of two lamps ' * 8_000_000",
        "tokenizer.encode(text)",
        0.1,
        False,
    ),
    "one long trace": (
        GIANT + "traces = tg.Traces.from_records([{'messages': said}])",
        "tg.align(traces, tokenizer, text_only=True)",
        0.1,
        False,
    ),
    "one long render": (GIANT, "tokenizer.render(said)", 0.1, False),
    "very many sequences": (PLACING, "tg.pack(s, np.ones(4_000_000), tokens_per_row=4096)", 1000, False),
    "one endless line": ("", "tg.read(path)", 0.2, False),
    "correct": (TERMS, "[tg.correct(old, old, trace=owner, weights=weights) for _ in range(9999)]", 0.5, False),
    "correct by trace": (
        TERMS,
        "[tg.correct(old, old, trace=owner, reduce=Reduce(per='trace', inner='mean')) for _ in range(9999)]",
        1.0,
        False,
    ),
    "align": (MANY, "[tg.align(traces, tokenizer, text_only=True) for _ in range(500)]", 0.3, False),
    "encode": (MANY, "[tokenizer.encode('hello world ' * 5000) for _ in range(10**6)]", 0.2, False),
    "render": (MANY, "[tokenizer.render([{'role': 'user', 'content': str(n)}]) for n in range(10**7)]", 0.2, False),
    "prepare": (FILE, "prepare.prepare(path, Path(model), Data(text_only=True), out / 'shards')", 0.5, False),
    "doctor": (FILE, "doctor.diagnose(str(path), model)", 0.5, False),
    "pack": (
        "s = tg.Sequences.from_arrays(np.arange(2_000_000) % 999, np.arange(0, 2_000_001, 100), "
        "np.full(2_000_000, -1.0), np.arange(2_000_000) % 100 > 0)",
        "[tg.pack(s, np.ones(20_000), tokens_per_row=999, share_prefixes=True) for _ in range(99)]",
        0.3,
        False,
    ),
}


def interrupted(path, prepare, road, after, waits):
    code = CODE.format(prepare=prepare, road=road, after=after, waits=waits)
    command = [sys.executable, "-c", code, str(path), str(MODEL)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


# One piece of work that takes seconds.
WHOLE = ("one long record", "one long text", "one long trace", "one long render", "very many sequences")
SLOW = ("correct by trace", "encode", "render", "pack", *WHOLE)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.nightly) if n in SLOW else n for n in ROADS])
@pytest.mark.first_cases(2)
def test_an_interrupt_is_answered_soon(tmp_path, name):
    path = tmp_path / "runs.jsonl.gz"
    if name == "one endless line":
        with gzip.open(path, "wb", compresslevel=1) as file:
            for _ in range(300):
                file.write(bytes(1 << 20).replace(b"\0", b"x"))
    prepare, road, after, waits = ROADS[name]
    done = interrupted(path, prepare, road, after, waits)
    assert done.returncode == 0, done.stderr
    took, alive = done.stdout.split()
    # CPU seconds of all threads: a second, and slack for what else ran.
    assert float(took) < (1 if name in WHOLE else 2)
    assert int(alive) > 0


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
@pytest.mark.parametrize("fed", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_wait_for_a_pipe_is_ended_by_an_interrupt(tmp_path, fed):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = subprocess.Popen(["sh", "-c", f"exec sleep 300 > '{path}'"]) if fed else None
    try:
        done = interrupted(path, "", "tg.read(path)", 0.5, True)
    finally:
        if writer:
            writer.kill()
            writer.wait()
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[0]) < 2


def test_an_interrupt_that_another_thread_takes_ends_a_wait_that_no_system_call_is_interrupted_in(tmp_path):
    """So it is with one that comes just before the wait begins."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = subprocess.Popen(["sh", "-c", f"exec sleep 300 > '{path}'"])
    prepare = "os.kill = lambda _, number: signal.pthread_kill(threading.get_ident(), number)"
    try:
        done = interrupted(path, prepare, "tg.read(path)", 0.5, True)
    finally:
        writer.kill()
        writer.wait()
    assert done.returncode == 0, done.stderr
    assert "it ended" not in done.stdout


@pytest.mark.nightly
def test_a_handler_that_does_not_raise_lets_the_work_go_on(tmp_path):
    prepare = MANY + "seen = []\nsignal.signal(signal.SIGINT, lambda *_: seen.append(1))\n"
    road = "found = [len(tg.align(traces, tokenizer, text_only=True).trace) for _ in range(9)]; print(set(found), seen)"
    done = interrupted(tmp_path, prepare, road, 0.1, False)
    assert done.stdout.startswith("{4000} [1]\nit ended"), done.stdout + done.stderr


def test_a_stream_that_was_stopped_says_so_and_skips_nothing(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    road = (
        "try: next(stream)\n"
        "    except KeyboardInterrupt:\n"
        "        try: next(stream)\n"
        "        except tg.TracegradError as error: print(str(error)[:11])\n"
        "        raise"
    )
    writer = subprocess.Popen(["sh", "-c", f"exec > '{path}'; echo '[1, 2, 3,'; exec sleep 300"])
    try:
        done = interrupted(path, "stream = tg.stream(path, on_error='skip')", road, 0.5, True)
    finally:
        writer.kill()
        writer.wait()
    assert done.stdout.startswith("TG-"), done.stdout + done.stderr


def test_the_c_interface_of_numpy_is_loaded_with_the_package(tmp_path):
    """Loaded within a call it would run Python, where a signal's exception makes it panic."""
    road = (
        "import numpy._core.multiarray as arrays\n"
        "    del arrays._ARRAY_API\n"
        "    messages = [{'role': 'user', 'content': 'hi'}]\n"
        "    print(tg.Tokenizer.from_pretrained(model).render(messages).text.count('hi'))"
    )
    done = interrupted(tmp_path, "import tracegrad._core", road, 1000, False)
    assert done.stdout.startswith("1\nit ended"), done.stdout + done.stderr
