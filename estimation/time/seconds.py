"""Seconds by what they are spent on."""

from collections.abc import Mapping


class Seconds(dict[str, float]):
    def add(self, other: Mapping[str, float], times: float = 1.0) -> "Seconds":
        """Add `times` x `other`, in place; returns itself."""
        for kind, seconds in other.items():
            self[kind] = self.get(kind, 0.0) + times * seconds
        return self

    @property
    def total(self) -> float:
        return sum(self.values())
