"""`check_env.py PYPROJECT [EXTRA ...]` prints the path of this Python if it has what is asked for there, else exits 1.

Reads installed metadata and imports nothing: a few hundredths of a second. Only lower bounds are compared.
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, version


def requirements(pyproject: str, extras: list[str]) -> list[tuple[str, list[int]]]:
    """(name, lowest version) of each dependency. Not a TOML parser: Python 3.10 has none before the set-up."""
    found = []
    for key in ["dependencies", *extras]:
        block = re.search(rf"^{key} = \[(.*?)^\]", pyproject, re.DOTALL | re.MULTILINE)
        if block is None:
            raise SystemExit(f"{key} is not a list in pyproject.toml")
        found += re.findall(r'"([\w.-]+)>=([\d.]+)[^"]*"', block[1])
    return [(name, [int(part) for part in low.split(".")]) for name, low in found]


def satisfied(name: str, low: list[int]) -> bool:
    try:
        have = [int(part) for part in re.findall(r"\d+", version(name))]
    except PackageNotFoundError:
        return False
    return have[: len(low)] >= low


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        wanted = requirements(file.read(), sys.argv[2:])
    if sys.version_info < (3, 10) or not all(satisfied(*each) for each in wanted):
        sys.exit(1)
    print(sys.executable)
