"""`titan-estimate` as a user calls it, on every shipped TOML."""

import re
from pathlib import Path

import pytest

from estimation.__main__ import main
from titan_like.config import ConfigError, load_config
from titan_like.launch import check_settings

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "train_configs").glob("*.toml"))


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(argv)
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


def test_every_shipped_config_fits_the_gpus_that_it_names(capsys):
    assert len(SHIPPED) >= 19
    for path in SHIPPED:
        named = re.search(r"^# (\d+) (?:GPUs|processes)", path.read_text(), re.MULTILINE)
        assert named, path
        code, out, err = run(capsys, "--job.config_file", str(path), "--world_size", named[1], "--device", "h100-sxm")
        assert (code, err) == (0, ""), (path, out, err)
        assert "\nfits: " in out and "memory does not include:" in out and "time does not include:" in out


def test_405b_is_shown_per_pipeline_rank(capsys):
    code, out, _ = run(capsys, "--job.config_file", str(ROOT / "train_configs/llama3_405b.toml"), "--world_size", "512")
    assert code == 0
    assert len(re.findall(r"^ +\d+ +\d+-\d+\+\d+-\d+ ", out, re.MULTILINE)) == 8  # two stages on each of 8 ranks


def test_what_does_not_fit_says_by_how_much(capsys):
    """8B without sharding: 16 bytes for each of 8.03e9 parameters are 119.7 GiB."""
    code, out, _ = run(capsys, "--model.flavor", "8B", "--world_size", "1", "--device", "h100-sxm")
    assert code == 1
    assert "does not fit: " in out and "GiB too much" in out
    assert float(re.search(r"resident ([\d.]+) GiB", out)[1]) == pytest.approx(16 * 8_030_261_248 / 2**30, abs=0.01)


def test_the_replay_finds_more_than_the_sum_of_the_pools(capsys):
    argv = ["--job.config_file", str(ROOT / "train_configs/llama3_8b.toml"), "--world_size", "8"]
    found = [
        float(re.search(r"fits: ([\d.]+) GiB reserved", run(capsys, *argv, *more)[1])[1]) for more in ([], ["--replay"])
    ]
    assert found[0] < found[1] < 1.5 * found[0]


def test_explain_lists_the_tensors_of_the_peak(capsys):
    _, out, _ = run(capsys, "--explain", "--world_size", "2")
    assert re.search(r"probabilities +[\d,]+", out)


def test_a_trace_answers_in_the_same_words(capsys):
    """Two stages of a debug model; the last holds the loss, and is the fullest by the formula."""
    argv = ["--world_size", "2", "--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=4"]
    formula, full = (run(capsys, *argv, *more)[1] for more in ([], ["--engine", "trace"]))
    assert "worst: pp rank 1" in formula and "\nrank 1, traced\n" in full
    for part in ("saved for the backward by module", "layers.*.feed_forward", "transient by kind", "at step 2"):
        assert part in full
    assert re.search(r"resident \d[^\n]+", formula)[0] == re.search(r"resident \d[^\n]+", full)[0]
    first = run(capsys, *argv, "--engine", "trace", "--rank", "0")[1]
    assert "rank 0, traced" in first and "logits/loss" not in first


def test_a_trace_says_of_which_layers_it_is(capsys):
    """All eight of them, or 4 to 6; both hold the same, and only the whole one knows of fragmentation."""
    argv = ["--world_size", "2", "--model.overrides={n_layers = 8}", "--training.seq_len=64", "--engine", "trace"]
    told, whole = (run(capsys, *argv, *more)[1] for more in ([], ["--whole"]))
    assert "\nrank 0, 4 to 6 layers traced, 8 told from them" in told and "\nrank 0, traced\n" in whole
    assert "the sum of the pools' peaks" in told and "the sum of the pools' peaks" not in whole
    for line in (r"resident \d[^\n]+", r"peak \d[^\n]+", r"layers\.\*\.feed_forward[^\n]+"):
        assert re.search(line, told)[0] == re.search(line, whole)[0]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--rank", "1"], "add --engine trace"),
        (["--engine", "trace", "--rank", "2"], "give one from 0 to 1"),
        (["--whole"], "add --engine trace"),
        (["--engine", "trace", "--explain"], "belongs to the formula"),
    ],
)
def test_an_option_of_the_other_engine_is_refused(capsys, options, sentence):
    code, _, err = run(capsys, "--world_size", "2", *options)
    assert code == 2 and sentence in err


@pytest.mark.parametrize(
    ("argv", "world_size"),
    [
        (["--parallelism.tensor_parallel_degree=2"], 5),
        (["--training.seq_len=4096"], 2),
        (["--parallelism.data_parallel_shard_degree=4"], 8),
    ],
)
def test_it_refuses_what_the_trainer_refuses_in_its_words(capsys, argv, world_size):
    code, _, err = run(capsys, *argv, "--world_size", str(world_size))
    config = load_config([*argv, "--comm.mode=fake"])
    assert code == 2
    sentences = check_settings(config, world_size)
    assert sentences and [f"error: {sentence}" for sentence in sentences] == err.splitlines()


def test_a_bad_config_is_refused_like_anywhere(capsys):
    with pytest.raises(ConfigError) as refused:
        load_config(["--training.stesp=5"])
    code, _, err = run(capsys, "--training.stesp=5", "--world_size", "2")
    assert (code, err) == (2, f"error: {refused.value.problems[0]}\n")


def test_an_unknown_device_lists_those_known(capsys):
    code, _, err = run(capsys, "--world_size", "2", "--device", "h10")
    assert code == 2
    assert 'device "h10" is unknown' in err and "h100-sxm" in err and "--device_memory" in err


def test_any_device_can_be_described(capsys):
    described = [
        "--device_memory=24",
        "--device_tflops=100",
        "--device_memory_bandwidth=1",
        "--device_link=50",
        "--device_network=10",
    ]
    code, out, _ = run(capsys, "--world_size", "2", "--device", "mine", *described)
    assert code == 0 and "of 24.00 GiB on mine" in out


def test_a_known_device_with_another_memory(capsys):
    code, out, _ = run(capsys, "--world_size", "2", "--device_memory", "2")
    assert code == 1 and "does not fit" in out  # 2.42 GiB are gone before the allocator gets any


def test_a_missing_world_size_is_a_usage_error(capsys):
    code, _, err = run(capsys, "--world_size", "0")
    assert code == 2 and "whole number above 0" in err


@pytest.mark.parametrize("compiled", [True, False])
def test_float8_in_compiled_blocks_is_told_to_be_counted_uncompiled(capsys, compiled):
    argv = ["--model.flavor", "8B", "--float8.enable", f"--compile.enable={str(compiled).lower()}"]
    said = run(capsys, "--world_size", "8", *argv)[1]
    assert ("casts: they are counted as uncompiled" in said) == compiled
