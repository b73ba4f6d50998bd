import errno
import io
import logging
import os
import warnings

import pytest

from titan_like.observe.logs import setup_logging


@pytest.fixture(autouse=True)
def restored_warnings():
    with warnings.catch_warnings():
        yield


def said(rank: int, capsys: pytest.CaptureFixture[str]) -> str:
    setup_logging(rank)
    logger = logging.getLogger("titan_like.somewhere")
    logger.info("step %d", 1)
    logger.warning("careful")
    return capsys.readouterr().out


def test_one_rank_speaks_and_the_others_only_warn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOG_RANK", raising=False)
    assert said(0, capsys) == "step 1\ncareful\n"
    assert said(1, capsys) == "[rank 1] careful\n"
    monkeypatch.setenv("LOG_RANK", "1")
    assert said(1, capsys) == "step 1\ncareful\n"
    assert said(0, capsys) == "[rank 0] careful\n"


def test_an_output_that_cannot_be_written_is_told_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sys.stdout", Full())
    setup_logging(0)
    for step in range(3):
        logging.getLogger("titan_like.somewhere").info("step %d", step)
    message = "the console output could not be written: No space left on device; the run goes on\n"
    assert capsys.readouterr().err == message
