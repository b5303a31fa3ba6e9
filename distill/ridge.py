"""Linear least squares from parts: the sums of a regression over any number of rows, then its solution.

Shapes: N rows of one part, P inputs, M outputs.
"""

import torch
from torch import Tensor

# Relative to the mean square of each input: enough for a stable solution, far too little to pull it
# towards zero.
_RIDGE = 1e-3
_ROWS_AT_ONCE = 1024  # adding up products costs as much as making them of fewer rows


class Ridge:
    """The matrix A [P, M] that minimises |X A - Y|^2 + ridge |scaled A|^2 over all rows given.

    Inputs count by their own size: one that is a thousand times larger than the others is not
    punished less. Sums are kept in float64.
    """

    def __init__(self) -> None:
        self._gram: Tensor | None = None
        self._cross: Tensor | None = None
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def add(self, inputs: Tensor, wanted: Tensor) -> None:
        """Rows [N, P] and what they should become [N, M]."""
        self._waiting.append((inputs, wanted))
        if sum(len(rows) for rows, _ in self._waiting) >= _ROWS_AT_ONCE:
            self._add_up()

    def solve(self) -> Tensor:
        """[P, M] float32.

        Raises:
            ValueError: if no row was given, or one is not finite.
        """
        gram, cross = self._sums()
        sizes = gram.diagonal().clamp_min(torch.finfo(torch.float64).tiny).sqrt()
        scaled = gram / sizes[:, None] / sizes
        scaled.diagonal().add_(_RIDGE)
        found = torch.linalg.solve(scaled, cross / sizes[:, None]) / sizes[:, None]
        if not torch.isfinite(found).all():
            raise ValueError("the target's recorded states are not finite: write the answers again")
        return found.float()

    def main_outputs(self, solution: Tensor, count: int) -> Tensor:
        """[M, count] orthonormal: the directions in which X A is largest over the rows."""
        gram, _ = self._sums()
        solution = solution.double()
        spread = solution.T @ gram @ solution
        return torch.linalg.eigh(spread).eigenvectors[:, -count:].float()

    def _sums(self) -> tuple[Tensor, Tensor]:
        if self._waiting:
            self._add_up()
        if self._gram is None or self._cross is None:
            raise ValueError("no position to fit the drafter on: expected answers with tokens")
        return self._gram, self._cross

    def _add_up(self) -> None:
        inputs = torch.cat([rows for rows, _ in self._waiting])
        wanted = torch.cat([rows for _, rows in self._waiting])
        self._waiting = []
        gram, cross = (inputs.T @ inputs).double(), (inputs.T @ wanted).double()
        if self._gram is None or self._cross is None:
            self._gram, self._cross = gram, cross
        else:
            self._gram += gram
            self._cross += cross
