"""The search: what it finds is valid, fits, and is what trying everything finds; the page and the TOML files."""

import re
from math import prod
from pathlib import Path

import pytest

from estimation.__main__ import main
from estimation.candidates import (
    BATCH,
    COMPILE,
    CP,
    MICRO_BATCH,
    MODE,
    OPTION,
    PP,
    REPLICATE,
    SCHEDULE,
    SEARCHED,
    SHARD,
    STAGES,
    TP,
    changed,
    divisors,
    groups,
    meshes,
    problems,
    value_of,
    variants,
)
from estimation.devices import DEVICES, GIB, Device
from estimation.formula import memory_of
from estimation.job import job_of
from estimation.search import Group, Result, least_bytes, least_fill, least_seconds, search
from estimation.search_cli import describe, tokens
from estimation.time.step import step_time
from estimation.time.way import way_of
from titan_like.config import Config, load_config

GPUS, SEQUENCES = 4, 8
BASE = load_config(["--model.flavor=1B", "--training.seq_len=4096", "--compile.enable"])
TIGHT = Device("tight", 12, 989, 0.73, 3.35, 450, 50, outside_gib=0.0)


@pytest.fixture(scope="module")
def found() -> Result:
    return search(BASE, GPUS, TIGHT, SEQUENCES, {})


def everything(base: Config = BASE, sequences: int = SEQUENCES, **fixed: object) -> list[tuple[Group, Config]]:
    return [
        (group, config)
        for mesh in meshes(base, GPUS, fixed)
        for group in groups(mesh, GPUS, sequences, fixed)
        for config in variants(group, GPUS, fixed)
    ]


@pytest.fixture(scope="module")
def free() -> list[Config]:
    return [config for _, config in everything()]


def shards(config: Config) -> int:
    return GPUS // prod(value_of(config, key) for key in (PP, TP, CP, REPLICATE))


@pytest.mark.parametrize(
    "fixed",
    [
        {PP: 4}, {TP: 2}, {CP: 2}, {REPLICATE: 4}, {SCHEDULE: "GPipe"}, {SCHEDULE: "DualPipeV"}, {STAGES: 4},
        {MICRO_BATCH: 2}, {MODE: "full"}, {MODE: "none", OPTION: "op"}, {OPTION: 2}, {TP: 2, MODE: "selective"},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_given_restricts_the_compositions(free, fixed):
    """To those of all that have it."""
    kept = [config for _, config in everything(**fixed)]
    assert kept and kept == [c for c in free if all(value_of(c, key) == value for key, value in fixed.items())]


def test_a_given_degree_of_shards_restricts_the_compositions(free):
    assert [config for _, config in everything(**{SHARD: 2})] == [config for config in free if shards(config) == 2]


@pytest.mark.parametrize("fixed", [{BATCH: 2}, {BATCH: 8, PP: 2}, {COMPILE: False}, {OPTION: 3}, {STAGES: 8, PP: 2}])
def test_what_nobody_would_have_tried_is_tried_when_given(fixed):
    kept = [config for _, config in everything(**fixed)]
    assert kept and not any(problems(config, GPUS) for config in kept)
    assert all(value_of(config, key) == value for config in kept for key, value in fixed.items())


def test_a_compiled_search_stays_compiled_when_asked_for(free):
    kept = [config for _, config in everything(**{COMPILE: True})]
    assert kept == [config for config in free if config.compile.enable] != free


def test_a_file_that_says_what_is_compiled_costs_no_composition(free):
    """Those that do not run compiled stay in."""
    base, fixed = changed(BASE, {"compile.components": ("blocks",)}), {PP: 4}
    made = (group for mesh in meshes(base, GPUS, fixed) for group in groups(mesh, GPUS, SEQUENCES, fixed))
    assert sum(1 for group in made for _ in variants(group, GPUS, fixed)) == sum(value_of(c, PP) == 4 for c in free)


def test_every_key_that_the_search_sets_can_be_given(free):
    """None is missing in SEARCHED: it would be ignored."""
    sections = ("parallelism", "training", "activation_checkpoint", "compile")
    keys = {f"{section}.{key}" for section in sections for key in type(getattr(BASE, section)).model_fields}
    varied = {key for key in keys if len({value_of(config, key) for config in free}) > 1}
    assert varied == {*SEARCHED} - {SHARD}


def test_the_best_is_what_trying_all_finds(found):
    fitting = []
    for _, config in everything():
        job = job_of(config, GPUS)
        if max(sum(rank.peak.pools) for rank in memory_of(job)) <= 12 * GIB:
            fitting.append(step_time(job, TIGHT, way_of(config)).seconds)
    assert len(fitting) > 50
    best = [each.seconds for each in found.best]
    assert best == pytest.approx(sorted(fitting)[: len(best)])


@pytest.mark.parametrize("fixed", [{}, {STAGES: 8, PP: 2}], ids=["all", "many stages"])
def test_bounds_are_below_what_they_bound(fixed):
    for group, config in everything(**fixed):
        assert_bounded(group, config, TIGHT, fixed)


def assert_bounded(group: Group, config: Config, device: Device, fixed: dict[str, object]) -> None:
    job, sample = job_of(config, GPUS), job_of(group.sample, GPUS)
    assert least_bytes(sample, 1) <= max(sum(rank.peak.pools) for rank in memory_of(job))
    seconds = least_seconds(group, sample, device) * least_fill(group, fixed)
    assert seconds <= step_time(job, device, way_of(config)).seconds * (1 + 1e-9)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_bounds_hold_in_float8(recipe, compiled):
    """What is cast is kept in one byte: where activations are most of all, the bound of bf16 was above the peak."""
    argv = ["--model.flavor=1B", "--training.seq_len=4096", "--float8.enable", f"--float8.recipe={recipe}"]
    base = load_config([*argv, *(["--compile.enable"] if compiled else [])])
    fixed = {MODE: "none", PP: 1}
    tried = everything(base, 64, **fixed)
    assert tried
    for group, config in tried:
        assert_bounded(group, config, DEVICES["h100-sxm"], fixed)


def test_all_found_is_valid_and_fits(found):
    assert [each.seconds for each in found.best] == sorted(each.seconds for each in found.best)
    for each in found.best:
        assert not problems(each.config, GPUS)
        assert each.reserved_bytes <= 12 * GIB
        assert each.config.training.global_batch_size == SEQUENCES


def test_every_axis_schedule_and_recompute_is_tried(free):
    configs = free
    tried = {
        key: {getattr(config.parallelism, key) for config in configs}
        for key in ("pipeline_parallel_degree", "tensor_parallel_degree", "context_parallel_degree",
                    "data_parallel_replicate_degree")
    }  # fmt: skip
    assert all(values == {1, 2, 4} for values in tried.values())
    schedules = {
        c.parallelism.pipeline_parallel_schedule for c in configs if c.parallelism.pipeline_parallel_degree > 1
    }
    assert len(schedules) == 7
    assert {c.activation_checkpoint.mode for c in configs} == {"none", "selective", "full"}
    uncompiled = {c.parallelism.pipeline_parallel_schedule for c in configs if not c.compile.enable}
    assert uncompiled >= {"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"}  # refused where compiled


def test_the_command_prints_draws_and_writes(tmp_path, capsys):
    page, file = tmp_path / "page.html", tmp_path / "row.toml"
    argv = ["search", "--flavor", "1B", "--gpus", "4", "--seq_len", "4096", "--global_batch_tokens", "32K"]
    with pytest.raises(SystemExit) as left:
        main([*argv, "--html", str(page), "--write", "3", str(file)])
    out = capsys.readouterr().out
    assert "\nmemory does not include:\n" in out and "\ntime does not include:\n" in out
    assert left.value.code == 0
    rows = re.findall(r"^(\d+) +([\d.]+) +([\d,]+) +[\d.]+% +([\d.]+) +", out, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(1, 11))
    text = page.read_text()
    assert text.count("<svg") == 3 and "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in text and "<link" not in text
    config = load_config(["--job.config_file", str(file)])
    step = step_time(job_of(config, 4), DEVICES["h100-sxm"], way_of(config))
    assert f"{step.seconds:.3f}" == rows[2][1] and not problems(config, 4)
    assert f"predicted: {step.seconds:.3f} s per step" in file.read_text()


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--global_batch_tokens", "5000"], r"\(5000\) is not a multiple of training.seq_len \(2048\); set it to 6144"),
        (["--global_batch_tokens", "6K", "--gpus", "5"], "takes 3 sequences of 2048 tokens per step"),
        (["--global_batch_tokens", "4K", "--device", "h10"], 'device "h10" is unknown; known are a100-40gb'),
        (["--global_batch_tokens", "4K", "--write", "11", "x"], "rows are 1 to 10"),
        (["--global_batch_tokens", "4K", "--write", "²", "x"], "rows are 1 to 10"),
        (["--global_batch_tokens", "4K", "--flavor", "9B"], 'model.flavor is "9B"; llama3 has'),
        (["--global_batch_tokens", "4K", "--gpus", "0"], "--gpus: '0' is not a whole number from 1 to 1,048,576"),
        (["--global_batch_tokens", "4K", "--seq_len", "0"], "--seq_len: '0' is not a whole number from 1"),
        (["--global_batch_tokens", "-4M"], "'-4M' is not a number of tokens such as"),
        (["--global_batch_tokens", "9" * 30], "is not a number of tokens .* from 1 to 1,099,511,627,776"),
        (["--global_batch_tokens", "4K", "--html", "/tmp"], "'/tmp' cannot be written .*; name a file"),
        (["--global_batch_tokens", "4K", "--html", ""], "'' cannot be written .*; name a file"),
        (["--global_batch_tokens", "4K", "--write", "1", "/none/o.toml"], "'/none/o.toml' cannot be written .*name"),
        (["--global_batch_tokens", "4K", "--write", "1", ""], "'' cannot be written .*; name a file"),
        (["--global_batch_tokens", "4K", "--training.global_batch_size=2"], "is what --global_batch_tokens says"),
        (["--global_batch_tokens", "4K", "--seq_len=2048", "--training.seq_len=64"], "is what --seq_len says"),
        (["--global_batch_tokens", "4K", f"--{SCHEDULE}=a.csv"], 'is "a.csv"; the search knows GPipe, .* choose'),
        (["--global_batch_tokens", "4K", f"--{TP}=3"], f"or leave out one of --{TP}"),
        (["--global_batch_tokens", "4K", f"--{SCHEDULE}=ZBVZeroBubble", f"--{MODE}=full"], f"with .*--{MODE}; leave"),
        (["--global_batch_tokens", "4K", "--lr_schedule.warmup_steps=1000", "--lr_schedule.decay_steps=1"], "exceed"),
    ],
)
def test_a_bad_request_is_a_sentence(argv, sentence, capsys):
    with pytest.raises(SystemExit) as left:
        main(["search", "--gpus", "2", *argv])
    said = capsys.readouterr()
    assert left.value.code == 2 and re.search(sentence, said.err) and len(said.err.splitlines()) == 1 and not said.out


def test_all_outputs_that_cannot_be_written_are_told_at_once(capsys):
    outputs = ["--html", "/none/p.html", "--write", "1", "/none/o.toml", "--write", "11", "x"]
    with pytest.raises(SystemExit) as left:
        main(["search", "--gpus", "2", "--global_batch_tokens", "4K", *outputs])
    told = capsys.readouterr().err
    assert left.value.code == 2 and len(told.splitlines()) == 3
    assert all(words in told for words in ("'/none/p.html' cannot", "'/none/o.toml' cannot", "rows are 1 to 10"))


def test_what_does_not_fit_is_told_apart_from_a_bad_request(capsys):
    with pytest.raises(SystemExit) as left:
        main(["search", "--gpus", "2", "--global_batch_tokens", "4K", "--flavor", "8B", "--device_memory", "10"])
    assert left.value.code == 1 and "no composition of llama3 8B on 2 GPUs fits" in capsys.readouterr().err


def test_the_command_line_is_kept_and_the_file_is_not(tmp_path, capsys):
    """One value of each, and the device of the file."""
    file = tmp_path / "run.toml"
    file.write_text(
        "[parallelism]\ntensor_parallel_degree = 4\n[activation_checkpoint]\nmode = 'full'\n"
        "[estimation]\ndevice = 'a100-40gb'\n"
    )
    with pytest.raises(SystemExit) as left:
        main(["search", "--job.config_file", str(file), f"--{CP}", "2", "--gpus", "4", "--global_batch_tokens", "16K"])
    out = capsys.readouterr().out
    rows = re.findall(r"^\d+ +[\d.]+ .*", out, re.MULTILINE)
    assert left.value.code == 0 and "debug on 4 x a100-40gb" in out
    assert rows and all("cp 2, " in row for row in rows) and not all("tp 4" in row for row in rows)
    assert f"\nchosen anew: {MODE}, {TP} of the config; what the command line says is kept\n" in out


def test_a_row_names_all_degrees_above_one():
    assert describe(changed(BASE, {TP: 2}), 8) == "tp 2, shard 4, micro-batch 1, recompute none"
    assert describe(changed(BASE, {TP: 2}), 2) == "tp 2, micro-batch 1, recompute none"


def test_document_masks_are_searched(capsys):
    with pytest.raises(SystemExit) as left:
        main(["search", "--gpus", "4", "--global_batch_tokens", "16K", "--data.reset_attention_mask", f"--{CP}=2"])
    assert left.value.code == 0 and re.search(r"^1 .*cp 2", capsys.readouterr().out, re.MULTILINE)


def test_help_is_for_users(capsys):
    with pytest.raises(SystemExit) as left:
        main(["search", "--help"])
    out = capsys.readouterr().out
    assert left.value.code == 0 and "ten fastest" in out and "Raises" not in out


def test_numbers_of_tokens():
    assert (tokens("4M"), tokens("8K"), tokens("12")) == (4 * 2**20, 8192, 12)
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_divisors_of_large_numbers_are_quick():
    assert len(divisors(2**40)) == 41 and divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["search", "--gpus", "1", "--global_batch_tokens", "2K"])
    assert not list(Path(tmp_path).iterdir())
