import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts import generate
from tests.tiny_run import run
from titan_like.data.indexed import IndexedWriter
from titan_like.prepare.vocabulary import train_tokenizer

PIECES = 300
TEXT = "def main(argument):\n    return argument\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint folder of a short run; the model's vocabulary is twice that of the tokenizer."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "tokenizer.model").write_bytes(
        train_tokenizer([TEXT * 50, "import os, sys\nprint(os.sep)\n" * 50], PIECES)
    )
    with IndexedWriter(folder / "train", np.uint16) as writer:
        for _ in range(20):
            writer.add_document(np.random.default_rng(0).integers(0, PIECES, 60))
    run(
        folder / "run", training__steps=2, checkpoint__enable=True, checkpoint__interval=1,
        model__tokenizer_path=folder / "tokenizer.model", model__overrides__vocab_size=2 * PIECES,
    )  # fmt: skip
    return folder / "run" / "checkpoint"


def text(capsys: pytest.CaptureFixture[str], checkpoint: Path, *more: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate.main([f"--checkpoint={checkpoint}", "--tokens=20", "--top_k=1000", *more])
    assert not torch.distributed.is_initialized()
    return capsys.readouterr().out


def test_the_prompt_goes_on(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = text(capsys, trained, "--prompt=def main(x):\n    ▁ ü 中")
    assert found.startswith("def main(x):\n    ▁ ü 中") and len(found) > 30
    assert text(capsys, trained, "--prompt=def ", "--tokens=0") == "def \n"
    assert len(text(capsys, trained)) > 1  # without a prompt, a document begins


def test_the_seed_decides(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, again, other = (text(capsys, trained, "--prompt=def", f"--seed={seed}") for seed in (1, 1, 2))
    assert one == again != other


def test_temperature_zero_takes_the_likeliest(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cold = [text(capsys, trained, "--prompt=def", "--temperature=0", f"--seed={seed}") for seed in (1, 2)]
    assert cold[0] == cold[1] == text(capsys, trained, "--prompt=def", "--top_k=1")


def test_sampling_by_hand() -> None:
    logits = torch.tensor([0.0, 5.0, 4.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    assert generate._sample(logits, 0.0, 50, generator) == 1
    drawn = [generate._sample(logits, 1.0, 2, generator) for _ in range(300)]
    assert set(drawn) == {1, 2}
    assert drawn.count(1) / 300 == pytest.approx(0.731, abs=0.1)  # 1 / (1 + e^-1)
    cooled = [generate._sample(logits, 0.1, 2, generator) for _ in range(300)]
    assert cooled.count(1) >= 298  # 1 / (1 + e^-10)


def test_generation_stops_at_the_end_of_a_document(monkeypatch: pytest.MonkeyPatch, trained: Path) -> None:
    monkeypatch.setattr(generate, "_sample", lambda *_: next(tokens))
    model = generate.load_model(
        trained, 2, generate.ModelConfig(**generate.checkpoint.read_record(trained, 2)["model"])
    )
    tokens = iter([7, 8, 2, 9])
    assert generate.generate(model, [5], 10, 1.0, 1, torch.Generator(), PIECES, end=2) == [5, 7, 8]


def test_the_data_say_what_begins_and_ends_a_document(trained: Path) -> None:
    tokenizer = generate.Tokenizer(trained.parents[1] / "tokenizer.model")
    ids = tokenizer.encode("def")
    assert generate.first_ids({"begins_with": 8, "ends_with": 9}, tokenizer, "def") == ([8, *ids], 9)
    assert generate.first_ids({"begins_with": 8, "ends_with": 9}, tokenizer, "") == ([8], 9)
    eos = tokenizer.eos_id
    assert generate.first_ids({"begins_with": None, "ends_with": None}, tokenizer, "") == ([eos], eos)
    tokenizer.eos_id = -1
    assert generate.first_ids({}, tokenizer, "def") == (ids, -1)
    with pytest.raises(generate.ConfigError, match="begins or ends a document; give a --prompt"):
        generate.first_ids({}, tokenizer, "")


def test_a_step_or_the_newest(trained: Path) -> None:
    assert generate.find_checkpoint(trained) == (trained, 2)
    assert generate.find_checkpoint(trained / "step-1") == (trained, 1)


@pytest.mark.parametrize("name", ["step-9", "nowhere", "."])
def test_no_checkpoint(trained: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = trained / name if name != "." else trained.parent
    with pytest.raises(SystemExit) as caught:
        generate.main([f"--checkpoint={path}"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        f"error: {path} holds no complete checkpoint; name a checkpoint folder or one of its step-N folders\n"
    )


def test_no_tokenizer(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        generate.main([f"--checkpoint={trained}", "--tokenizer=nowhere.model"])
    assert caught.value.code == 2
    assert "error: cannot read the tokenizer nowhere.model" in capsys.readouterr().err


def test_out_of_range_options(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        generate.main([f"--checkpoint={trained}", "--top_k=0"])
    assert caught.value.code == 2 and "--top_k at least 1" in capsys.readouterr().err
