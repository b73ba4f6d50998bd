import re

import pytest
import torch

from benchmarks import overhead


def test_overhead_prints_the_ratio(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr("sys.argv", ["overhead.py", "--rounds", "2", "--steps", "1"])
    try:
        overhead.main()
    finally:
        torch.set_num_threads(threads)
    line = capsys.readouterr().out.splitlines()[-1]
    number = r"(\d+\.\d{4})"
    found = re.fullmatch(f"trainer / bare loop: median {number}, quartiles {number} to {number}, 2 rounds", line)
    assert found, line
    median, low, high = map(float, found.groups())
    assert 0 < low <= median <= high
