import pytest

from titan_like.config.errors import ConfigError
from titan_like.prepare.config import help_text, load_prepare_config


def problems(*arguments):
    with pytest.raises(ConfigError) as caught:
        load_prepare_config(arguments)
    return caught.value.problems


def test_the_command_line_overrides_the_file(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text('[input]\npaths = ["a", "b"]\n[output]\nshards = 3\nbos = true\n[tokenizer]\neod = "<|end|>"\n')
    config = load_prepare_config(["--config", str(file), "--output.shards", "5", "--output.bos=false"])
    assert config.input.paths == ("a", "b") and config.tokenizer.eod == "<|end|>"
    assert (config.output.shards, config.output.bos) == (5, False)
    config = load_prepare_config(["--input.paths", "x,y", "--tokenizer.eod", "7", "--tokenizer.path", "1.model"])
    assert config.input.paths == ("x", "y") and config.tokenizer.eod == 7 and config.tokenizer.path == "1.model"
    assert load_prepare_config(['--input.paths=["x, y"]']).input.paths == ("x, y",)


def test_all_problems_are_reported_together(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text('[output]\nshrads = 3\nbos = "yes"\n[inputs]\npaths = ["a"]\n')
    found = problems("--config", str(file), "--input.formt=jsonl", "--output.shards=-1", "stray")
    text = "\n".join(found)
    for part in (
        "unexpected argument 'stray'",
        "output.shrads",
        "did you mean output.shards?",
        "unknown section inputs",
        "did you mean input.format?",
        "output.bos is 'yes'",
        "output.shards is -1",
    ):
        assert part in text
    assert len(found) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "absent.toml"], "absent.toml cannot be read (No such file"),
        (["--input.paths"], "--input.paths needs a value"),
        (["--input.format", "csv"], "input.format is 'csv'"),
        (["--output.validation_fraction", "1.0"], "output.validation_fraction is 1.0"),
        (["--clean.filters", "gopher"], "clean.filters is 'gopher'"),
        (["--tokenizer.path", "x.model", "--tokenizer.vocab_size", "9"], "tokenizer.vocab_size is for training one"),
        (["--dedup.near", "true", "--dedup.exact", "false"], "dedup.near needs dedup.exact"),
        (["--executor.slurm_time", "1:00"], "executor.slurm_time is for Slurm"),
        (["--executor.cpus_per_task", "2"], "for slurm and ray, not for local"),
        (["--executor.kind", "slurm"], "executor.slurm_partition is empty"),
        (["--output.folder", "s3://b/y"], "output.folder must be a local folder, not s3://b/y"),
        (["--output.folder=gs://b/y"], "output.folder must be a local folder, not gs://b/y"),
        (["--tokenizer.path", "az://a/c/t.model"], "tokenizer.path must be a local file, not az://a/c/t.model"),
        (["--input.paths", "x,s3://b/x.jsonl"], "input.paths has s3://b/x.jsonl, which cannot be read; give local"),
        (["--input.paths", "https://example.com/x.jsonl"], "or gs://, az://, https://ACCOUNT.blob.core.windows.net/"),
        (["--decontaminate.paths", "foo://x"], "decontaminate.paths has foo://x"),
        (["--clean.min_characters", "9", "--clean.max_characters", "3"], "clean.max_characters (3) is below"),
    ],
)
def test_settings_that_cannot_be(arguments, message):
    assert any(message in problem for problem in problems(*arguments))


def test_what_blobfile_reads_is_allowed():
    sources = ("gs://b/x", "az://a/c/x", "https://a.blob.core.windows.net/c/x", "local/a:b")
    assert load_prepare_config(["--input.paths", ",".join(sources)]).input.paths == sources


def test_help_names_every_key_with_its_default():
    text = help_text()
    for part in ("--input.bad_input (default: 'error')", "--executor.task_bytes (default: 67108864)", "[dedup]"):
        assert part in text
