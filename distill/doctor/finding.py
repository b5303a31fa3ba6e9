"""One thing that the doctor has found."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """error: training on this would be wrong or useless. warning: worth a look. note: good to know."""

    error = "error"
    warning = "warning"
    note = "note"


@dataclass(frozen=True)
class Finding:
    """A sentence and its remedy.

    code: names it in tests and pages.
    """

    level: Level
    code: str
    sentence: str
    remedy: str = ""

    @property
    def text(self) -> str:
        return f"{self.sentence}: {self.remedy}" if self.remedy else self.sentence


def by_level(findings: Sequence[Finding]) -> list[Finding]:
    """Errors first."""
    order = list(Level)
    return sorted(findings, key=lambda finding: order.index(finding.level))
