"""activation_checkpoint.mode = "auto": the lightest recompute that fits, in the estimator and in the trainer."""

import re

import pytest
import torch

from estimation.devices import Device
from estimation.formula import memory_of
from estimation.job import job_of
from estimation.recompute import lightest_recompute
from titan_like.auto import with_chosen_recompute
from titan_like.config import ConfigError, load_config
from titan_like.launch import check_settings
from titan_like.train import main

AUTO = ["--activation_checkpoint.mode=auto", "--training.local_batch_size=4", "--training.seq_len=1024"]


def needed(mode: str) -> float:
    """GiB reserved by the fullest rank."""
    config = load_config([*AUTO, f"--activation_checkpoint.mode={mode}"])
    return max(sum(rank.peak.pools) for rank in memory_of(job_of(config, 2))) / 2**30


def chosen(memory_gib: float, *argv: str) -> str:
    device = Device("made up", memory_gib, 1, 1, 1, 1, 1, outside_gib=0.0)
    return lightest_recompute(load_config([*AUTO, *argv]), 2, device)[0].activation_checkpoint.mode


def test_the_lightest_that_fits_is_chosen():
    sizes = [needed(mode) for mode in ("none", "selective", "full")]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 1.05 * sizes[2]
    assert [chosen(size + 1e-6) for size in sizes] == ["none", "selective", "full"]
    assert chosen(sizes[2] / 2) == "full"  # nothing fits: the pre-flight says so


def test_what_the_trainer_refuses_is_not_chosen():
    """Selective recompute cannot be compiled with tensor parallelism."""
    memory = (needed("none") + needed("selective")) / 4
    assert chosen(memory, "--parallelism.tensor_parallel_degree=2", "--compile.enable") == "full"


def test_without_a_gpu_or_a_name_it_is_refused():
    config = load_config([*AUTO, "--comm.backend=gloo"])
    assert any("estimation.device" in problem for problem in check_settings(config, 1))
    with pytest.raises(ConfigError, match="there is no GPU here"):
        with_chosen_recompute(config, torch.device("cpu"))
    named = load_config([*AUTO, "--comm.backend=gloo", "--estimation.device=h200"])
    assert not [problem for problem in check_settings(named, 1) if "auto" in problem]


def test_a_fake_world_chooses_too(monkeypatch, capfd):
    monkeypatch.setenv("NPROC", "2")
    main(["--comm.mode=fake", "--estimation.device=h100-sxm", *AUTO, "--training.seq_len=256"])
    captured = capfd.readouterr()
    assert re.search(r"mode auto: none .*fits: [\d.]+ GiB reserved", captured.out + captured.err)
