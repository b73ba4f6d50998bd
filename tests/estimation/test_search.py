"""The search: what it finds is valid, fits, and is what trying everything finds; the page and the TOML files."""

import re
from pathlib import Path

import pytest

from estimation.__main__ import main
from estimation.candidates import divisors, groups, meshes, problems, variants
from estimation.devices import DEVICES, GIB, Device
from estimation.formula import memory_of
from estimation.job import job_of
from estimation.search import Group, Result, least_bytes, least_seconds, search
from estimation.search_cli import tokens
from estimation.time.step import step_time
from estimation.time.way import way_of
from titan_like.config import ConfigError, load_config

GPUS, SEQUENCES = 4, 8
BASE = load_config(["--model.flavor=1B", "--training.seq_len=4096", "--compile.enable"])
TIGHT = Device("tight", 12, 989, 0.73, 3.35, 450, 50, outside_gib=0.0)


@pytest.fixture(scope="module")
def found() -> Result:
    return search(BASE, GPUS, TIGHT, SEQUENCES)


def everything() -> list[tuple[Group, object]]:
    return [
        (group, config)
        for mesh in meshes(BASE, GPUS)
        for group in groups(mesh, GPUS, SEQUENCES)
        for config in variants(group, GPUS)
    ]


def test_the_best_is_what_trying_all_finds(found):
    fitting = []
    for _, config in everything():
        job = job_of(config, GPUS)
        if max(sum(rank.peak.pools) for rank in memory_of(job)) <= 12 * GIB:
            fitting.append(step_time(job, TIGHT, way_of(config)).seconds)
    assert len(fitting) > 50
    best = [each.seconds for each in found.best]
    assert best == pytest.approx(sorted(fitting)[: len(best)])


def test_bounds_are_below_what_they_bound():
    for group, config in everything():
        job, sample = job_of(config, GPUS), job_of(group.sample, GPUS)
        assert least_bytes(sample, 1) <= max(sum(rank.peak.pools) for rank in memory_of(job))
        assert least_seconds(group, sample, TIGHT) <= step_time(job, TIGHT, way_of(config)).seconds * (1 + 1e-9)


def test_all_found_is_valid_and_fits(found):
    assert [each.seconds for each in found.best] == sorted(each.seconds for each in found.best)
    for each in found.best:
        assert not problems(each.config, GPUS)
        assert each.reserved_bytes <= 12 * GIB
        assert each.config.training.global_batch_size == SEQUENCES


def test_every_axis_schedule_and_recompute_is_tried():
    configs = [config for _, config in everything()]
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
        (["--global_batch_tokens", "4K", "--flavor", "9B"], 'model.flavor is "9B"; llama3 has'),
        (["--global_batch_tokens", "4K", "--gpus", "0"], "'0' is not a whole number above 0"),
        (
            ["--global_batch_tokens", "4K", "--flavor", "8B", "--device_memory", "10"],
            "no composition of llama3 8B fits",
        ),
    ],
)
def test_a_bad_request_is_a_sentence(argv, sentence, capsys):
    with pytest.raises(SystemExit) as left:
        main(["search", "--gpus", "2", *argv])
    assert left.value.code == 2 and re.search(sentence, capsys.readouterr().err)


def test_numbers_of_tokens():
    assert (tokens("4M"), tokens("8K"), tokens("12")) == (4 * 2**20, 8192, 12)
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_searching_without_a_start_names_the_model(capsys):
    with pytest.raises(ConfigError, match="fits"):
        search(BASE, 1, Device("tiny", 1, 989, 0.73, 3.35, 450, 50, outside_gib=0.0), 1)


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["search", "--gpus", "1", "--global_batch_tokens", "2K"])
    assert not list(Path(tmp_path).iterdir())
