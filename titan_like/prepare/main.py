"""The command titan-prepare."""

import argparse
import signal
import sys
from collections.abc import Sequence

from titan_like.config.errors import ConfigError, TitanError
from titan_like.data.manifest import Manifest, manifest_path
from titan_like.prepare.corpus import (
    DEFAULT_OUTPUT,
    DEFAULT_VALIDATION_FRACTION,
    DEFAULT_VOCAB_SIZE,
    prepare_corpus,
)
from titan_like.prepare.documents import STDLIB


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit code is 0, or 2 for a user's mistake (one sentence each on standard error)."""
    options = _parser().parse_args(arguments)
    # As an exception, so that temporary files are removed.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if options.command == "run":
            prepare_corpus(options.output, options.source, options.vocab_size, options.validation_fraction)
        else:
            inspect(options.prefix)
    except TitanError as error:
        print("\n".join(f"error: {problem}" for problem in str(error).splitlines()), file=sys.stderr)
        return error.exit_code
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


def inspect(prefix: str) -> None:
    """Print a shard's manifest and compare sizes and hashes of its files with it.

    Raises:
        ConfigError: no manifest, or a file differs.
    """
    manifest = Manifest.load(prefix)
    if manifest is None:
        raise ConfigError(f"{manifest_path(prefix)} does not exist; give the prefix of a prepared shard")
    print(manifest.model_dump_json(indent=2))
    if problems := manifest.problems(prefix, hashes=True):
        raise ConfigError(*problems)
    print("sizes and hashes agree")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("titan-prepare", description="Turn text into tokenised shards for training.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="read, deduplicate, split, train a tokenizer, tokenise",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    run.add_argument("--output", default=str(DEFAULT_OUTPUT), help="folder to make; relative to the current directory")
    run.add_argument(
        "--source",
        nargs="+",
        default=[STDLIB],
        metavar="SOURCE",
        help=f"'{STDLIB}' (the running Python's standard library), text files, or folders of .py, .txt and .md files",
    )
    run.add_argument("--vocab_size", type=int, default=DEFAULT_VOCAB_SIZE, help="pieces of the tokenizer")
    run.add_argument(
        "--validation_fraction", type=float, default=DEFAULT_VALIDATION_FRACTION, help="share of documents; 0: none"
    )
    inspection = commands.add_parser("inspect", help="show a shard's manifest and verify sizes and hashes")
    inspection.add_argument("prefix", help="path without .idx, e.g. data/stdlib/train")
    return parser


if __name__ == "__main__":
    sys.exit(main())
