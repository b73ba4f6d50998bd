"""`titan-estimate` as a user calls it, on every shipped TOML."""

import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import tomli_w

from estimation.__main__ import main
from estimation.devices import DEVICES
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


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_the_bubble_is_the_share_that_is_listed(capsys, schedule):
    """Of the step, on the rank that is named."""
    argv = ["--parallelism.pipeline_parallel_degree=4", f"--parallelism.pipeline_parallel_schedule={schedule}"]
    out = run(capsys, "--model.flavor=8B", "--training.local_batch_size=8", *argv, "--world_size", "4")[1]
    step, share, rank = re.search(
        r"step ([\d.]+) s.*pipeline bubble ([\d.]+)%.* \(both of pp rank (\d), which works longest\):\n", out
    ).groups()
    listed = float(re.search(r"\n  pipeline bubble +([\d.]+) s", out)[1])
    assert float(share) == pytest.approx(100 * listed / float(step), abs=0.2) and 0 <= int(rank) < 4


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


@pytest.mark.parametrize("more", [[], ["--replay"], ["--engine=trace"], ["--engine=trace", "--whole"]])
def test_the_verdict_says_whether_it_is_a_replays(capsys, more):
    argv = ["--world_size", "2", "--model.overrides={n_layers = 8}", "--training.seq_len=64", *more]
    out = run(capsys, *argv)[1]
    reserved = re.search(r"fits: ([\d.]+) GiB reserved", out)[1]
    replay = f"reserved {reserved} GiB by a replay through a model of the caching allocator, with fragmentation; the v"
    assert (replay in out) == bool({"--replay", "--whole"}.intersection(more))
    assert (f"\nreserved {reserved} GiB without fragmentation\n" in out) == (more == ["--engine=trace"])
    assert "at most" not in out


@pytest.mark.parametrize("compiled", [[], ["--compile.enable", "--compile.components=loss"]])
def test_a_trace_says_that_a_compiled_loss_is_traced_uncompiled(capsys, compiled):
    argv = ["--training.seq_len=64", "--engine=trace", "--model.overrides.n_layers=2", "--world_size=1"]
    assert ("these numbers are of an uncompiled loss" in run(capsys, *argv, *compiled)[1]) == bool(compiled)


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
        (["--engine", "trace", "--rank", "2"], "--rank 2 is none of the 2 ranks; give one from 0 to 1"),
        (["--rank", "-1"], "--rank: '-1' is not a whole number from 0 to"),
        (["--world_size", "0"], "--world_size: '0' is not a whole number from 1 to 1,048,576"),
        (["--world_size", "1e20"], "--world_size: '1e20' is not a whole number from 1 to 1,048,576"),
        (["--device_memory=nan"], "--device_memory: 'nan' is not a number from 0.001 to 1,000,000"),
        (["--device_tflops", "1e-300"], "--device_tflops: '1e-300' is not a number from 0.001 to 1,000,000"),
        (["--device_outside", "-1"], "--device_outside: '-1' is not a number from 0 to 1,000,000"),
        (["--training.local_batch_size=1" + 20 * "0"], "training.local_batch_size or training.global_batch_size (1"),
        (["--engine", "guess"], "--engine: invalid choice: 'guess' (choose from"),
        (["--device"], "--device: expected one argument; titan-estimate --help lists the options"),
        (["--trace", "/nonexistent/a.json"], "'/nonexistent/a.json' cannot be written (No such file or directory)"),
        (["--trace", "/tmp"], "'/tmp' cannot be written (Is a directory); name a file"),
        (["--trace", ""], "'' cannot be written (Is a directory); name a file"),
        (["--estimation.device=h10"], 'device "h10" is unknown; known are a100-40gb'),
        (["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=none.csv"],
         "none.csv cannot be used: No such file or directory; name a .csv file that can be read, or one of GPipe"),
        (["--whole"], "add --engine trace"),
        (["--engine", "trace", "--explain"], "belongs to the formula"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_a_sentence_before_any_output(capsys, options, sentence):
    code, out, err = run(capsys, "--world_size", "2", *options)
    assert (code, out) == (2, "") and sentence in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("content", [None, "old"])
def test_a_refused_run_leaves_its_outputs_alone(capsys, tmp_path, content):
    file = tmp_path / "trace.json"
    if content:
        file.write_text(content)
    code, _, _ = run(capsys, "--world_size", "2", "--trace", str(file), "--training.seq_len=1000000")
    assert code == 2 and (file.read_text() if file.exists() else None) == content


@pytest.mark.parametrize("nobody", ["head -1", "true"])
def test_a_reader_that_goes_away_is_no_error(nobody):
    command = f"{sys.executable} -m estimation --world_size 2 | {nobody}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == "" and done.returncode in (0, 141)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
@pytest.mark.parametrize("end", ["> /dev/full", "--trace /dev/full"])
def test_a_full_disk_is_a_sentence(end):
    command = f"{sys.executable} -m estimation --world_size 2 {end}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    told = "error: an output could not be written (No space left on device); name another place\n"
    assert (done.stderr, done.returncode) == (told, 2)


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


def test_a_missing_world_size_is_a_sentence(capsys):
    code, _, err = run(capsys)
    assert code == 2 and err.startswith("error: the following arguments are required: --world_size; ")


@pytest.mark.parametrize("more", [[], ["--engine=trace"], ["--activation_checkpoint.mode=auto"]], ids=str)
def test_the_device_of_the_config_is_the_default(capsys, more):
    argv = ["--world_size=2", "--training.seq_len=64", "--estimation.device=a100-40gb", *more]
    assert "of 39.39 GiB on a100-40gb" in run(capsys, *argv)[1]
    assert "of 178.35 GiB on b200" in run(capsys, *argv, "--device=b200")[1]


def test_nothing_need_be_outside_of_the_allocator(capsys):
    code, out, _ = run(capsys, "--world_size", "2", "--device_outside", "0")
    assert code == 0 and " + 0.00 GiB outside the allocator" in out


FILE = {key: value for key, value in asdict(DEVICES["h200"]).items() if value is not None}


@pytest.mark.parametrize("name", ["mine.toml", "mine"])
def test_a_device_file_may_have_any_name(capsys, tmp_path, name):
    (tmp_path / name).write_text(tomli_w.dumps(FILE | {"outside_gib": 0}))
    code, out, _ = run(capsys, "--world_size", "2", "--device", str(tmp_path / name))
    assert code == 0 and "of 139.80 GiB on h200" in out


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"memory_gib": "x"}, "memory_gib is 'x' (input should be a valid number)"),
        ({"memory_gib": float("nan")}, "memory_gib is nan (input should be"),
        ({"tflops": float("inf")}, "tflops is inf (input should be less than or equal to 1000000)"),
        ({"memory_gib": -1}, "memory_gib is -1 (input should be greater"),
        ({"memory_gib": True}, "memory_gib is True (input should be a valid number)"),
        ({"outside_gib": -0.5}, "outside_gib is -0.5 (input should be greater than or equal to 0)"),
        ({"efficiency": 50}, "efficiency is 50 (input should be less than or equal to 1)"),
        ({"efficiency": 0}, "efficiency is 0 (input should be greater than 0)"),
        ({"flash": [0.5, 2]}, "flash.1 is 2 (input should be less than or equal to 1)"),
        ({"flash": 3}, "flash is 3 (input should be a valid tuple)"),
        ({"units": 1.5}, "units is 1.5 (input should be a valid integer)"),
        ({"node": 0, "tflop": 1}, "node is 0 (input should be greater than or equal to 1), tflop is no key"),
        ({"tflops": None}, "tflops is missing"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("option", ["--device", "--estimation.device"])
def test_a_bad_value_of_a_device_file_is_told(capsys, tmp_path, changes, told, option):
    values = {key: value for key, value in (FILE | changes).items() if value is not None}
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(values))
    code, out, err = run(capsys, "--world_size", "2", option, str(tmp_path / "mine.toml"))
    assert (code, out) == (2, "") and f'error: device "{tmp_path / "mine.toml"}": {told}' in err
    assert err.endswith("; give a file as titan-estimate calibrate writes it\n") and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "name is missing, memory_gib is missing"),
        (b"\xff\xfe", "it is not TOML"),
        (b"a = = 1", "it is not TOML"),
        (b"[training]\nsteps = 1", "training is no key of a device"),
        (None, "it cannot be read (No such file or directory)"),
    ],
)
def test_a_file_that_is_no_device_is_told(capsys, tmp_path, content, told):
    path = tmp_path / "mine.toml"
    if content is not None:
        path.write_bytes(content)
    code, _, err = run(capsys, "--world_size", "2", "--device", str(path))
    assert code == 2 and err.startswith(f'error: device "{path}": ') and told in err and len(err.splitlines()) == 1
