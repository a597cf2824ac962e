"""Pictures of one record are found again in time in proportion to its bytes, not to their product."""

import base64
import json
import time

import pytest

from tracegrad import _core
from tracegrad.data import read
from tracegrad.data.trace import Traces

COUNT, BYTES = 600, 30_000


def pictures(seed):
    """Files of one length that begin as a GIF does."""
    head = b"GIF89a\x05\x00\x07\x00"
    return [head + n.to_bytes(4, "big") + bytes([seed]) * (BYTES - 14) for n in range(COUNT)]


def record(files, name):
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/gif;base64," + base64.b64encode(file).decode()}}
        for file in files
    ]
    return {"id": name, "messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "x"}]}


@pytest.mark.parametrize("source", ["file", "memory"])
def test_many_pictures_of_a_record_are_found_again_in_linear_time(source, tmp_path):
    many = {name: pictures(seed) for seed, name in enumerate("ab")}
    lines = [json.dumps(record(files, name)) for name, files in many.items()]
    if source == "memory":
        traces = Traces.from_records([line.encode() for line in lines])
    else:
        path = tmp_path / "t.jsonl"
        path.write_text("\n".join(lines) + "\n")
        traces = read(path)
    begun = time.process_time()
    # By turns of both records, and from the last picture to the first.
    for pair in zip(*(files[::-1] for files in many.values()), strict=True):
        for file in pair:
            assert _core.picture_bytes(traces.core, _core.picture_digest(file)) == file
    # Decoding all pictures before each one took some 10 seconds; each alone takes a tenth of one.
    assert time.process_time() - begun < 5
