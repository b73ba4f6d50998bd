"""TOML file and command line: precedence, forms, errors, --help and --print_config."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from titan_like.config import Config, ConfigError, dump_toml, load_config, load_config_or_exit

SHIPPED = Path(__file__).parents[2] / "train_configs"


@pytest.fixture
def toml(tmp_path):
    """Writes a TOML file and returns the arguments that name it."""

    def write(text: str | bytes, name: str = "run.toml") -> list[str]:
        file = tmp_path / name
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return ["--job.config_file", str(file)]

    return write


def problems(argv: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config(argv)
    return error.value.problems


# --- precedence (R137) and forms (R140)


def test_the_command_line_beats_the_file_and_the_file_beats_the_defaults(toml):
    file = toml("[training]\nsteps = 20\nseq_len = 64\n")
    training = load_config([*file, "--training.steps", "30"]).training
    assert (training.steps, training.seq_len, training.local_batch_size) == (30, 64, 1)
    assert load_config(["--training.steps", "30", *file]).training.steps == 30
    assert load_config([*file, "--training.steps=30", "--training.steps", "40"]).training.steps == 40


@pytest.mark.parametrize("off", [["=false"], ["=False"], [" false"], ["no-"]])
def test_a_switch_that_the_file_turns_on_can_be_turned_off(toml, capsys, off):
    argv = ["--checkpoint.no-enable"] if off == ["no-"] else f"--checkpoint.enable{off[0]}".split()
    file = toml("[checkpoint]\nenable = true\n")
    assert load_config([*file, *argv]).checkpoint.enable is False
    with pytest.raises(SystemExit):
        load_config([*file, *argv, "--print_config"])
    assert "[checkpoint]\nenable = false\n" in capsys.readouterr().out


@pytest.mark.parametrize("on", ["--training.deterministic", "--training.deterministic=true"])
def test_a_switch_can_be_turned_on(toml, on):
    assert load_config([*toml("[training]\ndeterministic = false"), on, "--training.steps", "3"]).training.deterministic


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a,b", ("a", "b")),
        ("a, b", ("a", "b")),
        ('["a", "b"]', ("a", "b")),
        ('["a,b"]', ("a,b",)),
        ("a", ("a",)),
        ("a=1,b c", ("a=1", "b c")),
    ],
)
def test_lists_on_the_command_line_replace_longer_ones(toml, text, value):
    file = toml('[data]\ntrain = ["x", "y", "z"]\n')
    assert load_config([*file, "--data.train", text]).data.train == value
    assert load_config([*file, f"--data.train={text}"]).data.train == value


def test_lists_in_the_file_and_empty_lists(toml):
    assert load_config(toml('[data]\ntrain = ["a", "b"]\nvalidation = []\n')).data.train == ("a", "b")
    assert load_config(toml("[data]\nvalidation = []\n")).data.validation == ()
    assert load_config(["--data.validation", "[]"]).data.validation == ()


def test_one_entry_of_a_table_or_all(toml):
    file = toml("[model.overrides]\nn_layers = 2\ndim = 64\n")
    assert load_config([*file, "--model.overrides.n_layers", "4"]).model.overrides == {"n_layers": 4, "dim": 64}
    assert load_config([*file, "--model.overrides", "{n_layers = 4}"]).model.overrides == {"n_layers": 4}
    assert load_config([*file, "--model.overrides", "{}"]).model.overrides == {}
    argv = ["--model.overrides.rope_theta=1e4", "--model.overrides.tied", "true", "--model.overrides.n=-1"]
    overrides = load_config(argv).model.overrides
    assert [(name, type(value), value) for name, value in overrides.items()] == [
        ("rope_theta", float, 10000.0),
        ("tied", bool, True),
        ("n", int, -1),
    ]


@pytest.mark.parametrize("name", ["a b.toml", "a=b.toml", "ä.toml"])
def test_paths_with_spaces_equals_signs_and_accents(toml, name):
    flag, path = toml("[training]\nsteps = 7\n", name)
    assert load_config([flag, path]).training.steps == 7
    assert load_config([f"{flag}={path}"]).training.steps == 7


def test_a_relative_path_starts_at_the_current_directory(toml, tmp_path, monkeypatch):
    toml("[training]\nsteps = 7\n")
    monkeypatch.chdir(tmp_path)
    assert load_config(["--job.config_file", "run.toml"]).training.steps == 7


@pytest.mark.parametrize("text", [b"", b"# nothing\n", b"\xef\xbb\xbf[training]\r\nsteps = 100\r\n"])
def test_empty_files_byte_order_marks_and_windows_lines(toml, text):
    assert load_config(toml(text)) == Config()


# --- unknown names (R135)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("training.stpes", "training.steps"),
        ("training.stesp", "training.steps"),
        ("optimizer.max_norm", "training.max_norm"),
        ("optimiser.lr", "optimizer.lr"),
        ("training.global-batch-size", "training.global_batch_size"),
        ("parallelism.data_parallel_shard_degre", "parallelism.data_parallel_shard_degree"),
        ("checkpoint.keep_last_k", "checkpoint.keep_latest_k"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(toml, wrong, right):
    expected = f"unknown key {wrong} on the command line; did you mean {right}?"
    assert problems([f"--{wrong}", "5"]) == [expected]
    assert problems([f"--{wrong}=5"]) == [expected]
    section, key = wrong.split(".")
    if section == right.split(".")[0]:
        flag, path = toml(f"[{section}]\n{key} = 5\n")
        assert problems([flag, path]) == [f"unknown key {wrong} in {path}; did you mean {right}?"]


def test_unknown_sections_keys_without_section_and_options(toml):
    flag, path = toml("steps = 5\n[trainign]\nsteps = 5\n")
    assert problems([flag, path]) == [
        f"unknown section steps in {path}; did you mean training.steps?",
        f"unknown section trainign in {path}; did you mean training?",
    ]
    assert problems(["--steps", "5"]) == ["unknown key steps on the command line; did you mean training.steps?"]
    assert problems(["--job.config_fle", "x"]) == [
        "unknown key job.config_fle on the command line; did you mean job.config_file?"
    ]
    assert problems(["--print-config"]) == ["unknown key print-config on the command line; did you mean print_config?"]
    assert problems(["--training", "5"]) == [
        "unknown key training on the command line; its keys are written training.KEY"
    ]
    assert problems(["--zzz.qqq", "5"]) == ["unknown key zzz.qqq on the command line; --help lists all keys"]
    assert problems(["--training.no-steps"]) == [
        "unknown key training.no-steps on the command line; did you mean training.steps?"
    ]
    assert problems(["--training.steps.x", "5"])[0].startswith("unknown key training.steps.x on the command line")
    flag, path = toml("training = 5\n")
    assert problems([flag, path]) == [f"training is 5 in {path}; write it as a table [training]"]


# --- other mistakes of the command line


@pytest.mark.parametrize("rest", [[], ["--training.seed", "1"]])
def test_a_missing_value_is_an_error(rest):
    assert problems(["--training.steps", *rest]) == ["--training.steps needs a value on the command line: int >= 1"]
    assert problems(["--job.config_file", *rest]) == [
        "--job.config_file needs a value on the command line: the path of a TOML file"
    ]


def test_stray_words_and_values_for_switched_off(toml):
    assert problems(["run.toml"]) == [
        "unexpected argument 'run.toml' on the command line; settings look like --section.key VALUE"
    ]
    assert problems(["--checkpoint.no-enable=true"]) == [
        "--checkpoint.no-enable takes no value on the command line, but got true"
    ]
    (problem,) = problems(["--job.description", "caf\udce9"])
    assert problem == r"argument 'caf\udce9' on the command line is not UTF-8 text; write it in UTF-8"


# --- files that cannot be read


def test_files_that_cannot_be_read(toml, tmp_path):
    flag, path = toml("[training]\nsteps = = 5\n")
    (problem,) = problems([flag, path])
    assert problem.startswith(f"config file {path} is not valid TOML: ") and "line 2" in problem
    flag, path = toml("[training]\nsteps = 1\nsteps = 2\n")
    assert "is not valid TOML" in problems([flag, path])[0]
    flag, path = toml(b"# caf\xe9\n")
    assert problems([flag, path]) == [f"config file {path} is not UTF-8 text (byte 5); save it as UTF-8"]
    assert problems([flag, str(tmp_path)]) == [f"config file {tmp_path} is a folder; name a TOML file in it"]
    (problem,) = problems([flag, str(tmp_path / "none.toml")])
    assert problem.startswith(f"config file {tmp_path / 'none.toml'} does not exist")
    (problem,) = problems([flag, f"{path}/x.toml"])
    assert problem == f"config file {path}/x.toml cannot be read: Not a directory"


# --- all problems at once


def test_all_problems_of_file_and_command_line_come_together(toml):
    flag, path = toml('[training]\nsteps = "10"\nseq_len = 10.5\nstpes = 5\n[data]\ntrain = "a,b"\n[nope]\n')
    argv = [flag, path, "--optimizer.lr=0", "--training.steps", "3", "--metrics.log_frq", "1", "--job.dump_folder"]
    argv += ["--validation.interval", "5", "--data.validation", "[]"]
    assert problems(argv) == [
        f"unknown key training.stpes in {path}; did you mean training.steps?",
        f"unknown section nope in {path}; --help lists all keys",
        f'training.steps is "10" in {path}; allowed: int >= 1',
        f"training.seq_len is 10.5 in {path}; allowed: int >= 1",
        f'data.train is "a,b" in {path}; '
        "allowed: list of 1 or more [non-empty string or {prefix = non-empty string, weight = number > 0}, ...]",
        "unknown key metrics.log_frq on the command line; did you mean metrics.log_freq?",
        "--job.dump_folder needs a value on the command line: non-empty string",
        "optimizer.lr is 0 on the command line; allowed: number > 0",
        "validation.interval (5) needs data, but data.validation is empty; "
        "name shards there or set validation.interval to 0",
    ]


def test_a_misspelt_or_refused_value_brings_no_conflict_of_its_default(toml):
    """warmup_steps 200 fits the steps that were meant, not the 100 of the default."""
    warmup = ["--lr_schedule.warmup_steps", "200", "--lr_schedule.decay_steps", "0"]
    assert len(problems([*warmup, "--training.stpes", "1000"])) == 1
    assert len(problems([*warmup, "--training.steps", "1000.0"])) == 1
    assert len(problems([*warmup, "--job.config_file", "/does/not/exist"])) == 1
    assert len(problems(warmup)) == 1


def test_entries_of_tables_are_named_one_by_one(toml):
    flag, path = toml('[model.overrides]\na = "x"\nb = 1\nc = {d = 1}\n')
    numbers = "allowed: int or number or true or false"
    assert problems([flag, path, "--model.overrides.e", "four"]) == [
        f'model.overrides.a is "x" in {path}; {numbers}',
        f'model.overrides.c is {{"d": 1}} in {path}; {numbers}',
        f"model.overrides.e is four on the command line; {numbers}",
    ]


# --- output


def test_problems_go_to_standard_error_with_exit_code_2(capsys):
    with pytest.raises(SystemExit) as exit_:
        load_config_or_exit(["--training.steps", "0", "--training.stesp", "5"])
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "error: unknown key training.stesp on the command line; did you mean training.steps?",
        "error: training.steps is 0 on the command line; allowed: int >= 1",
    ]


EVERYTHING = [
    "--job.description=a \"quoted\" \\ back\nslash, 'é' = [1] # no comment",
    '--model.overrides={n_layers = 4, rope_theta = 1e6, tied = true, "odd name" = 0.1}',
    "--data.train=a,b c",
    "--data.validation=[]",
    "--optimizer.lr=1e-300",
    "--optimizer.betas=0,0.1",
    "--training.seed=9223372036854775807",
    "--training.global_batch_size=-1",
    "--checkpoint.resume=7",
    "--metrics.no-progress_bar",
]


@pytest.mark.parametrize("argv", [[], EVERYTHING, ["--checkpoint.resume=auto"]])
def test_the_printed_config_loads_back_to_the_same(toml, capsys, argv):
    """R147"""
    config = load_config(argv)
    with pytest.raises(SystemExit) as exit_:
        load_config([*argv, "--print_config"])
    printed = capsys.readouterr().out
    assert exit_.value.code == 0 and printed == dump_toml(config)
    again = load_config(toml(printed))
    assert again == config
    assert dump_toml(again) == printed
    assert [type(value) for value in again.model.overrides.values()] == [
        type(value) for value in config.model.overrides.values()
    ]


def test_print_config_does_not_ask_whether_it_can_run_here(capsys):
    with pytest.raises(SystemExit) as ended:
        load_config(["--print_config"], lambda config: ["there is no data here"])
    assert ended.value.code == 0 and "[training]" in capsys.readouterr().out


def test_print_config_of_a_bad_config_is_an_error():
    assert len(problems(["--print_config", "--training.steps", "0"])) == 1


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_wins_over_mistakes(capsys, flag):
    with pytest.raises(SystemExit) as exit_:
        load_config(["--training.deterministic", flag, "--training.steps", "0"])
    assert exit_.value.code == 0
    assert "--training.steps  (int >= 1; default: 100)" in capsys.readouterr().out


def test_help_is_fast_and_the_config_imports_no_torch():
    program = (
        "import sys; from titan_like.config import load_config\n"
        "try: load_config(['--help'])\n"
        "finally: assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    seconds = []
    for _ in range(2):  # the first run may have to compile; a busy machine may disturb either
        start = time.perf_counter()
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        seconds.append(time.perf_counter() - start)
        assert result.returncode == 0, result.stderr
    assert min(seconds) < 2


def test_every_shipped_config_loads(capsys):
    for file in sorted(SHIPPED.glob("*.toml")):
        config = load_config(["--job.config_file", str(file)])
        assert isinstance(config, Config), file
