"""Conflicts between settings; every product and multiple below is worked out by hand."""

import pytest

from titan_like.config import ConfigError, load_config, world_checks
from titan_like.config.checks import cross_checks


def conflicts(*argv: str) -> list[str]:
    try:
        load_config(argv)
    except ConfigError as error:
        return error.problems
    return []


def test_the_schedule_must_fit_into_the_steps():
    steps, warmup, decay = "--training.steps=1000", "--lr_schedule.warmup_steps=200", "--lr_schedule.decay_steps="
    assert conflicts(steps, warmup, decay + "900") == [
        "lr_schedule.warmup_steps (200) + lr_schedule.decay_steps (900) exceed training.steps (1000); "
        "lower one or raise training.steps"
    ]
    assert len(conflicts("--training.steps=199", warmup, decay + "0")) == 1
    assert conflicts("--training.steps=199", warmup) == []  # a trial that ends inside the warm-up
    assert conflicts(steps, warmup, decay + "800") == []
    assert conflicts("--training.steps=200", warmup, decay + "-1") == []


@pytest.mark.parametrize(
    ("argv", "product", "fits"),
    [
        (["--training.local_batch_size=4"], "training.local_batch_size (4)", "8 or 12"),
        (
            ["--training.local_batch_size=2", "--parallelism.data_parallel_replicate_degree=2"],
            "training.local_batch_size (2) x parallelism.data_parallel_replicate_degree (2) = 4",
            "8 or 12",
        ),
        (
            ["--training.local_batch_size=4", "--parallelism.data_parallel_shard_degree=4"],
            "training.local_batch_size (4) x parallelism.data_parallel_shard_degree (4) = 16",
            "16",
        ),
    ],
)
def test_the_global_batch_must_be_whole_micro_batches(argv, product, fits):
    assert conflicts("--training.global_batch_size=10", *argv) == [
        f"training.global_batch_size (10) is not a multiple of {product}; set it to {fits}"
    ]
    assert conflicts("--training.global_batch_size=32", *argv) == []
    assert conflicts("--training.global_batch_size=-1", *argv) == []


@pytest.mark.parametrize(
    ("argv", "tokens"),
    [
        ([], 64),
        (["--parallelism.context_parallel_degree=2"], 32),
        (["--parallelism.tensor_parallel_degree=2"], 64),  # all tokens, a part of the vocabulary
        (["--parallelism.tensor_parallel_degree=2", "--parallelism.no-enable_loss_parallel"], 32),
        (["--parallelism.pipeline_parallel_degree=2"], 32),  # one sequence at a time
    ],
)
def test_no_chunk_of_the_loss_is_empty(argv, tokens):
    batch = ["--training.seq_len=32", "--training.local_batch_size=2"]
    assert conflicts(*batch, *argv, f"--training.loss_chunks={tokens}") == []
    assert conflicts(*batch, *argv, f"--training.loss_chunks={tokens + 1}") == [
        f"training.loss_chunks ({tokens + 1}) exceeds the tokens that a rank's loss sees at a time ({tokens}); "
        "lower it, or leave it at -1"
    ]


def test_settings_without_effect_are_refused():
    assert conflicts("--validation.interval=5") == []
    (problem,) = conflicts("--validation.interval=5", "--data.validation=[]")
    assert problem.startswith("validation.interval (5) needs data, but data.validation is empty")
    (problem,) = conflicts("--checkpoint.no-enable", "--checkpoint.resume=7")
    assert problem.startswith("checkpoint.resume (7) needs checkpoint.enable")
    assert conflicts("--checkpoint.no-enable") == []
    assert conflicts("--optimizer.name=sgd", "--optimizer.betas=0.8,0.9") == [
        "optimizer.betas ([0.8, 0.9]) has no effect with optimizer.name (sgd); "
        "leave it at its default ([0.9, 0.95]) or choose adamw"
    ]
    assert conflicts("--optimizer.name=sgd", "--optimizer.betas=0.9,0.95") == []
    assert conflicts("--compile.components=loss") == [
        'compile.components (["loss"]) has no effect with compile.enable (false); leave it out or set '
        "compile.enable to true"
    ]
    assert conflicts("--compile.components=blocks,loss") == []
    (problem,) = conflicts("--comm.fake_rank=1")
    assert problem.startswith("comm.fake_rank (1) has no effect with comm.mode (real)")
    assert conflicts("--comm.fake_rank=1", "--comm.mode=fake") == []
    assert conflicts("--optimizer.name=sgd", "--optimizer.implementation=fused") == [
        "optimizer.implementation (fused) cannot be with optimizer.name (sgd), whose fused kernel does not know "
        "sharded weights; leave it at auto, or choose foreach or for-loop"
    ]


def test_what_is_named_in_a_list_is_named_once():
    compiled = "--compile.enable"
    assert conflicts(compiled, "--compile.components=blocks,blocks") == [
        'compile.components names "blocks" 2 times; name it once'
    ]
    (problem,) = conflicts("--profiling.enable_profiling", "--profiling.profiler_ranks=1,0,1,1")
    assert problem == "profiling.profiler_ranks names 1 3 times; name it once"


def in_world(size: int, replicate: int, shard: int, *argv: str) -> list[str]:
    degrees = (
        f"--parallelism.data_parallel_{axis}_degree={n}" for axis, n in (("replicate", replicate), ("shard", shard))
    )
    return world_checks(load_config([*degrees, *argv]), size)


@pytest.mark.parametrize(("size", "replicate", "shard"), [(1, 1, -1), (1, 1, 1), (6, 2, 3), (6, 2, -1), (8, 8, -1)])
def test_degrees_that_fit_the_world(size, replicate, shard):
    assert in_world(size, replicate, shard) == []


def test_degrees_that_do_not_fit_the_world():
    assert in_world(4, 2, 3) == [
        "parallelism.data_parallel_replicate_degree (2) x parallelism.data_parallel_shard_degree (3) = 6 "
        "does not equal the world size (4); start 6 processes or set data_parallel_shard_degree to -1"
    ]
    assert in_world(6, 4, -1) == [
        "parallelism.data_parallel_replicate_degree (4) does not divide the world size (6); "
        "start a multiple of 4 processes or lower a degree"
    ]
    assert len(in_world(4, 1, 1)) == 1
    assert len(in_world(2, 4, -1)) == 1


def test_all_that_is_wrong_in_a_world_is_told():
    batch = ("--training.local_batch_size=2", "--training.global_batch_size=3")
    config = load_config([*batch, "--parallelism.data_parallel_shard_degree=2"], checks=None)
    degree, samples = cross_checks(config, 3)  # the batch once, though two checks look at it
    assert "does not equal the world size (3)" in degree and "global_batch_size (3) is not a multiple of" in samples
    assert cross_checks(config) == [samples]


def test_the_global_batch_against_the_world():
    batch = ("--training.local_batch_size=2", "--training.global_batch_size=12")
    assert in_world(6, 2, -1, *batch) == []  # 2 x 2 x 3 = 12
    assert in_world(8, 2, -1, *batch) == [  # 2 x 2 x 4 = 16
        "training.global_batch_size (12) is not a multiple of training.local_batch_size (2) x "
        "parallelism.data_parallel_replicate_degree (2) x parallelism.data_parallel_shard_degree (4) = 16; set it to 16"
    ]
    assert in_world(4, 1, -1, *batch) == [  # 2 x 4 = 8
        "training.global_batch_size (12) is not a multiple of training.local_batch_size (2) x "
        "parallelism.data_parallel_shard_degree (4) = 8; set it to 8 or 16"
    ]


def test_only_checkpoints_may_lie_behind_a_url():
    store = "--checkpoint.folder=s3://b/x"
    assert conflicts(
        store, "--checkpoint.async_mode=process", "--checkpoint.export_hf=s3://b/hf", "--job.dump_folder=gs://b/run"
    ) == [
        "job.dump_folder (gs://b/run) is a URL, but only checkpoint.folder can be one; name a local folder",
        "checkpoint.export_hf (s3://b/hf) is a URL, but only checkpoint.folder can be one; name a local folder",
        "checkpoint.async_mode (process) writes to local folders only, but checkpoint.folder is s3://b/x; set "
        "checkpoint.async_mode to thread",
    ]
    assert conflicts(store, "--checkpoint.async_mode=thread") == []
