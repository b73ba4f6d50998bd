"""The printed answer: one line per pipeline rank, the worst rank in full, and whether it fits."""

import re
from collections import Counter
from collections.abc import Sequence

from estimation.devices import GIB, Device
from estimation.formula import RankMemory
from estimation.time.step import StepTime
from estimation.types import MemoryReport


def gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def memory_table(ranks: Sequence[RankMemory]) -> list[str]:
    """One line per rank of the pipeline axis; GiB."""
    heads = f"{'pp rank':>7} {'layers':>9} {'resident':>9} {'activations':>12} {'transient':>10}"
    lines = [f"{heads} {'allocated':>10} {'reserved':>9}  peak in"]
    for memory in ranks:
        report = memory.report()
        layers = "+".join(
            f"{layers[0]}-{layers[-1]}" for layers in (memory.job.stages[number] for number in memory.stages)
        )
        live = sum(report.at_peak.get(key, 0) for key in ("parameters", "gradients", "optimizer state", "buffers"))
        activations = report.at_peak.get("activations", 0)
        lines.append(
            f"{memory.pipeline_rank:>7} {layers:>9} {gib(report.resident.total):>9} {gib(activations):>12} "
            f"{gib(report.peak_bytes - live - activations):>10} {gib(report.peak_bytes):>10} "
            f"{gib(report.reserved_bytes):>9}  {memory.peak.label}"
        )
    return lines


def worst_rank(ranks: Sequence[RankMemory]) -> RankMemory:
    """The rank that reserves most."""
    return max(ranks, key=lambda memory: sum(memory.peak.pools))


def breakdown(report: MemoryReport) -> list[str]:
    """What the peak of a rank is made of; GiB."""
    resident = report.resident
    lines = [
        f"resident {gib(resident.total)} GiB: parameters {gib(resident.parameters)}, "
        f"gradients {gib(resident.gradients)}, optimizer {gib(resident.optimizer)}, buffers {gib(resident.buffers)}",
        f"peak {gib(report.peak_bytes)} GiB at {report.moment}:",
    ]
    parts = sorted(report.at_peak.items(), key=lambda item: -item[1])
    return lines + [f"  {name:<18} {gib(size):>8}" for name, size in parts if size >= GIB // 200]


def reserved_line(reserved: int, *, is_replayed: bool) -> str:
    """Where the number comes from that the verdict judges; GiB."""
    replay = "by a replay through a model of the caching allocator, with fragmentation; the verdict is the replay's"
    return f"reserved {gib(reserved)} GiB {replay if is_replayed else 'without fragmentation'}"


def details(report: MemoryReport) -> list[str]:
    """What a trace knows beyond its peak; GiB. Modules of all layers are added up."""
    by_module: Counter[str] = Counter()
    for name, size in report.activations.items():
        by_module[re.sub(r"\.\d+", ".*", name)] += size
    parts = [
        ("saved for the backward by module, when most is:", by_module),
        ("transient by kind, each at its own time:", Counter(report.transient)),
    ]
    shown = report.peak_bytes // 100
    lines = []
    for title, sizes in parts:
        lines += [title, *(f"  {name:<28} {gib(size):>8}" for name, size in sizes.most_common() if size > shown)]
    return lines


def explain(memory: RankMemory) -> list[str]:
    """Every tensor kind alive at the peak, with its bytes; docs/memory.md has the formulas."""
    by_term: dict[str, Counter[str]] = {}
    for (term, name), size in memory.peak.terms.items():
        by_term.setdefault(term, Counter())[name] += size
    lines = []
    for term, names in sorted(by_term.items(), key=lambda item: -sum(item[1].values())):
        lines.append(f"{term}: {sum(names.values()):,} bytes")
        lines += [f"  {name:<32} {size:>20,}" for name, size in names.most_common() if size]
    return lines


def time_lines(step: StepTime) -> list[str]:
    """Step time, and what it is made of on the pipeline rank that works longest."""
    whose = f" (both of pp rank {step.rank}, which works longest)" if len(step.ran) > 1 else ""
    lines = [
        f"step {step.seconds:.3f} s, {step.tokens_per_second:,.0f} tokens/s per GPU, MFU {step.mfu:.1%}, "
        f"pipeline bubble {step.bubble:.1%}, exposed communication {step.exposed / step.seconds:.1%}{whose}:"
    ]
    parts = sorted(step.parts.items(), key=lambda item: -item[1])
    return lines + [f"  {name:<26} {seconds:>8.3f} s" for name, seconds in parts if seconds > step.seconds / 1000]


def verdict(reserved: int, device: Device, communicators: int) -> tuple[bool, str]:
    """Whether the worst rank fits, and the sentence that says so."""
    outside = device.outside(communicators)
    needed = reserved / GIB + outside
    margin = device.memory_gib - needed
    numbers = (
        f"{gib(reserved)} GiB reserved + {outside:.2f} GiB outside the allocator = {needed:.2f} of "
        f"{device.memory_gib:.2f} GiB on {device.name}"
    )
    if margin >= 0:
        return True, f"fits: {numbers}, {margin:.2f} GiB ({100 * margin / device.memory_gib:.0f} %) to spare"
    return False, f"does not fit: {numbers}, {-margin:.2f} GiB too much"
