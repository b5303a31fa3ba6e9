"""How an EAGLE-3 drafter is made from its target, and what it is trained on.

Made so that it is of use before the first step (`eagle3_start.py`), then trained on the target's
distribution at every answer token, at each of a few steps of drafting (`eagle3_unroll.py`). Frozen:
the embeddings, which are the target's, and the head unless asked for.

Shapes: B rows, S tokens, N loss positions, D hidden size, n draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from distill.batches import Batch, Example
from distill.drafted_steps import drafted_terms, loss_places
from distill.eagle3_start import solve_start
from distill.eagle3_unroll import Window, unrolled
from distill.losses import LossConfig
from distill.objective import Objective, Terms
from distill.recipe import TargetParts
from distill.signals import TargetHead
from distill.state_recipe import StateRecipe, StateSettings, head_dim_of, take_target_ends
from specdec_runtime.drafters.eagle3 import Eagle3Drafter
from specdec_runtime.eagle3_network import NORMS, Eagle3Network, eagle3_config, load_eagle3
from specdec_runtime.engines import Engine


@dataclass(kw_only=True)
class Eagle3Settings(StateSettings):
    """draft.* of an EAGLE-3 head, beside `StateSettings`.

    norms: eagle3.1, or eagle3 without the norms in front of `fc` and on what is handed on (see
        specdec_runtime/eagle3_network.py): some dimensions of the target's states are hundreds of
        times larger than others, which a common learning rate does not suit.
    train_head: train the rows of the head too.
    """

    kind: str = "eagle3"
    norms: str = "eagle3.1"
    train_head: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norms not in NORMS:
            raise ValueError(f"draft.norms is {self.norms!r}, expected one of {', '.join(NORMS)}")


SETTINGS = Eagle3Settings


def make(settings: Eagle3Settings, parts: TargetParts) -> "Eagle3Recipe":
    """A drafter for this target; its embeddings and the rows of its head are the target's."""
    target = parts.module.config
    head_dim = head_dim_of(target)
    num_heads = max(1, target.hidden_size // head_dim)
    if settings.context_heads >= num_heads:
        raise ValueError(
            f"draft.context_heads is {settings.context_heads}, expected fewer than the drafter's "
            f"{num_heads} heads"
        )
    config = eagle3_config(
        target,
        layer_ids=settings.feature_layers(target.num_hidden_layers),
        draft_vocab_size=len(parts.vocab),
        num_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=settings.intermediate_size or target.intermediate_size,
        norms=settings.norms,
    )
    network = Eagle3Network(config).float()
    take_target_ends(network, parts)
    network.lm_head.requires_grad_(settings.train_head)
    return Eagle3Recipe(settings, parts, network)


class Eagle3Recipe(StateRecipe):
    """An EAGLE-3 drafter under training; see `distill.recipe.Recipe`."""

    def _solve(self, examples: Sequence[Example]) -> None:
        carrying = self.module.config.num_attention_heads - self._settings.context_heads
        solve_start(self.module, examples, carrying)

    def _load(self, folder: str) -> Eagle3Network:
        return load_eagle3(folder)

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
