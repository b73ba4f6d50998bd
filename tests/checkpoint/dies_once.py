"""titan_like.train, whose rank 1 is killed at step 5 of the first attempt."""

import os
import signal
from typing import Any

from titan_like import train
from titan_like.trainer import Trainer

step = Trainer._train_one_step


def dying(self: Trainer, lr: float) -> Any:
    if self.counters.step == 5 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, lr)


if __name__ == "__main__":
    Trainer._train_one_step = dying  # type: ignore[method-assign]
    train.main()
