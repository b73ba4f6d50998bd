"""Before a run allocates anything: does it fit, and if not, which small changes would make it fit."""

import logging
from collections.abc import Iterator
from typing import Any

from estimation.candidates import changed, problems
from estimation.devices import GIB, Device
from estimation.formula import memory_of
from estimation.job import job_of
from estimation.report import verdict, worst_rank
from estimation.types import MemoryReport
from titan_like.config import Config
from titan_like.config.errors import ConfigError

logger = logging.getLogger(__name__)
SHOWN = 3  # changes that are proposed


def preflight(config: Config, world_size: int, device: Device) -> MemoryReport:
    """The prediction for the worst rank; says so where it does not fit.

    Raises:
        ConfigError: it does not fit, and estimation.preflight is abort.
    """
    job = job_of(config, world_size)
    report = worst_rank(memory_of(job)).report()
    fits, sentence = verdict(report.reserved_bytes, device, job.communicators)
    logger.info("memory forecast: %s; not included: %s", sentence, "; ".join(report.not_included))
    if fits:
        return report
    found = [f"{text} ({size:.1f} GiB)" for text, size in remedies(config, world_size, device)]
    proposal = f"these would fit: {'; '.join(found)}" if found else "use more ranks, or a higher parallel degree"
    message = f"this run {sentence}; {proposal}"
    if config.estimation.preflight == "abort":
        raise ConfigError(f"{message}; or set estimation.preflight to warn")
    logger.warning(message)
    return report


def gpu_here(name: str, total_bytes: int) -> Device:
    """This machine's GPU; only its memory matters here, so speeds of an unknown one are left at 0."""
    return Device(name, total_bytes / GIB, tflops=0, efficiency=0, memory_tb_s=0, link_gb_s=0, network_gb_s=0)


def remedies(config: Config, world_size: int, device: Device) -> list[tuple[str, float]]:
    """The first few changes, cheapest first, that fit: what to set, and GiB reserved then."""
    found = []
    for keys in _changes(config):
        other = changed(config, keys)
        if problems(other, world_size):
            continue
        job = job_of(other, world_size)
        reserved = sum(worst_rank(memory_of(job)).peak.pools)
        if verdict(reserved, device, job.communicators)[0]:
            text = ", ".join(f"{key} = {value}" for key, value in keys.items())
            found.append((text, reserved / GIB))
        if len(found) == SHOWN:
            break
    return found


def _changes(config: Config) -> Iterator[dict[str, Any]]:
    """In the order of what they cost: less to keep, smaller micro-batches of the same global batch, then both."""
    modes = ["none", "selective", "full"]
    stronger = modes[modes.index(config.activation_checkpoint.mode) + 1 :]
    recompute = [
        {"activation_checkpoint.mode": mode, "activation_checkpoint.selective_ac_option": "op"} for mode in stronger
    ]
    yield from recompute
    rows = config.training.local_batch_size
    smaller = (
        [rows // part for part in (2, 4, 8) if rows % part == 0] if config.training.global_batch_size != -1 else []
    )
    for count in smaller:
        yield {"training.local_batch_size": count}
    for count in smaller:
        for change in recompute:
            yield {**change, "training.local_batch_size": count}
