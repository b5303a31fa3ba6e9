"""One target pass over the drafts, and the verdict on them.

Chains, token trees and drafts that the target's own first layers have already seen all come in as
a `Draft` and leave as a `Verdict`; which tokens are kept is decided in verification.py and
trees.py. After it the target's cache holds the kept path as a plain sequence.

Shapes: b rows, K drafted tokens of the longest draft (N nodes of the largest tree), V vocabulary.
"""

from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_runtime.draft import Draft
from specdec_runtime.model import Cache, CausalModel, ModelOutput, right_padded
from specdec_runtime.sampling import NO_TOKEN, Sampler
from specdec_runtime.tree_drafting import tree_inputs
from specdec_runtime.trees import DraftTree, verify_tree
from specdec_runtime.verification import (
    verify_block,
    verify_greedy,
    verify_speculative,
)


class Rule(Enum):
    """How sampled chains are verified; greedy rows are compared, whatever the rule."""

    speculative = "speculative"  # token by token
    block = "block"  # the whole chain at once: never fewer tokens in expectation

    @classmethod
    def _missing_(cls, value: object) -> "Rule":
        names = " or ".join(rule.value for rule in cls)
        raise ValueError(f"rule is {value!r}, expected {names}")


class Verdict(NamedTuple):
    """What becomes of one round's drafts, row by row, on the host."""

    kept: list[list[int]]
    next_tokens: list[int]  # recovered, bonus, or plainly the target's; NO_TOKEN: none is allowed
    num_drafted: list[int]  # of a tree: its depth
    features: dict[int, Tensor]  # layer -> [b, F, D]; of row i the first len(kept[i]) + 1 count


class Verifier:
    """The target's side of a decoding.

    Args:
        most: largest number of tokens that one round may submit.
        hidden_layers: which hidden states of the target the drafter reads.
    """

    def __init__(
        self,
        model: CausalModel,
        cache: Cache,
        sampler: Sampler,
        *,
        rule: Rule,
        most: int,
        hidden_layers: tuple[int, ...],
    ) -> None:
        self._model = model
        self._cache = cache
        self._sampler = sampler
        self._rule = rule
        self._most = most
        self._hidden_layers = hidden_layers
        # Of chains: where the largest logit is all that counts, the others are left out.
        is_plain = sampler.is_plain_greedy
        self._scores: dict[str, Any] = {
            "logits": not is_plain,
            "likeliest_of": sampler.vocab_size if is_plain else None,
        }

    def prefill(self, rows: list[int], prompts: list[list[int]]) -> Verdict:
        """Read the prompts; the first token of every row."""
        new = right_padded(prompts)
        output = self._model.forward(
            new.token_ids,
            self._cache,
            num_new=new.num_new,
            rows=rows,
            last_only=True,
            hidden_layers=self._hidden_layers,
            **self._scores,
        )
        tokens = self._first_tokens(output, rows, prompts).tolist()  # waits
        kept, tokens = self._up_to_impossible([[] for _ in rows], tokens, width=1)
        return Verdict(kept, tokens, [0] * len(rows), output.hidden)

    def verify(self, rows: list[int], committed: list[list[int]], draft: Draft) -> Verdict:
        """Score pending tokens and drafts in one pass and judge them.

        Args:
            committed: all final tokens per row; the last one is pending.
        """
        if draft.tree is not None:
            return self._verify_trees(rows, committed, draft, draft.tree)
        return self._verify_chains(rows, committed, draft)

    def _verify_chains(self, rows: list[int], committed: list[list[int]], draft: Draft) -> Verdict:
        token_ids = torch.tensor([[tokens[-1]] for tokens in committed])
        if draft.token_ids.shape[1]:
            token_ids = torch.cat([token_ids.to(draft.token_ids.device), draft.token_ids], dim=1)
        output = self._model.forward(
            token_ids,
            self._cache,
            num_new=draft.num_drafted + 1,
            rows=rows,
            hidden_layers=self._hidden_layers,
            layers=self._layers_left(draft),
            hidden_in=draft.exit_hidden,
            **self._scores,
        )
        judge = self._judge_greedily if self._sampler.all_greedy else self._judge_by_rule
        kept, following = judge(rows, committed, draft, output)
        return Verdict(kept, following, draft.num_drafted.tolist(), output.hidden)

    def _judge_greedily(
        self, rows: list[int], committed: list[list[int]], draft: Draft, output: ModelOutput
    ) -> tuple[list[list[int]], list[int]]:
        """The drafts that each row keeps and the token behind them, on the host."""
        chosen = self._choices(rows, committed, draft, output).tolist()  # the round's one wait
        drafted, counts = draft.token_ids.tolist(), draft.num_drafted.tolist()
        kept, following = [], []
        for choice, tokens, count in zip(chosen, drafted, counts, strict=True):
            num_accepted = verify_greedy(tokens[:count], choice)
            kept.append(tokens[:num_accepted])
            following.append(choice[num_accepted])
        return self._up_to_impossible(kept, following, width=draft.token_ids.shape[1] + 1)

    def _choices(
        self, rows: list[int], committed: list[list[int]], draft: Draft, output: ModelOutput
    ) -> Tensor:
        """[b, K + 1] the target's token behind the pending one and behind every draft."""
        if output.likeliest is not None:
            return output.likeliest
        assert output.logits is not None
        every, histories = self._contexts(rows, committed, draft)
        choices = self._sampler.argmax(output.logits.flatten(0, 1), every, histories)
        return choices.view(output.logits.shape[:2])

    def _judge_by_rule(
        self, rows: list[int], committed: list[list[int]], draft: Draft, output: ModelOutput
    ) -> tuple[list[list[int]], list[int]]:
        """As `_judge_greedily`, where any row samples."""
        logits = output.logits
        assert logits is not None
        num_rows, width, _ = logits.shape  # width = K + 1
        device, draft_ids = logits.device, draft.token_ids.to(logits.device)
        every, histories = self._contexts(rows, committed, draft)
        probs = self._sampler.probs(logits.flatten(0, 1), every, histories)
        verify = verify_block if self._rule is Rule.block else verify_speculative
        verdict = verify(
            draft_ids,
            None if draft.probs is None else draft.probs.to(device),
            probs.view(num_rows, width, -1),
            draft.num_drafted.to(device),
            self._uniforms(rows, width).to(device),
        )
        columns = [verdict.num_accepted[:, None], verdict.next_token_ids[:, None], draft_ids]
        table = torch.cat(columns, dim=1).tolist()  # the round's one wait for the device
        kept = [line[2 : 2 + line[0]] for line in table]
        return self._up_to_impossible(kept, [line[1] for line in table], width)

    def _contexts(
        self, rows: list[int], committed: list[list[int]], draft: Draft
    ) -> tuple[list[int], list[list[int]] | None]:
        """Of every position of every row: its row, and the tokens in front of what it chooses."""
        width = draft.token_ids.shape[1] + 1
        every = [row for row in rows for _ in range(width)]
        if not self._sampler.needs_history:
            return every, None
        drafted = draft.token_ids.tolist()
        return every, [
            [*tokens, *drafted[i][:position]]
            for i, tokens in enumerate(committed)
            for position in range(width)
        ]

    def _verify_trees(
        self, rows: list[int], committed: list[list[int]], draft: Draft, tree: DraftTree
    ) -> Verdict:
        starts = [len(tokens) - 1 for tokens in committed]
        inputs = tree_inputs([tokens[-1] for tokens in committed], tree)
        output = self._model.forward(
            inputs.token_ids,
            self._cache,
            num_new=inputs.num_new,
            rows=rows,
            positions=torch.tensor(starts)[:, None] + inputs.depths.cpu(),
            visible=inputs.visible,
            hidden_layers=self._hidden_layers,
            layers=self._layers_left(draft),
            hidden_in=draft.exit_hidden,
        )
        logits = output.logits
        assert logits is not None
        num_rows, width, _ = logits.shape  # width = N + 1
        every = [row for row in rows for _ in range(width)]
        histories = _tree_histories(committed, tree) if self._sampler.needs_history else None
        probs = self._sampler.probs(logits.flatten(0, 1), every, histories)
        placed = DraftTree(*(part.to(logits.device) for part in tree))
        verdict = verify_tree(
            placed,
            None if draft.probs is None else draft.probs.to(logits.device),
            probs.view(num_rows, width, -1),
            self._uniforms(rows, width).to(logits.device),
        )
        counts, paths = verdict.num_accepted.tolist(), verdict.path.tolist()
        kept_nodes = [line[:count] for line, count in zip(paths, counts, strict=True)]
        for row, start, nodes in zip(rows, starts, kept_nodes, strict=True):
            self._cache.keep_path(row, start, [start, *(start + 1 + node for node in nodes)])
        token_ids = tree.token_ids.tolist()
        kept = [[token_ids[i][node] for node in nodes] for i, nodes in enumerate(kept_nodes)]
        kept, following = self._up_to_impossible(
            kept, verdict.next_token_ids.tolist(), width, kept_nodes
        )
        return Verdict(
            kept,
            following,
            inputs.depths.amax(dim=1).tolist(),
            {k: _along(hidden, kept_nodes) for k, hidden in output.hidden.items()},
        )

    def _layers_left(self, draft: Draft) -> tuple[int, int] | None:
        """The layers that have not seen the draft yet; None = all."""
        return None if draft.exit_layer is None else (draft.exit_layer, self._model.num_layers)

    def _first_tokens(
        self, output: ModelOutput, rows: list[int], prompts: list[list[int]]
    ) -> Tensor:
        """[b] what follows the prompts."""
        if output.likeliest is not None:
            return output.likeliest[:, 0]
        assert output.logits is not None
        logits = output.logits[:, 0]
        histories = prompts if self._sampler.needs_history else None
        if self._sampler.all_greedy:
            return self._sampler.argmax(logits, rows, histories)
        nothing = torch.zeros(len(rows), 0, dtype=torch.int64, device=logits.device)
        probs = self._sampler.probs(logits, rows, histories)
        uniforms = self._uniforms(rows, 1).to(logits.device)
        none = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        return verify_speculative(nothing, None, probs[:, None], none, uniforms).next_token_ids

    def _up_to_impossible(
        self,
        kept: list[list[int]],
        following: list[int],
        width: int,
        nodes: list[list[int]] | None = None,
    ) -> tuple[list[list[int]], list[int]]:
        """The same up to the first place where the settings forbid every token, NO_TOKEN there.

        Args:
            width: places of a row in the sampler's last call, that of the pending token first.
            nodes: of the kept tokens of a tree; None = a chain.
        """
        if not self._sampler.impossible:
            return kept, following
        for row, tokens in enumerate(kept):
            path = range(len(tokens)) if nodes is None else nodes[row]
            for count, place in enumerate((0, *(node + 1 for node in path))):
                if row * width + place in self._sampler.impossible:
                    kept[row], following[row] = tokens[:count], NO_TOKEN
                    break
        return kept, following

    def _uniforms(self, rows: list[int], width: int) -> Tensor:
        """[b, width] noise for one verification.

        Every round takes the same amount from every row's stream, so that a row's text does not
        depend on how much the others have drafted.
        """
        noise = self._sampler.verify_uniforms(rows, self._most + 1)
        return torch.cat([noise[:, : width - 1], noise[:, -1:]], dim=1)


def _tree_histories(committed: list[list[int]], tree: DraftTree) -> list[list[int]]:
    """The tokens in front of what follows each root and node, row by row, padding included."""
    histories = []
    for tokens, ids, parents in zip(
        committed, tree.token_ids.tolist(), tree.parents.tolist(), strict=True
    ):
        paths = [list(tokens)]
        for token, parent in zip(ids, parents, strict=True):
            paths.append([*paths[parent + 1], token])
        histories += paths
    return histories


def _along(hidden: Tensor, kept_nodes: list[list[int]]) -> Tensor:
    """[b, F, D]: the states of the pending token and the kept nodes, in text order."""
    width = 1 + max(map(len, kept_nodes))
    columns = [
        [0, *(node + 1 for node in nodes), *[0] * (width - 1 - len(nodes))] for nodes in kept_nodes
    ]
    index = torch.tensor(columns, device=hidden.device)
    return hidden.gather(1, index[:, :, None].expand(-1, -1, hidden.shape[-1]))
