"""`titan-estimate`, also `python -m estimation`: what a composition needs, before it is launched and without a GPU."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from estimation import search_cli
from estimation.candidates import changed
from estimation.devices import DEVICES, LEAST, MOST, Device, device_named
from estimation.formula import FRAGMENTATION, memory_of
from estimation.job import Job, job_of
from estimation.options import MOST_GPUS, MOST_TOKENS, Parser, number, output, whole
from estimation.recompute import lightest_recompute
from estimation.report import breakdown, details, explain, memory_table, reserved_line, time_lines, verdict, worst_rank
from estimation.reserve import replayed
from estimation.time.step import NOT_INCLUDED as TIME_NOT_INCLUDED
from estimation.time.step import step_time
from estimation.time.timeline import write_trace
from estimation.time.way import notes_on, way_of
from titan_like.config import Config, load_config
from titan_like.config.errors import ConfigError, TitanError
from titan_like.launch import check_folder, check_settings
from titan_like.models.flavors import resolve
from titan_like.parallel.checks import model_checks

DEFAULT_DEVICE = "h100-sxm"
UNREAD = 141  # exit code when nobody reads on, as a shell tells it of other programs
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
    commands = {"search": find, "calibrate": measure}
    try:
        try:
            raise SystemExit(commands[argv[0]](argv[1:]) if argv and argv[0] in commands else estimate(argv))
        finally:
            sys.stdout.flush()
    except TitanError as error:
        print(*(f"error: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere
        raise SystemExit(UNREAD) from None
    except OSError as error:  # of an output: what is read has its own sentences
        where = f"{error.filename} " if error.filename else ""
        print(f"error: an output {where}could not be written ({error.strerror}); name another place", file=sys.stderr)
        raise SystemExit(ConfigError.exit_code) from None


def estimate(argv: Sequence[str]) -> int:
    """Print the estimate of one config; returns the exit code."""
    options, rest = parser().parse_known_args(argv)
    _check_engine(options)
    config = load_config(rest)
    device = device_of(options, config)
    check(config, options.world_size, device)
    if config.activation_checkpoint.mode == "auto":
        config, _ = lightest_recompute(config, options.world_size, device)
        print(f"activation_checkpoint.mode auto: {config.activation_checkpoint.mode}")
    job = job_of(config, options.world_size)
    print(f"{config.model.name} {config.model.flavor} on {options.world_size} x {device.name}, memory per rank in GiB")
    lines, reserved = traced(options, config) if options.engine == "trace" else calculated(options, job)
    print(*lines, sep="\n")
    fits, sentence = verdict(reserved, device, job.communicators)
    step = step_time(job, device, way_of(config))
    print("", *time_lines(step), sep="\n")
    time_left_out = (*TIME_NOT_INCLUDED, *notes_on(config))
    print("time does not include:", *(f"  - {line}" for line in time_left_out), sep="\n")
    if options.trace:
        write_trace(options.trace, step)
    print(f"\n{sentence}")
    return 0 if fits else 1


def calculated(options: argparse.Namespace, job: Job) -> tuple[list[str], int]:
    """The formula's answer: all pipeline ranks, and the fullest in full; and the bytes that it reserves."""
    ranks = memory_of(job)
    worst = worst_rank(ranks)
    report = worst.report()
    reserved = replayed(worst, expandable=True).peak_reserved if options.replay else report.reserved_bytes
    lines = [*memory_table(ranks), f"\nworst: pp rank {worst.pipeline_rank}", *breakdown(report)]
    lines += [reserved_line(reserved, is_replayed=True)] if options.replay else []
    lines += ["", *explain(worst)] if options.explain else []
    left_out = [sentence for sentence in report.not_included if not (options.replay and sentence == FRAGMENTATION)]
    return [*lines, *_left_out(left_out)], reserved


def traced(options: argparse.Namespace, config: Config) -> tuple[list[str], int]:
    """One rank's answer of the trace; and the bytes that it reserves."""
    from estimation.extrapolate import LAYERS, model_of, trace_some_layers  # imports torch, as the formula does not
    from estimation.trace import trace

    rank = worst_rank(memory_of(job_of(config, options.world_size))).report().rank
    rank = rank if options.rank is None else options.rank
    is_whole = options.whole or options.replay
    report = None if is_whole else trace_some_layers(config, options.world_size, rank, gpu=True)
    how, left_out, is_replayed = "traced", tuple[str, ...](), report is None
    if report is None:
        report = trace(config, options.world_size, rank, gpu=True)
    else:
        layers = model_of(config).n_layers
        how = f"{LAYERS[0]} to {LAYERS[-1]} layers traced, {layers} told from them (--whole traces all)"
        left_out = (FRAGMENTATION,)
    lines = [f"rank {rank}, {how}", *breakdown(report), reserved_line(report.reserved_bytes, is_replayed=is_replayed)]
    if config.compile.enable and "loss" in config.compile.components:
        lines.append("these numbers are of an uncompiled loss, which holds more than the compiled one that will run")
    lines += details(report)
    return [*lines, *_left_out((*report.not_included, *left_out))], report.reserved_bytes


def _left_out(sentences: Sequence[str]) -> list[str]:
    return ["\nmemory does not include:", *(f"  - {line}" for line in sentences)]


def find(argv: Sequence[str]) -> int:
    """`titan-estimate search`."""
    found = Parser(
        "titan-estimate search",
        "The ten fastest compositions that fit, a page of plots, and any of them as a TOML file.",
        "Every other option is the trainer's, kept in every composition: --optimizer.name sgd, "
        "--parallelism.tensor_parallel_degree 4, ... Of a config file, what the search chooses is chosen anew. "
        "All are compiled that can be.",
    )
    search_cli.add_options(found)
    add_device_options(found)
    options, rest = found.parse_known_args(argv)
    config = load_config(rest, checks=None)  # the search chooses what goes together
    fixed = search_cli.fixed_by(options, rest, config)
    return search_cli.run_search(options, config, fixed, device_of(options, config))


def measure(argv: Sequence[str]) -> int:
    """`titan-estimate calibrate`."""
    from estimation.calibrate import calibrate  # imports torch

    found = Parser("titan-estimate calibrate", calibrate.__doc__ or "")
    found.add_argument("--output", type=Path, required=True, help="a TOML file, for --device and estimation.device")
    add_device_options(found)
    options = found.parse_args(argv)
    if problems := check_folder("--output", str(options.output.parent)):
        raise ConfigError(*problems)
    calibrate(options.output, device_of(options))
    return 0


def parser() -> Parser:
    """Options of the estimator; all others are the trainer's."""
    found = Parser(
        "titan-estimate",
        __doc__ or "",
        "Every other option is the trainer's: --job.config_file FILE, --training.seq_len 4096, ... "
        "See also: titan-estimate search --help, titan-estimate calibrate --help",
    )
    found.add_argument("--world_size", type=whole(1, MOST_GPUS), required=True, help="number of GPUs")
    found.add_argument(
        "--engine", choices=("formula", "trace"), default="formula",
        help="trace: run two steps of the real trainer on one rank, on tensors without memory (seconds)",
    )  # fmt: skip
    found.add_argument(
        "--rank", type=whole(0, MOST_GPUS - 1), help="of the trace; by default the fullest, as the formula finds it"
    )
    found.add_argument(
        "--replay", action="store_true",
        help="replay the fullest rank through a model of the caching allocator (seconds): finds fragmentation; a trace "
        "is whole then",
    )  # fmt: skip
    found.add_argument("--whole", action="store_true", help="trace all layers, where 4 to 6 would tell of the others")
    found.add_argument("--explain", action="store_true", help="list every tensor alive at the peak")
    found.add_argument("--trace", type=output, help="write the simulated step to this file, for ui.perfetto.dev")
    add_device_options(found)
    return found


def add_device_options(found: argparse.ArgumentParser) -> None:
    found.add_argument(
        "--device",
        help=f"one of {', '.join(DEVICES)}, a file from titan-estimate calibrate, "
        f"or any other name with the next options; default: the config's estimation.device, else {DEFAULT_DEVICE}",
    )
    for option, (name, text) in DEVICE_OPTIONS.items():
        found.add_argument(option, dest=name, type=number(0 if name == "outside_gib" else LEAST, MOST), help=text)


def device_of(options: argparse.Namespace, config: Config | None = None) -> Device:
    name = options.device or (config.estimation.device if config else "") or DEFAULT_DEVICE
    return device_named(name, **{name: getattr(options, name) for name, _ in DEVICE_OPTIONS.values()})


def check(config: Config, world_size: int, device: Device) -> None:
    """Refuse what the trainer refuses on `device`, in its words; its folders and data are not looked at.

    Raises:
        ConfigError: one sentence per problem.
    """
    # In the trainer's fake mode nothing is written, so it asks for no folder.
    unwritten = changed(config, {"comm.mode": "fake", "comm.fake_rank": 0, "estimation.device": device.name})
    problems = check_settings(unwritten, world_size)
    problems += model_checks(resolve(config.model.name, config.model.flavor, config.model.overrides), config)
    training = config.training
    if (rows := max(training.local_batch_size, training.global_batch_size)) * training.seq_len > MOST_TOKENS:
        problems.append(
            f"training.local_batch_size or training.global_batch_size ({rows}) is more than {MOST_TOKENS:,} tokens per "
            "step; lower it"
        )
    if problems:
        raise ConfigError(*dict.fromkeys(problems))


def _check_engine(options: argparse.Namespace) -> None:
    """Raises: ConfigError: an option that the other engine has."""
    if options.engine == "formula" and options.rank is not None:
        raise ConfigError("--rank chooses the traced rank; add --engine trace, or leave it out: the formula shows all")
    if options.engine == "formula" and options.whole:
        raise ConfigError("--whole traces all layers; add --engine trace, or leave it out: the formula counts all")
    if options.rank is not None and options.rank >= options.world_size:
        raise ConfigError(
            f"--rank {options.rank} is none of the {options.world_size} ranks; give one from 0 to "
            f"{options.world_size - 1}"
        )
    if options.engine == "trace" and options.explain:
        raise ConfigError("--explain belongs to the formula; leave it out: the trace lists by itself")


if __name__ == "__main__":
    main()
