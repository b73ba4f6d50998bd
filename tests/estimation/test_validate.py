"""Scoring of published runs, on a CSV made by hand; the number of its first row is public (torchtitan 6a6f755d2)."""

import csv
from importlib.util import find_spec
from pathlib import Path

import pytest

from estimation.validate import NotCovered, Score, job_of_row, main, score_file, summary

LLAMA_8B = {
    "framework": "torchtitan (FSDP2)", "framework_version": "torchtitan 6a6f755d2", "model": "llama3-8B",
    "layers": "32",
    "dim": "4096", "heads": "32", "kv_heads": "8", "ffn_dim": "14336", "vocab": "128256", "seq_len": "8192",
    "gpu_mem_GiB": "94.99", "ngpus": "8", "dp_shard": "8", "dp_replicate": "1", "tp": "1", "pp": "1", "cp": "1",
    "micro_bs": "1", "grad_accum": "1", "ac": "selective op", "compile": "no", "other_flags": "",
    "optimizer": "AdamW", "notes": "",
    "peak_mem_GiB": "41.17145", "mem_kind": "active", "resident_mem_GiB": "14.958", "complete": "1",
}  # fmt: skip
ROWS = [
    LLAMA_8B,
    {**LLAMA_8B, "resident_mem_GiB": "", "peak_mem_GiB": "OOM", "mem_kind": "reserved", "micro_bs": "16"},
    {**LLAMA_8B, "framework": "NeMo"},
    {**LLAMA_8B, "complete": "0"},
]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(LLAMA_8B))
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def test_rows_are_scored_or_left_out_with_a_reason(table):
    scores, left_out = score_file(table)
    assert [(score.line, score.kind) for score in scores] == [(2, "resident"), (2, "allocated"), (3, "reserved")]
    assert left_out == [(4, "no profile for NeMo")]
    # 16 bytes for 8,030,261,248 parameters over 8 ranks are 14.958 GiB.
    assert abs(scores[0].error) < 0.01 and abs(scores[1].error) < 0.02
    assert [score.fits for score in scores] == [None, True, False]


def test_the_last_line_says_how_well(table, tmp_path, capsys):
    main(["--csv", str(table), "--output", str(tmp_path / "out")])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        "resident n 1 mean 0.0 % p95 0.0 %; allocated n 1 mean 0.0 % p95 0.0 %; reserved n 0; "
        "fit right 2 of 2; left out 1"
    )
    assert (tmp_path / "out/memory.csv").read_text().count("\n") == 4
    if find_spec("matplotlib"):
        assert (tmp_path / "out/memory.png").stat().st_size > 1000


def test_errors_and_judgements_by_hand():
    """Errors of 10, 2 and 0 percent: mean 4, 95th percentile 10; one fit judged wrongly."""
    scores = [
        Score(2, "allocated", "p", 10.0, 11.0, True),
        Score(3, "allocated", "p", 50.0, 49.0, False),
        Score(4, "allocated", "p", 8.0, 8.0, None),
    ]
    assert "allocated n 3 mean 4.0 % p95 10.0 %" in summary(scores, [])
    assert summary(scores, []).endswith("fit right 1 of 2; left out 0")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ffn_dim": "moe 8192 x16"}, "mixtures of experts"),
        ({"framework_version": "torchtitan", "notes": "undated"}, "no date"),
        ({"ac": "offload"}, "recompute"),
        ({"other_flags": "FSDP1 eager"}, "another implementation of FSDP"),
    ],
)
def test_what_no_profile_describes(changes, reason):
    with pytest.raises(NotCovered, match=reason):
        job_of_row({**LLAMA_8B, **changes})


def test_a_missing_file_is_a_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        main(["--csv", str(tmp_path / "none.csv"), "--output", str(tmp_path)])
    assert left.value.code == 2 and "is no file" in capsys.readouterr().err
