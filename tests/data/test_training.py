"""What is said of a run's data when it begins."""

import logging

import numpy as np
import pytest
import torch

from titan_like.config import load_config
from titan_like.data.indexed import IndexedWriter
from titan_like.data.manifest import Manifest, file_sha256
from titan_like.data.training import TrainingData


@pytest.fixture
def shard(tmp_path):
    """Writes a shard of which the manifest names a tokenizer."""

    def write(name, tokenizer):
        prefix = tmp_path / name
        with IndexedWriter(prefix, np.uint16) as writer:
            writer.add_document([1, 2, 3] * 100)
        files = {}
        for suffix in ("bin", "idx"):
            path = tmp_path / f"{name}.{suffix}"
            files |= {f"{suffix}_sha256": file_sha256(path), f"{suffix}_bytes": path.stat().st_size}
        Manifest(
            tokenizer=tokenizer, tokenizer_sha256=file_sha256(tmp_path / "right.model"), vocab_size=300, eod_id=2,
            documents=1, tokens=300, dtype="uint16", source="test", unigram_entropy_nats=1.0, settings={}, versions={},
            **files,
        ).save(prefix)  # fmt: skip
        return str(prefix)

    (tmp_path / "right.model").write_bytes(b"right")
    (tmp_path / "other.model").write_bytes(b"other")
    return write


def warnings_of(caplog, *arguments):
    config = load_config([*arguments, "--training.seq_len=8", "--training.local_batch_size=1"])
    with caplog.at_level(logging.INFO, "titan_like"):
        caplog.clear()
        TrainingData(config, 0, 1, torch.device("cpu"), 300)
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("tokenizer", "fault"), [("absent.model", "is missing"), ("other.model", "has another sha256"), ("right.model", "")]
)
def test_a_wrong_tokenizer_beside_the_data_is_told_once(tmp_path, caplog, shard, tokenizer, fault):
    a, b = shard("a", tokenizer), shard("b", tokenizer)
    found = warnings_of(caplog, f"--data.train={a},{b}", f"--data.validation={b}")
    assert [fault in line and tokenizer in line and f" of {a} " in line for line in found] == [True] * bool(fault)
    chosen = f"--model.tokenizer_path={tmp_path}/right.model"  # the one beside the data is not used then
    assert warnings_of(caplog, f"--data.train={a},{b}", f"--data.validation={b}", chosen) == []
