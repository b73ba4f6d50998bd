"""`activation_checkpoint.mode = "auto"`: chosen before the model is built, by the estimator's forecast of memory."""

import logging

import torch
import torch.distributed as dist

from titan_like.config import Config
from titan_like.config.errors import ConfigError

logger = logging.getLogger(__name__)


def with_chosen_recompute(config: Config, device: torch.device) -> Config:
    """`config` with the lightest recompute that fits estimation.device, or else the smallest GPU of all ranks.

    Every rank gets the same; call it with the process group up.

    Raises:
        ConfigError: no device is known, or none of that name.
    """
    if config.activation_checkpoint.mode != "auto":
        return config
    from estimation.devices import device_named
    from estimation.preflight import gpu_here
    from estimation.recompute import lightest_recompute

    if config.estimation.device:
        target = device_named(config.estimation.device)
    elif device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        smallest = torch.tensor(properties.total_memory, dtype=torch.int64, device=device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        target = gpu_here(properties.name, int(smallest))
    else:
        raise ConfigError(
            'activation_checkpoint.mode is "auto", but there is no GPU here whose memory could be filled; name one in '
            'estimation.device, or set the mode to "none", "selective" or "full"'
        )
    chosen, sentence = lightest_recompute(config, dist.get_world_size(), target)
    recompute = chosen.activation_checkpoint
    logger.info(
        "activation_checkpoint.mode auto: %s (selective_ac_option %s): %s",
        recompute.mode, recompute.selective_ac_option, sentence,
    )  # fmt: skip
    return chosen
