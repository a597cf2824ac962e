"""Check `token_log.mode` and `token_log.max_mb`, rows of test_every_option.py."""

from unittest import mock

from tracegrad.trainer import token_log_writer
from tracegrad.trainer.token_log import TokenLog
from watched import GROUPS, SIZE, traces, watched


def terms_kept(folder):
    """The row of `token_log.mode` in test_every_option."""
    watched(traces(), folder, token_log__mode="none")
    assert not (folder / "terms").exists()


def terms_megabytes(folder):
    """The row of `token_log.max_mb` there."""
    with mock.patch.object(
        token_log_writer, "_MEGA", 20_000
    ):  # 20 kB and not 256 times as much, which would hold everything
        watched(traces(), folder, token_log__max_mb=1)
    [name] = TokenLog(folder).sets()
    assert 0 < TokenLog(folder).sequences(name).traces < GROUPS * SIZE
