"""The manifest beside a shard, `{prefix}.manifest.json`: what the Megatron format itself cannot say."""

import hashlib
import os
import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from titan_like.config.errors import ConfigError
from titan_like.data.indexed import IndexedDataset


class Manifest(BaseModel):
    """Where a shard comes from and what it must hold. Tick `format_version` when a field changes its meaning."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal[1] = 1
    tokenizer: str  # file, relative to the folder of the manifest
    tokenizer_sha256: str
    vocab_size: int
    eod_id: int  # -1: none; so for the other two
    bos_id: int = -1
    pad_id: int = -1
    append_eod: bool = True  # every document ends with EOD
    add_bos: bool = False  # every document begins with BOS
    documents: int
    tokens: int  # with EOD and BOS
    shard: int = 0  # this is number `shard` of `shards`
    shards: int = 1
    dtype: str
    source: str
    unigram_entropy_nats: float  # of this shard's tokens: the loss of a model that only counts them
    bin_sha256: str
    bin_bytes: int
    idx_sha256: str
    idx_bytes: int
    settings: dict[str, JsonValue]
    versions: dict[str, str]

    @classmethod
    def load(cls, prefix: str | Path) -> "Manifest | None":
        """The manifest of a shard, None where there is none (shards of other tools).

        Raises:
            ConfigError: it cannot be read or is of another format version.
        """
        path = manifest_path(prefix)
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"cannot read the manifest {path}: {error.strerror}; prepare the data again") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "file"
            raise ConfigError(f"bad manifest {path}: {where}: {first['msg']}; prepare the data again") from error

    def save(self, prefix: str | Path) -> None:
        """Write it, all or nothing."""
        path = manifest_path(prefix)
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_text(self.model_dump_json(indent=2) + "\n")
        os.replace(temporary, path)

    def tokenizer_path(self, prefix: str | Path) -> Path:
        """The tokenizer file of the shard with this prefix."""
        return manifest_path(prefix).parent / self.tokenizer

    def problems(self, prefix: str | Path, hashes: bool = False) -> list[str]:
        """One sentence for each file that is not the one described here; by size, or by size and sha256."""
        found = []
        for suffix, size, digest in (
            ("bin", self.bin_bytes, self.bin_sha256),
            ("idx", self.idx_bytes, self.idx_sha256),
        ):
            path = Path(f"{prefix}.{suffix}")
            if not path.is_file():
                found.append(f"{path} is missing; prepare the data again")
            elif (actual := path.stat().st_size) != size:
                found.append(f"{path} has {actual} bytes, its manifest says {size}; prepare the data again")
            elif hashes and file_sha256(path) != digest:
                found.append(f"{path} is not the file its manifest describes (sha256 differs); prepare the data again")
        return found

    def differences(self, shard: IndexedDataset) -> list[str]:
        """One sentence for each field that is not what the index says; reads no tokens."""
        documents = len(shard.document_indices) - 1
        found = {"dtype": str(shard.dtype), "tokens": shard.num_tokens, "documents": documents}
        return [
            f"{shard.prefix}.idx has {key} {value}, its manifest says {getattr(self, key)}; "
            "copy the files of one preparation or prepare the data again"
            for key, value in found.items()
            if value != getattr(self, key)
        ]


def expand_prefix(prefix: str | Path) -> list[str]:
    """The shards that a prefix names: itself, or `{prefix}_00000`, `{prefix}_00001`, ... in order.

    Raises:
        ConfigError: a shard of the series is missing.
    """
    if Path(f"{prefix}.idx").exists():
        return [str(prefix)]
    name = re.compile(re.escape(Path(prefix).name) + r"_\d{5}\.idx")
    found = sorted(str(path)[:-4] for path in Path(prefix).parent.glob("*.idx") if name.fullmatch(path.name))
    if not found:
        return [str(prefix)]  # opening it says what is missing
    manifest = Manifest.load(found[0])
    expected = [f"{prefix}_{i:05d}" for i in range(manifest.shards if manifest else len(found))]
    if missing := sorted(set(expected) - set(found)):
        raise ConfigError(
            f"{missing[0]}.idx is missing, one of {len(expected)} shards of {prefix}; copy it or prepare again"
        )
    return found


def manifest_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.manifest.json")


def file_sha256(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
