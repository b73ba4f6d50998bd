"""What the commands of the estimator share: numbers in a range, files that can be written, and errors as sentences."""

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from titan_like.config.errors import ConfigError

MOST_GPUS, MOST_TOKENS = 2**20, 2**40  # tokens of a step


class Parser(argparse.ArgumentParser):
    """Takes options by their whole names only, and raises ConfigError instead of printing its usage."""

    def __init__(self, prog: str, description: str, epilog: str | None = None) -> None:
        super().__init__(prog, description=description, epilog=epilog, allow_abbrev=False)
        self._negative_number_matcher = re.compile(r"-\d")  # "-4M" is a bad value, not an option

    def error(self, message: str) -> NoReturn:
        told = "" if "'" in message else f"; {self.prog} --help lists the options"  # a quoted value has its sentence
        raise ConfigError(message.removeprefix("argument ") + told)


def whole(low: int, high: int) -> Callable[[str], int]:
    """A type for argparse."""

    def convert(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,20}", text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low:,} to {high:,}")
        return int(text)

    return convert


def number(low: float, high: float) -> Callable[[str], float]:
    """A type for argparse."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:,} to {high:,}")
        return value

    return convert


def output(text: str) -> Path:
    """A type for argparse: a file that can be written; asked before the work whose result it takes."""
    path, is_new = Path(text), not os.path.lexists(text)
    try:
        path.open("a").close()
        if is_new:
            path.unlink()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written ({reason}); name a file in a folder that exists"
        ) from None
    return path
