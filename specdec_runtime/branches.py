"""What may follow, as a tree of votes: the continuations of several earlier occurrences merged.

Lookup knows more than one continuation wherever a phrase has gone on in different ways. Each
occurrence votes for its own with a weight; ways that begin alike share their first nodes.
"""

from collections.abc import Iterable, Sequence


class Branch:
    """One node: the votes that reach it and what they go on with.

    Args:
        weight: sum of the votes.
    """

    def __init__(self, weight: float = 0.0) -> None:
        self.weight = weight
        self.children: dict[int, Branch] = {}

    @classmethod
    def merged(cls, continuations: Iterable[tuple[Sequence[int], float]]) -> "Branch":
        """The root of all (tokens, weight); among equal votes the earlier given lead."""
        root = cls()
        for tokens, weight in continuations:
            node = root
            node.weight += weight
            for token in tokens:
                node = node.children.setdefault(token, cls())
                node.weight += weight
        return root

    def at(self, path: Sequence[int]) -> "Branch":
        """The node that `path` leads to; an empty one where no vote goes there."""
        node = self
        for token in path:
            if token not in node.children:
                return Branch()
            node = node.children[token]
        return node

    def likeliest(self, count: int) -> tuple[list[int], list[float]]:
        """The `count` children with most votes: tokens, and each one's share of the votes that
        its elder siblings leave."""
        ranked = sorted(self.children.items(), key=lambda child: -child[1].weight)[:count]
        left = self.weight
        shares = []
        for _, child in ranked:
            shares.append(child.weight / left)
            left -= child.weight
        return [token for token, _ in ranked], shares
