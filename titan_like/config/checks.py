"""Conflicts between settings that are each valid alone. Every check returns one sentence per problem.

Sentences name keys in full (`training.steps`): load.py leaves out those about keys whose own value is already refused.
"""

import os
from collections import Counter
from math import prod
from pathlib import Path

from titan_like.config.composition import refusals, stage_count, tokens_of_loss
from titan_like.config.describe import as_text
from titan_like.config.pipeline_csv import read_schedule
from titan_like.config.schema import (
    SCHEDULES,
    SINGLE_STAGE,
    SPLIT_BACKWARD,
    V_SHAPED,
    Checkpoint,
    Compile,
    Config,
    Float8,
    Optimizer,
    Parallelism,
    Profiling,
)

PROFILING_NEEDS = {  # what each key of [profiling] needs one of
    "save_traces_folder": ("enable_profiling",),
    "profiler_active": ("enable_profiling",),
    "profiler_warmup": ("enable_profiling",),
    "profile_freq": ("enable_profiling", "enable_memory_snapshot"),
    "profiler_ranks": ("enable_profiling", "enable_memory_snapshot"),
    "save_memory_snapshot_folder": ("enable_memory_snapshot",),
}
DEGREES = (  # of every axis but the one that can take the rest
    "data_parallel_replicate_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
)


def cross_checks(config: Config, world_size: int = 0) -> list[str]:
    """Conflicts inside the config, and with the number of processes `world_size` (0: unknown)."""
    return [
        *_schedule(config),
        *(
            world_checks(config, world_size)
            if world_size
            else _batch(config, config.parallelism.data_parallel_shard_degree)
        ),
        *_sequence(config),
        *_loss(config),
        *_blend(config),
        *_pipeline(config),
        *_unused(config),
        *_switched_off(config),
        *_named_twice(config),
        *_float8(config),
        *_profiling(config),
        *_urls(config),
        *refusals(config),
    ]


def world_checks(config: Config, world_size: int) -> list[str]:
    """Conflicts between the config and the number of processes `world_size` (>= 1), the global batch among them."""
    problems = []
    if config.comm.mode == "fake" and config.comm.fake_rank >= world_size:
        problems.append(
            f"comm.fake_rank ({config.comm.fake_rank}) is not below the number of processes ({world_size}); lower it"
        )
    shard = config.parallelism.data_parallel_shard_degree
    factors = [(f"parallelism.{key}", getattr(config.parallelism, key)) for key in DEGREES]
    used = [(name, degree) for name, degree in factors if degree > 1]
    product = prod(degree for _, degree in used)
    shown = " x ".join(f"{name} ({degree})" for name, degree in used) or "the product of all degrees"
    if shard == -1 and world_size % product == 0:
        shard = world_size // product
    elif shard == -1:
        problems.append(
            f"{shown}{f' = {product}' if len(used) > 1 else ''} does not divide the world size ({world_size}); "
            f"start a multiple of {product} processes or lower a degree"
        )
    elif (total := product * shard) != world_size:
        shard_shown = f"parallelism.data_parallel_shard_degree ({shard})"
        shown = f"{shown} x {shard_shown} = {total}" if used else shard_shown
        problems.append(
            f"{shown} does not equal the world size ({world_size}); start {total} processes or set "
            "data_parallel_shard_degree to -1"
        )
    return [*problems, *_batch(config, shard)]


def device_checks(config: Config, have: str) -> list[str]:
    """What `config` asks of a GPU, for a run on a CPU; `have` says why it is on one, as in "no GPU is found here"."""
    float8, is_named = config.float8, bool(config.estimation.device)
    asked = [
        (
            config.activation_checkpoint.mode == "auto" and not is_named,
            "activation_checkpoint.mode auto needs a GPU whose memory is to be filled",
            'name one in estimation.device, or set the mode to "none", "selective" or "full"',
        ),
    ]
    if config.comm.mode == "real":  # fake: nothing else meets the device
        asked += [
            (config.comm.backend == "nccl", "comm.backend nccl needs a GPU", "leave it at auto"),
            (
                float8.enable and not float8.emulate,
                "float8.enable needs a GPU with float8 units",
                "set float8.emulate to compute the same numbers slowly, or turn float8.enable off",
            ),
            (
                config.parallelism.enable_async_tensor_parallel,
                "parallelism.enable_async_tensor_parallel needs a GPU",
                "turn it off",
            ),
            (
                config.profiling.enable_memory_snapshot,
                "profiling.enable_memory_snapshot needs a GPU",
                "turn it off",
            ),
            (
                config.estimation.preflight == "abort" and not is_named,
                "estimation.preflight abort needs a GPU whose memory is to be filled",
                "name one in estimation.device, or set estimation.preflight to warn",
            ),
        ]
    return [f"{needs}, but {have}; {remedy}" for is_asked, needs, remedy in asked if is_asked]


def _schedule(config: Config) -> list[str]:
    """A decay of fixed length must fit. Without one, a short trial may end inside a long warm-up."""
    schedule, steps = config.lr_schedule, config.training.steps
    if schedule.decay_steps == -1 or schedule.warmup_steps + schedule.decay_steps <= steps:
        return []
    return [
        f"lr_schedule.warmup_steps ({schedule.warmup_steps}) + lr_schedule.decay_steps ({schedule.decay_steps}) exceed "
        f"training.steps ({steps}); lower one or raise training.steps"
    ]


def _batch(config: Config, shard: int) -> list[str]:
    """The global batch must be whole micro-batches of all data-parallel ranks; `shard` -1: unknown, at least 1."""
    local, total = config.training.local_batch_size, config.training.global_batch_size
    replicate = config.parallelism.data_parallel_replicate_degree
    unit = local * replicate * max(shard, 1)
    if total == -1 or total % unit == 0:
        return []
    factors = [f"training.local_batch_size ({local})"]
    if replicate > 1:
        factors.append(f"parallelism.data_parallel_replicate_degree ({replicate})")
    if shard > 1:
        factors.append(f"parallelism.data_parallel_shard_degree ({shard})")
    product = f"{' x '.join(factors)} = {unit}" if len(factors) > 1 else factors[0]
    below = total // unit * unit
    return [
        f"training.global_batch_size ({total}) is not a multiple of {product}; "
        f"set it to {f'{below} or ' if below else ''}{below + unit}"
    ]


def _sequence(config: Config) -> list[str]:
    """The axes that cut sequences must cut them evenly."""
    parallelism, seq_len = config.parallelism, config.training.seq_len
    cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    halves = 2 if cp > 1 and parallelism.context_parallel_load_balance else 1
    unit = cp * halves * tp
    if seq_len % unit == 0:
        return []
    parts = [f"parallelism.context_parallel_degree ({cp})"] if cp > 1 else []
    parts += ["2 (context_parallel_load_balance)"] if halves > 1 else []
    parts += [f"parallelism.tensor_parallel_degree ({tp})"] if tp > 1 else []
    below = seq_len // unit * unit
    return [
        f"training.seq_len ({seq_len}) is not a multiple of {' x '.join(parts)} = {unit}, by which sequences are cut; "
        f"set it to {f'{below} or ' if below else ''}{below + unit}"
    ]


def _loss(config: Config) -> list[str]:
    """No chunk may be empty."""
    chunks, tokens = config.training.loss_chunks, tokens_of_loss(config)
    if chunks <= tokens:
        return []
    return [
        f"training.loss_chunks ({chunks}) exceeds the tokens that a rank's loss sees at a time ({tokens}); lower it, "
        "or leave it at -1"
    ]


def _blend(config: Config) -> list[str]:
    """A blend needs all weights; the order of a set without a weight would be undefined."""
    bare = [entry for entry in config.data.train if isinstance(entry, str)]
    if len(bare) in (0, len(config.data.train)):
        return []
    return [
        f"data.train has no weight for {', '.join(bare)}, but weights for others; give all of them "
        "{prefix, weight}, or none to read them as one set"
    ]


def _pipeline(config: Config) -> list[str]:
    """Stages, micro-batches and schedule must fit each other."""
    parallelism, local = config.parallelism, config.training.local_batch_size
    degree, size, name = (
        parallelism.pipeline_parallel_degree,
        parallelism.pipeline_parallel_microbatch_size,
        parallelism.pipeline_parallel_schedule,
    )
    keys = [key for key in Parallelism.model_fields if key.startswith("pipeline") and "degree" not in key]
    if degree == 1:
        return [
            f"parallelism.{key} ({as_text(getattr(parallelism, key))}) has no effect without pipelining; leave it out "
            "or set parallelism.pipeline_parallel_degree above 1"
            for key in keys
            if getattr(parallelism, key) != Parallelism.model_fields[key].default
        ]
    if local % size:
        return [
            f"training.local_batch_size ({local}) is not a multiple of parallelism.pipeline_parallel_microbatch_size "
            f"({size}); set it to {-(-local // size) * size}"
        ]
    micro_batches = local // size
    if name.endswith(".csv"):
        return _pipeline_csv(config, micro_batches)
    if name not in SCHEDULES:
        return [
            f'parallelism.pipeline_parallel_schedule is "{name}"; allowed: {", ".join(SCHEDULES)}, '
            "or a path ending in .csv"
        ]
    stages = stage_count(config)
    split = len(parallelism.pipeline_parallel_split)
    problems = []
    if (name in SINGLE_STAGE) != (stages == degree):
        wanted = "exactly 1" if name in SINGLE_STAGE else "2 or more"
        problems.append(
            f"parallelism.pipeline_parallel_schedule {name} needs {wanted} stages per rank, but "
            f"{stages} stages on parallelism.pipeline_parallel_degree ({degree}) ranks are asked for; change the "
            "schedule, parallelism.pipeline_parallel_virtual_stages or parallelism.pipeline_parallel_split"
        )
    elif name in V_SHAPED and stages != 2 * degree:
        problems.append(
            f"parallelism.pipeline_parallel_schedule {name} needs 2 stages per rank, not {stages / degree:g}; "
            "set parallelism.pipeline_parallel_virtual_stages to 2"
        )
    if split and (
        split + 1 != stages
        or list(parallelism.pipeline_parallel_split) != sorted({*parallelism.pipeline_parallel_split})
    ):
        problems.append(
            f"parallelism.pipeline_parallel_split {list(parallelism.pipeline_parallel_split)} must name "
            f"{stages - 1} layers in ascending order for {stages} stages"
        )
    return problems + _micro_batches(config, name, micro_batches, stages)


def _micro_batches(config: Config, name: str, count: int, stages: int) -> list[str]:
    """What torch's schedules ask of the number of micro-batches."""
    degree, size = config.parallelism.pipeline_parallel_degree, config.parallelism.pipeline_parallel_microbatch_size
    needed = {"1F1B": stages, "DualPipeV": stages}.get(name, 1)
    rounds = max(1, count // degree)
    training = config.training
    is_cast = training.mixed_precision_param != training.mixed_precision_reduce
    if count < needed:
        remedy, reason = needed, f"at least as many as stages ({stages})"
    elif name in SPLIT_BACKWARD and is_cast and count < 2:
        # Gradients of a backward for weights alone are cast when the next one of their stage comes (torch 2.13).
        remedy, reason = 2, f"2 or more (gradients are reduced in {training.mixed_precision_reduce})"
    elif name in ("Interleaved1F1B", "InterleavedZeroBubble") and count % rounds:
        remedy, reason = rounds * degree, f"a multiple of its rounds ({count} // {degree} = {rounds})"
    else:
        return []
    return [
        f"parallelism.pipeline_parallel_schedule {name} needs {reason} micro-batches, but training.local_batch_size "
        f"({config.training.local_batch_size}) / parallelism.pipeline_parallel_microbatch_size ({size}) = {count}; "
        f"set training.local_batch_size to {remedy * size}"
    ]


def _pipeline_csv(config: Config, micro_batches: int) -> list[str]:
    path, degree = config.parallelism.pipeline_parallel_schedule, config.parallelism.pipeline_parallel_degree
    try:
        schedule = read_schedule(Path(path))
    except OSError as error:
        return [
            f"parallelism.pipeline_parallel_schedule {path} cannot be used: {error.strerror}; name a .csv file that "
            f"can be read, or one of {', '.join(SCHEDULES)}"
        ]
    except ValueError as error:
        return [f"parallelism.pipeline_parallel_schedule {path} cannot be used: {error}"]
    problems = []
    if len(schedule.stages_of_rank) != degree:
        problems.append(
            f"parallelism.pipeline_parallel_schedule {path} has {len(schedule.stages_of_rank)} rows, one per rank, but "
            f"parallelism.pipeline_parallel_degree is {degree}; make them equal"
        )
    if schedule.micro_batches != micro_batches:
        problems.append(
            f"parallelism.pipeline_parallel_schedule {path} runs {schedule.micro_batches} micro-batches, but "
            f"training.local_batch_size / parallelism.pipeline_parallel_microbatch_size is {micro_batches}; "
            "make them equal"
        )
    split = len(config.parallelism.pipeline_parallel_split)
    if split and split + 1 != schedule.stages:
        problems.append(
            f"parallelism.pipeline_parallel_split names {split + 1} stages, but {path} runs {schedule.stages}; "
            "make them equal"
        )
    return problems


def _urls(config: Config) -> list[str]:
    """Checkpoints alone may lie behind a URL; a second process would write to its own memory://."""
    local = {"job.dump_folder": config.job.dump_folder, "checkpoint.export_hf": config.checkpoint.export_hf}
    problems = [
        f"{key} ({value}) is a URL, but only checkpoint.folder can be one; name a local folder"
        for key, value in local.items()
        if "://" in value
    ]
    if "://" in config.checkpoint.folder and config.checkpoint.async_mode == "process":
        problems.append(
            f"checkpoint.async_mode (process) writes to local folders only, but checkpoint.folder is "
            f"{config.checkpoint.folder}; set checkpoint.async_mode to thread"
        )
    return problems


def _switched_off(config: Config) -> list[str]:
    """Settings of a section whose enable is off."""
    sections = {"compile": Compile.model_fields, "float8": Float8.model_fields}
    checkpoint = ("keep_every_n", "async_mode", "on_error", "allow_changes", "export_hf")
    sections["checkpoint"] = {key: Checkpoint.model_fields[key] for key in checkpoint}
    return [
        f"{section}.{key} ({as_text(value)}) has no effect with {section}.enable (false); "
        f"leave it out or set {section}.enable to true"
        for section, fields in sections.items()
        if not getattr(config, section).enable
        for key, field in fields.items()
        if (value := getattr(getattr(config, section), key)) != field.default
    ]


def _float8(config: Config) -> list[str]:
    """Float8 settings without effect."""
    settings = config.float8
    if (
        settings.enable
        and settings.precompute_float8_dynamic_scale_for_fsdp
        and not settings.enable_fsdp_float8_all_gather
    ):
        return [
            "float8.precompute_float8_dynamic_scale_for_fsdp (true) has no effect without "
            "float8.enable_fsdp_float8_all_gather; set that too or leave it out"
        ]
    return []


def _profiling(config: Config) -> list[str]:
    settings, problems = config.profiling, []
    on = {"enable_profiling": settings.enable_profiling, "enable_memory_snapshot": settings.enable_memory_snapshot}
    for key, switches in PROFILING_NEEDS.items():
        value, field = getattr(settings, key), Profiling.model_fields[key]
        if value != field.default and not any(on[switch] for switch in switches):
            wanted = " or ".join(f"profiling.{switch}" for switch in switches)
            problems.append(
                f"profiling.{key} ({as_text(value)}) has no effect without {wanted}; set that or leave it out"
            )
    if settings.enable_profiling and settings.profiler_warmup + settings.profiler_active > settings.profile_freq:
        problems.append(
            f"profiling.profiler_warmup ({settings.profiler_warmup}) + profiling.profiler_active "
            f"({settings.profiler_active}) exceed profiling.profile_freq ({settings.profile_freq}); raise "
            "profiling.profile_freq or lower one"
        )
    first = settings.profile_freq - settings.profiler_active + 1
    if settings.enable_profiling and first > config.training.steps:
        problems.append(
            f"profiling.profile_freq ({settings.profile_freq}) is beyond training.steps ({config.training.steps}), "
            "so no step would be traced; lower it"
        )
    for key in ("save_traces_folder", "save_memory_snapshot_folder"):
        folder = getattr(settings, key)
        if os.path.normpath(folder).partition(os.sep)[0] == "..":
            problems.append(
                f'profiling.{key} is "{folder}", which is outside job.dump_folder; name a folder inside it, or an '
                "absolute path"
            )
    return problems


def _named_twice(config: Config) -> list[str]:
    """Lists of which only the set counts."""
    lists = {
        "compile.components": config.compile.components,
        "float8.filter_fqns": config.float8.filter_fqns,
        "profiling.profiler_ranks": config.profiling.profiler_ranks,
    }
    return [
        f"{key} names {as_text(item)} {count} times; name it once"
        for key, items in lists.items()
        for item, count in Counter[object](items).items()
        if count > 1
    ]


def _unused(config: Config) -> list[str]:
    """Settings that the others would leave without effect."""
    problems = []
    if config.activation_checkpoint.mode != "selective" and config.activation_checkpoint.selective_ac_option != "op":
        problems.append(
            f"activation_checkpoint.selective_ac_option ({config.activation_checkpoint.selective_ac_option}) has no "
            f'effect with activation_checkpoint.mode ({config.activation_checkpoint.mode}); set the mode to "selective"'
        )
    if config.comm.fake_rank and config.comm.mode == "real":
        problems.append(
            f"comm.fake_rank ({config.comm.fake_rank}) has no effect with comm.mode (real); leave it out or set "
            "comm.mode to fake"
        )
    if config.validation.interval and not config.data.validation:
        problems.append(
            f"validation.interval ({config.validation.interval}) needs data, but data.validation is empty; "
            "name shards there or set validation.interval to 0"
        )
    if config.checkpoint.resume != "never" and not config.checkpoint.enable:
        problems.append(
            f"checkpoint.resume ({config.checkpoint.resume}) needs checkpoint.enable, which is false; "
            'set it to true or checkpoint.resume to "never"'
        )
    if config.checkpoint.keep_every_n and not config.checkpoint.keep_latest_k:
        problems.append(
            f"checkpoint.keep_every_n ({config.checkpoint.keep_every_n}) has no effect with checkpoint.keep_latest_k "
            "(0), which keeps all; set checkpoint.keep_latest_k to 1 or more"
        )
    if config.optimizer.name == "sgd":
        problems += [
            f"optimizer.{key} ({as_text(getattr(config.optimizer, key))}) has no effect with optimizer.name (sgd); "
            f"leave it at its default ({as_text(field.default)}) or choose adamw"
            for key, field in Optimizer.model_fields.items()
            if key in ("betas", "eps") and getattr(config.optimizer, key) != field.default
        ]
    if config.optimizer.name == "sgd" and config.optimizer.implementation == "fused":
        problems.append(
            "optimizer.implementation (fused) cannot be with optimizer.name (sgd), whose fused kernel does not know "
            "sharded weights; leave it at auto, or choose foreach or for-loop"
        )
    return problems
