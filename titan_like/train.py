"""`titan-train`, and what torchrun starts on every rank: config -> checks -> trainer -> fit -> close."""

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

from titan_like.config import Config, load_config_or_exit
from titan_like.config.errors import TitanError
from titan_like.launch import check_environment, check_run, check_settings


def main(argv: Sequence[str] | None = None) -> None:
    """Run one rank. Exit code 0: finished; 1: failed while running; 2: could not be run as asked; 75: stopped before
    its end by a signal or the time limit, with a checkpoint of its last step."""
    config = load_config_or_exit(sys.argv[1:] if argv is None else argv, _problems)
    try:
        if config.comm.mode == "fake":
            from titan_like.fake import run_fake

            run_fake(config, check_environment(os.environ)[0])
            return
        from titan_like import stop  # torch is imported for a run that can be run only
        from titan_like.trainer import Trainer

        trainer = Trainer(config)
        trainer.fit()
        if trainer.stopped:
            stop.ignore_signals()
        trainer.close()
    except TitanError as error:
        _leave(error.exit_code, "".join(f"error: {line}\n" for line in str(error).splitlines()))
    except BaseException:
        _leave(1, traceback.format_exc())
    code = stop.EXIT_CODE if trainer.stopped else 0
    if "RANK" in os.environ:
        # All is written and closed. Gloo's threads may outlive their groups, and then abort an interpreter that shuts
        # down ("terminate called without an active exception", seen once).
        _leave(code, "")
    if code:
        raise SystemExit(code)


def _problems(config: Config) -> list[str]:
    if config.comm.mode == "real":
        return check_run(config, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    world_size, problems = check_environment(os.environ)
    return [*problems, *check_settings(config, world_size)]


def _leave(code: int, message: str) -> None:
    """Say why and go at once: waiting for the other ranks, as a clean exit does, could wait for ever."""
    rank = os.environ.get("RANK")
    prefix = f"[rank {rank}] " if rank is not None else ""
    with suppress(OSError):  # it may be a file on a full disk
        sys.stdout.flush()
    sys.stderr.write("".join(f"{prefix}{line}\n" for line in message.splitlines()))
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
