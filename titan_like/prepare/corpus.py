"""The preparation as a whole: all stages into a temporary folder beside the output, then one rename."""

import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import JsonValue

from titan_like.config.errors import ConfigError
from titan_like.data.manifest import Manifest, file_sha256
from titan_like.data.tokenizer import Tokenizer
from titan_like.prepare.documents import STDLIB, Tally, deduplicate, describe, find_files, read, split, summary
from titan_like.prepare.shards import write_shard
from titan_like.prepare.vocabulary import train_tokenizer

DEFAULT_OUTPUT = Path("data/stdlib")
DEFAULT_VOCAB_SIZE = 4096
DEFAULT_VALIDATION_FRACTION = 0.02
TRAIN, VALIDATION, TOKENIZER = "train", "validation", "tokenizer.model"


def prepare_corpus(
    output: str | Path = DEFAULT_OUTPUT,
    source: Sequence[str] = (STDLIB,),
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    validation_fraction: float = DEFAULT_VALIDATION_FRACTION,
    say: Callable[[str], None] = print,
) -> None:
    """Make `output`/{train,validation}.{bin,idx,manifest.json} and tokenizer.model out of text files.

    A file is a document. The tokenizer is trained on the training side alone. Nothing is done when the output is there,
    whole and made with these settings. A killed run leaves no `output`, at most a hidden
    `.<name>.<random>.tmp` beside it. Memory: the whole text is held.

    Raises:
        ConfigError: sources without text, settings that cannot work, or an output that is something else.
    """
    output = Path(output)
    settings: dict[str, JsonValue] = {
        "source": list(source),
        "vocab_size": vocab_size,
        "validation_fraction": validation_fraction,
    }
    if not 0 <= validation_fraction < 1:
        raise ConfigError(f"validation_fraction must be at least 0 and below 1, not {validation_fraction}")
    if _is_ready(output, settings):
        say(f"{output} is there and valid; nothing to do (remove it to prepare it again)")
        return
    temporary = output.parent / f".{output.name}.{secrets.token_hex(4)}.tmp"
    try:
        temporary.mkdir(parents=True)
        _write(temporary, settings, source, vocab_size, validation_fraction, say)
        _commit(temporary, output, settings)
    except OSError as error:
        raise ConfigError(f"preparing {output} failed: {error}; nothing was written") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    say(f"wrote {output}")


def ensure_default(prefixes: Sequence[str]) -> None:
    """Prepare the default corpus if these are its prefixes, [...]/data/stdlib/{train,validation}, and it is missing."""
    folders = {Path(prefix).parent for prefix in prefixes}
    names = {Path(prefix).name for prefix in prefixes}
    if len(folders) != 1 or not names <= {TRAIN, VALIDATION}:
        return
    folder = folders.pop()
    present = all(Path(f"{prefix}.idx").exists() for prefix in prefixes)
    if folder.absolute().parts[-2:] == DEFAULT_OUTPUT.parts and not present:
        prepare_corpus(folder)


def _write(
    folder: Path,
    settings: dict[str, JsonValue],
    source: Sequence[str],
    vocab_size: int,
    validation_fraction: float,
    say: Callable[[str], None],
) -> None:
    start = time.monotonic()
    origin = ", ".join(map(describe, source))
    say(f"preparing {origin}")
    tally = Tally()
    train, validation = split(deduplicate(read(find_files(source), tally), tally), validation_fraction)
    _check_sides(len(train), len(validation), validation_fraction)
    size = {name: sum(len(d.text.encode()) for d in side) for name, side in ((TRAIN, train), (VALIDATION, validation))}
    kept, kept_bytes = len(train) + len(validation), sum(size.values())
    say(f"read {tally.documents_in} documents, {tally.bytes_in:,} bytes; kept {kept} documents, {kept_bytes:,} bytes")
    for line in summary(tally):
        say(line)
    (folder / TOKENIZER).write_bytes(train_tokenizer((d.text for d in train), vocab_size))
    say(f"trained a tokenizer of {vocab_size} pieces after {time.monotonic() - start:.1f} s")
    tokenizer = Tokenizer(folder / TOKENIZER)
    for name, side in ((TRAIN, train), (VALIDATION, validation)):
        if side:
            manifest = write_shard(folder / name, side, tokenizer, origin, settings)
            say(
                f"{name}: {manifest.documents} documents, {manifest.tokens:,} tokens, "
                f"{size[name] / manifest.tokens:.2f} bytes per token, "
                f"unigram entropy {manifest.unigram_entropy_nats:.3f} nats"
            )
    say(f"took {time.monotonic() - start:.1f} s")


def _check_sides(train: int, validation: int, validation_fraction: float) -> None:
    if train == 0 or (validation == 0 and validation_fraction > 0):
        raise ConfigError(
            f"of {train + validation} documents {train} fell to training and {validation} to validation, "
            f"but each needs one; give more files or change validation_fraction "
            f"({validation_fraction}; 0 makes no validation shard)"
        )


def _commit(temporary: Path, output: Path, settings: dict[str, JsonValue]) -> None:
    try:
        os.rename(temporary, output)
    except OSError:
        if not _is_ready(output, settings):  # else another process was faster and made the same
            raise


def _is_ready(output: Path, settings: dict[str, JsonValue]) -> bool:
    """True if the output is whole and made with these settings, False if there is none.

    Raises:
        ConfigError: something else is there.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    remedy = "remove it or choose another output folder"
    problems: list[str] = []
    names = [TRAIN, VALIDATION] if settings["validation_fraction"] else [TRAIN]
    for name in names:
        manifest = Manifest.load(output / name)
        if manifest is None:
            raise ConfigError(
                f"{output} is there but holds no prepared corpus ({name}.manifest.json is missing); {remedy}"
            )
        if manifest.settings != settings:
            raise ConfigError(f"{output} was prepared with {manifest.settings}, asked for {settings}; {remedy}")
        problems += manifest.problems(output / name)
        path = manifest.tokenizer_path(output / name)
        if not path.is_file() or file_sha256(path) != manifest.tokenizer_sha256:
            problems.append(f"{path} is missing or not the tokenizer of {output / name}")
    if problems:
        raise ConfigError(*(f"{problem} ({remedy})" for problem in problems))
    return True
