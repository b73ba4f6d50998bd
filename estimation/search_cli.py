"""`titan-estimate search`: the ten fastest compositions that fit, a page of plots, and any of them as a TOML file."""

import argparse
import re
from collections.abc import Sequence
from math import prod
from pathlib import Path

import tomli_w

from estimation.candidates import COMPILE, MODE, SCHEDULE, SEARCHED, SHARD, Fixed, changed, value_of
from estimation.devices import GIB, Device
from estimation.formula import NOT_INCLUDED as MEMORY_NOT_INCLUDED
from estimation.options import MOST_GPUS, MOST_TOKENS, output, whole
from estimation.page import page
from estimation.search import SHOWN, Found, Result, search
from estimation.time.step import NOT_INCLUDED as TIME_NOT_INCLUDED
from titan_like.config import Config
from titan_like.config.errors import ConfigError
from titan_like.config.schema import SCHEDULES
from titan_like.models.flavors import resolve

HEADS = ("", "s/step", "tokens/s", "MFU", "GiB", "composition", "besides its matrix products it spends")
UNITS = {"": 1, "K": 2**10, "M": 2**20}
OWN = {  # options that say what a trainer's key says
    "model.name": "model", "model.flavor": "flavor", "training.seq_len": "seq_len",
    "training.global_batch_size": "global_batch_tokens",
}  # fmt: skip


def add_options(found: argparse.ArgumentParser) -> None:
    found.add_argument("--model", help="family, as model.name; default: the config's")
    found.add_argument("--flavor", help="size, as model.flavor")
    found.add_argument("--gpus", type=whole(1, MOST_GPUS), required=True, help="number of GPUs")
    found.add_argument("--seq_len", type=whole(1, MOST_TOKENS), help="tokens per sequence, as training.seq_len")
    found.add_argument(
        "--global_batch_tokens", type=tokens, required=True, help="tokens per optimizer step: 4194304, 4096K or 4M"
    )
    found.add_argument("--html", help="write a page with plots")
    found.add_argument(
        "--write", nargs=2, action="append", default=[], metavar=("ROW", "FILE"), help="write a row as a TOML file"
    )


def tokens(text: str) -> int:
    """A number with K (1024) or M (1024 squared)."""
    found = re.fullmatch(r"([0-9]{1,20})([KM]?)", text)
    number = int(found[1]) * UNITS[found[2]] if found else 0
    if not 0 < number <= MOST_TOKENS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of tokens such as 4194304, 4096K or 4M, from 1 to {MOST_TOKENS:,}"
        )
    return number


def fixed_by(options: argparse.Namespace, argv: Sequence[str], config: Config) -> Fixed:
    """What the trainer's options in `argv`, not its file, leave no choice of; -1 and auto leave all.

    Raises:
        ConfigError: an option that says what one of the search's own says, or a schedule that it does not know.
    """
    given = {token.removeprefix("--").partition("=")[0].replace(".no-", ".") for token in argv}
    for key, own in OWN.items():
        if key in given and getattr(options, own) is not None:
            raise ConfigError(f"--{key} is what --{own} says in a search; leave --{key} out")
    values = {key: value_of(config, key) for key in SEARCHED if key in given}
    if values.get(SCHEDULE, SCHEDULES[0]) not in SCHEDULES:
        raise ConfigError(
            f'{SCHEDULE} is "{values[SCHEDULE]}"; the search knows {", ".join(SCHEDULES)}: choose one, or leave it out'
        )
    return {key: value for key, value in values.items() if (key, value) not in ((SHARD, -1), (MODE, "auto"))}


def run_search(options: argparse.Namespace, config: Config, fixed: Fixed, device: Device) -> int:
    """Print, and write what is asked for; returns the exit code.

    Raises:
        ConfigError: a bad request.
        TitanError: nothing fits.
    """
    base = _base(options, config)
    sequences, left = divmod(options.global_batch_tokens, base.training.seq_len)
    if left or not sequences:
        raise ConfigError(
            f"--global_batch_tokens ({options.global_batch_tokens}) is not a multiple of training.seq_len "
            f"({base.training.seq_len}); set it to {(sequences + 1) * base.training.seq_len}"
        )
    if problems := _output_problems(options):
        raise ConfigError(*problems)
    result = search(base, options.gpus, device, sequences, fixed)
    rows = [HEADS, *(_row(number, found, options.gpus) for number, found in enumerate(result.best[:SHOWN], start=1))]
    title = f"{base.model.name} {base.model.flavor} on {options.gpus} x {device.name}, {sequences} x "
    title += f"{base.training.seq_len} tokens per step"
    print(title, *_aligned(rows), *_chosen_anew(config, fixed), sep="\n")
    print(_counts(result), "memory does not include:", *(f"  - {line}" for line in MEMORY_NOT_INCLUDED), sep="\n")
    print("time does not include:", *(f"  - {line}" for line in TIME_NOT_INCLUDED), sep="\n")
    if options.html is not None:
        Path(options.html).write_text(page(title, rows, result.best, device))
    for row, file in options.write:
        if int(row) > len(result.best):
            raise ConfigError(f"--write {row}: only {len(result.best)} compositions fit; choose one of these")
        Path(file).write_text(as_toml(result.best[int(row) - 1], options.gpus, device))
    return 0


def _output_problems(options: argparse.Namespace) -> list[str]:
    problems = []
    outputs = [("--html", options.html)] if options.html is not None else []
    for row, file in options.write:
        if row not in map(str, range(1, SHOWN + 1)):
            problems.append(f"--write {row} is no row of the table; rows are 1 to {SHOWN}")
        outputs.append((f"--write {row}", file))
    for option, file in outputs:
        try:
            output(file)
        except argparse.ArgumentTypeError as error:
            problems.append(f"{option}: {error}")
    return problems


def _base(options: argparse.Namespace, config: Config) -> Config:
    own = {key: getattr(options, OWN[key]) for key in ("model.name", "model.flavor", "training.seq_len")}
    defaults = {key: value_of(Config(), key) for key in SEARCHED}
    keys = {key: value for key, value in own.items() if value is not None}
    base = changed(config, {**defaults, **keys})
    resolve(base.model.name, base.model.flavor, base.model.overrides)  # an unknown one is told now
    return base


def describe(config: Config, gpus: int) -> str:
    """The composition in a line: degrees above 1, schedule, batch and recompute."""
    p, training, recompute = config.parallelism, config.training, config.activation_checkpoint
    degrees = {
        "pp": p.pipeline_parallel_degree, "replicate": p.data_parallel_replicate_degree,
        "cp": p.context_parallel_degree, "tp": p.tensor_parallel_degree,
    }  # fmt: skip
    degrees["shard"] = gpus // prod(degrees.values())
    words = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]
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


def _row(number: int, found: Found, gpus: int) -> tuple[str, ...]:
    step = found.step
    spent = sorted(((s, k) for k, s in step.parts.items() if k != "matrix products"), reverse=True)[:3]
    why = ", ".join(f"{seconds / step.seconds:.0%} {kind}" for seconds, kind in spent)
    return (
        str(number), f"{step.seconds:.3f}", f"{step.tokens_per_second:,.0f}", f"{step.mfu:.1%}",
        f"{found.reserved_bytes / GIB:.1f}", describe(found.config, gpus), why,
    )  # fmt: skip


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _chosen_anew(config: Config, fixed: Fixed) -> list[str]:
    """What the config says of searched keys, and no composition has to keep."""
    keys = {*SEARCHED, "training.global_batch_size"} - {COMPILE, *fixed}
    lost = ", ".join(sorted(key for key in keys if value_of(config, key) != value_of(Config(), key)))
    return [f"chosen anew: {lost} of the config; what the command line says is kept"] if lost else []


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
