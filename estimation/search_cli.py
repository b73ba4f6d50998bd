"""`titan-estimate search`: the ten fastest compositions that fit, a page of plots, and any of them as a TOML file."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import tomli_w

from estimation.candidates import changed
from estimation.devices import GIB, Device
from estimation.page import page
from estimation.search import SHOWN, Found, Result, search
from estimation.time.step import NOT_INCLUDED
from titan_like.config import Config, load_config
from titan_like.config.errors import ConfigError
from titan_like.models.flavors import resolve

HEADS = ("", "s/step", "tokens/s", "MFU", "GiB", "composition", "besides its matrix products it spends")
UNITS = {"": 1, "K": 2**10, "M": 2**20}


def add_options(found: argparse.ArgumentParser) -> None:
    found.add_argument("--model", help="family, as model.name; default: the config's")
    found.add_argument("--flavor", help="size, as model.flavor")
    found.add_argument("--gpus", type=positive, required=True, help="number of GPUs")
    found.add_argument("--seq_len", type=int, help="tokens per sequence, as training.seq_len")
    found.add_argument(
        "--global_batch_tokens", type=tokens, required=True, help="tokens per optimizer step: 4194304, 4096K or 4M"
    )
    found.add_argument("--html", type=Path, help="write a page with plots")
    found.add_argument(
        "--write", nargs=2, action="append", default=[], metavar=("ROW", "FILE"), help="write a row as a TOML file"
    )


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def tokens(text: str) -> int:
    """A number with K (1024) or M (1024 squared)."""
    found = re.fullmatch(r"(\d+)([KM]?)", text)
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens such as 4194304, 4096K or 4M")
    return int(found[1]) * UNITS[found[2]]


def run_search(options: argparse.Namespace, rest: Sequence[str], device: Device) -> int:
    """Print, and write what is asked for; returns the exit code.

    Raises:
        ConfigError: a bad request, or nothing fits.
    """
    base = _base(options, load_config(rest))
    sequences, left = divmod(options.global_batch_tokens, base.training.seq_len)
    if left or not sequences:
        raise ConfigError(
            f"--global_batch_tokens ({options.global_batch_tokens}) is not a multiple of training.seq_len "
            f"({base.training.seq_len}); set it to {(sequences + 1) * base.training.seq_len}"
        )
    for row, _ in options.write:
        if not row.isdigit() or not 1 <= int(row) <= SHOWN:
            raise ConfigError(f"--write {row} is no row of the table; rows are 1 to {SHOWN}")
    result = search(base, options.gpus, device, sequences)
    rows = [HEADS, *(_row(number, found) for number, found in enumerate(result.best[:SHOWN], start=1))]
    title = f"{base.model.name} {base.model.flavor} on {options.gpus} x {device.name}, {sequences} x "
    title += f"{base.training.seq_len} tokens per step"
    print(title, *_aligned(rows), sep="\n")
    print(_counts(result), "time does not include:", *(f"  - {line}" for line in NOT_INCLUDED), sep="\n")
    if options.html:
        options.html.write_text(page(title, rows, result.best, device))
    for row, file in options.write:
        if int(row) > len(result.best):
            raise ConfigError(f"--write {row}: only {len(result.best)} compositions fit; choose one of these")
        Path(file).write_text(as_toml(result.best[int(row) - 1], options.gpus, device))
    return 0


def _base(options: argparse.Namespace, config: Config) -> Config:
    given = {"model.name": options.model, "model.flavor": options.flavor, "training.seq_len": options.seq_len}
    keys = {key: value for key, value in given.items() if value is not None}
    base = changed(config, {"compile.enable": True, **keys})  # candidates turn it off where it is refused
    resolve(base.model.name, base.model.flavor, base.model.overrides)  # an unknown one is told now
    return base


def describe(config: Config) -> str:
    """The composition in a line: degrees above 1, schedule, batch and recompute."""
    p, training, recompute = config.parallelism, config.training, config.activation_checkpoint
    degrees = {
        "pp": p.pipeline_parallel_degree, "replicate": p.data_parallel_replicate_degree,
        "cp": p.context_parallel_degree, "tp": p.tensor_parallel_degree,
    }  # fmt: skip
    words = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1] + ["shard the rest"]
    if p.pipeline_parallel_degree > 1:
        virtual = "" if p.pipeline_parallel_virtual_stages == -1 else f" x{p.pipeline_parallel_virtual_stages}"
        size = p.pipeline_parallel_microbatch_size
        words.append(f"{p.pipeline_parallel_schedule}{virtual}")
        words.append(f"{training.local_batch_size // size} micro-batches of {size}")
    else:
        words.append(f"micro-batch {training.local_batch_size}")
    option = f" {recompute.selective_ac_option}" if recompute.mode == "selective" else ""
    words.append(f"recompute {recompute.mode}{option}")
    return ", ".join(words if config.compile.enable else [*words, "uncompiled"])


def _row(number: int, found: Found) -> tuple[str, ...]:
    step = found.step
    spent = sorted(((s, k) for k, s in step.parts.items() if k != "matrix products"), reverse=True)[:3]
    why = ", ".join(f"{seconds / step.seconds:.0%} {kind}" for seconds, kind in spent)
    return (
        str(number), f"{step.seconds:.3f}", f"{step.tokens_per_second:,.0f}", f"{step.mfu:.1%}",
        f"{found.reserved_bytes / GIB:.1f}", describe(found.config), why,
    )  # fmt: skip


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _counts(result: Result) -> str:
    return (
        f"of {result.groups:,} pairs of mesh and micro-batch, {result.timed:,} compositions could not be told from the "
        f"best by bounds and were timed; the memory of {result.predicted:,} was predicted"
    )


def as_toml(found: Found, gpus: int, device: Device) -> str:
    """What differs from the defaults, with the predictions; the trainer loads it."""
    return (
        f"# {gpus} x {device.name}; predicted: {found.seconds:.3f} s per step, {found.reserved_bytes / GIB:.1f} GiB "
        f"reserved on the fullest GPU\n{tomli_w.dumps(found.config.model_dump(exclude_defaults=True))}"
    )
