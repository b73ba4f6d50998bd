"""Scoring of published runs, on a CSV made by hand; the number of its first row is public (torchtitan 6a6f755d2)."""

import csv
from importlib.util import find_spec
from pathlib import Path

import pytest

from estimation.formula import memory_of
from estimation.profiles import NotCovered
from estimation.row_table import say_left_out
from estimation.rows import job_of_row
from estimation.validate import Score, main, score_file, score_row, summary

LLAMA_8B = {
    "framework": "torchtitan (FSDP2)", "framework_version": "torchtitan 6a6f755d2", "model": "llama3-8B",
    "layers": "32",
    "dim": "4096", "heads": "32", "kv_heads": "8", "ffn_dim": "14336", "vocab": "128256", "seq_len": "8192",
    "gpu_mem_GiB": "94.99", "ngpus": "8", "dp_shard": "8", "dp_replicate": "1", "tp": "1", "pp": "1", "cp": "1",
    "micro_bs": "1", "grad_accum": "1", "ac": "selective op", "compile": "no", "other_flags": "",
    "optimizer": "AdamW", "notes": "", "gpu": "H100 SXM (HBM2e 96GB, 500W)", "float8": "", "source_url": "u",
    "peak_mem_GiB": "41.17145", "mem_kind": "active", "resident_mem_GiB": "14.958", "complete": "1", "sp": "0",
    "pp_schedule": "", "precision": "fp32 params/grads/AdamW; bf16 compute", "global_bs": "8", "ep": "1",
    "tokens_per_s_per_gpu": "5762",
}  # fmt: skip
ROWS = [
    LLAMA_8B,
    {
        **LLAMA_8B,
        "resident_mem_GiB": "",
        "peak_mem_GiB": "OOM",
        "mem_kind": "reserved",
        "micro_bs": "16",
        "global_bs": "128",
    },
    {**LLAMA_8B, "framework": "NeMo"},
    {**LLAMA_8B, "complete": "0"},
]


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(LLAMA_8B))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write(tmp_path / "runs.csv", ROWS)


def test_rows_are_scored_or_left_out_with_a_reason(table):
    scores, left_out = score_file(table)
    assert [(score.line, score.kind) for score in scores] == [(2, "resident"), (2, "allocated"), (3, "reserved")]
    assert left_out == [(4, "no profile for NeMo"), (5, "not complete: complete is '0', not 1")]
    # 16 bytes for 8,030,261,248 parameters over 8 ranks are 14.958 GiB.
    assert abs(scores[0].error) < 0.01 and abs(scores[1].error) < 0.02
    assert [score.fits for score in scores] == [None, True, False]


def test_the_last_line_says_how_well(table, tmp_path, capsys):
    main(["--csv", str(table), "--output", str(tmp_path / "out")])
    said = capsys.readouterr().out.splitlines()
    assert "left out: 1 row (line 4): no profile for NeMo" in said
    assert said[-1] == (
        "resident n 1 mean 0.0 % p95 0.0 %; allocated n 1 mean 0.0 % p95 0.0 %; reserved n 0; "
        "fit right 2 of 2; 4 rows: 2 scored, 2 left out"
    )
    assert (tmp_path / "out/memory.csv").read_text().count("\n") == 6
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
    assert summary(scores, []).endswith("fit right 1 of 2; 3 rows: 3 scored, 0 left out")


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
        ({"vocab": "1e30"}, "vocab 1e30"),
        ({"vocab": "1.5"}, "vocab 1.5"),
        ({"vocab": "32000(padded)"}, "vocab 32000"),
        ({"ffn_dim": "14336.5"}, "ffn_dim 14336.5"),
        ({"pp": "2"}, "pp_schedule is not published"),
        ({"pp": "64", "pp_schedule": "1F1B"}, "32 layers cannot be cut into 64 stages"),
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


def test_a_remark_says_whether_one_table_serves_both_ends():
    tied = [job_of_row({**LLAMA_8B, "vocab": f"128256{remark}"}).model.tie_embeddings for remark in ("", "(untied)")]
    assert tied == [False, False] and job_of_row({**LLAMA_8B, "vocab": "128256(tied)"}).model.tie_embeddings


CELLS = ["", "n/a", "0", "-1", "3.5", "?", "unknown", "nan", "1e999", "1e30", "999999999999", "\u00b2"]
WHOLE = ("layers", "dim", "heads", "kv_heads", "vocab", "ffn_dim", "seq_len", "ngpus", "tp", "micro_bs", "grad_accum")
CHOICES = ("sp", "pp_schedule", "ac", "compile", "precision", "float8", "optimizer")


def table_of(path: Path) -> dict[int, str]:
    """Line and reason; the reason of a row that was scored is empty."""
    with path.open(newline="") as file:
        return {int(row["line"]): row["left out"] for row in csv.DictReader(file)}


@pytest.mark.parametrize("what", ["memory", "time"])
def test_every_row_is_scored_or_left_out_with_a_reason(tmp_path, capsys, what):
    """Each odd cell in each column of a row that can be scored, and that row among them."""
    row = {**LLAMA_8B, "layers": "2"}
    changes = [(name, cell) for name in row for cell in CELLS]
    path = write(tmp_path / "odd.csv", [row, *({**row, name: cell} for name, cell in changes)])
    main(["--csv", str(path), "--output", str(tmp_path), "--what", what])
    said, found = capsys.readouterr().out.splitlines(), table_of(tmp_path / f"{what}.csv")
    assert list(found) == list(range(2, len(changes) + 3)) and not found[2]
    left = sum(map(bool, found.values()))
    assert said[-1].endswith(f"{len(found)} rows: {len(found) - left} scored, {left} left out")
    assert sum(int(line.split()[2]) for line in said if line.startswith("left out: ")) == left
    reasons = dict(zip(changes, list(found.values())[1:], strict=True))
    assert not [reason for reason in found.values() if "error of the program" in reason]
    for cell in ("n/a", "0", "-1", "3.5", "nan", "1e30", "\u00b2"):
        assert all(cell in reasons[name, cell] for name in WHOLE), cell
    assert all("'?'" in reasons[name, "?"] for name in CHOICES)


@pytest.mark.parametrize("cell", ["", "0", "-1", "nan", "abc", "1.0"])
def test_what_is_not_complete_is_said_so(tmp_path, cell):
    _, left_out = score_file(write(tmp_path / "runs.csv", [{**LLAMA_8B, "complete": cell}]))
    assert left_out == [(2, f"not complete: complete is {cell!r}, not 1")]


MEGATRON = {
    **LLAMA_8B, "framework": "Megatron-LM/Core", "gpu": "H100", "optimizer": "Adam", "ac": "none",
    "mem_kind": "allocated", "precision": "bf16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "changes", "reason"),
    [
        (LLAMA_8B, {"tp": "3"}, "dp_shard 8 x tp 3 x pp 1 x cp 1 is 24"),
        (LLAMA_8B, {"ngpus": "16"}, "ngpus is 16, but dp_replicate 1 x dp_shard 8"),
        (LLAMA_8B, {"dp_shard": ""}, "ngpus is 8, but dp_replicate 1 x dp_shard 1"),
        (LLAMA_8B, {"tp": "3", "ngpus": "24"}, "heads 32 is not a multiple of 3"),
        (LLAMA_8B, {"tp": "16", "ngpus": "128"}, "kv_heads 8 is not a multiple of 16"),
        (LLAMA_8B, {"tp": "8", "ngpus": "64", "ffn_dim": "14340"}, "ffn_dim 14340 is not a multiple of 8"),
        (LLAMA_8B, {"tp": "8", "ngpus": "64", "seq_len": "8196"}, "seq_len 8196 is not a multiple of 8"),
        (LLAMA_8B, {"cp": "2", "ngpus": "16", "seq_len": "8190"}, "seq_len 8190 is not a multiple of 4"),
        (LLAMA_8B, {"heads": "24"}, "dim 4096 is not a multiple of 24"),
        (LLAMA_8B, {"kv_heads": "5"}, "heads 32 is not a multiple of kv_heads 5"),
        (LLAMA_8B, {"heads": "4096", "kv_heads": "4096"}, "head_dim is 1: Input should be a multiple of 2"),
        (LLAMA_8B, {"ep": "3"}, "ep 3 does not divide"),
        (LLAMA_8B, {"global_bs": "16"}, "global_bs is 16, but micro_bs 1 x grad_accum 1 x dp_replicate 1 x dp_shard 8"),
        (LLAMA_8B, {"gpu_mem_GiB": "3"}, "resident_mem_GiB is 14.958, above gpu_mem_GiB 3"),
        (LLAMA_8B, {"gpu_mem_GiB": "30"}, "peak_mem_GiB is 41.17145, above gpu_mem_GiB 30"),
        (LLAMA_8B, {"peak_mem_GiB": "12"}, "resident_mem_GiB is 14.958, above peak_mem_GiB 12"),
        (LLAMA_8B, {"mem_kind": "nvidia-smi"}, "mem_kind is 'nvidia-smi'; known are reserved"),
        (LLAMA_8B, {"optimizer": "Lion"}, "optimizer is 'Lion'; known are AdamW"),
        (LLAMA_8B, {"precision": "pure bf16"}, "precision is 'pure bf16'; known are fp32 params"),
        (LLAMA_8B, {"layers": "2000"}, "layers is 2000, above 1000"),
        (MEGATRON, {"tp": "16", "ngpus": "128", "ffn_dim": "14344"}, "ffn_dim 14344 is not a multiple of 16"),
        (MEGATRON, {"global_bs": "20", "grad_accum": ""}, "global_bs is 20, but"),
        (MEGATRON, {"vocab": "1.5"}, "vocab '1.5' is not understood"),
        (MEGATRON, {"ffn_dim": "1e30"}, "ffn_dim '1e30' is not understood"),
        (MEGATRON, {"float8": "MXFP8"}, "float8 is 'MXFP8'; known are hybrid"),
        (MEGATRON, {"precision": "fp32"}, "precision is 'fp32'; known are bf16"),
    ],
)  # fmt: skip
def test_rows_that_contradict_themselves_or_say_what_is_not_known(tmp_path, row, changes, reason):
    """The row as it was is scored beside it."""
    scores, left_out = score_file(write(tmp_path / "runs.csv", [{**row, **changes}, row]))
    assert {score.line for score in scores} == {3}
    assert [line for line, _ in left_out] == [2] and reason in left_out[0][1]


@pytest.mark.parametrize(
    "changes",
    [
        {"ngpus": ""}, {"global_bs": ""}, {"seq_len": "3"}, {"layers": "3"}, {"precision": ""}, {"float8": ""},
        {"float8": "float8 rowwise, bf16 all-gather"}, {"mem_kind": "active (torch active_bytes.all.peak)"},
        {"compile": "no(loss eager)"}, {"optimizer": "AdamW8bit"}, {"micro_bs": "2", "global_bs": "16"},
    ],
)  # fmt: skip
def test_rows_that_say_little_or_add_a_remark_are_scored(tmp_path, changes):
    scores, left_out = score_file(write(tmp_path / "runs.csv", [{**LLAMA_8B, **changes}]))
    assert len(scores) == 2 and not left_out


def test_megatron_copies_heads_and_finds_its_accumulation(tmp_path):
    copied = {**MEGATRON, "tp": "16", "ngpus": "128"}
    rows = [copied, {**MEGATRON, "grad_accum": "", "global_bs": "16"}]
    scores, left_out = score_file(write(tmp_path / "runs.csv", rows))
    assert {score.line for score in scores} == {2, 3} and not left_out


def test_an_unforeseen_error_costs_one_row(tmp_path, monkeypatch):
    def fails_at_seq_len_5(job):
        if job.seq_len == 5:
            raise IndexError("pop from empty list")
        return memory_of(job)

    monkeypatch.setattr("estimation.validate.memory_of", fails_at_seq_len_5)
    scores, left_out = score_file(write(tmp_path / "runs.csv", [{**LLAMA_8B, "seq_len": "5"}, LLAMA_8B]))
    assert {score.line for score in scores} == {3}
    assert left_out[0][0] == 2 and left_out[0][1].endswith("IndexError: pop from empty list")


def test_reasons_are_grouped_and_long_lists_cut():
    left_out = [(line, "a") for line in (3, 7, 8, 9, 12)] + [(4, "b")] + [(line, "c") for line in range(21, 41, 2)]
    assert list(say_left_out(left_out)) == [
        "left out: 5 rows (lines 3, 7-9, 12): a",
        "left out: 1 row (line 4): b",
        "left out: 10 rows (lines 21, 23, 25, 27, 29, 31, ...): c",
    ]


def test_cells_beyond_the_header_and_lines_of_the_file(tmp_path):
    """A comma too many shifts what follows; an empty line is no row, and lines are those of the file."""
    path = write(tmp_path / "runs.csv", [LLAMA_8B, LLAMA_8B])
    header, first, second = path.read_text().splitlines()
    path.write_text("\ufeff" + "\n".join([header, first + ",x", "", second + ",,"]), encoding="utf-8")
    scores, left_out = score_file(path)
    assert {score.line for score in scores} == {4} and left_out == [(2, "it has more cells than the header")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "is no text in UTF-8"),
        (b"\xff\xfea,b\n", "is no text in UTF-8"),
        (b"a,layers\n1,2\n", "lacks the columns framework, complete, dim"),
        (",".join(LLAMA_8B).encode() + b'\nu,"torchtitan\nu,NeMo\n', "is no CSV after line 1: unexpected end of data"),
        (",".join(LLAMA_8B).encode() + b'\n"' + b"x" * 200_000, "is no CSV after line 1: field larger than"),
    ],
)
def test_a_file_that_is_no_table_of_runs_is_refused(tmp_path, capsys, content, said):
    path = tmp_path / "other.csv"
    path.write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        main(["--csv", str(path), "--output", str(tmp_path)])
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_an_empty_name_is_shown_as_it_was_given(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--csv", "", "--output", str(tmp_path)])
    assert stopped.value.code == 2 and "--csv '' is no file" in capsys.readouterr().err
