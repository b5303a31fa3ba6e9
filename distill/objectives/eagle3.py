"""How an EAGLE-3 drafter is made from its target, and what it is trained on.

Made so that it is of use before the first step (`eagle3_start.py`), then trained on the target's
distribution at every answer token, at each of a few steps of drafting (`eagle3_unroll.py`). Frozen:
the embeddings, which are the target's, and the head unless asked for.

Shapes: B rows, S tokens, N loss positions, D hidden size, n draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distill.batches import Batch, Example
from distill.drafted_steps import drafted_terms, loss_places
from distill.eagle3_start import solve_start
from distill.eagle3_unroll import Window, unrolled
from distill.losses import LossConfig
from distill.objective import Objective, Terms
from distill.recipe import DraftSettings, TargetParts
from distill.signals import TargetHead
from distill.state_recipe import StateRecipe
from specdec_runtime.drafters.eagle3 import Eagle3Drafter
from specdec_runtime.eagle3_network import NORMS, Eagle3Network, eagle3_config
from specdec_runtime.engines import Engine


@dataclass(kw_only=True)
class Eagle3Settings(DraftSettings):
    """draft.* of an EAGLE-3 head.

    layer_ids: k of the target's residuals after k layers that the drafter reads; null = the serving
        engines' default, a low, a middle and a high one.
    context_heads: how many of the attention heads are left free of the solved linear map.
    intermediate_size: of its MLP; null = the target's.
    norms: eagle3.1, or eagle3 without the norms in front of `fc` and on what is handed on (see
        specdec_runtime/eagle3_network.py): some dimensions of the target's states are hundreds of
        times larger than others, which a common learning rate does not suit.
    steps: drafted tokens that a training step unrolls.
    step_decay: weight of each step's loss relative to the one before.
    train_head: train the rows of the head too.
    solve_start: start from the solved linear model instead of random numbers.
    """

    kind: str = "eagle3"
    layer_ids: list[int] | None = None
    context_heads: int = 2
    intermediate_size: int | None = None
    norms: str = "eagle3.1"
    steps: int = 2
    step_decay: float = 0.8
    train_head: bool = False
    solve_start: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norms not in NORMS:
            raise ValueError(f"draft.norms is {self.norms!r}, expected one of {', '.join(NORMS)}")
        for name, least in (("steps", 1), ("context_heads", 0)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"draft.{name} must be at least {least}, got {getattr(self, name)}"
                )
        if not 0 < self.step_decay <= 1:
            raise ValueError(f"draft.step_decay must be in (0, 1], got {self.step_decay}")

    def feature_layers(self, num_layers: int) -> tuple[int, ...]:
        return tuple(self.layer_ids or default_layer_ids(num_layers))


SETTINGS = Eagle3Settings


def default_layer_ids(num_layers: int) -> list[int]:
    """2, n // 2, n - 3 as the serving engines have it; for a shallow target what there is of it."""
    return sorted({min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0)})


def make(settings: Eagle3Settings, parts: TargetParts) -> "Eagle3Recipe":
    """A drafter for this target; its embeddings and the rows of its head are the target's."""
    target = parts.module.config
    head_dim = getattr(target, "head_dim", None) or (
        target.hidden_size // target.num_attention_heads
    )
    num_heads = max(1, target.hidden_size // head_dim)
    if settings.context_heads >= num_heads:
        raise ValueError(
            f"draft.context_heads is {settings.context_heads}, expected fewer than the drafter's "
            f"{num_heads} heads"
        )
    layer_ids = settings.feature_layers(target.num_hidden_layers)
    config = eagle3_config(
        target,
        layer_ids=layer_ids,
        draft_vocab_size=len(parts.vocab),
        num_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=settings.intermediate_size or target.intermediate_size,
        norms=settings.norms,
    )
    network = Eagle3Network(config).float()
    with torch.no_grad():
        embeddings = parts.module.get_input_embeddings().weight
        network.model.embed_tokens.weight.copy_(embeddings)
        network.lm_head.weight.copy_(parts.head.kept_weight)
    network.model.embed_tokens.requires_grad_(False)
    network.lm_head.requires_grad_(settings.train_head)
    return Eagle3Recipe(settings, parts, network)


class Eagle3Recipe(StateRecipe):
    """An EAGLE-3 drafter under training; see `distill.recipe.Recipe`."""

    def _solve(self, examples: Sequence[Example]) -> None:
        carrying = self.module.config.num_attention_heads - self._settings.context_heads
        solve_start(self.module, examples, carrying)

    def _objective(self, target_head: TargetHead, loss: LossConfig) -> Objective:
        return objective(self._settings, target_head, loss)

    def drafter(self, *, engine: Engine) -> Eagle3Drafter:
        return Eagle3Drafter(self.module, draft_vocab=self._draft_rows, engine=engine)

    def compile(self) -> None:
        self.module.model.layer.mlp.compile(dynamic=True)


def objective(settings: Eagle3Settings, target_head: TargetHead, config: LossConfig) -> Objective:
    """The weighted losses of all steps; see `drafted_terms`."""

    def terms(module: nn.Module, batch: Batch) -> Terms:
        assert isinstance(module, Eagle3Network)
        steps = step_states(module, batch, settings.steps)
        head, decay = module.lm_head.weight, settings.step_decay
        return drafted_terms(steps, head, target_head, batch, config, decay=decay)

    return terms


def step_states(network: Eagle3Network, batch: Batch, steps: int) -> list[Tensor]:
    """[N, D] for each step: what the head reads where the loss positions' tokens are drafted.

    The token behind position q is scored by entry q - 1, whose draft of s tokens began at q - s.

    Raises:
        ValueError: if the features are missing, or a prompt is too short for so many steps.
    """
    rows, places = loss_places(batch, steps)
    assert batch.features is not None
    window = _window(batch, rows, places, steps)
    entries = places - 1 - window.first[rows]
    return [
        states[rows, entries]
        for states in unrolled(network.model, batch.token_ids, batch.features, steps, window)
    ]


def _window(batch: Batch, rows: Tensor, places: Tensor, steps: int) -> Window:
    """The entries from where each row's first draft began to its last loss position."""
    none = places.new_zeros(len(batch.token_ids))
    first = none.scatter_reduce(0, rows, places - steps, "amin", include_self=False)
    return Window(first, max(end - begin for begin, end in batch.spans) + steps)
