"""The command titan-prepare."""

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from titan_like.config.errors import ConfigError, TitanError
from titan_like.data.indexed import IndexedDataset
from titan_like.data.manifest import Manifest, expand_prefix, manifest_path
from titan_like.data.tokenizer import Tokenizer
from titan_like.prepare.config import (
    DEFAULT_VOCAB_SIZE,
    PrepareConfig,
    help_text,
    load_prepare_config,
    local_problem,
)

EXCERPT_CHARACTERS = 300


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit code is 0, 2 for a user's mistake (one sentence each on standard error), else 1."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options, settings = _parser().parse_known_args(arguments)
    # As an exception, so that what runs in other processes is ended.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if options.command == "run":
            _run(settings)
            return 0
        if settings:
            raise ConfigError(f"unknown argument {settings[0]!r}; titan-prepare {options.command} --help lists all")
        if options.command == "inspect":
            for prefix in expand_prefix(options.prefix):
                inspect(prefix, options.documents, options.verify)
        elif options.command == "merge":
            _merge(options.prefixes, options.output)
        else:
            train_tokenizer_file(options.paths, options.output, options.vocab_size)
    except TitanError as error:
        print("\n".join(f"error: {problem}" for problem in str(error).splitlines()), file=sys.stderr)
        return error.exit_code
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


def inspect(prefix: str, documents: int = 0, verify: bool = False) -> None:
    """Print a shard's manifest, its first documents, and whether its files are those of the manifest.

    Raises:
        ConfigError: a file is missing, damaged or not the one described.
    """
    data = IndexedDataset(prefix)
    manifest = Manifest.load(prefix)
    if manifest is None:
        count = len(data.document_indices) - 1
        print(
            f"warning: {manifest_path(prefix)} does not exist: the tokenizer of this shard is unknown", file=sys.stderr
        )
        print(f"{prefix}: {count} documents, {data.num_tokens} tokens, {data.dtype}")
    else:
        print(manifest.model_dump_json(indent=2))
        if problems := manifest.problems(prefix, hashes=verify) or manifest.differences(data):
            raise ConfigError(*problems)
    for line in _documents(prefix, data, manifest, documents):
        print(line)
    if verify:
        from titan_like.prepare.shards import count_tokens

        if manifest is None:
            raise ConfigError(f"{manifest_path(prefix)} does not exist, so there is nothing to verify {prefix} with")
        count_tokens(data, manifest.vocab_size)
        print(f"{prefix}: sizes, hashes and token ids agree with the manifest")


def train_tokenizer_file(paths: Sequence[str], output: str, vocab_size: int) -> None:
    """Train a SentencePiece model on files (like the paths of input.paths) and write it, all or nothing.

    Raises:
        ConfigError: no text, bad input, or an output that exists.
    """
    from titan_like.prepare.read import Reader, plan_tasks
    from titan_like.prepare.report import Ledger
    from titan_like.prepare.storage import find_files
    from titan_like.prepare.vocabulary import train_tokenizer

    if problem := local_problem("--output", output, "file"):
        raise ConfigError(problem)
    if Path(output).exists():
        raise ConfigError(f"{output} exists; remove it or choose another --output")
    config = PrepareConfig()
    tasks = plan_tasks(find_files(paths, config.input.text_suffixes), config.input, 1 << 62)
    reader = Reader(tasks, config.input, config.clean, Ledger(None))
    model = train_tokenizer((document.text for document in reader()), vocab_size)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(f"{output}.tmp")
    temporary.write_bytes(model)
    os.replace(temporary, output)
    print(f"wrote {output}: {vocab_size} pieces")


def _run(settings: Sequence[str]) -> None:
    config = load_prepare_config(settings)
    from titan_like.prepare.pipeline import prepare  # after the settings are known to be good: datatrove takes a second

    prepare(config)


def _merge(prefixes: Sequence[str], output: str) -> None:
    from titan_like.prepare.shards import merge

    if problem := local_problem("--output", output, "prefix"):
        raise ConfigError(problem)
    manifest = merge([shard for prefix in prefixes for shard in expand_prefix(prefix)], output)
    if manifest is None:
        print(f"warning: a shard has no manifest, so {output} has none: its tokenizer is unknown", file=sys.stderr)
    data = IndexedDataset(output)
    print(f"wrote {output}: {len(data.document_indices) - 1} documents, {data.num_tokens} tokens")


def _documents(prefix: str, data: IndexedDataset, manifest: Manifest | None, count: int) -> Iterator[str]:
    tokenizer = Tokenizer(manifest.tokenizer_path(prefix)) if manifest and count else None
    for i in range(min(count, len(data.document_indices) - 1)):
        ids = [int(t) for s in range(*map(int, data.document_indices[i : i + 2])) for t in data.read(s)]
        text = repr(tokenizer.decode(ids)[:EXCERPT_CHARACTERS]) if tokenizer else str(ids[:20])
        yield f"document {i}: {len(ids)} tokens: {text}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("titan-prepare", description="Turn text into tokenised shards for training.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "run",
        help="read, clean, deduplicate, split, tokenise; all settings: titan-prepare run --help",
        usage="titan-prepare run [--config FILE.toml] [--section.key VALUE ...]",
        epilog=help_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    training = commands.add_parser("train-tokenizer", help="train a SentencePiece tokenizer")
    training.add_argument("paths", nargs="+", help="files and folders of text, JSONL or Parquet, or 'stdlib'")
    training.add_argument("--output", required=True, help="the .model file to write")
    training.add_argument("--vocab_size", type=int, default=DEFAULT_VOCAB_SIZE, help="pieces (default %(default)s)")
    inspection = commands.add_parser("inspect", help="show shards")
    inspection.add_argument("prefix", help="path without .idx, e.g. data/stdlib/train")
    inspection.add_argument("--documents", type=int, default=0, help="decode so many documents")
    inspection.add_argument("--verify", action="store_true", help="compare hashes and token ids with the manifest")
    merging = commands.add_parser("merge", help="put shards one after the other into one")
    merging.add_argument("prefixes", nargs="+", help="shards, or the common prefix of numbered ones")
    merging.add_argument("--output", required=True, help="prefix of the new shard")
    return parser


if __name__ == "__main__":
    sys.exit(main())
