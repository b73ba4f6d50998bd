"""Every key of the schema: what it is, what it refuses (R141, R145) and how it is documented."""

import pytest
from pydantic import ValidationError

from titan_like.config import Config, ConfigError, load_config
from titan_like.config.describe import FIELDS, describe, help_text

KEYS = [".".join(key) for key in FIELDS]

# Values that no key of the given kind may accept; the kind is read off the default.
WRONG = {
    bool: ['"true"', "1", "0", "1.0", "[]", "{}"],
    int: ['"10"', "10.5", "10.0", "true", "nan", "[1]", "{}", "-2", "2026-01-01"],
    float: ['"0.1"', "true", "nan", "inf", "-inf", "[0.1]", "{}", "-1"],
    str: ["1", "1.5", "true", "{}", '["auto"]', "07:30:00"],
    tuple: ['"a,b"', '"a"', "1", "{}", "[1, true, 3]", "[[1, 2]]"],
    dict: ['"n_layers=1"', "4", "[]", '{n_layers = "4"}', "{n_layers = [4]}", "{n_layers = nan}"],
}
WRONG_BY_KEY = [(key, text) for key in KEYS for text in WRONG[type(FIELDS[tuple(key.split("."))].default)]]
WRONG_BY_KEY.remove(("checkpoint.resume", "1"))  # a step to resume from
WRONG_BY_KEY.remove(("activation_checkpoint.selective_ac_option", "1"))  # every layer


def toml_of(key: str, text: str) -> str:
    section, name = key.split(".")
    return f"[{section}]\n{name} = {text}\n"


def test_the_defaults_are_a_valid_config():
    config = Config()
    assert (config.training.steps, config.optimizer.betas, config.data.train) == (
        100,
        (0.9, 0.95),
        ("data/stdlib/train",),
    )
    assert config.checkpoint.resume == "never"
    assert load_config([]) == config


def test_a_config_cannot_be_changed():
    with pytest.raises(ValidationError):
        Config().training.steps = 5


@pytest.mark.parametrize(("key", "text"), WRONG_BY_KEY)
def test_every_key_refuses_a_wrong_type(key, text, tmp_path):
    file = tmp_path / "x.toml"
    file.write_text(toml_of(key, text))
    with pytest.raises(ConfigError) as error:
        load_config(["--job.config_file", str(file)])
    (problem,) = error.value.problems
    assert problem.startswith(key) and f" in {file}; allowed: " in problem


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_documented(key):
    info = FIELDS[tuple(key.split("."))]
    assert info.description
    lines = help_text().splitlines()
    (place,) = [i for i, line in enumerate(lines) if line.startswith(f"  --{key} ")]
    assert describe(info) in lines[place] and "default: " in lines[place]
    assert lines[place + 1].strip() == info.description


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("training.steps", "int >= 1"),
        ("training.global_batch_size", "-1 or int >= 1"),
        ("training.max_norm", "number > 0"),
        ("lr_schedule.min_lr_factor", "number >= 0 and <= 1"),
        ("metrics.progress_bar", "true or false"),
        ("job.description", "string"),
        ("job.dump_folder", "non-empty string"),
        ("optimizer.name", '"adamw" or "sgd"'),
        ("optimizer.betas", "list of 2 [number >= 0 and < 1, ...]"),
        ("data.train", "list of 1 or more [non-empty string or {prefix = non-empty string, weight = number > 0}, ...]"),
        ("checkpoint.resume", '"never" or "auto" or int >= 0'),
        ("model.overrides", "table {name = int or number or true or false, ...}"),
    ],
)
def test_what_a_key_allows_is_said_in_words(key, words):
    assert describe(FIELDS[tuple(key.split("."))]) == words


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("training.steps", ["0", "-5", "1e3", "ten", ""]),
        ("training.seq_len", ["0", "-1"]),
        ("training.local_batch_size", ["0", "-1"]),
        ("training.global_batch_size", ["0", "-2", "-1.0"]),
        ("training.max_norm", ["-1", "0", "nan", "inf", "1e999", "one"]),
        ("training.seed", ["-1", str(2**63), str(2**64)]),
        ("training.mixed_precision_param", ["float16", "Float32", "1"]),
        ("data.train", ["[]", "", "a,", ",", '["a", 1]', "[a]", "['']"]),
        ("data.num_workers", ["-1"]),
        ("optimizer.name", ["AdamW", "adam"]),
        ("optimizer.lr", ["-1", "0", "nan"]),
        ("optimizer.betas", ["0.9", "0.9,1.0", "-0.1,0.9", "0.9,0.95,0.99", "[]", "nan,0.9"]),
        ("optimizer.eps", ["0"]),
        ("optimizer.weight_decay", ["-0.1"]),
        ("lr_schedule.warmup_steps", ["-1", "0.5"]),
        ("lr_schedule.decay_steps", ["-2"]),
        ("lr_schedule.min_lr_factor", ["-0.1", "1.1"]),
        ("parallelism.data_parallel_replicate_degree", ["0", "-1"]),
        ("parallelism.data_parallel_shard_degree", ["0", "-2"]),
        ("parallelism.fsdp_reshard_after_forward", ["true", "Always"]),
        ("checkpoint.interval", ["0", "-1"]),
        ("checkpoint.keep_latest_k", ["-1"]),
        ("checkpoint.resume", ["-1", "latest", "7.0", "true"]),
        ("validation.interval", ["-1"]),
        ("validation.samples", ["0"]),
        ("metrics.log_freq", ["0"]),
        ("metrics.progress_bar", ["yes", "1", ""]),
        ("comm.train_timeout_seconds", ["0"]),
        ("model.overrides", ["{", "4", "{a = 1}\nb = 2", "a=1"]),
        ("model.overrides.n_layers", ["four", "nan", ""]),
    ],
)
def test_values_out_of_range_are_refused(key, bad):
    for text in bad:
        with pytest.raises(ConfigError) as error:
            load_config([f"--{key}={text}"])
        (problem,) = error.value.problems
        assert problem.startswith(f"{key} is ") and " on the command line; allowed: " in problem and "\n" not in problem


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("training.steps", "1", 1),
        ("training.global_batch_size", "-1", -1),
        ("training.seed", str(2**63 - 1), 2**63 - 1),
        ("optimizer.lr", "1", 1.0),
        ("optimizer.lr", "1e-3", 0.001),
        ("optimizer.betas", "0,0.99", (0.0, 0.99)),
        ("lr_schedule.decay_steps", "0", 0),
        ("lr_schedule.min_lr_factor", "1", 1.0),
        ("checkpoint.keep_latest_k", "0", 0),
        ("checkpoint.resume", "7", 7),
        ("checkpoint.resume", "auto", "auto"),
        ("job.description", "", ""),
        ("job.description", "a = b, [c] -- d", "a = b, [c] -- d"),
    ],
)
def test_values_at_the_edge_are_accepted(key, text, value):
    section, name = key.split(".")
    got = getattr(getattr(load_config([f"--{key}", text]), section), name)
    assert (got, type(got)) == (value, type(value))
