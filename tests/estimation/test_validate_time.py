"""Scoring of published throughput, on rows made by hand; the first is public (torchtitan benchmarks, December 2024)."""

import csv
from pathlib import Path

import pytest

from estimation.profiles import NotCovered
from estimation.time.validate import (
    TimeScore,
    device_of_row,
    ranking,
    score_times,
    summary,
    way_of_row,
)
from estimation.validate import main

ROW = {
    "source_url": "u", "framework": "torchtitan (FSDP2)", "framework_version": "torchtitan 9dec370 (2024-12-26)",
    "model": "llama3-8B", "layers": "32", "dim": "4096", "heads": "32", "kv_heads": "8", "ffn_dim": "14336",
    "vocab": "128256", "seq_len": "8192", "gpu": "H100 SXM (HBM2e 96GB, 500W, Meta Grand Teton)", "ngpus": "8",
    "dp_shard": "8", "dp_replicate": "1", "tp": "1", "pp": "1", "cp": "1", "pp_schedule": "", "micro_bs": "2",
    "grad_accum": "1", "ac": "selective op", "compile": "per-block", "float8": "", "other_flags": "",
    "optimizer": "AdamW", "notes": "", "tokens_per_s_per_gpu": "6667", "complete": "1", "dup_group": "g",
    "peak_mem_GiB": "", "resident_mem_GiB": "", "mem_kind": "",
}  # fmt: skip


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROW))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_published_table_is_scored(tmp_path, capsys):
    """8B on 8 GPUs: compiled 6667 tokens/s, eager 5762, compiled with float8 8532."""
    eager = {**ROW, "compile": "no", "tokens_per_s_per_gpu": "5762"}
    float8 = {**ROW, "float8": "float8 tensorwise", "tokens_per_s_per_gpu": "8532"}
    slow = {**ROW, "float8": "float8 rowwise"}
    table = write(tmp_path / "runs.csv", [ROW, eager, float8, slow, {**ROW, "peak_mem_GiB": "5"}])
    main(["--csv", str(table), "--output", str(tmp_path / "out"), "--what", "time"])
    lines = capsys.readouterr().out.splitlines()
    assert "left out: 1 row (line 5): the speed of products in float8 rowwise is not published" in lines
    assert "left out: 1 row (line 6): the same run is in a line above" in lines
    assert lines[-1].startswith("torchtitan n 3 mean ")
    assert lines[-1].endswith("order right in 3 of 3 pairs, 1 of 1 tables whole; 5 rows: 3 scored, 2 left out")
    scores, _ = score_times(table)
    assert all(abs(score.error) < 15 for score in scores)
    assert (tmp_path / "out/time.csv").read_text().count("\n") == 6


def test_errors_and_order_by_hand():
    """Errors of 10, 20 and 0 %; of three pairs one is in the wrong order, one too close to count."""
    scores = [
        TimeScore(2, "torchtitan", "t", True, 100.0, 110.0),
        TimeScore(3, "torchtitan", "t", True, 150.0, 120.0),
        TimeScore(4, "torchtitan", "t", True, 151.0, 151.0),
        TimeScore(5, "torchtitan", "s", False, 100.0, 200.0),
    ]
    assert ranking(scores) == (2, 2, 1, 1)
    assert ranking([*scores, TimeScore(6, "torchtitan", "t", True, 200.0, 90.0)]) == (2, 5, 0, 1)
    text = summary(scores, [])
    assert "torchtitan n 3 mean 10.0 % p95 20.0 %" in text and "(incomplete rows) n 1 mean 100.0 %" in text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": "RTX 4090"}, "speeds of RTX 4090"),
        ({"gpu": "B200", "notes": "8x power-limited B200"}, "power limit is not published"),
        ({"float8": "mxfp8_cublas"}, "products in mxfp8_cublas"),
    ],
)
def test_what_is_not_covered(changes, reason):
    with pytest.raises(NotCovered, match=reason):
        row = {**ROW, **changes}
        device_of_row(row), way_of_row(row)


def test_rows_without_throughput_or_trainer_are_left_out_with_the_reason(tmp_path):
    rows = [{**ROW, "tokens_per_s_per_gpu": ""}, {**ROW, "framework": "NeMo"}, {**ROW, "framework": ""},
            {**ROW, "compile": "unknown"}, {**ROW, "complete": "abc"}]  # fmt: skip
    scores, left_out = score_times(write(tmp_path / "runs.csv", rows))
    assert [(score.line, score.complete) for score in scores] == [(6, False)]
    assert dict(left_out) == {
        2: "no throughput is published",
        3: "no step time for NeMo",
        4: "no step time for a trainer that is not named",
        5: "compile is 'unknown'; known are no, per-block, yes, SimpleFSDP full inductor",
    }


def test_ways_of_rows():
    way = way_of_row({**ROW, "float8": "float8 tensorwise + fp8 all-gather", "other_flags": "async TP"})
    assert way.float8 and way.float8_gather and way.async_tensor and way.attention == "flash"
    assert way_of_row({**ROW, "gpu": "B200"}).attention == "cudnn"
    again = "float8 tensorwise + fp8 all-gather + force_recompute_fp8_weight_in_bwd"
    assert way_of_row({**ROW, "float8": again}).float8_again and not way.float8_again


@pytest.mark.parametrize(
    ("changes", "update"),
    [
        ({}, "foreach"),
        ({"other_flags": "AdamW fused=True"}, "fused"),
        ({"framework_version": "torchtitan 820504e (2025-06)"}, "fused"),
        ({"framework": "torchtune full_finetune_single_device"}, "fused"),
    ],
)
def test_torchtitan_left_the_optimizer_to_torch_at_first(changes, update):
    assert way_of_row({**ROW, **changes}).update == update


def test_a_graph_without_a_compiler_has_the_kernels_of_torch(tmp_path):
    graph = {**ROW, "compile": "no", "other_flags": "SimpleFSDP aot_eager"}
    rows = [{**ROW, "compile": "no"}, {**graph, "tokens_per_s_per_gpu": "5000"}]
    scores, _ = score_times(write(tmp_path / "runs.csv", rows))
    assert scores[0].predicted == pytest.approx(scores[1].predicted)
