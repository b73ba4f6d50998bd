"""The formula against the trace on random valid compositions: resident bytes are equal, peaks agree within 3 %."""

import os
import random

import pytest

from estimation.candidates import problems
from estimation.formula import memory_of
from estimation.job import job_of
from estimation.profiles import TITAN_LIKE, TITAN_LIKE_CPU
from estimation.trace import trace
from titan_like.config import Config, ConfigError, load_config
from titan_like.config.schema import V_SHAPED

SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
RECIPES = ["tensorwise", "tensorwise", "rowwise", "rowwise_with_gw_hp"]


def random_config(draw: random.Random) -> tuple[Config, int]:
    """A valid config of a debug model and its world size."""
    while True:
        pp, tp, cp, replicate = (draw.choice(sizes) for sizes in ([1, 2, 4], [1, 1, 2], [1, 1, 2], [1, 1, 2]))
        world_size = pp * tp * cp * replicate * draw.choice([1, 2, 3])
        rows, batches, readers = draw.choice([1, 2]), draw.choice([1, 2, 4]), world_size // (pp * tp * cp)
        local = rows * batches if pp > 1 else rows
        mode, schedule = draw.choice(["none", "selective", "full"]), draw.choice(SCHEDULES)
        overrides = (
            f"{{n_layers = {draw.choice([4, 4, 5, 8])}, tie_embeddings = {draw.choice(['true', 'false'])}, "
            f"vocab_size = {draw.choice([4096, 4096, 512])}}}"
        )
        argv = [
            f"--model.name={draw.choice(['llama2', 'llama3', 'qwen2', 'qwen3'])}", "--model.flavor=debug",
            f"--model.overrides={overrides}",
            f"--training.seq_len={draw.choice([256, 384, 512])}", f"--training.local_batch_size={local}",
            f"--training.global_batch_size={local * readers * draw.choice([1, 1, 1, 2, 3])}",
            f"--training.loss_chunks={draw.choice([-1, -1, 1, 2, 3])}", f"--training.z_loss={draw.choice([0, 0.01])}",
            f"--training.mixed_precision_param={draw.choice(['float32', 'bfloat16'])}",
            f"--training.mixed_precision_reduce={draw.choice(['float32', 'float32', 'bfloat16'])}",
            f"--parallelism.pipeline_parallel_degree={pp}", f"--parallelism.tensor_parallel_degree={tp}",
            f"--parallelism.context_parallel_degree={cp}", f"--parallelism.data_parallel_replicate_degree={replicate}",
            f"--parallelism.context_parallel_rotate_method={draw.choice(['allgather', 'alltoall'])}",
            f"--parallelism.context_parallel_load_balance={draw.choice(['true', 'false'])}",
            f"--parallelism.enable_loss_parallel={draw.choice(['true', 'false'])}",
            f"--parallelism.fsdp_reshard_after_forward={draw.choice(['default', 'default', 'always', 'never'])}",
            f"--activation_checkpoint.mode={mode}", f"--data.reset_attention_mask={draw.choice(['true', 'false'])}",
            f"--optimizer.name={draw.choice(['adamw', 'sgd'])}",
        ]  # fmt: skip
        if pp > 1:
            argv += [f"--parallelism.pipeline_parallel_schedule={schedule}",
                     f"--parallelism.pipeline_parallel_microbatch_size={rows}"]  # fmt: skip
        if pp > 1 and schedule not in ("GPipe", "1F1B", *V_SHAPED) and draw.random() < 0.3:
            argv.append(f"--parallelism.pipeline_parallel_virtual_stages={draw.choice([2, 3, 4])}")
        if mode == "selective" and draw.random() < 0.3:
            argv.append("--activation_checkpoint.selective_ac_option=2")
        if draw.random() < 0.4:
            argv += _float8(draw)
        try:
            config = load_config(argv)
        except ConfigError:
            continue
        if not problems(config, world_size):
            return config, world_size


def _float8(draw: random.Random) -> list[str]:
    """Linear layers in float8, all or some, emulated or not."""
    recipe, left_out = draw.choice(RECIPES), draw.choice(["output", "output", "wk", "layers.1.", "w2"])
    is_gathered = recipe == "tensorwise" and draw.random() < 0.6
    return [
        "--float8.enable", f"--float8.recipe={recipe}", f"--float8.filter_fqns={left_out}",
        f"--float8.emulate={draw.choice(['true', 'false'])}",
        f"--float8.enable_fsdp_float8_all_gather={str(is_gathered).lower()}",
        f"--float8.precompute_float8_dynamic_scale_for_fsdp={str(is_gathered and draw.random() < 0.5).lower()}",
    ]  # fmt: skip


SEEDS = range(int(os.environ.get("RANDOM_COMPOSITIONS", "20")))  # about two seconds each, compiled five
# Compiled, these have been wrong by 4 to 8 %: operands that are kept with an emulated product; gathered 16-bit numbers
# that are kept instead of casts; a document mask that is written out for every head; kernels too far apart to be one.
ONCE_WRONG = (251, 275, 636, 792)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_composition_agrees(seed: int) -> None:
    draw = random.Random(seed)
    config, world_size = random_config(draw)
    assert not disagreement(draw, config, world_size)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*SEEDS, *(seed for seed in ONCE_WRONG if seed not in SEEDS)])
def test_a_random_compiled_composition_agrees(seed: int) -> None:
    draw = random.Random(seed)
    config, world_size = random_config(draw)
    config = with_compiled_blocks(config)
    if problems(config, world_size):
        pytest.skip("blocks of this composition are not compiled")
    assert not disagreement(draw, config, world_size)


def with_compiled_blocks(config: Config) -> Config:
    """The blocks alone: the loss is traced uncompiled."""
    section = config.compile.model_copy(update={"enable": True, "components": ("blocks",)})
    return config.model_copy(update={"compile": section})


def disagreement(draw: random.Random, config: Config, world_size: int) -> str:
    """What is wrong on one rank, if anything."""
    is_gpu = draw.random() < 0.5
    memory = draw.choice(memory_of(job_of(config, world_size, TITAN_LIKE if is_gpu else TITAN_LIKE_CPU)))
    formula = memory.report()
    traced = trace(config, world_size, formula.rank, gpu=is_gpu)
    error = formula.peak_bytes / traced.peak_bytes - 1
    if formula.resident == traced.resident and abs(error) <= 0.03:
        return ""
    resident = "equal" if formula.resident == traced.resident else "different"
    return f"{world_size} ranks, {'GPU' if is_gpu else 'CPU'} kernels: peak {error:+.1%}, resident {resident}"
