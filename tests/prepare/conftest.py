import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from titan_like.data.indexed import IndexedDataset
from titan_like.data.manifest import Manifest, expand_prefix
from titan_like.data.tokenizer import Tokenizer
from titan_like.prepare.config import load_prepare_config
from titan_like.prepare.pipeline import prepare
from titan_like.prepare.vocabulary import train_tokenizer

WORDS = "the quick brown fox jumps over a lazy dog and then some more words are needed for three hundred pieces"


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A SentencePiece model of 300 pieces with byte fallback: every text comes back from its ids."""
    path = tmp_path_factory.mktemp("model") / "small.model"
    path.write_bytes(train_tokenizer([WORDS * 20], 300))
    return path


class Workshop:
    """Runs preparations in a folder and reads what they made."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model, self.out, self.lines = folder, model, folder / "out", []

    def jsonl(self, name: str, *records: Any) -> str:
        """A file; a record is a text, a JSON value, or bytes as they are."""
        lines = []
        for record in records:
            record = {"text": record} if isinstance(record, str) else record
            lines.append(record if isinstance(record, bytes) else json.dumps(record).encode())
        return self.file(name, b"\n".join(lines) + b"\n")

    def file(self, name: str, content: bytes) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return str(path)

    def run(self, *sources: str, out: str | None = None, **settings: Any) -> dict[str, Any]:
        """Prepare without validation unless asked otherwise; `a__b=value` is the setting a.b. Returns the report."""
        given = {"input.paths": json.dumps(sources), "output.folder": str(self.folder / out if out else self.out)}
        given |= {"output.validation_fraction": 0, "tokenizer.path": self.model, "executor.workers": 1}
        given |= {key.replace("__", "."): value for key, value in settings.items()}
        if given["tokenizer.path"] is None:
            del given["tokenizer.path"]
        prepare(load_prepare_config([f"--{key}={value}" for key, value in given.items()]), self.lines.append)
        return json.loads((Path(given["output.folder"]) / "report.json").read_text())

    def shards(self, side: str = "train", out: str | None = None) -> list[list[str]]:
        """The decoded documents of each shard; EOD is checked and taken off."""
        found = []
        for prefix in expand_prefix((self.folder / out if out else self.out) / side):
            manifest = Manifest.load(prefix)
            assert manifest and manifest.problems(prefix, hashes=True) == []
            tokenizer, data = Tokenizer(manifest.tokenizer_path(prefix)), IndexedDataset(prefix)
            documents = [data.read(i).tolist() for i in range(data.num_sequences)]
            assert manifest.documents == len(documents) and manifest.tokens == sum(map(len, documents))
            assert all(ids[-1] == manifest.eod_id for ids in documents)
            found.append([tokenizer.decode(ids[:-1]) for ids in documents])
        return found

    def texts(self, side: str = "train", out: str | None = None) -> list[str]:
        return [text for shard in self.shards(side, out) for text in shard]


@pytest.fixture
def shop(tmp_path, model) -> Workshop:
    return Workshop(tmp_path, model)
