"""Which samples each step saw, as the ranks' loaders say it: anyone can check the order of the data with it."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from titan_like.observe.metrics import lines_up_to


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
        self._file = None
        if folder is not None:
            path = folder / "sample_ids.jsonl"
            path.write_text("".join(lines_up_to(path, start_step)))
            self._file = path.open("a")

    def write(self, step: int, ids: Tensor) -> None:  # ids: (accumulation, local batch) int64 of this rank
        """All ranks call it: one collective."""
        mine = torch.cat([torch.tensor([self._batch_rank]), ids.flatten()]).to(self._device)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        if self._file is not None:
            by_reader = {int(part[0]): part[1:].view_as(ids) for part in gathered}
            in_order = torch.stack([by_reader[reader] for reader in range(self._readers)], dim=1)
            self._file.write(json.dumps({"step": step, "sample_ids": in_order.flatten().tolist()}) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
