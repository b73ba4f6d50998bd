#!/usr/bin/env python3
"""Where the time of a step goes: python scripts/where_time_goes.py TRACE...

TRACE is a file that [profiling] has written (.json or .json.gz). Two tables of milliseconds per step, the mean over the
steps in it: by the named parts of the step, and by kind of operation, each instant counted once. On a GPU the second
follows the kernels, on a CPU the operations of the training thread. See docs/profiling.md.
"""

import argparse
import gzip
import json
import re
import signal
import sys
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MATRIX, ATTENTION, LOSS, OPTIMIZER, OTHER, COPIES, COLLECTIVES, IDLE = KINDS = (
    "matrix products", "attention", "loss", "optimizer, clipping", "norms, elementwise and others", "copies",
    "collectives, exposed", "host (Python, launches), idle",
)  # fmt: skip
PATTERNS = (  # first match wins: operations of the CPU and kernels of a GPU
    (COLLECTIVES, r"^_?c10d|nccl|^gloo:"),
    (ATTENTION, r"attention|attn|flash_|fmha"),
    (LOSS, r"ChunkedLoss|cross_?entropy|nll_loss|log_?softmax|logsumexp"),
    (OPTIMIZER, r"multi_tensor_apply|fused_adam|_foreach"),
    (MATRIX, r"^aten::(mm|addmm|bmm|baddbmm|matmul|linear|_scaled_mm|_grouped_mm|_scaled_grouped_mm)\b"),
    (MATRIX, r"gemm|cutlass|nvjet|cublas|xmma|Cijk"),
    (COPIES, r"^aten::(copy_|_to_copy|clone|contiguous|cat|stack)\b|^fsdp::|Memcpy|Memset|CatArray|direct_copy"),
)
RANGES = ("data", "forward", "backward", "clip", "optimizer", "collectives", "pipeline", "validation", "checkpoint")
IN_OPTIMIZER = ("clip", "optimizer")
UPDATE = "Python in these two"  # not a kind: until an operation runs, the host is idle
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
Span = tuple[float, float, str]  # start, end in microseconds, kind or range


@dataclass(frozen=True)
class Split:
    """Milliseconds per step.

    Attributes:
        ranges: time of the training thread by range, without the ranges inside it, and of the kernels started there.
        kinds: by kind; the sum is `step`.
        overlapped: collectives while something else was computed, in none of `kinds`.
    """

    steps: int
    step: float
    ranges: dict[str, tuple[float, float]]
    kinds: dict[str, float]
    overlapped: float
    is_gpu: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2: a file is not such a trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="+", type=Path)
    for path in parser.parse_args(argv).trace:
        try:
            split = split_of(read(path))
        except RecursionError:
            return refuse(path, "it is nested too deeply")
        except (OSError, ValueError, EOFError, zlib.error) as error:
            return refuse(path, error)
        print(*table(str(path), split), sep="\n", end="\n\n")
    return 0


def refuse(path: Path, why: object) -> int:
    print(f"error: {path} is not a trace that [profiling] has written: {why}", file=sys.stderr)
    return 2


def read(path: Path) -> list[dict[str, Any]]:
    """The events that have a duration.

    Raises:
        ValueError: what is in it is not what a trace has.
        OSError, EOFError, zlib.error: it cannot be read, or unpacked.
        RecursionError: lists in lists, without end.
    """
    content = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list):
        raise ValueError('it has no list "traceEvents"')
    timed = [event for event in events if isinstance(event, dict) and event.get("ph") == "X"]
    for event in timed:
        if not is_event(event):
            raise ValueError(f"an event in it is {json.dumps(event)[:200]}")
    return timed


def is_event(event: dict[str, Any]) -> bool:
    """Whether all that is read of an event is what torch writes. By hand: a trace may have a million events."""
    args = event.get("args", {})
    return (
        isinstance(event.get("name"), str)
        and isinstance(event.get("tid"), int | str)
        and all(isinstance(event.get(key), int | float) and abs(event[key]) < 2**63 for key in ("ts", "dur"))
        and event["dur"] >= 0
        and isinstance(args, dict)
        and isinstance(args.get("correlation", 0), int)
    )


def split_of(events: Iterable[dict[str, Any]]) -> Split:
    """
    Raises:
        ValueError: no step is marked, or it takes no time.
    """
    events = list(events)
    steps = [e for e in events if e["name"].startswith("ProfilerStep#") and e.get("cat") == "user_annotation"]
    if not steps:
        raise ValueError("it marks no step (ProfilerStep)")
    first, last = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    threads: defaultdict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        if event.get("cat") in ("cpu_op", "user_annotation") and first <= event["ts"] < last:
            threads[event["tid"]].append(event)
    trainer = steps[0]["tid"]
    ranges = Spans(flatten(threads[trainer], range_of))
    host, device = defaultdict[str, float](float), defaultdict[str, float](float)
    for start, end, name in ranges.spans:
        host[name] += end - start
    kernels = launched(events, first, last)
    spans = flatten(threads[trainer], operation_kind)
    if kernels:
        operations = {thread: Spans(flatten(found, operation_kind)) for thread, found in threads.items()}
        spans = []
        for event, (launch, thread) in kernels:
            where, kind = ranges.at(launch), kind_of(event["name"])
            device[where] += event["dur"]
            if not kind and thread in operations:
                kind = operations[thread].at(launch)
            kind = OPTIMIZER if where in IN_OPTIMIZER and kind != COLLECTIVES else kind
            kind = kind if kind in KINDS else OTHER
            spans.append((event["ts"], event["ts"] + event["dur"], kind))
        first, last = min(start for start, _, _ in spans), max(end for _, end, _ in spans)
    else:
        spans += [(e["ts"], e["ts"] + e["dur"], COLLECTIVES) for e in events if e["name"].startswith("gloo:")]
    if last <= first:
        raise ValueError("its steps take no time")
    kinds, overlapped = sweep(spans, first, last)
    per_step = 1e-3 / len(steps)
    return Split(
        steps=len(steps),
        step=(last - first) * per_step,
        ranges={name: (host[name] * per_step, device[name] * per_step) for name in RANGES if host[name]},
        kinds={kind: kinds[kind] * per_step for kind in KINDS},
        overlapped=overlapped * per_step,
        is_gpu=bool(kernels),
    )


class Spans:
    """Spans that do not overlap, in order."""

    def __init__(self, spans: list[Span]) -> None:
        self.spans, self._starts = spans, [start for start, _, _ in spans]

    def at(self, time: float) -> str:
        """The label at `time`; "": none."""
        index = bisect_right(self._starts, time) - 1
        return self.spans[index][2] if index >= 0 and time < self.spans[index][1] else ""


def launched(events: list[dict[str, Any]], first: float, last: float) -> list[tuple[dict[str, Any], tuple[float, Any]]]:
    """What a GPU ran for the steps between `first` and `last`, each with the time and the thread that started it."""
    calls = {
        e["args"]["correlation"]: (e["ts"], e["tid"])
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    found = [(e, calls.get(e.get("args", {}).get("correlation"))) for e in events if e.get("cat") in DEVICE]
    return [(event, call) for event, call in found if call is not None and first <= call[0] < last]


def flatten(events: Iterable[dict[str, Any]], label: Any) -> list[Span]:
    """Events of one thread, outer before inner, as spans that do not overlap: the innermost has each instant.

    Args:
        label: (event, label of the event around it or "") -> its label; "": nothing to be counted.
    """
    spans: list[Span] = []
    around: list[tuple[float, str]] = []  # end and label of the events that are open
    now = 0.0

    def advance(until: float) -> None:
        nonlocal now
        if around and around[-1][1] and until > now:
            spans.append((now, until, around[-1][1]))
        now = max(now, until)

    for event in events:
        while around and around[-1][0] <= event["ts"]:
            advance(around[-1][0])
            around.pop()
        advance(event["ts"])
        around.append((event["ts"] + event["dur"], label(event, around[-1][1] if around else "")))
    while around:
        advance(around[-1][0])
        around.pop()
    return spans


def range_of(event: dict[str, Any], outer: str) -> str:
    """The named part of a step; all of a validation counts as that."""
    is_named = event["cat"] == "user_annotation" and event["name"] in RANGES
    return event["name"] if is_named and outer != "validation" else outer


def operation_kind(event: dict[str, Any], outer: str) -> str:
    """An operation that no pattern knows belongs to the one around it."""
    if event["cat"] == "user_annotation":
        return UPDATE if event["name"] in IN_OPTIMIZER else outer
    kind = kind_of(event["name"])
    if outer in (UPDATE, OPTIMIZER) and kind != COLLECTIVES:
        return OPTIMIZER
    return kind or outer or OTHER


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in PATTERNS if re.search(pattern, name, re.IGNORECASE)), "")


def sweep(spans: Iterable[Span], first: float, last: float) -> tuple[dict[str, float], float]:
    """Microseconds by kind between `first` and `last`, the first of KINDS that is active having each instant; and those
    in which collectives ran beside another kind."""
    changes = sorted(
        (min(max(time, first), last), change, kind)
        for start, end, kind in spans
        for time, change in ((start, 1), (end, -1))
    )
    active, total = Counter[str](), dict.fromkeys(KINDS, 0.0)
    overlapped, now = 0.0, first
    for time, change, kind in [*changes, (last, 0, IDLE)]:
        winner = next((k for k in KINDS if active[k] > 0), IDLE)
        total[winner] += time - now
        if active[COLLECTIVES] > 0 and winner != COLLECTIVES:
            overlapped += time - now
        active[kind] += change
        now = time
    return total, overlapped


def table(name: str, split: Split) -> list[str]:
    """For people."""
    device = f" {'kernels':>9}" if split.is_gpu else ""
    lines = [
        f"{name}: {split.steps} step{'s' * (split.steps > 1)}, {split.step:.2f} ms each"
        f"{', as the GPU ran' if split.is_gpu else ''}",
        "", f"{'part of a step':<32} {'ms':>9} {'%':>6}{device}",
    ]  # fmt: skip
    rest = split.step - sum(host for host, _ in split.ranges.values())
    for part, (host, kernels) in {**split.ranges, "rest": (rest, 0.0)}.items():
        shown = f" {kernels:>9.2f}" if split.is_gpu else ""
        lines.append(f"{part:<32} {host:>9.2f} {host / split.step:>6.1%}{shown}")
    lines += ["", f"{'kind of operation':<32} {'ms':>9} {'%':>6}"]
    lines += [f"{kind:<32} {ms:>9.2f} {ms / split.step:>6.1%}" for kind, ms in split.kinds.items()]
    return [*lines, f"{'(collectives, overlapped)':<32} {split.overlapped:>9.2f} {split.overlapped / split.step:>6.1%}"]


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, without a word
    sys.exit(main())
