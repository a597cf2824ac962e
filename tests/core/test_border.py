"""What crosses the border between Python and Rust: panics, bytes that are no bool, forks, pickles, interpreters."""

import copy
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tracegrad import _core
from tracegrad.alignment.align import align
from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.data import read
from tracegrad.data.trace import Traces
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.packing import pack

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "quickstart" / "model"
# Functions that only hand out what is held already: nothing in them can fail.
PLAIN = {
    *("sampling_options", "sampling_option_is_off", "aligned_count"),
    *("__len__", "__deepcopy__", "__reduce__", "take", "concatenate", "format", "id", "location", "group", "reward"),
    *(
        "rewards",
        "model",
        "record",
        "record_size",
        "messages",
        "message_rewards",
        "conversation",
        "tools",
        "template_kwargs",
    ),
    *("generations", "reward_column", "columns", "abandon", "has_generation", "has_template", "name", "eos_ids"),
    *(
        "spelling",
        "report",
        "rebuilt",
        "token_bytes",
        "id_of_bytes",
        "id_of_added",
        "is_special",
        "is_added",
        "model_vocab_size",
    ),
}


def traces(count=40):
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four " * 20}]
    return Traces.from_records([{"id": f"t{n}", "messages": messages, "reward": n} for n in range(count)])


def functions_of_the_border():
    """(file, name, body) of every function that Python can call."""
    for path in sorted((ROOT / "rust" / "py" / "src").glob("*.rs")):
        text = path.read_text()
        blocks = re.findall(r"\n#\[pymethods\]\nimpl [^\n]*\{\n(.*?)\n\}\n", text, re.S)
        for block in blocks:
            for name, body in re.findall(r"\n    fn (\w+)(.*?)\n    \}", "\n" + block, re.S):
                yield path.name, name, body
        for name, body in re.findall(r"#\[pyfunction\].*?\nfn (\w+)(.*?)\n\}\n", text, re.S):
            yield path.name, name, body


def test_every_call_that_works_goes_through_the_border():
    found = list(functions_of_the_border())
    assert {"align_traces", "pack_lay", "correct_terms", "batch", "render", "encode", "decode"} <= {
        n for _, n, _ in found
    }
    bare = [
        (file, name)
        for file, name, body in found
        if not re.search(r"\b(without_gil|with_python|Self::decode|self\.with)\b", body)
    ]
    assert [entry for entry in bare if entry[1] not in PLAIN] == []
    [through] = re.findall(r"\n    fn with<.*?\n    \}", (ROOT / "rust/py/src/read.rs").read_text(), re.S)
    assert "without_gil(py, " in through


def test_a_panic_is_an_error_of_ours():
    # cu_seqlens points behind the ids, which pack() checks and its core indexes by.
    row = np.zeros(1, np.int32)
    lengths = np.full(1, 5, np.int32)
    arguments = (np.zeros(2, np.int32), np.ones(2, bool), np.ones(2, np.float32), np.array([0, 9]), lengths)
    with pytest.raises(TracegradError) as caught:
        _core.pack_lay(*arguments, row, row, row, np.ones(1, np.int32), np.zeros(1, bool), 1)
    assert isinstance(caught.value, Exception)


def test_bool_bytes_beyond_0_and_1_never_reach_rust():
    twos = np.full(3, 2, np.uint8).view(bool)
    nan = float("nan")
    with pytest.raises(ArgumentError, match="TG-ARGS-010"):
        Sequences.from_arrays([1, 2, 3], [0, 3], [nan, -1, -1], twos)
    whole = Sequences.from_arrays([1, 2, 3], [0, 3], [nan, -1, -1], [False, True, True])
    object.__setattr__(whole, "trainable", twos)
    with pytest.raises(ArgumentError, match="TG-BORDER-004"):
        pack(whole, [1.0], tokens_per_row=8)
    row = np.zeros(1, np.int32)
    for flags in (twos, np.repeat(twos, 2)[::2]):
        with pytest.raises(ArgumentError, match="TG-BORDER-004"):
            _core.pack_measure(np.array([0, 3]), row, np.zeros(3, np.int32), flags, ["a"], 9, False, False, "error")


def aligned(tokenizer=None):
    tokenizer = tokenizer or Tokenizer.from_pretrained(MODEL)
    return align(traces(), tokenizer, text_only=True).ids.tolist()


def ids_of(index):
    return aligned()[:50]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own():
    tokenizer = Tokenizer.from_pretrained(MODEL)
    expected, long = aligned(tokenizer), tokenizer.encode("hello world " * 20_000).tolist()
    ending = threading.Event()

    def work():
        while not ending.is_set():
            aligned(tokenizer)

    busy = threading.Thread(target=work)
    busy.start()
    children = []
    for _ in range(5):  # at five moments of another thread's work
        child = os.fork()
        if child == 0:
            signal.alarm(120)
            same = aligned(tokenizer) == expected and tokenizer.encode("hello world " * 20_000).tolist() == long
            os._exit(0 if same else 1)
        children.append(child)
    ending.set()
    busy.join()
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 5


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_processes_of_every_kind_align(method):
    expected = aligned()[:50]
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.map_async(ids_of, [0]).get(timeout=240) == [expected]


class Aligned:
    """A data set whose workers align."""

    def __init__(self):
        self.traces, self.tokenizer = traces(4), Tokenizer.from_pretrained(MODEL)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return align(self.traces[index], self.tokenizer, text_only=True).ids[:5]


def test_a_data_loader_of_torch_aligns_in_its_workers():
    data = pytest.importorskip("torch.utils.data")
    here = [Aligned()[index].tolist() for index in range(4)]
    loader = data.DataLoader(Aligned(), batch_size=2, num_workers=1, multiprocessing_context="fork", timeout=240)
    assert [row for batch in loader for row in batch.tolist()] == here


def test_traces_are_pickled_and_copied(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_bytes(b"\n".join(trace.record.replace(b'"id"', b'"name"') for trace in traces(3)))
    for whole in (traces(5), traces(5)[1:3], read(path), read(path, format="chat")):
        for again in (pickle.loads(pickle.dumps(whole)), copy.copy(whole), copy.deepcopy(whole)):
            assert again == whole
            assert hash(again) == hash(whole)
            assert [trace.location for trace in again] == [trace.location for trace in whole]
            assert [trace.id for trace in again] == [trace.id for trace in whole]
            assert again.read_report == whole.read_report
        one = whole[1]
        sent = pickle.dumps(one)
        assert len(sent) < 2 * len(one.record) + 1000, "one trace does not carry the others"
        for again in (pickle.loads(sent), copy.copy(one), copy.deepcopy(one)):
            assert again == one
            assert (again.id, again.messages, again.location) == (one.id, one.messages, one.location)
    assert traces(2) != traces(3)
    assert pickle.loads(pickle.dumps(traces(0))) == traces(0)


@pytest.mark.parametrize("first", ["import tracegrad", "pass"])
def test_another_interpreter_is_refused_in_words(first):
    code = (
        "try: import _interpreters as sub\n"
        "except ImportError: import _xxsubinterpreters as sub\n"
        f"{first}\n"
        "try: print(sub.run_string(sub.create(), 'import tracegrad'))\n"
        "except Exception as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "tracegrad was imported in a sub-interpreter" in done.stdout
