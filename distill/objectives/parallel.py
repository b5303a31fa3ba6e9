"""How a parallel drafter is made from its target, and what it is trained on.

Made so that it is of use before the first step (`parallel_start.py`), then trained on the target's
distribution at every answer token, at each place of the blocks that reach it (`parallel_blocks.py`).
Frozen: the embeddings, which are the target's, the head, and the second half of the low-rank table,
which is a part of the head; of the table, each token's own row is trained.

Beside that the confidence head learns the overlap at every place. It reads the states as they are:
what it learns does not change what is drafted.

Shapes: N loss positions, D hidden size, n draft vocabulary, R rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distill.batches import Batch, Example
from distill.drafted_steps import drafted_terms, loss_places
from distill.losses import TARGET_FREE, LossConfig
from distill.objective import Objective, Terms
from distill.parallel_blocks import block_states
from distill.parallel_start import solve_start
from distill.recipe import TargetParts
from distill.signals import TargetHead
from distill.state_recipe import StateRecipe, StateSettings, head_dim_of, take_target_ends
from distill.weighing import PerPosition
from specdec_runtime.drafters.parallel import ParallelDrafter
from specdec_runtime.engines import Engine
from specdec_runtime.parallel_network import ParallelNetwork, load_parallel, parallel_config


@dataclass(kw_only=True)
class ParallelSettings(StateSettings):
    """draft.* of a parallel drafter, beside `StateSettings`.

    steps: places of a block that training scores; a longer block may be drafted.
    context_heads: beside those that the start needs.
    markov_rank: of what a drafted token adds to the scores behind it.
    """

    kind: str = "parallel"
    steps: int = 3
    markov_rank: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_at_least(markov_rank=1)


SETTINGS = ParallelSettings


def make(settings: ParallelSettings, parts: TargetParts) -> "ParallelRecipe":
    """A drafter for this target; its embeddings and the rows of its head are the target's."""
    target = parts.module.config
    head_dim = head_dim_of(target)
    task_heads = max(4, 4 * target.hidden_size // (3 * head_dim))
    config = parallel_config(
        target,
        layer_ids=settings.feature_layers(target.num_hidden_layers),
        draft_vocab_size=len(parts.vocab),
        num_heads=task_heads + settings.context_heads,
        head_dim=head_dim,
        intermediate_size=settings.intermediate_size or target.intermediate_size,
        markov_rank=min(settings.markov_rank, target.hidden_size),
        block_size=settings.steps,
    )
    network = ParallelNetwork(config).float()
    take_target_ends(network, parts)
    network.markov_w2.requires_grad_(False)
    if settings.solve_start:
        attention = network.layer.self_attn
        for fixed in (attention.q_norm, attention.k_norm):
            fixed.requires_grad_(False)
        for partly in (attention.q_proj, attention.k_proj):
            partly.requires_grad_(settings.context_heads > 0)
    return ParallelRecipe(settings, parts, network)


class ParallelRecipe(StateRecipe):
    """A parallel drafter under training; see `distill.recipe.Recipe`."""

    def _solve(self, examples: Sequence[Example]) -> None:
        settings = self._settings
        solve_start(
            self.module, examples, context_heads=settings.context_heads, steps=settings.steps
        )

    def _load(self, folder: str) -> ParallelNetwork:
        return load_parallel(folder)

    def _objective(self, target_head: TargetHead, loss: LossConfig) -> Objective:
        return objective(self._settings, target_head, loss)

    def drafter(self, *, engine: Engine) -> ParallelDrafter:
        return ParallelDrafter(self.module, draft_vocab=self._draft_rows, engine=engine)

    def compile(self) -> None:
        self.module.layer.mlp.compile(dynamic=True)


def objective(settings: ParallelSettings, target_head: TargetHead, config: LossConfig) -> Objective:
    """The weighted losses of all places, see `drafted_terms`, and the confidence head's."""

    def terms(module: nn.Module, batch: Batch) -> Terms:
        assert isinstance(module, ParallelNetwork)
        steps = place_states(module, batch, settings)
        head = torch.cat([module.lm_head.weight, module.markov_w2.weight], dim=1)
        found_at: list[PerPosition] = []
        found = drafted_terms(
            steps,
            head,
            target_head,
            batch,
            config,
            decay=settings.step_decay,
            found_at=found_at,
        )
        is_greedy = config.name in TARGET_FREE  # only agreement is known then
        kept = torch.cat([at.agrees.float() if is_greedy else at.overlap for at in found_at])
        guessed = module.confidence(torch.cat(steps).detach()).squeeze(-1)
        missed = F.binary_cross_entropy_with_logits(guessed, kept, reduction="sum") / len(steps)
        total = torch.full_like(kept[0], len(kept))
        counts = {**found.counts, "confidence": (guessed.detach().sigmoid().sum(), total)}
        return Terms(found.loss_sum + missed, found.num_tokens, counts)

    return terms


def place_states(
    network: ParallelNetwork, batch: Batch, settings: ParallelSettings
) -> list[Tensor]:
    """[N, D + R] for each place of a block: what the head beside the low-rank table reads where the
    loss positions' tokens are drafted there.

    The token behind position q is drafted at place k by the block that begins at q - k; the tokens
    drafted before are the text's.

    Raises:
        ValueError: if the features are missing, or a prompt is too short for so many places.
    """
    rows, places = loss_places(batch, settings.steps - 1)
    assert batch.features is not None
    codes = network.markov_w1(batch.token_ids[rows, places])
    solved = network.config.num_attention_heads - settings.context_heads
    blocks = block_states(
        network,
        batch.token_ids,
        batch.features,
        rows,
        places,
        settings.steps,
        fixed_heads=solved if settings.solve_start else 0,
    )
    return [torch.cat([states, codes.to(states.dtype)], dim=-1) for states in blocks]
