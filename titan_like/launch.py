"""What can be checked before any process starts; imports no torch. run_train.sh runs it: `python -m titan_like.launch`.

On success, standard output is two lines: the run folder, the checkpoint folder. All else goes to standard error.
"""

import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from titan_like.checkpoint.storage import check_url, is_url, locate
from titan_like.config import Config, ConfigError, TitanError, load_config
from titan_like.config.checks import cross_checks, device_checks
from titan_like.data.dataset import check_data
from titan_like.models.flavors import resolve
from titan_like.models.hf_format import check_start, read_hf_config
from titan_like.parallel.checks import model_checks
from titan_like.prepare import ensure_default
from titan_like.quantize.layers import float8_checks

GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/nvmap")  # NVIDIA, AMD, WSL, Jetson


def main(argv: Sequence[str] | None = None) -> None:
    """Check the environment and the config, prepare the default corpus if it is used and missing, check the data.

    Raises:
        SystemExit: 2 after printing one sentence per problem; 1 if the preparation failed.
    """
    world_size, problems = check_environment(os.environ)
    try:
        config = load_config(
            sys.argv[1:] if argv is None else argv, lambda config: [*problems, *check_settings(config, world_size)]
        )
        if config.comm.mode == "real":
            with redirect_stdout(sys.stderr):
                ensure_default([*config.data.train_entries, *config.data.validation])
            if problems := check_shards(config):
                raise ConfigError(*problems)
    except TitanError as error:
        print(*(f"error: {problem}" for problem in str(error).splitlines()), sep="\n", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    folder = Path(config.job.dump_folder).absolute()
    print(config.comm.mode, folder, locate(config.checkpoint.folder, folder), sep="\n")


def check_run(config: Config, world_size: int) -> list[str]:
    """One sentence for each reason why `config` cannot run on `world_size` processes (0: unknown); writes nothing."""
    return [*check_settings(config, world_size), *check_shards(config)]


def check_settings(config: Config, world_size: int) -> list[str]:
    """The part of check_run that looks at no data."""
    problems = cross_checks(config, world_size)
    if reason := why_no_gpu(config):
        problems += device_checks(config, reason)
    model = config.model
    try:
        shape = resolve(model.name, model.flavor, model.overrides)
        limit = shape.max_seq_len
    except ConfigError as error:
        problems += error.problems
    else:
        problems += model_checks(shape, config)
        problems += float8_checks(shape, config, world_size)
        problems += check_start(Path(model.hf_path), shape) if model.hf_path else []
        if config.training.seq_len > limit:
            problems.append(
                f"training.seq_len ({config.training.seq_len}) is longer than the {limit} tokens that {model.name} "
                f"{model.flavor} allows; lower it, or raise model.overrides.max_seq_len"
            )
    if config.comm.mode == "fake":
        return problems
    problems += check_folder("job.dump_folder", config.job.dump_folder)
    problems += check_profiling_folders(config)
    if config.checkpoint.folder.startswith("memory://") and world_size > 1:
        problems.append(
            f'checkpoint.folder ("{config.checkpoint.folder}") lies in the memory of one process, but there are '
            f"{world_size}; use another URL or a local folder"
        )
    if beyond := [rank for rank in config.profiling.profiler_ranks if 0 < world_size <= rank]:
        problems.append(
            f"profiling.profiler_ranks names rank {beyond[0]}, but there are {world_size} ranks, from 0 on; name those"
        )
    if is_url(config.checkpoint.folder):
        problems += check_url("checkpoint.folder", config.checkpoint.folder)
    elif Path(config.checkpoint.folder).is_absolute():
        problems += check_folder("checkpoint.folder", config.checkpoint.folder)
    return problems


def check_shards(config: Config) -> list[str]:
    """The part of check_run that opens the data: shards, manifest and tokenizer against the model."""
    try:
        vocab_size = resolve(config.model.name, config.model.flavor, config.model.overrides).vocab_size
        if config.model.hf_path:  # rows beyond its vocabulary have learnt nothing: no token may need them
            vocab_size = min(vocab_size, read_hf_config(Path(config.model.hf_path)).vocab_size)
    except ConfigError:
        return []  # check_settings says so
    data = config.data
    return check_data(
        data.train_entries,
        config.training.seq_len,
        vocab_size,
        config.model.tokenizer_path or None,
        validation=data.validation,
        blended=data.train_weights is not None,
        repeat=data.on_exhausted == "repeat",
    )


def why_no_gpu(config: Config) -> str:
    """Why the run can only be one on the CPU; empty: torch will see. A GPU needs the device file of its driver."""
    if config.comm.mode == "fake":
        return "comm.mode fake has none"
    if config.comm.backend == "gloo":
        return "comm.backend gloo trains on the CPU"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1"):
        return f'CUDA_VISIBLE_DEVICES is "{visible}"'
    return "" if any(Path(file).exists() for file in GPU_FILES) else "no GPU is found on this machine"


def check_profiling_folders(config: Config) -> list[str]:
    """Whether what profiling writes can be written."""
    settings, run_folder = config.profiling, Path(config.job.dump_folder)
    problems = []
    if settings.enable_profiling:
        problems += check_folder("profiling.save_traces_folder", str(run_folder / settings.save_traces_folder))
    if settings.enable_memory_snapshot:
        folder = str(run_folder / settings.save_memory_snapshot_folder)
        problems += check_folder("profiling.save_memory_snapshot_folder", folder)
    return problems


def check_folder(key: str, folder: str) -> list[str]:
    """Whether `folder`, the value of `key`, can be made and written to; leaves nothing behind."""
    path = Path(folder).absolute()
    while not os.path.lexists(path):
        path = path.parent
    try:
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        return [f'{key} is "{folder}", but nothing can be written to {path} ({error.strerror}); choose another folder']
    return []


def check_environment(env: Mapping[str, str]) -> tuple[int, list[str]]:
    """The number of processes (0: unknown), and what is wrong with the variables that say how many meet where."""
    problems: list[str] = []

    def number(name: str, low: int, high: float, default: int, remedy: str) -> int:
        text = env.get(name) or str(default)
        if text.isascii() and text.isdigit() and low <= int(text) <= high:
            return int(text)
        allowed = f"{low} to {high}" if high < float("inf") else f"{low} or more"
        problems.append(f"{name} is {text!r}; allowed is a whole number, {allowed}: {remedy}")
        return 0

    processes = number("NPROC", 1, float("inf"), 1, "the processes to start on this node, one per GPU")
    nodes = number("NNODES", 1, float("inf"), 1, "the nodes that the run has")
    rank = number("NODE_RANK", 0, max(nodes - 1, 0), 0, "a different one on each node, below NNODES")
    port = number("MASTER_PORT", 1, 65535, 29500, "a free port of the node with NODE_RANK 0")
    if nodes > 1:
        problems += [
            f"{name} is not set, but NNODES is {nodes}; set it to {meaning}"
            for name, meaning in (("MASTER_ADDR", "the host of the node with NODE_RANK 0"), ("NODE_RANK", "0, 1, ..."))
            if not env.get(name)
        ]
    if rank == 0 and port and env.get("MASTER_PORT") and (nodes > 1 or processes > 1):
        problems += check_port(port)
    return processes * nodes, [*problems, *check_slurm(env)]


def check_port(port: int) -> list[str]:
    """Whether this host can listen on `port` now."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return [
            f"MASTER_PORT {port} cannot be used on this host ({error.strerror}); choose a free one, or on a single "
            "node leave it unset to have one chosen"
        ]
    return []


def check_slurm(env: Mapping[str, str]) -> list[str]:
    """srun must start this script once per node: it starts the processes of the node itself."""
    tasks, nodes = env.get("SLURM_STEP_NUM_TASKS", "1"), env.get("SLURM_STEP_NUM_NODES", "1")
    if tasks == nodes:
        return []
    return [f"srun starts {tasks} tasks on {nodes} nodes; start one per node: srun --ntasks-per-node=1"]


if __name__ == "__main__":
    main()
