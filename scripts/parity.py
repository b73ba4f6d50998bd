#!/usr/bin/env python3
"""Does a composition give the answer of one process? Shrinks the model of a config, keeps its structure and its
composition, runs both on this machine's CPU over gloo, and compares loss, grad norm, every gradient and the weights.

    python scripts/parity.py --job.config_file train_configs/parity_4d.toml [--section.key VALUE ...]

Exit code: 0 equal, 1 not equal, 2 the composition is refused or needs more than 8 processes.
"""

import sys
from collections.abc import Sequence

from titan_like.config import Config, ConfigError, load_config_or_exit, world_checks
from titan_like.config.composition import stage_count
from titan_like.models.flavors import ModelConfig, resolve
from titan_like.parallel.checks import model_checks

MAX_PROCESSES = 8


def main(argv: Sequence[str]) -> int:
    config = load_config_or_exit(argv)
    try:
        small, processes = shrink(config)
        problems = [*world_checks(small, processes), *model_checks(resolve_shape(small), small)]
        if problems:
            raise ConfigError(*problems)
    except ConfigError as error:
        print(*(f"error: {problem}" for problem in error.problems), sep="\n", file=sys.stderr)
        return error.exit_code
    from titan_like.oracle import launch  # torch, for a composition that can be run only

    name = f"{config.model.name} {config.model.flavor} on {processes} processes"
    (report,) = launch({name: small}, processes)
    print(report.table())
    return 0 if report.is_exact else 1


def resolve_shape(config: Config) -> ModelConfig:
    return resolve(config.model.name, config.model.flavor, config.model.overrides)


def shrink(config: Config) -> tuple[Config, int]:
    """The same composition with a small model, short sequences and few of them; and how many processes it takes.

    Kept: family, ties, biases, norms, the ratio of query to key/value heads, everything about parallelism, precision,
    recompute and compile. Batches keep more than one micro-batch per step where the config accumulates.

    Raises:
        ConfigError: more than MAX_PROCESSES processes.
    """
    parallelism, shape = config.parallelism, resolve_shape(config)
    tp, cp = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    others = parallelism.data_parallel_replicate_degree * tp * cp * parallelism.pipeline_parallel_degree
    shard = parallelism.data_parallel_shard_degree
    shard = (2 if 2 * others <= MAX_PROCESSES else 1) if shard == -1 else shard
    processes = others * shard
    if processes > MAX_PROCESSES:
        raise ConfigError(
            f"the composition takes {processes} processes, at most {MAX_PROCESSES} run here; "
            "lower degrees on the command line, such as --parallelism.data_parallel_shard_degree 1"
        )
    heads = shape.n_heads // shape.n_kv_heads
    kv_heads = tp if shape.n_kv_heads % tp == 0 else shape.n_kv_heads  # what tp cannot divide stays so, and is refused
    overrides = {
        **config.model.overrides,
        "n_layers": max(2, stage_count(config), *(last + 1 for last in parallelism.pipeline_parallel_split[-1:])),
        "n_kv_heads": kv_heads,
        "n_heads": heads * kv_heads,
        "head_dim": 8,
        "dim": 32,
        "ffn_dim": 24 * tp,
        "vocab_size": 64 + shape.vocab_size % tp,  # as divisible by tp as the model's
    }
    seq_len = 8 * 2 * cp * tp
    accumulates = config.training.global_batch_size not in (
        -1,
        config.training.local_batch_size * parallel_readers(config, shard),
    )
    micro_batches = config.training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    local = (
        min(micro_batches, 4 * parallelism.pipeline_parallel_degree) if parallelism.pipeline_parallel_degree > 1 else 2
    )
    if parallelism.pipeline_parallel_schedule.endswith(".csv"):
        local = micro_batches
    global_batch_size = local * parallel_readers(config, shard) * (2 if accumulates else 1)
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"overrides": overrides}),
            "training": config.training.model_copy(
                update={"seq_len": seq_len, "local_batch_size": local, "global_batch_size": global_batch_size}
            ),
            "parallelism": parallelism.model_copy(
                update={"data_parallel_shard_degree": shard, "pipeline_parallel_microbatch_size": 1}
            ),
        }
    ), processes


def parallel_readers(config: Config, shard: int) -> int:
    return config.parallelism.data_parallel_replicate_degree * shard


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
