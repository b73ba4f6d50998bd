"""A stand-in for Python, so that the real scripts run in milliseconds and every call they make can be read."""

from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]

FAKE = """#!/usr/bin/env bash
{ printf '%s|' "$@"; printf 'NPROC=%s OMP=%s\\n' "${NPROC:-}" "${OMP_NUM_THREADS:-}"; } >>"$FAKE_LOG"
case "$*" in
    *check_env.py*) [ -n "${FAKE_BARE:-}" ] && exit 1; printf '%s\\n' "$0" ;;
    "-c "*) exit "${FAKE_UNSUPPORTED:-0}" ;;
    --version) echo "Python 3.11.0" ;;
    *"-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"-m pip"*) exit "${FAKE_PIP:-0}" ;;
    *titan_like.launch*) printf 'real\\n%s\\n%s\\n' "$FAKE_RUN" "$FAKE_RUN/checkpoint"; exit "${FAKE_LAUNCH:-0}" ;;
    *titan_like.train* | *titan_like.torchrun*) eval "${FAKE_TRAIN:-exit 0}" ;;
    *generate.py*) echo "def sampled"; exit "${FAKE_GENERATE:-0}" ;;
esac
"""


@dataclass
class FakePython:
    path: Path
    log: Path
    env: dict[str, str]

    def calls(self, word: str) -> list[str]:
        """The recorded calls that contain `word`: arguments joined by |, then NPROC and OMP_NUM_THREADS."""
        return [line for line in self.log.read_text().splitlines() if word in line] if self.log.exists() else []
