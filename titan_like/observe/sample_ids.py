"""Which samples each step saw, as the ranks' loaders say it: anyone can check the order of the data with it."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from titan_like.observe.appended import StepLog


class SampleIdLog:
    """Appends {"step": s, "sample_ids": [...]} per step to `<folder>/sample_ids.jsonl`, in the global order.

    Args:
        batch_rank, readers: this rank's place among the data-parallel ranks, and their number.
        folder: the run folder on the rank that writes; None on all others.
        start_step: the last step that is already there; later lines of an earlier run are dropped.
    """

    def __init__(
        self, batch_rank: int, readers: int, device: torch.device, *, folder: Path | None, start_step: int
    ) -> None:
        self._batch_rank, self._readers, self._device = batch_rank, readers, device
        self._log = StepLog(folder / "sample_ids.jsonl", start_step) if folder is not None else None

    def write(self, step: int, ids: Tensor) -> None:  # ids: (accumulation, local batch) int64 of this rank
        """All ranks call it: one collective."""
        mine = torch.cat([torch.tensor([self._batch_rank]), ids.flatten()]).to(self._device)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        if self._log is not None:
            by_reader = {int(part[0]): part[1:].view_as(ids) for part in gathered}
            in_order = torch.stack([by_reader[reader] for reader in range(self._readers)], dim=1)
            self._log.write({"step": step, "sample_ids": in_order.flatten().tolist()})

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
