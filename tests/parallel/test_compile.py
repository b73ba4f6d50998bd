"""Compiled blocks start warm: ranks share inductor's cache on disk, and a second run finds all of it there."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.tiny_run import arguments, losses, write_corpus

REPO = Path(__file__).parents[2]
COUNTING = """
import json, os
from torch._dynamo.utils import counters
from titan_like import train
from titan_like.trainer import Trainer

close = Trainer.close
def closing(self):
    close(self)
    found = {**counters["aot_autograd"], **counters["inductor"]}
    with open(f"{os.environ['COUNTS']}-{os.environ['RANK']}.json", "w") as file:
        json.dump({name: count for name, count in found.items() if "cache" in name}, file)
Trainer.close = closing
train.main()
"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_a_second_run_compiles_nothing_that_the_first_has(tmp_path: Path) -> None:
    write_corpus(tmp_path / "train")
    (tmp_path / "worker.py").write_text(COUNTING)
    counts = {}
    for name in ("cold", "warm"):
        argv = arguments(tmp_path / name, training__steps=2, compile__enable="true")
        code = f"import os, sys; from titan_like.torchrun import main; sys.exit(main({argv!r}, os.environ, 'worker'))"
        env = {
            **os.environ, "PYTHONPATH": f"{REPO}:{tmp_path}", "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "NPROC": "2", "COUNTS": str(tmp_path / name),
        }  # fmt: skip
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        ranks = [Counter(json.loads((tmp_path / f"{name}-{rank}.json").read_text())) for rank in range(2)]
        counts[name] = [
            tuple(sum(count for kind, count in rank.items() if kind.endswith(word)) for word in ("_hit", "_miss"))
            for rank in ranks
        ]
    assert sum(misses for _, misses in counts["cold"]) > 0
    assert all(hits > 0 and misses == 0 for hits, misses in counts["warm"]), counts
    assert losses(tmp_path / "warm") == losses(tmp_path / "cold")
