"""The split of a step, on traces made by hand and on one that a run has written."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import where_time_goes as script
from tests.tiny_run import run, write_corpus

TRAINER, AUTOGRAD, GLOO, STREAM, MESSAGES = 1, 2, 3, 7, 8
Event = dict[str, Any]


def event(name: str, start: float, end: float, category: str = "cpu_op", thread: int = TRAINER, **args: int) -> Event:
    """Times in milliseconds."""
    return {
        "ph": "X", "name": name, "cat": category, "tid": thread, "ts": start * 1e3, "dur": (end - start) * 1e3,
        "args": args,
    }  # fmt: skip


def named(name: str, start: float, end: float) -> Event:
    return event(name, start, end, "user_annotation")


def a_step_on_a_cpu(begin: float) -> list[Event]:
    """10 ms."""
    events = [
        named("ProfilerStep#1", 0, 10),
        named("data", 0, 1),
        named("forward", 1, 4),
        event("aten::linear", 1, 2.5),
        event("aten::t", 1, 1.25),  # belongs to the product
        event("aten::mm", 1.25, 2.5),
        event("aten::scaled_dot_product_attention", 2.5, 3),
        event("aten::mul", 3, 3.5),
        event("_ChunkedLoss", 3.5, 4),
        event("aten::mm", 3.75, 4),  # a product inside the loss
        named("backward", 4, 7),
        event("autograd::engine::evaluate_function: MmBackward0", 4, 6),
        event("MmBackward0", 4, 6),
        event("aten::mm", 4.5, 5.5),
        event("aten::copy_", 6, 6.5),
        named("clip", 7, 8.5),
        named("collectives", 7, 8),
        event("c10d::allreduce_", 7, 7.25),
        event("aten::mul", 8, 8.5),
        named("optimizer", 8.5, 9.5),
        event("aten::_fused_adamw_", 8.5, 9),
        # Two messages: one beside 1 ms of a product and the first 0.25 of "others", one for which the trainer waits.
        event("gloo:all_gather", 4.5, 5.75, "user_annotation", GLOO),
        event("gloo:all_reduce", 7.25, 8, "user_annotation", GLOO),
    ]
    return [{**e, "ts": e["ts"] + begin * 1e3} for e in events]


def test_a_step_on_a_cpu() -> None:
    # The second step begins a millisecond late: what lies between steps counts as theirs.
    split = script.split_of(a_step_on_a_cpu(0) + a_step_on_a_cpu(11))
    assert (split.steps, split.step, split.is_gpu) == (2, 10.5, False)
    assert {name: host for name, (host, _) in split.ranges.items()} == pytest.approx(
        {"data": 1, "forward": 3, "backward": 3, "clip": 0.5, "collectives": 1, "optimizer": 1}
    )
    assert split.kinds == pytest.approx(
        {
            script.MATRIX: 1.5 + 0.25 + 1,
            script.ATTENTION: 0.5,
            script.LOSS: 0.25,
            script.OPTIMIZER: 0.5 + 0.5,
            script.OTHER: 0.5 + 1,  # mul, and the backward node around its product
            script.COPIES: 0.5,
            script.COLLECTIVES: 1,
            script.IDLE: 10.5 - 7.5,
        }
    )
    assert split.overlapped == 1.25
    assert sum(split.kinds.values()) == split.step


def a_step_on_a_gpu() -> list[Event]:
    """The host takes 4 ms; the kernels run from 1 to 9 ms."""

    def kernel(
        name: str, launch: float, start: float, end: float, stream: int = STREAM, by: int = TRAINER
    ) -> list[Event]:
        number = int(launch * 100)
        category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        return [
            event("cudaLaunchKernel", launch, launch + 0.01, "cuda_runtime", by, correlation=number),
            event(name, start, end, category, stream, correlation=number),
        ]

    return [
        named("ProfilerStep#5", 0, 4),
        named("forward", 0, 2),
        named("backward", 2, 3),
        named("optimizer", 3, 4),
        event("_ChunkedLoss", 1.5, 2),
        event("MulBackward0", 2, 2.9, thread=AUTOGRAD),
        *kernel("sm90_xmma_gemm_bf16", 0.5, 1, 3),
        *kernel("flash_fwd_kernel", 0.7, 3, 4),
        *kernel("ncclDevKernel_AllGather", 0.8, 2, 5, MESSAGES),  # 1 ms of it alone
        *kernel("vectorized_elementwise_kernel", 1.6, 5, 5.5),  # started by the loss
        *kernel("vectorized_elementwise_kernel", 2.5, 5.5, 6.5, by=AUTOGRAD),
        *kernel("Memcpy DtoD", 2.6, 6.5, 6.75, by=AUTOGRAD),
        *kernel("vectorized_elementwise_kernel", 3.5, 8, 9),
        *kernel("sm90_xmma_gemm_bf16", 4.5, 9, 12),  # of the next step
    ]


def test_a_step_on_a_gpu() -> None:
    split = script.split_of(a_step_on_a_gpu())
    assert (split.step, split.is_gpu) == (8, True)
    assert split.ranges == {
        "forward": pytest.approx((2, 2 + 1 + 3 + 0.5)),
        "backward": pytest.approx((1, 1.25)),
        "optimizer": pytest.approx((1, 1)),
    }
    assert split.kinds == pytest.approx(
        {
            script.MATRIX: 2,
            script.ATTENTION: 1,
            script.LOSS: 0.5,
            script.OPTIMIZER: 1,
            script.OTHER: 1,
            script.COPIES: 0.25,
            script.COLLECTIVES: 1,
            script.IDLE: 1.25,
        }
    )
    assert split.overlapped == 2


def test_what_a_pipeline_waits_for_is_the_pipeline() -> None:
    """The action of a schedule holds waiting for a message and the work of the stage."""
    events = [
        named("ProfilerStep#1", 0, 10),
        named("pipeline", 0, 8),
        named("PP:0F0", 0, 4),
        named("forward", 1, 4),
        named("Backward 0", 4, 8),
        named("backward", 6, 8),
        named("validation", 8, 10),
        named("forward", 8, 9),
    ]
    assert {name: host for name, (host, _) in script.split_of(events).ranges.items()} == pytest.approx(
        {"pipeline": 1 + 2, "forward": 3, "backward": 2, "validation": 2}
    )


def test_a_trace_that_a_run_has_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path / "train")
    run(
        tmp_path / "run",
        **{"profiling.enable_profiling": "true", "profiling.profile_freq": 4, "profiling.profiler_active": 2,
           "profiling.profiler_warmup": 1, "training.steps": 6},
    )  # fmt: skip
    path = tmp_path / "run" / "profile_traces" / "step-4-rank-0.json.gz"
    split = script.split_of(script.read(path))
    assert split.steps == 2 and not split.is_gpu
    assert sum(split.kinds.values()) == pytest.approx(split.step)
    assert set(split.ranges) == {"data", "forward", "backward", "collectives", "clip", "optimizer"}
    assert 0 < sum(host for host, _ in split.ranges.values()) <= split.step
    for kind in (script.MATRIX, script.ATTENTION, script.LOSS, script.OPTIMIZER, script.OTHER, script.IDLE):
        assert split.kinds[kind] > 0, kind
    capsys.readouterr()
    assert script.main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert "2 steps" in printed and all(kind in printed for kind in script.KINDS)


def broken(**changes: Any) -> str:
    return json.dumps({"traceEvents": [{**named("ProfilerStep#1", 0, 10), **changes}]})


@pytest.mark.parametrize(
    "content",
    [
        *("", "{}", "[1, 2]", "null", "[" * 100_000),
        *(f'{{"traceEvents": {events}}}' for events in ("[]", "3", "null", "[1]", '[{"a": 1}]', '[{"ph": "X"}]')),
        json.dumps({"traceEvents": [named("forward", 0, 1)]}),
        *(broken(name=3), broken(ts="1"), broken(dur="1"), broken(dur=0), broken(dur=-1), broken(ts=float("nan"))),
        *(broken(ts=10**400), broken(tid=[]), broken(args=3), broken(args={"correlation": []})),
    ],
)
def test_another_file_is_refused_in_one_sentence(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    assert script.main([str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path} is not a trace that [profiling] has written: ")
    assert " " in line.partition("written: ")[2]  # a sentence, not the name of a key
    assert script.main([str(tmp_path / "gone.json.gz")]) == 2


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"traceEvents": a_step_on_a_cpu(0)}))
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run([sys.executable, script.__file__, path], stdout=write_end, stderr=subprocess.PIPE, timeout=60)
    os.close(write_end)
    assert done.stderr == b""
