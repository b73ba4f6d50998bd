"""The trainer's forecast before it allocates anything."""

import logging

import pytest
import torch

from estimation.devices import Device
from estimation.preflight import preflight
from titan_like.config import ConfigError, load_config
from titan_like.trainer import forecast_memory

LITTLE = 0.6  # GiB


def device(memory_gib: float) -> Device:
    return Device("small", memory_gib, 1, 1, 1, 1, 1, outside_gib=0.0)


def config(*argv: str):
    batch = ["--training.local_batch_size=8", "--training.global_batch_size=16"]
    return load_config(["--training.seq_len=2048", *batch, *argv])


def test_a_run_that_fits_is_only_logged(caplog):
    caplog.set_level(logging.INFO)
    report = preflight(config(), 2, device(40))
    assert "fits: " in caplog.text and not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert 0 < report.peak_bytes < 40 * 2**30


def test_the_forecast_says_what_it_leaves_out(caplog):
    caplog.set_level(logging.INFO)
    report = preflight(config(), 2, device(40))
    assert report.not_included and all(sentence in caplog.text for sentence in report.not_included)


def test_a_run_that_does_not_fit_proposes_changes_that_do(caplog):
    """A whole loss alone needs 8 x 2048 x 4096 logits in fp32 and in bf16: 0.375 GiB; fewer rows need less."""
    report = preflight(config("--training.loss_chunks=1"), 2, device(LITTLE))
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "does not fit" in warning and "training.local_batch_size = 4" in warning
    assert report.peak_bytes > 0.375 * 2**30
    smaller = config("--training.local_batch_size=4", "--training.loss_chunks=1")
    assert preflight(smaller, 2, device(LITTLE)).reserved_bytes < LITTLE * 2**30


def test_abort_stops_the_run_with_the_numbers():
    with pytest.raises(ConfigError, match=r"does not fit: [\d.]+ GiB reserved .* these would fit: "):
        preflight(config("--estimation.preflight=abort", "--training.loss_chunks=1"), 2, device(LITTLE))


def test_nothing_helps_where_the_weights_are_too_large():
    with pytest.raises(ConfigError, match="use more ranks"):
        preflight(config("--estimation.preflight=abort", "--model.flavor=8B"), 2, device(0.8))


def test_on_a_cpu_without_a_device_there_is_no_forecast():
    assert forecast_memory(config(), torch.device("cpu")) is None
    off = config("--estimation.preflight=off", "--estimation.device=h200")
    assert forecast_memory(off, torch.device("cpu")) is None


def test_a_bad_device_file_is_refused_even_where_a_forecast_only_warns(tmp_path):
    (tmp_path / "mine.toml").write_text('name = "mine"\nmemory_gib = "x"\n')
    with pytest.raises(ConfigError, match=r"memory_gib is 'x' .*, tflops is missing"):
        forecast_memory(config(f"--estimation.device={tmp_path / 'mine.toml'}"), torch.device("cpu"))
