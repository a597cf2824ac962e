"""Progress lines: how often they come, what they say, and that a thread prints them while nothing else does."""

import io
import threading

import pytest

from tracegrad.progress import Heartbeat, ProgressPrinter, progress_line, time_left


def test_a_line_is_printed_every_ten_seconds_whatever_happens_in_between():
    now, lines = [100.0], []
    printer = ProgressPrinter(lines.append, clock=lambda: now[0])
    for second in range(35):
        now[0] = 100.0 + second
        printer.tick(lambda seconds: f"{seconds:.0f}")
    printer.tick(lambda seconds: "now", at_once=True)
    assert lines == ["10", "20", "30", "now"]


def test_without_a_terminal_there_is_no_return_to_the_start_of_a_line():
    now, stream = [0.0], io.StringIO()
    printer = ProgressPrinter(stream=stream, clock=lambda: now[0])
    now[0] = 10.0
    printer.tick(lambda seconds: "a")
    printer.clear()
    assert stream.getvalue() == "a\n"


def test_the_time_left_is_that_of_the_work_left():
    assert time_left(10.0, 1, 2) == "10 s left"
    assert time_left(119.0, 1, 2) == "119 s left"
    assert time_left(120.0, 1, 2) == "2 min 0 s left"
    assert time_left(3600.0, 1, 3) == "2 h 0 min left"
    assert time_left(10.0, 2, 2) == time_left(10.0, 3, 2) == time_left(10.0, 0, 2) == ""


def test_a_phase_of_unknown_length_has_its_time_so_far():
    assert progress_line("aligning", seconds=12.4) == "aligning  12 s so far"
    assert progress_line("reading", ["5 records"], seconds=12.4, done=5) == "reading  5 records  12 s so far"
    assert progress_line("reading", seconds=30, done=0, total=10) == "reading  0 %  30 s so far"


def test_a_heartbeat_beats_until_its_block_ends():
    beaten = threading.Event()
    with Heartbeat(beaten.set, every_s=0.001) as heartbeat:
        assert beaten.wait(60)
    assert not heartbeat._thread.is_alive()


def test_a_heartbeat_whose_output_is_gone_ends_and_its_error_is_raised_at_the_end_of_the_block(capfd):
    def beat():
        raise BrokenPipeError

    heartbeat = Heartbeat(beat, every_s=0.001).__enter__()
    heartbeat._thread.join(60)
    assert not heartbeat._thread.is_alive()
    with pytest.raises(BrokenPipeError):
        heartbeat.__exit__(None, None, None)
    assert capfd.readouterr() == ("", "")
