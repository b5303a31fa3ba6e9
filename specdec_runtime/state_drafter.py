"""What drafters share that are a small network on the target's hidden states.

The loop hands the states over with every call of `propose`; `HandedOver` keeps them until the
network reads them.

Shapes: b rows, F states of a row, A layers of the target, D hidden size, n rows of a network's head.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PretrainedConfig

from specdec_runtime.draft_vocabulary import DraftVocabulary
from specdec_runtime.engines import Engine, make_model
from specdec_runtime.formats import read_draft_vocab
from specdec_runtime.model import CausalModel
from specdec_runtime.sampling import Sampler
from specdec_runtime.target import Target


class StateDrafter:
    """A network, and the engine that runs its layer. Each kind says how to `begin` a session.

    Args:
        network: its weights are copied where the C++ engine runs it; see `refresh`.
        draft_vocab: [n] int64, the target id of each row of its head; None = row i is id i.
        temperature: replaces the temperature of rows that sample, while drafting.

    Raises:
        ValueError: if the draft vocabulary does not fit the head.
    """

    kind: str  # a module of specdec_runtime.drafters

    def __init__(
        self,
        network: Any,
        *,
        draft_vocab: Tensor | None = None,
        temperature: float | None = None,
        engine: Engine | str = Engine.auto,
    ) -> None:
        rows = network.lm_head.out_features
        if draft_vocab is not None and len(draft_vocab) != rows:
            raise ValueError(
                f"the draft vocabulary names {len(draft_vocab)} tokens, the head has {rows} rows: "
                "expected one row a token"
            )
        self.network = network
        self.draft_vocab = draft_vocab
        self.temperature = temperature
        self.hidden_layers: tuple[int, ...] = tuple(network.config.eagle_aux_hidden_state_layer_ids)
        self.max_positions: int | None = network.config.max_position_embeddings
        self._engine = engine
        self.refresh()

    def refresh(self) -> None:
        """Take over the weights that the network has now; between `generate` calls only."""
        self.model: CausalModel = make_model(
            self.network, engine=self._engine, head_token_ids=self.draft_vocab
        )

    @classmethod
    def of_folder(
        cls,
        folder: str | Path | None,
        target: Target,
        *,
        load_network: Callable[..., Any],
        engine: Engine | str,
        settings: dict[str, Any],
    ) -> Self:
        """The drafter in `folder`. Settings: `temperature`.

        Raises:
            ValueError: if there is none, or it reads states of another size than the target's.
        """
        if folder is None:
            raise ValueError(
                f"{cls.kind} needs a folder with the drafter's weights: give {cls.kind}:FOLDER"
            )
        network = load_network(folder, device=target.model.device)
        _require_states_of(network.config, folder, target)
        return cls(
            network,
            draft_vocab=read_draft_vocab(folder),
            temperature=settings.get("temperature"),
            engine=engine,
        )


class StateSession:
    """One batch: the layer's cache, and the states that it has not been fed yet."""

    def __init__(
        self, drafter: StateDrafter, batch_size: int, capacity: int, sampler: Sampler
    ) -> None:
        self.cache = drafter.model.new_cache(batch_size, capacity)
        self._drafter: Any = drafter
        self._model = drafter.model
        self._sampler = sampler
        self._vocab = DraftVocabulary(drafter.draft_vocab, drafter.model, sampler.vocab_size)
        self._states = HandedOver(batch_size, drafter.hidden_layers)


class HandedOver:
    """What the target has handed over for each row of one batch.

    Args:
        layers: of the target, whose states are laid side by side.
    """

    def __init__(self, batch_size: int, layers: Sequence[int]) -> None:
        self._layers = layers
        self._waiting: list[list[Tensor]] = [[] for _ in range(batch_size)]  # each [F, A * D]
        self._count = [0] * batch_size  # states of each row so far

    def take(
        self, rows: list[int], committed: list[list[int]], features: dict[int, Tensor] | None
    ) -> None:
        """Keeps what came with a call of `DraftSession.propose`."""
        assert features, "the loop hands over the hidden layers that a drafter names"
        states = torch.cat([features[k] for k in self._layers], dim=-1)
        for member, (row, tokens) in enumerate(zip(rows, committed, strict=True)):
            count = len(tokens) - 1 - self._count[row]
            self._waiting[row].append(states[member, :count])
            self._count[row] += count

    def num_read(self, row: int) -> int:
        """States of a row that its drafter has read."""
        return self._count[row] - sum(map(len, self._waiting[row]))

    def read(self, row: int) -> Tensor:
        """[F, A * D] those that it has not read yet; from now on it has."""
        waiting, self._waiting[row] = self._waiting[row], []
        return waiting[0] if len(waiting) == 1 else torch.cat(waiting)


def _require_states_of(config: PretrainedConfig, folder: str | Path, target: Target) -> None:
    """Compares what a drafter reads with what a target has."""
    wanted, found = config.target_hidden_size, target.model.hidden_size
    deepest = config.eagle_aux_hidden_state_layer_ids[-1]
    if wanted != found or deepest > target.model.num_layers:
        raise ValueError(
            f"{folder} reads states of size {wanted}, the deepest after {deepest} layers; "
            f"{target.name} has {found} and {target.model.num_layers}: "
            "expected a drafter trained for this target"
        )
