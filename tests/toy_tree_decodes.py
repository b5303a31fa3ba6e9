"""Every path through the decoder with token trees: the drawing and judging part of toy_decodes.py.

Siblings are drawn one after another, each from what the elder ones left, and every test of a
sibling is a choice of its own.

Shapes: n rows of one call, N nodes of the largest tree, V vocabulary.
"""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specdec_runtime import trees
from specdec_runtime.tree_growth import ROOT
from specdec_runtime.trees import DraftTree, Siblings, TreeVerification
from tests.toy_decodes import BISECTIONS, Paths
from tests.toy_models import bisect, next_token_probs


def siblings_by(paths: Paths) -> Callable:
    """`draw_siblings`, taking the rows' choices; its uniforms [n, m] hold row numbers."""
    draw_siblings = trees.draw_siblings

    def chosen(rest: Tensor, row_numbers: Tensor) -> Tensor:
        seen: Counter[int] = Counter()
        turns = []
        for row in row_numbers.tolist():  # several nodes of one row choose in turn
            turns.append(seen[row])
            seen[row] += 1
        turn, tokens = torch.tensor(turns), torch.zeros(len(turns), dtype=torch.int64)
        can_draw = rest.sum(1) > 0.0
        for number in range(max(turns) + 1):
            now = torch.nonzero((turn == number) & can_draw).squeeze(1)
            tokens[now] = paths.choose(row_numbers[now].long(), rest[now])
        return tokens

    def draw(probs: Tensor, uniforms: Tensor) -> Siblings:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trees, "draw_by_inversion", chosen)
            return draw_siblings(probs, uniforms)

    return draw


def tree_rule_by(paths: Paths) -> Callable:
    """`verify_tree`, taking the rows' choices; its uniforms hold row numbers."""
    verify_tree = trees.verify_tree

    def verify(
        tree: DraftTree, draft_probs: Tensor | None, target_probs: Tensor, uniforms: Tensor
    ) -> TreeVerification:
        rows, every = uniforms[:, -1].long(), torch.arange(len(uniforms))
        noise = torch.full_like(uniforms, 0.5)

        def run(index: Tensor, uniforms: Tensor) -> TreeVerification:
            q = None if draft_probs is None else draft_probs[index]
            part = DraftTree(*(part[index] for part in tree))
            return verify_tree(part, q, target_probs[index], uniforms)

        walks = [_Walk(tree, row) for row in range(len(rows))]
        for step in range(tree.token_ids.shape[1]):
            tested = torch.tensor([row for row, walk in enumerate(walks) if walk.waiting])
            if not len(tested):
                break
            columns = torch.tensor([walks[row].waiting[0] for row in tested.tolist()])
            keeps = _keeps(run, tested, noise, step, columns)
            keep = bisect(keeps, len(tested), steps=BISECTIONS)
            refused = paths.choose(rows[tested], torch.stack([keep, 1.0 - keep], 1))
            noise[tested, step] = torch.where(refused == 1, (1.0 + keep) / 2, keep / 2)
            for row, is_refused in zip(tested.tolist(), refused.tolist(), strict=True):
                walks[row].go_on(is_kept=not is_refused)
        after = next_token_probs(
            lambda index, uniforms: torch.stack([run(index, uniforms).next_token_ids] * 2, 1),
            every,
            noise[:, :-1],
            target_probs.shape[-1],
            steps=BISECTIONS,
        )
        verdict = run(every, noise)
        kept = [line[line >= 0].tolist() for line in verdict.path]
        assert kept == [walk.kept for walk in walks], "the rule does not walk as its kind does"
        return verdict._replace(next_token_ids=paths.choose(rows, after))

    return verify


def _keeps(run: Callable, rows: Tensor, noise: Tensor, step: int, columns: Tensor) -> Callable:
    """Whether each row keeps the node in its column, by the uniform of this step."""
    uniforms = noise[rows].clone()

    def keeps(uniform: Tensor) -> Tensor:
        uniforms[:, step] = uniform
        return (run(rows, uniforms).path == columns[:, None]).any(1)

    return keeps


class _Walk:
    """Where one row stands in its tree: the columns kept, and the siblings still to be tested."""

    def __init__(self, tree: DraftTree, row: int) -> None:
        size = int(tree.num_nodes[row])
        self._parents = tree.parents[row, :size].tolist()
        self.kept: list[int] = []
        self.waiting = self._children(ROOT)

    def go_on(self, *, is_kept: bool) -> None:
        column, *younger = self.waiting
        if is_kept:
            self.kept.append(column)
        self.waiting = self._children(column) if is_kept else younger

    def _children(self, node: int) -> list[int]:
        return [column for column, parent in enumerate(self._parents) if parent == node]
