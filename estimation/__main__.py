"""`titan-estimate`, also `python -m estimation`: what a composition needs, before it is launched and without a GPU."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from estimation.candidates import changed
from estimation.devices import DEVICES, Device, device_named
from estimation.formula import NOT_INCLUDED, memory_of
from estimation.job import job_of
from estimation.recompute import lightest_recompute
from estimation.report import breakdown, explain, memory_table, time_lines, verdict, worst_rank
from estimation.reserve import replayed
from estimation.search_cli import add_options, run_search
from estimation.time.step import NOT_INCLUDED as TIME_NOT_INCLUDED
from estimation.time.step import step_time
from estimation.time.timeline import write_trace
from estimation.time.way import notes_on, way_of
from titan_like.config import Config, load_config
from titan_like.config.errors import ConfigError, TitanError
from titan_like.launch import check_settings
from titan_like.models.flavors import resolve
from titan_like.parallel.checks import model_checks

DEVICE_OPTIONS = {
    "--device_memory": ("memory_gib", "GiB that the device has"),
    "--device_outside": ("outside_gib", "GiB outside torch's allocator: context and communicators"),
    "--device_tflops": ("tflops", "dense bf16 peak, 1e12 FLOP/s"),
    "--device_memory_bandwidth": ("memory_tb_s", "1e12 B/s"),
    "--device_link": ("link_gb_s", "1e9 B/s one way within a node"),
    "--device_network": ("network_gb_s", "1e9 B/s one way between nodes"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Exit code 0: it fits; 1: it does not; 2: it could not be estimated as asked."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        raise SystemExit(find(argv[1:]) if argv[:1] == ["search"] else estimate(argv))
    except TitanError as error:
        print(*(f"error: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def estimate(argv: Sequence[str]) -> int:
    """Print the estimate of one config; returns the exit code."""
    options, rest = parser().parse_known_args(argv)
    device = device_of(options)
    config = load_config(rest)
    check(config, options.world_size, device)
    if config.activation_checkpoint.mode == "auto":
        config, _ = lightest_recompute(config, options.world_size, device)
        print(f"activation_checkpoint.mode auto: {config.activation_checkpoint.mode}")
    job = job_of(config, options.world_size)
    ranks = memory_of(job)
    worst = worst_rank(ranks)
    report = worst.report()
    reserved = report.reserved_bytes
    if options.replay:
        reserved = replayed(worst, expandable=True).peak_reserved
    fits, sentence = verdict(reserved, device)
    print(f"{config.model.name} {config.model.flavor} on {options.world_size} x {device.name}, memory per rank in GiB")
    print(*memory_table(ranks), sep="\n")
    print(f"\nworst: pp rank {worst.pipeline_rank}", *breakdown(report), sep="\n")
    if options.explain:
        print("", *explain(worst), sep="\n")
    left_out = NOT_INCLUDED[:-1] if options.replay else NOT_INCLUDED
    print("\nmemory does not include:", *(f"  - {line}" for line in left_out), sep="\n")
    step = step_time(job, device, way_of(config))
    print("", *time_lines(step), sep="\n")
    time_left_out = (*TIME_NOT_INCLUDED, *notes_on(config))
    print("time does not include:", *(f"  - {line}" for line in time_left_out), sep="\n")
    if options.trace:
        write_trace(options.trace, step)
    print(f"\n{sentence}")
    return 0 if fits else 1


def find(argv: Sequence[str]) -> int:
    """`titan-estimate search`."""
    found = argparse.ArgumentParser(
        "titan-estimate search", description=run_search.__doc__, allow_abbrev=False,
        epilog="Every other option is the trainer's, kept in every composition: --optimizer.name sgd, ... "
        "All are compiled that can be.",
    )  # fmt: skip
    add_options(found)
    add_device_options(found)
    options, rest = found.parse_known_args(argv)
    return run_search(options, rest, device_of(options))


def parser() -> argparse.ArgumentParser:
    """Options of the estimator; all others are the trainer's."""
    found = argparse.ArgumentParser(
        "titan-estimate", description=__doc__, allow_abbrev=False,
        epilog="Every other option is the trainer's: --job.config_file FILE, --training.seq_len 4096, ... "
        "See also: titan-estimate search --help",
    )  # fmt: skip
    found.add_argument("--world_size", type=_positive, required=True, help="number of GPUs")
    found.add_argument(
        "--replay", action="store_true",
        help="replay the fullest rank through a model of the caching allocator (seconds): finds fragmentation",
    )  # fmt: skip
    found.add_argument("--explain", action="store_true", help="list every tensor alive at the peak")
    found.add_argument("--trace", type=Path, help="write the simulated step to this file, for ui.perfetto.dev")
    add_device_options(found)
    return found


def add_device_options(found: argparse.ArgumentParser) -> None:
    found.add_argument(
        "--device", default="h100-sxm", help=f"one of {', '.join(DEVICES)}, or any other name with the next options"
    )
    for option, (name, text) in DEVICE_OPTIONS.items():
        found.add_argument(option, dest=name, type=_positive_float, help=text)


def device_of(options: argparse.Namespace) -> Device:
    return device_named(options.device, **{name: getattr(options, name) for name, _ in DEVICE_OPTIONS.values()})


def check(config: Config, world_size: int, device: Device) -> None:
    """Refuse what the trainer refuses on `device`, in its words; its folders and data are not looked at.

    Raises:
        ConfigError: one sentence per problem.
    """
    # In the trainer's fake mode nothing is written, so it asks for no folder.
    unwritten = changed(config, {"comm.mode": "fake", "comm.fake_rank": 0, "estimation.device": device.name})
    problems = check_settings(unwritten, world_size)
    problems += model_checks(resolve(config.model.name, config.model.flavor, config.model.overrides), config)
    if problems:
        raise ConfigError(*dict.fromkeys(problems))


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


if __name__ == "__main__":
    main()
