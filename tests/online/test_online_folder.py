"""The folder that is the queue: what is cut is not there, what is changed is said, each writer has its own file."""

import json
import os
import random
import subprocess
import sys
import threading

import pytest
import zstandard

import tracegrad as tg
from peak import PEAK
from tracegrad.errors import ArgumentError, FormatError, ReadError
from tracegrad.online.buffer import ConsumedGroups, GroupLocation, GroupReader, GroupWriter, read
from tracegrad.online.collector import StalenessLimit, Tasks


def group(number, count=2, text="hi"):
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]
    return [{"id": f"{number}-{i}", "group": str(number), "reward": i, "messages": messages} for i in range(count)]


def test_groups_come_out_as_they_went_in_and_once(tmp_path):
    follower = GroupReader(tmp_path)
    with GroupWriter(tmp_path) as writer:
        places = [writer.write(group(0)), writer.write(group(1, text="é\u2028"))]
        seen = follower.read_new()
        assert [place for place, _ in seen] == places
        assert [traces.groups for _, traces in seen] == [["0", "0"], ["1", "1"]]
        assert follower.read_new() == []
        places.append(writer.write(group(2)))
        assert [place for place, _ in follower.read_new()] == places[2:]
    assert read(tmp_path, places[1]).groups == ["1", "1"]
    assert tg.read(tmp_path / places[0].file).groups == ["0", "0", "1", "1", "2", "2"]
    again = GroupReader(tmp_path)
    again.skip(places[:2])
    assert [place for place, _ in again.read_new()] == places[2:]


@pytest.mark.parametrize("cut", [1, 7, 60])
def test_a_group_that_is_cut_is_not_there_until_it_is_whole(tmp_path, cut):
    with GroupWriter(tmp_path) as writer:
        writer.write(group(0))
        place = writer.write(group(1))
    path = tmp_path / place.file
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    follower = GroupReader(tmp_path)
    assert [traces.groups[0] for _, traces in follower.read_new()] == ["0"]
    with pytest.raises(ReadError, match="TG-ONLINE-002"):
        read(tmp_path, place)
    path.write_bytes(whole)
    assert [traces.groups[0] for _, traces in follower.read_new()] == ["1"]


def test_a_group_that_was_changed_is_said(tmp_path):
    with GroupWriter(tmp_path) as writer:
        place = writer.write(group(0))
    path = tmp_path / place.file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(ReadError, match="TG-READ-002"):
        GroupReader(tmp_path).read_new()


# Peak memory of going through a folder, beyond what was taken before, in MiB.
GROWTH = """
import sys
from pathlib import Path
from tracegrad.online.buffer import GroupReader
before = peak()
print(sum(len(traces) for _, traces in GroupReader(Path(sys.argv[1])).iter_new()), peak() - before)
"""


def test_memory_is_bounded_by_a_group_however_long_the_file(tmp_path):
    with GroupWriter(tmp_path) as writer:
        for number in range(48):
            writer.write(group(number, text=random.Random(number).randbytes(500_000).hex()))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) > 16 << 20
    command = [sys.executable, "-c", PEAK + GROWTH, str(tmp_path)]
    traces, peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    # A group has 2 MB, its traces as much again; all of them 96.
    assert int(traces) == 96
    assert float(peak) < 24


@pytest.mark.parametrize("data", [b"no zstd, and longer than a header is", b"\x28\xb5\x2f\xfd\x20\x03abc" * 4])
def test_bytes_that_are_no_frame_are_said(tmp_path, data):
    (tmp_path / "00000.jsonl.zst").write_bytes(data)
    with pytest.raises(ReadError, match=r"TG-READ-002.*0"):
        GroupReader(tmp_path).read_new()


def test_a_frame_that_does_not_say_how_long_it_is_is_said(tmp_path):
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(b"{}\n" * 99)
    (tmp_path / "00000.jsonl.zst").write_bytes(frame)
    with pytest.raises(ReadError, match="TG-READ-002"):
        GroupReader(tmp_path).read_new()


def test_a_frame_that_claims_more_than_a_group_may_have_is_said(tmp_path):
    # A header of one segment that claims 2^40 bytes.
    (tmp_path / "00000.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + bytes(9))
    with pytest.raises(ReadError, match=r"TG-READ-002.*1099511627776"):
        GroupReader(tmp_path).read_new()


def test_groups_longer_than_what_is_held_of_their_file_come_out_as_they_went_in(tmp_path):
    texts = [random.Random(number).randbytes(size).hex() for number, size in enumerate((900_000, 10, 300_000, 10, 10))]
    with GroupWriter(tmp_path) as writer:
        places = [writer.write(group(number, 1, text=text)) for number, text in enumerate(texts)]
    seen = GroupReader(tmp_path).read_new()
    assert [place for place, _ in seen] == places
    assert [traces[0].messages[0]["content"] for _, traces in seen] == texts
    assert [read(tmp_path, place)[0].messages[0]["content"] for place in places] == texts


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "00000.jsonl.zst")
    with pytest.raises(ReadError, match="TG-READ-001"):
        GroupReader(tmp_path).read_new()


def test_a_frame_that_claims_less_than_it_holds_is_said(tmp_path):
    with GroupWriter(tmp_path) as writer:
        place = writer.write(group(0, text="a" * 300))
        path = tmp_path / place.file
    data = bytearray(path.read_bytes())
    size = zstandard.get_frame_parameters(bytes(data)).content_size
    at = bytes(data).index((size - 256).to_bytes(2, "little"))
    data[at : at + 2] = (20).to_bytes(2, "little")
    path.write_bytes(data)
    with pytest.raises(ReadError, match="TG-READ-002"):
        GroupReader(tmp_path).read_new()


def test_writers_have_files_of_their_own_and_threads_share_one(tmp_path):
    with GroupWriter(tmp_path) as first, GroupWriter(tmp_path) as second:
        assert first.name != second.name
        threads = [threading.Thread(target=first.write, args=(group(n, 30),)) for n in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        second.write(group(40))
    found = sorted(int(traces.groups[0]) for _, traces in GroupReader(tmp_path).read_new())
    assert found == list(range(41))


def test_a_record_that_no_tokenizer_could_see_is_left_out_and_the_rest_is_read(tmp_path):
    with GroupWriter(tmp_path) as writer:
        writer.write([*group(0, 2), *group(0, 1, text="half \ud800")])
        writer.write(group(1, 2, text="\ud800"))
        writer.write(group(2))
    assert [traces.groups for _, traces in GroupReader(tmp_path).read_new()] == [["0", "0"], [], ["2", "2"]]


def test_what_json_cannot_say_is_refused_and_the_file_goes_on(tmp_path):
    with GroupWriter(tmp_path) as writer:
        with pytest.raises(ArgumentError, match="TG-ONLINE-003"):
            writer.write([{"id": "a", "group": "0", "metadata": {1, 2}}])
        writer.write(group(1))
    assert len(GroupReader(tmp_path).read_new()) == 1


def test_a_ledger_reads_what_it_wrote_and_leaves_out_a_line_that_was_cut(tmp_path):
    ledger, place = ConsumedGroups(tmp_path), GroupLocation("00000.jsonl.zst", 5, 9)
    ledger.add(0, [place, GroupLocation("00001.jsonl.zst", 0, 3)], zero_std=[0])
    ledger.add(1, [place])
    path = tmp_path / "steps.jsonl"
    path.write_bytes(path.read_bytes()[:-3])
    again = ConsumedGroups(tmp_path)
    assert again.steps == ledger.steps[:1]
    assert again.steps[0].trained == (GroupLocation("00001.jsonl.zst", 0, 3),)
    again.add(7, [place])
    assert [step.version for step in ConsumedGroups(tmp_path).steps] == [0, 7]
    ledger = ConsumedGroups(tmp_path)
    ConsumedGroups(tmp_path).add(8, [])
    assert ledger.wait(2, lambda: False).version == 8
    assert ledger.wait(3, lambda: True) is None


@pytest.mark.parametrize(
    "change",
    [
        {"groups": [["../../etc/passwd", 0, 1]]},
        {"groups": [["x.jsonl.zst", -1, 1]]},
        {"dull": [1]},
        {"step": 4},
        {"version": 1.5},
        {"groups": 7},
    ],
)
def test_a_ledger_of_somebody_else_is_refused(tmp_path, change):
    line = {"step": 0, "version": 0, "groups": [["x.jsonl.zst", 0, 1]], "dull": [], **change}
    (tmp_path / "steps.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(FormatError, match="TG-ONLINE-008"):
        ConsumedGroups(tmp_path)


def test_the_pace_by_hand():
    pace = StalenessLimit(groups=4, steps_ahead=1, max_resample_factor=3, steps=3)
    assert [pace.max_started(taken, 0) for taken in range(4)] == [8, 12, 12, 12]
    assert pace.max_started(0, 5) == 13
    assert pace.max_started(0, 99) == 8 * 3
    assert StalenessLimit(groups=4, steps_ahead=0, max_resample_factor=1).max_started(0, 99) == 4


def test_a_list_of_tasks_comes_again_in_another_order_and_goes_on_where_it_was():
    tasks = Tasks(list(range(50)), seed=3)
    every = [task for (_, task), _ in zip(tasks.after(set()), range(150), strict=False)]
    assert sorted(every[:50]) == sorted(every[50:100]) == list(range(50))
    assert every[:50] != every[50:100] != list(range(50))
    rest = [each for each, _ in zip(tasks.after({0, 2}), range(3), strict=False)]
    assert rest == [(1, every[1]), (3, every[3]), (4, every[4])]
    assert [task for _, task in Tasks(iter("abc")).after({1})] == ["a", "c"]
    with pytest.raises(ArgumentError, match="TG-ONLINE-010"):
        Tasks([])
    with pytest.raises(ArgumentError, match=r"TG-ONLINE-009.*str"):
        Tasks("abc")
