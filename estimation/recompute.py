"""The lightest recompute that fits a device."""

from estimation.candidates import changed, problems
from estimation.devices import Device
from estimation.formula import memory_of
from estimation.job import job_of
from estimation.report import verdict, worst_rank
from titan_like.config import Config
from titan_like.config.errors import ConfigError

MODES = ("none", "selective", "full")  # in the order of what they compute again


def lightest_recompute(config: Config, world_size: int, device: Device) -> tuple[Config, str]:
    """The config with the first mode that fits, or the strongest that is valid where none does; and why.

    Raises:
        ConfigError: no mode is valid, in the trainer's words.
    """
    refused: list[str] = []
    last: tuple[Config, str] | None = None
    for mode in MODES:
        found = changed(config, {"activation_checkpoint.mode": mode})
        if wrong := problems(found, world_size):
            refused += wrong
            continue
        job = job_of(found, world_size)
        fits, sentence = verdict(sum(worst_rank(memory_of(job)).peak.pools), device, job.communicators)
        last = found, sentence
        if fits:
            break
    if last is None:
        raise ConfigError(*dict.fromkeys(refused))
    return last
