#!/usr/bin/env python3
"""Weights between checkpoints and Hugging Face folders, on CPU, offline, with about one shard in memory:

python scripts/convert_hf.py export outputs/debug/checkpoint exported/
python scripts/convert_hf.py import exported/ imported/
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from titan_like import __version__
from titan_like.checkpoint import hf, manager
from titan_like.checkpoint.dcp_files import dcp_save
from titan_like.checkpoint.find import find_checkpoint
from titan_like.checkpoint.storage import locate
from titan_like.config import Config, dump_toml
from titan_like.config.errors import ConfigError, TitanError
from titan_like.config.schema import Model
from titan_like.data.hf_tokenizer import ID_KEYS, export_tokenizer, token_ids, tokenizer_of
from titan_like.data.tokenizer import Tokenizer
from titan_like.models.flavors import ModelConfig
from titan_like.models.hf_format import as_settings, describe
from titan_like.parallel.distributed import close_process_group, init_process_group


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    try:
        if args.command == "import":
            import_folder(args.folder, args.checkpoint, args.vocab_size)
        else:
            export_checkpoint(args)
    except TitanError as error:
        print(*(f"error: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        sys.exit(error.exit_code)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Weights between checkpoints and Hugging Face folders.")
    commands = parser.add_subparsers(dest="command", required=True)

    to_here = commands.add_parser("import", help="a Hugging Face folder -> CHECKPOINT/step-0, fp32, weights only")
    to_here.add_argument("folder", type=Path, help="config.json and .safetensors of a llama, qwen2 or qwen3 model")
    to_here.add_argument("checkpoint", help="the checkpoint folder to make, or its URL")
    to_here.add_argument("--vocab_size", type=int, help="at least the folder's; the rows in addition are zero")

    to_there = commands.add_parser("export", help="a checkpoint -> a Hugging Face folder, or one torch file")
    to_there.add_argument("checkpoint", help="a checkpoint folder (newest step) or a step-N, or its URL")
    to_there.add_argument("folder", type=Path, help="the folder to write; with --format torch, the file")
    to_there.add_argument("--format", choices=["hf", "torch"], default="hf", help="default hf")
    to_there.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="default float32"
    )
    to_there.add_argument("--tokenizer", help="a tokenizer file or folder (default: the one that the checkpoint names)")
    to_there.add_argument("--vocab_size", type=int, help="export so many rows, at least the tokenizer's (default: all)")
    to_there.add_argument("--max_shard_bytes", type=int, help=f"of one file (default {hf.MAX_SHARD_BYTES})")
    for key in ID_KEYS:
        to_there.add_argument(f"--{key}", type=int, help="in config.json (default: the tokenizer's)")
    args = parser.parse_args(argv)
    if args.command == "export":
        if args.max_shard_bytes is not None and args.max_shard_bytes < 1:
            parser.error("--max_shard_bytes must be at least 1")
        unused = [
            key for key in ("tokenizer", "vocab_size", "max_shard_bytes", *ID_KEYS) if getattr(args, key) is not None
        ]
        if args.format == "torch" and unused:
            parser.error(f"--{unused[0]} has no effect with --format torch")
    return args


def export_checkpoint(args: argparse.Namespace) -> None:
    folder, step = find_checkpoint(args.checkpoint)
    manager.require_intact(folder, step)
    record, path = manager.read_record(folder, step), folder / f"step-{step}"
    config, dtype = ModelConfig(**record["model"]), getattr(torch, args.dtype)
    if args.format == "torch":
        hf.export_torch(path, args.folder, config, dtype)
        print(f"wrote {args.folder}: a state_dict of {path}")
        return
    tokenizer = find_tokenizer(args.tokenizer, record["tokenizer"])
    ids = token_ids(tokenizer) if tokenizer else {}
    ids |= {key: getattr(args, key) for key in ID_KEYS if getattr(args, key) is not None}
    check_rows(args.vocab_size or config.vocab_size, tokenizer)
    export = hf.Export(args.folder, config, args.vocab_size, dtype, args.max_shard_bytes or hf.MAX_SHARD_BYTES)
    export.write(path)
    export.finish(ids)
    files = export_tokenizer(tokenizer, args.folder) if tokenizer else []
    print(f"exported {path} to {args.folder}: {', '.join([*export.shards, 'config.json', *files])}")
    if not files:
        print("without a tokenizer; name one with --tokenizer", file=sys.stderr)


def import_folder(source: Path, name: str | Path, vocab_size: int | None) -> None:
    checkpoint = locate(name)
    weights = hf.Weights(source)
    tokenizer = tokenizer_of(source)
    check_rows(weights.config.vocab_size, tokenizer)
    if vocab_size is not None and vocab_size < weights.config.vocab_size:
        raise ConfigError(
            f"--vocab_size {vocab_size} would cut the {weights.config.vocab_size} rows of {source}; raise it"
        )
    shape = weights.config.model_copy(update={"vocab_size": vocab_size or weights.config.vocab_size})
    name, flavor, overrides = as_settings(shape)
    settings = Config(model=Model.model_validate({"name": name, "flavor": flavor, "overrides": overrides}))
    record = {
        "titan_like": __version__,
        "torch": torch.__version__,
        "imported_from": str(source.absolute()),
        "model": shape.model_dump(),
        "tokenizer": str(tokenizer.absolute()) if tokenizer else None,
    }

    # DCP keeps in memory what one file holds.
    write = partial(dcp_save, planner=hf.ReadingPlanner(weights), single_file_per_rank=False)
    init_process_group(torch.device("cpu"), init_timeout_seconds=60)
    try:
        manager.save(checkpoint, 0, hf.tensors_to_import(shape), record, dump_toml(settings), write=write)
    finally:
        if dist.is_initialized():
            close_process_group()
    print(f"imported {source} to {checkpoint / 'step-0'}: weights only")
    print(f"to train from them: {describe(shape)} --model.hf_path {source}")


def find_tokenizer(given: str | None, recorded: str | None) -> Path | None:
    """The tokenizer file that was asked for or that the checkpoint names, if it names one."""
    if given is None:
        return Path(recorded) if recorded else None
    path = Path(given)
    if path.is_dir():
        found = tokenizer_of(path)
        if found is None:
            raise ConfigError(f"--tokenizer {path} holds no tokenizer.json and no tokenizer.model; name a file")
        return found
    return path


def check_rows(rows: int, tokenizer: Path | None) -> None:
    """
    Raises:
        ConfigError: the tokenizer has ids that the tables have no row for.
    """
    if tokenizer is not None and (ids := Tokenizer(tokenizer).vocab_size) > rows:
        raise ConfigError(
            f"the vocabulary of {rows} rows is smaller than the {ids} ids of {tokenizer}; use its own tokenizer"
        )


if __name__ == "__main__":
    main()
