"""Scoring of published runs, on a CSV made by hand; the number of its first row is public (torchtitan 6a6f755d2)."""

import csv
from importlib.util import find_spec
from pathlib import Path

import pytest

from estimation.formula import memory_of
from estimation.validate import NotCovered, Score, job_of_row, main, score_file, score_row, summary

LLAMA_8B = {
    "framework": "torchtitan (FSDP2)", "framework_version": "torchtitan 6a6f755d2", "model": "llama3-8B",
    "layers": "32",
    "dim": "4096", "heads": "32", "kv_heads": "8", "ffn_dim": "14336", "vocab": "128256", "seq_len": "8192",
    "gpu_mem_GiB": "94.99", "ngpus": "8", "dp_shard": "8", "dp_replicate": "1", "tp": "1", "pp": "1", "cp": "1",
    "micro_bs": "1", "grad_accum": "1", "ac": "selective op", "compile": "no", "other_flags": "",
    "optimizer": "AdamW", "notes": "", "gpu": "H100 SXM (HBM2e 96GB, 500W)", "float8": "", "source_url": "u",
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
        ({"other_flags": "CPU offload"}, "offloading"),
        ({"framework": "torchtune full_finetune_single_device"}, "not packed"),
        ({"other_flags": "LoRA; packed"}, "adapters"),
        ({"micro_bs": ""}, "its micro_bs is not published"),
        ({"kv_heads": "MLA kv_lora512"}, "kv_heads MLA"),
        ({"other_flags": "abs() in SAC save list", "float8": "float8 rowwise"}, "absolute values"),
    ],
)
def test_what_no_profile_describes(changes, reason):
    with pytest.raises(NotCovered, match=reason):
        job_of_row({**LLAMA_8B, **changes})


def test_pipelines_of_published_rows():
    """Eight sequences in as many micro-batches as ranks; what a rank holds is that of its stages."""
    row = {**LLAMA_8B, "pp": "4", "pp_schedule": "Interleaved1F1B", "micro_bs": "8"}
    job = job_of_row(row)
    assert (job.pp, len(job.stages), job.rows) == (4, 8, 2)
    assert sum(map(len, job.stages)) == 32 and len(job.actions[0]) == 2 * 2 * 4
    # 16 bytes for 8,030,261,248 parameters over 8 ranks, cut over the pipeline.
    assert abs(sum(rank.resident.total for rank in memory_of(job)) / 2**30 - 14.958) < 0.001
    assert len(score_row(2, row)) == 2
    with pytest.raises(NotCovered, match="split backward"):
        score_row(2, {**row, "pp_schedule": "InterleavedZeroBubble"})


TUNE = {
    **LLAMA_8B, "framework": "torchtune full_finetune_single_device", "dp_shard": "1", "compile": "yes", "ac": "full",
    "other_flags": "packed;chunked CE", "vocab": "128256(tied)", "resident_mem_GiB": "",
}  # fmt: skip
HIDDEN, TABLE = 8192 * 4096 * 2, 128256 * 4096 * 2  # bytes in bf16


def at_peak(row: dict[str, str]) -> dict[str, int]:
    (memory,) = memory_of(job_of_row(row))
    return {name: size for (_, name), size in memory.peak.terms.items()}


@pytest.mark.parametrize(
    ("changes", "expandable", "keeps_attention"),
    [
        ({"framework_version": "torchtitan 2024-06"}, False, True),
        ({}, True, True),
        ({"framework_version": "torchtitan 2c8b594", "gpu": "MI300X"}, False, True),
        ({"framework_version": "torchtitan 6fc499f", "gpu": "B200"}, True, False),
        ({"framework_version": "torchtitan d9bdfbb20"}, True, False),
        ({"framework_version": "torchtitan 2025-12", "gpu": "B200"}, True, True),
        ({"framework_version": "torchtitan e7c0cae", "source_url": "benchmarks/h200_trainy.md"}, False, True),
    ],
)
def test_what_depends_on_date_device_and_script(changes, expandable, keeps_attention):
    profile = job_of_row({**LLAMA_8B, **changes}).profile
    assert (profile.expandable, profile.keeps_attention) == (expandable, keeps_attention)


def test_attention_that_is_not_kept():
    """32 blocks keep (T, 4096) in bf16 and 4 bytes for each of 32 heads and token less."""
    kept, not_kept = (at_peak({**LLAMA_8B, "framework_version": f"torchtitan {at}"}) for at in ("2025-12", "2025-11"))
    assert kept["attention"] == 32 * HIDDEN and kept["logsumexp"] == 32 * 8192 * 32 * 4
    assert "attention" not in not_kept and "logsumexp" not in not_kept


def test_the_flat_buffer_of_early_torch_lies_in_the_pool_of_the_reduction():
    """All shards of gradients, and beside the last of them the tables and the last norm in fp32."""
    (memory,) = memory_of(job_of_row({**LLAMA_8B, "framework_version": "torchtitan 40f8fd007"}))
    assert memory.peak.pools[2] == 8030261248 * 4 // 8 + (2 * 128256 * 4096 + 4096) * 4


def test_simple_fsdp_has_one_stream():
    """What a stream has cached serves all: less is reserved than by three, and no more than is cached in vain."""
    row = {**LLAMA_8B, "framework_version": "torchtitan d9bdfbb20", "mem_kind": "reserved", "resident_mem_GiB": ""}
    (three,), (one,) = (score_row(2, {**row, "compile": "yes", "other_flags": flags}) for flags in ("", "SimpleFSDP"))
    (memory,) = memory_of(job_of_row({**row, "other_flags": "SimpleFSDP"}))
    assert memory.peak.allocated / 2**30 <= one.predicted < memory.peak.allocated / 2**30 * 1.15
    assert not job_of_row({**row, "other_flags": "SimpleFSDP"}).profile.own_streams and three.fits and one.fits


def test_fsdp1_gathers_one_flat_parameter():
    """In the forward of 32 blocks of 218,112,000 numbers: one in bf16 and two that the device may still use; a rank's
    fp32 part is cast before. Gradients of a block: its own, a flat one, and that in fp32."""
    (memory,) = memory_of(job_of_row({**LLAMA_8B, "framework_version": "torchtitan 83c879f18", "other_flags": "FSDP1"}))
    block, root = 218_112_000, 2 * 128256 * 4096 + 4096
    stage = memory.stages[0]
    assert memory.peak.terms["all-gather", "freed all-gather buffer"] == 2 * block * 2
    # Backward: the tables, two freed blocks, the block that is used and the next one, of which a part is cast.
    assert memory.peak.pools[1] == 2 * (root + 4 * block + block // 8)
    (one, *_), last = stage.groups["block"], stage.groups["root"][0]
    assert (one.numel, last.numel) == (block, root)
    assert memory.peak.pools[2] == 8030261248 // 8 * 4 + root * 4


def test_a_chunked_loss_of_torchtune():
    """Compiled, whole logits in bf16 are all that is there beside the gradient of a piece, and no fp32 copy is."""
    compiled, eager = (at_peak({**TUNE, "ac": "none", "compile": compile}) for compile in ("yes", "no"))
    assert "log-probabilities" in eager and "log-probabilities" not in compiled
    assert compiled["optimizer state"] == 2 * compiled["parameters"] + 4 * (32 * 9 + 2)


def test_updates_in_the_backward():
    """Only the gradient of the tied table waits, and a second one before the two are added."""
    found = at_peak({**TUNE, "other_flags": "packed;chunked CE;optimizer_in_bwd"})
    assert [name for name in found if "gradient" in name] == ["gradient of the tied table", "second gradient"]
    assert found["second gradient"] == TABLE


def test_activations_on_the_host():
    """Of 32 inputs of blocks five are there, and the result of the last block."""
    row = {**TUNE, "other_flags": "packed;chunked CE;optimizer_in_bwd;activation offloading"}
    assert at_peak(row)["x"] == 6 * HIDDEN
    assert at_peak({**row, "other_flags": "packed;chunked CE;optimizer_in_bwd"})["x"] == 33 * HIDDEN


def test_torchtune_on_several_devices():
    """Eight bytes a parameter in bf16: weight, gradient and two moments, over 8 ranks; 4 for each step count."""
    row = {**TUNE, "dp_shard": "8", "vocab": "128256", "compile": "no", "other_flags": "packed"}
    (memory,) = memory_of(job_of_row(row))
    assert memory.resident.total == 8030261248 + 4 * (32 * 9 + 3)
    assert len(score_row(2, row)) == 1


def test_a_missing_file_is_a_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        main(["--csv", str(tmp_path / "none.csv"), "--output", str(tmp_path)])
    assert left.value.code == 2 and "is no file" in capsys.readouterr().err


CELLS = ["", "n/a", "0", "-1", "3.5", "?", "unknown", "1e999"]


@pytest.mark.parametrize("what", ["memory", "time"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_row_with_an_odd_cell_is_scored_or_left_out_with_a_reason(tmp_path, capsys, cell, what):
    """Each column in turn, of a row that can be scored."""
    row = {**LLAMA_8B, "layers": "2", "tokens_per_s_per_gpu": "6000", "ep": "1"}
    names = [name for name in row if name not in ("complete", "framework")]
    with (tmp_path / "odd.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerows({**row, name: cell} for name in names)
    main(["--csv", str(tmp_path / "odd.csv"), "--output", str(tmp_path), "--what", what])
    said = capsys.readouterr().out
    left = {line.split(": ")[1] for line in said.splitlines() if line.startswith("left out")}
    if cell in ("n/a", "3.5") and what == "memory":
        assert {f"line {names.index(name) + 2}" for name in ("layers", "tp", "micro_bs", "grad_accum")} <= left


def test_a_csv_without_the_columns_is_refused(tmp_path, capsys):
    path = tmp_path / "other.csv"
    path.write_text("a,layers\n1,2\n")
    with pytest.raises(SystemExit) as stopped:
        main(["--csv", str(path), "--output", str(tmp_path)])
    assert stopped.value.code == 2 and "lacks the columns framework, complete, dim" in capsys.readouterr().err
