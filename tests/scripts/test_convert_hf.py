"""The command line of the conversion, and a trained model that says the same in transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts import convert_hf, generate
from tests.tiny_run import config, run
from titan_like.config import load_config
from titan_like.config.errors import ConfigError, TitanError
from titan_like.data.indexed import IndexedWriter
from titan_like.data.tokenizer import Tokenizer
from titan_like.launch import check_settings
from titan_like.prepare.vocabulary import train_tokenizer
from titan_like.trainer import Trainer

PIECES = 300
TEXT = "def main(argument):\n    return argument\n\n\nimport os, sys\nprint(os.sep)\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with its export; after 40 steps the likeliest tokens are clearly so."""
    folder = tmp_path_factory.mktemp("convert")
    (folder / "tokenizer.model").write_bytes(train_tokenizer([TEXT * 50], PIECES))
    ids = Tokenizer(folder / "tokenizer.model").encode(TEXT)
    with IndexedWriter(folder / "train", np.uint16) as writer:
        for _ in range(60):
            writer.add_document(np.array([*ids, 2]))
    run(
        folder / "run", training__steps=40, checkpoint__enable=True, checkpoint__interval=40, optimizer__lr=0.02,
        model__tokenizer_path=folder / "tokenizer.model", model__overrides__vocab_size=PIECES + 20,
        checkpoint__export_hf="hf",
    )  # fmt: skip
    return folder / "run"


def failing(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    with pytest.raises(SystemExit) as caught:
        convert_hf.main([str(argument) for argument in argv])
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_the_same_text(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    prompt = "def main("
    argv = [f"--checkpoint={trained / 'checkpoint'}", f"--prompt={prompt}", "--tokens=24", "--temperature=0"]
    generate.main(argv)
    ours = capsys.readouterr().out.removesuffix("\n")
    model = transformers.AutoModelForCausalLM.from_pretrained(trained / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained / "hf")
    ids = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=24, do_sample=False, pad_token_id=2)
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == ours
    assert ours.startswith(prompt) and len(ours) > len(prompt) + 20


def test_export_at_the_end_equals_the_command(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert_hf.main(["export", str(trained / "checkpoint"), str(tmp_path / "hf")])
    assert "exported" in capsys.readouterr().out
    by_run, by_command = (
        {p.name: p.read_bytes() for p in folder.iterdir()} for folder in (trained / "hf", tmp_path / "hf")
    )
    assert by_run == by_command
    assert sorted(by_run) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    ]  # fmt: skip
    settings = json.loads(by_run["config.json"])
    assert (settings["bos_token_id"], settings["eos_token_id"], settings["vocab_size"]) == (1, 2, PIECES + 20)


def test_given_ids_and_size(trained: Path, tmp_path: Path) -> None:
    more = [f"--vocab_size={PIECES}", "--pad_token_id=0", "--eos_token_id=5", "--dtype=bfloat16"]
    convert_hf.main(["export", str(trained / "checkpoint" / "step-40"), str(tmp_path), *more])
    settings = json.loads((tmp_path / "config.json").read_text())
    keys = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype")
    assert [settings[key] for key in keys] == [PIECES, 1, 5, 0, "bfloat16"]


def test_a_tokenizer_that_is_too_large(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R218: rows < ids is an error both ways; nothing is written."""
    message = failing(capsys, "export", trained / "checkpoint", tmp_path / "out", "--vocab_size=299")
    assert message.startswith("error: the vocabulary of 299 rows is smaller than the 300 ids of ")
    source = tmp_path / "source"
    convert_hf.main(["export", str(trained / "checkpoint"), str(source)])
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.model").write_bytes(
        train_tokenizer([generate.__doc__ + Path(generate.__file__).read_text()], 500)
    )
    capsys.readouterr()
    message = failing(capsys, "import", source, tmp_path / "out")
    assert message.startswith("error: the vocabulary of 320 rows is smaller than the 500 ids of ")
    assert not (tmp_path / "out").exists()


def test_import_tells_how_to_train(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The settings that it prints are those that training accepts, and generate.py reads what it writes."""
    convert_hf.main(["import", str(trained / "hf"), str(tmp_path)])
    line = capsys.readouterr().out.splitlines()[-1]
    options = line.removeprefix("to train from them: ").split()
    given = load_config([*options, "--training.seq_len=16"])
    assert check_settings(given, 1) == []
    assert check_settings(load_config([*options, "--training.seq_len=16", "--model.overrides.dim=32"]), 1)[
        0
    ].startswith(f"model.hf_path {trained / 'hf'} holds another model: dim 16 instead of 32; set --model.name")
    texts = []
    for checkpoint in (tmp_path, trained / "checkpoint"):
        generate.main([f"--checkpoint={checkpoint}", "--prompt=def main(", "--tokens=9", "--temperature=0"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_imported_weights_are_no_run_to_go_on_with(trained: Path, tmp_path: Path) -> None:
    convert_hf.main(["import", str(trained / "hf"), str(tmp_path / "run" / "checkpoint")])
    (tmp_path / "train.bin").write_bytes((trained.parent / "train.bin").read_bytes())
    (tmp_path / "train.idx").write_bytes((trained.parent / "train.idx").read_bytes())
    settings = {"checkpoint__enable": True, "checkpoint__resume": "auto", "model__overrides__vocab_size": PIECES + 20}
    with pytest.raises(ConfigError, match=r"holds weights only, imported from .*model.hf_path"):
        run(tmp_path / "run", **settings)


def test_a_start_from_another_model(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(TitanError, match="holds another model: vocab_size 320 instead of 96"):
        run(trained.parent / "other", model__hf_path=trained / "hf")


def test_a_torch_file(trained: Path, tmp_path: Path) -> None:
    convert_hf.main(["export", str(trained / "checkpoint"), str(tmp_path / "model.pt"), "--format=torch"])
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert state["output.weight"].shape == (PIECES + 20, 16)


def test_bad_input(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = trained / "checkpoint"
    assert "holds no complete checkpoint" in failing(capsys, "export", tmp_path, tmp_path / "out")
    assert "cannot read" in failing(capsys, "export", checkpoint, tmp_path / "out", "--tokenizer=nowhere.model")
    assert "holds no tokenizer.json" in failing(
        capsys, "export", checkpoint, tmp_path / "out", f"--tokenizer={tmp_path}"
    )
    assert "cannot read" in failing(capsys, "import", tmp_path / "nowhere", tmp_path / "out")
    assert "at least 1" in failing(capsys, "export", checkpoint, tmp_path / "out", "--max_shard_bytes=0")
    assert "no effect" in failing(capsys, "export", checkpoint, tmp_path / "out", "--format=torch", "--vocab_size=3")
    assert list(tmp_path.iterdir()) == []


def test_an_export_needs_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.export_hf .* has no effect with checkpoint.enable"):
        config(tmp_path, checkpoint__export_hf="hf")


def test_a_finished_run_is_exported_without_training(trained: Path, tmp_path: Path) -> None:
    """checkpoint.export_hf can be set after the fact; a folder of others is refused before the first step."""
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "model.safetensors").write_bytes(b"x")
    settings = dict(
        training__steps=40, checkpoint__enable=True, checkpoint__interval=40, optimizer__lr=0.02,
        checkpoint__resume="auto",
        model__tokenizer_path=trained.parent / "tokenizer.model", model__overrides__vocab_size=PIECES + 20,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="was not exported by titan_like"):
        run(trained, **settings, checkpoint__export_hf=foreign)
    trainer: Trainer = run(trained, **settings, checkpoint__export_hf=tmp_path / "again")
    assert trainer.counters.step == 40
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        trained / "hf" / "model.safetensors"
    ).read_bytes()


def test_checkpoints_behind_urls(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, back = f"file://{tmp_path}/bucket", tmp_path / "back"
    convert_hf.main(["import", str(trained / "hf"), there])
    convert_hf.main(["export", there, str(back)])
    name = "model.safetensors"
    assert (back / name).read_bytes() == (trained / "hf" / name).read_bytes()
    capsys.readouterr()
    tokenizer = trained.parent / "tokenizer.model"
    argv = [f"--checkpoint={there}/step-0", f"--tokenizer={tokenizer}", "--prompt=def main(", "--temperature=0"]
    generate.main(argv)
    said = capsys.readouterr().out
    generate.main([f"--checkpoint={trained / 'checkpoint'}", *argv[1:]])
    assert capsys.readouterr().out == said and len(said) > 20
    assert '"tape://x" cannot be used' in failing(capsys, "export", "tape://x", back)
