"""What composes with what, and how sequences, stages and micro-batches must fit."""

import re
from pathlib import Path

import pytest

from titan_like.config import ConfigError, load_config, world_checks
from titan_like.config.composition import FEATURES, RULES, features_of
from titan_like.config.pipeline_csv import read_schedule

P = "--parallelism."
PP2 = (f"{P}pipeline_parallel_degree=2", "--training.local_batch_size=8")
SPLIT = (*PP2, f"{P}pipeline_parallel_schedule=InterleavedZeroBubble")


def problems(*argv: str) -> list[str]:
    try:
        load_config(argv)
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("argv", "features"),
    [
        ((*SPLIT, "--compile.enable"), "pipeline, split backward with compile"),
        ((*SPLIT, "--activation_checkpoint.mode=full"), "pipeline, split backward with full recompute"),
        (
            (*SPLIT, "--activation_checkpoint.mode=selective"),
            "pipeline, split backward with selective recompute (op)",
        ),
        ((*SPLIT, f"{P}fsdp_reshard_after_forward=always"), "pipeline, split backward with reshard always"),
        (
            ("--compile.enable", f"{P}tensor_parallel_degree=2", "--activation_checkpoint.mode=selective"),
            "tensor with selective recompute (op) with compile",
        ),
        (
            (
                f"{P}context_parallel_degree=2",
                f"{P}context_parallel_rotate_method=alltoall",
                "--data.reset_attention_mask",
            ),
            "context, alltoall with document masks",
        ),
        ((f"{P}enable_async_tensor_parallel",), "async tensor"),
        ((f"{P}enable_async_tensor_parallel", "--compile.enable"), "async tensor"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(argv: tuple[str, ...], features: str) -> None:
    (problem,) = problems(*argv)
    assert problem.startswith(f"{features} is refused: ")


def test_a_refused_combination_without_one_of_its_parts_is_allowed() -> None:
    assert problems(*SPLIT) == []
    assert problems("--compile.enable", f"{P}tensor_parallel_degree=2") == []
    assert problems(
        "--compile.enable", f"{P}tensor_parallel_degree=2", "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=2",
    ) == []  # fmt: skip
    assert problems(f"{P}enable_async_tensor_parallel", "--compile.enable", f"{P}tensor_parallel_degree=2") == []


def test_rules_speak_of_known_features() -> None:
    assert {name for rule in RULES for name in (*rule.features, *rule.without)} <= set(FEATURES)


def test_features_of_the_defaults() -> None:
    assert features_of(load_config([])) == {"bfloat16"}


def test_sequences_are_cut_evenly() -> None:
    """R096, and the same for context parallelism, whose load balance needs twice as many parts."""
    (problem,) = problems("--training.seq_len=15", f"{P}tensor_parallel_degree=2")
    assert problem == (
        "training.seq_len (15) is not a multiple of parallelism.tensor_parallel_degree (2) = 2, by which sequences are "
        "cut; set it to 14 or 16"
    )
    (problem,) = problems("--training.seq_len=18", f"{P}context_parallel_degree=2")
    assert "parallelism.context_parallel_degree (2) x 2 (context_parallel_load_balance) = 4" in problem
    assert problem.endswith("set it to 16 or 20")
    assert (
        problems("--training.seq_len=18", f"{P}context_parallel_degree=2", f"{P}no-context_parallel_load_balance") == []
    )


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        # R103, R104
        (("--training.local_batch_size=5", f"{P}pipeline_parallel_microbatch_size=2"), ("(5)", "(2)", "set it to 6")),
        (("--training.local_batch_size=1",), ("1F1B", "at least as many as stages (2)", "= 1", "to 2")),
        (
            ("--training.local_batch_size=1", f"{P}pipeline_parallel_schedule=ZBVZeroBubble"),
            ("ZBVZeroBubble needs 2 or more (gradients are reduced in float32) micro-batches", "= 1", "to 2"),
        ),
        (
            ("--training.local_batch_size=3", f"{P}pipeline_parallel_schedule=DualPipeV"),
            ("DualPipeV", "stages (4)", "to 4"),
        ),
        (
            ("--training.local_batch_size=5", f"{P}pipeline_parallel_schedule=Interleaved1F1B"),
            ("Interleaved1F1B", "a multiple of its rounds (5 // 2 = 2)"),
        ),
        ((f"{P}pipeline_parallel_schedule=1f1b",), ('"1f1b"', "allowed: GPipe, 1F1B")),
        ((f"{P}pipeline_parallel_virtual_stages=2",), ("1F1B needs exactly 1 stages per rank",)),
        (
            (f"{P}pipeline_parallel_schedule=LoopedBFS", f"{P}pipeline_parallel_virtual_stages=1"),
            ("LoopedBFS needs 2 or more stages per rank",),
        ),
        (
            (f"{P}pipeline_parallel_schedule=ZBVZeroBubble", f"{P}pipeline_parallel_virtual_stages=3"),
            ("ZBVZeroBubble needs 2 stages per rank, not 3",),
        ),
        ((f"{P}pipeline_parallel_schedule=LoopedBFS", f"{P}pipeline_parallel_split=3,2,4"), ("ascending order",)),
        ((f"{P}pipeline_parallel_schedule=gone.csv",), ("gone.csv cannot be used", "No such file")),
    ],
)  # fmt: skip
def test_stages_and_micro_batches_must_fit(argv: tuple[str, ...], words: tuple[str, ...]) -> None:
    (problem,) = problems(f"{P}pipeline_parallel_degree=2", "--training.local_batch_size=4", *argv)
    assert all(word in problem for word in words), problem


def test_pipeline_keys_without_pipelining_are_refused() -> None:
    (problem,) = problems(f"{P}pipeline_parallel_schedule=GPipe")
    assert problem.startswith('parallelism.pipeline_parallel_schedule ("GPipe") has no effect without pipelining')


def test_all_degrees_against_the_world() -> None:
    config = load_config([f"{P}tensor_parallel_degree=2", f"{P}context_parallel_degree=3", "--training.seq_len=24"])
    assert world_checks(config, 12) == []
    assert world_checks(config, 8) == [
        "parallelism.context_parallel_degree (3) x parallelism.tensor_parallel_degree (2) = 6 does not divide the "
        "world size (8); start a multiple of 6 processes or lower a degree"
    ]


SCHEDULE = "0F0,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0G1\n", "row 1 holds '0G1'"),
        ("0F0,0B0\n0F1,0B1\n", "each of 0, 1, 2, ... must be on exactly one rank"),
        ("0F0,0B0\n2F0,2B0\n", "hold the stages [0, 2]"),
        ("0F0,0F1,0B0\n1F0,1F1,1B0,1B1\n", "stage 0 lacks the forward or the backward of micro-batch 1"),
        ("0F0,0I0\n1F0,1B0\n", "stage 0 lacks"),
    ],
)
def test_a_schedule_file_that_cannot_run_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(words)):
        read_schedule(path)


def test_a_schedule_file_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(SCHEDULE)
    schedule = read_schedule(path)
    assert (schedule.stages_of_rank, schedule.micro_batches, schedule.splits_backward) == (((0,), (1,)), 2, False)
    settings = (f"{P}pipeline_parallel_degree=2", f"{P}pipeline_parallel_schedule={path}")
    assert problems(*settings, "--training.local_batch_size=2") == []
    (problem,) = problems(*settings, "--training.local_batch_size=4")
    assert "runs 2 micro-batches" in problem
    split = tmp_path / "split.csv"
    split.write_text("0F0,0I0,0W0\n1F0,1B0\n")
    assert read_schedule(split).splits_backward
