"""Batches that the runtime itself makes: the drafter proposes, the target verifies, both are learnt from.

A text decoded speculatively is one that the target could have written, so its tokens are learnt from
as any answer's (forward KL or LK). What the drafter proposed from the first rejection on is not in it:
those drafts are replayed, each behind the text that it was proposed after, and there the drafter
learns to let go of what the target would not say (reverse KL, weights decaying behind the
rejection). The target scores both as they are, drafted tokens included.

Source: Draft-OPD, arXiv:2605.29343: mean forward KL on accepted tokens + sum decay^k reverse KL / sum
decay^k on rejected ones; DistillSpec, arXiv:2310.08461, for learning on the draft's own samples.

Which micro-batches are made here, and from which weights, is a function of their number; so a run
that is stopped and continued sees the same ones.

Shapes: B rows, N loss positions, K drafted tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from distill.batches import Batch, Example, collate
from distill.live_signals import with_live_states
from distill.losses import LossConfig, LossName
from distill.objective import Objective, Terms
from distill.position_weights import mean_one
from distill.recipe import RefreshableDrafter
from distill.signals import NoSignal
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.draft import Draft, DraftSession, TargetSharing
from specdec_runtime.draft_length import LengthRound
from specdec_runtime.model import Cache, CausalModel
from specdec_runtime.sampling import Sampler
from specdec_runtime.target import Target

# Drafters whose objective needs a text alone, whoever wrote it.
ON_POLICY_KINDS = ("causal_lm", "early_exit")


@dataclass(kw_only=True)
class OnPolicyConfig:
    """on_policy.*

    fraction: of the micro-batches that the runtime makes; 0 = none.
    refresh_every: optimizer steps after which it proposes with the weights of then.
    num_draft_tokens, temperature, max_new_tokens: of its decoding.
    num_prompts: of a micro-batch; those of the answers that it takes the place of.
    replays: rounds of a micro-batch that are replayed, at most; each costs its whole prefix.
    replay_weight: of their mean loss next to that of the text.
    decay: of a replayed position's weight towards the next.
    """

    fraction: float = 0.0
    refresh_every: int = 50
    num_draft_tokens: int = 4
    temperature: float = 1.0
    max_new_tokens: int = 64
    num_prompts: int = 8
    replays: int = 8
    replay_weight: float = 1.0
    decay: float = 0.8

    def __post_init__(self) -> None:
        for name in ("fraction", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"on_policy.{name} must lie between 0 and 1, got {getattr(self, name)}"
                )
        for name in ("refresh_every", "num_draft_tokens", "max_new_tokens", "num_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"on_policy.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("temperature", "replays", "replay_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"on_policy.{name} must be 0 or more, got {getattr(self, name)}")


def is_on_policy(number: int, fraction: float) -> bool:
    """Whether micro-batch `number` comes from the runtime: evenly spread, the first ones do not."""
    return int((number + 1) * fraction) > int(number * fraction)


class Proposer:
    """The runtime's drafter with weights of some earlier step.

    Args:
        module: a copy of the drafter's, not trained.
        drafter: of the runtime, around that copy.
    """

    def __init__(self, module: nn.Module, drafter: RefreshableDrafter) -> None:
        self._module, self.drafter = module, drafter
        self.step: int | None = None  # of which the weights are

    def take(self, trained: nn.Module, step: int) -> None:
        """Propose with the weights that `trained` has now."""
        self._module.load_state_dict(trained.state_dict())
        self.drafter.refresh()
        self.step = step

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint has to hold: the weights that are trained."""
        trained = {name for name, p in self._module.named_parameters() if p.requires_grad}
        return {k: v for k, v in self._module.state_dict().items() if k in trained}

    def restore(self, tensors: dict[str, Tensor], step: int) -> None:
        """Continue with weights from a checkpoint."""
        with torch.no_grad():
            for name, tensor in tensors.items():
                self._module.get_parameter(name).copy_(tensor)
        self.drafter.refresh()
        self.step = step


class OnPolicyStream:
    """Micro-batches by number, a fraction of them made by the runtime.

    Args:
        stream: number -> batch of answers; the prompts come from there.
        prompts_of: number -> the examples of that batch.
        trained: the drafter under training, at the step of the number that is asked for.
        per_step: micro-batches of an optimizer step, over all processes.
        seed: of the noise.
    """

    def __init__(
        self,
        stream: Callable[[int], Batch],
        prompts_of: Callable[[int], Sequence[Example]],
        *,
        target: Target,
        proposer: Proposer,
        trained: nn.Module,
        config: OnPolicyConfig,
        per_step: int,
        seed: int,
    ) -> None:
        self._stream, self._prompts_of = stream, prompts_of
        self._target, self._proposer, self._trained = target, proposer, trained
        self._config, self._per_step, self._seed = config, per_step, seed

    def __call__(self, number: int) -> Batch:
        step = number // self._per_step
        due = step - step % self._config.refresh_every
        if step == due and self._proposer.step != step:
            self._proposer.take(self._trained, step)
        if not is_on_policy(number, self._config.fraction):
            return self._stream(number)
        assert self._proposer.step == due, (self._proposer.step, due)
        prompts = self._prompts_of(number)[: self._config.num_prompts]
        return rollout(
            self._target,
            self._proposer.drafter,
            [example.token_ids[: example.prompt_length].tolist() for example in prompts],
            self._config,
            seed=self._seed * 1_000_003 + number,
        )


def rollout(
    target: Target,
    drafter: RefreshableDrafter,
    prompts: Sequence[list[int]],
    config: OnPolicyConfig,
    *,
    seed: int,
) -> Batch:
    """One micro-batch: the decoded texts, and in `replay` the refused drafts."""
    recorder = _Recorder(drafter)
    generation = SpeculativeDecoder(
        target, recorder, num_draft_tokens=config.num_draft_tokens
    ).generate(
        prompts,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        seed=[seed + row for row in range(len(prompts))],
    )
    texts = [[*p, *new] for p, new in zip(prompts, generation.token_ids, strict=True)]
    answers = [
        _example(f"rollout-{seed}-{row}", text, len(prompt))
        for row, (text, prompt) in enumerate(zip(texts, prompts, strict=True))
    ]
    refused = refusals(recorder.proposals, texts)
    chosen = _spread(refused, config.replays)
    replays = [
        _example(f"replay-{seed}-{i}", one.token_ids, one.first_refused)
        for i, one in enumerate(chosen)
    ]
    examples = [*answers, *replays]
    total = sum(example.num_tokens for example in examples)
    scored = with_live_states(target, examples, max_positions=total)
    batch = collate(scored[: len(answers)])
    if not replays:
        return batch
    weights = [config.decay ** torch.arange(example.num_tokens) for example in replays]
    again = replace(collate(scored[len(answers) :]), weights=mean_one(torch.cat(weights)))
    return replace(batch, replay=again)


class Refusal(NamedTuple):
    """A draft that was refused: the text in front of it with all of its tokens."""

    token_ids: list[int]
    first_refused: int  # index of the first token that the target did not keep


class Proposal(NamedTuple):
    """A draft as it was made: which row of the batch, behind how many tokens, and what."""

    row: int
    start: int
    token_ids: list[int]


def refusals(proposals: Sequence[Proposal], texts: Sequence[Sequence[int]]) -> list[Refusal]:
    """The drafts that do not go on as the text does; what is drafted past its end is not judged."""
    found = []
    for row, start, drafted in proposals:
        text = texts[row]
        wrong = next(
            (i for i, token in enumerate(drafted[: len(text) - start]) if token != text[start + i]),
            None,
        )
        if wrong is not None:
            found.append(Refusal([*text[:start], *drafted], start + wrong))
    return found


def with_replay(base: Objective, replay: Objective, weight: float) -> Objective:
    """The objective `base`, and where a batch has refused drafts also `replay` on those.

    Args:
        weight: of the mean loss over replayed positions next to the mean over the others.
    """

    def terms(module: nn.Module, batch: Batch) -> Terms:
        found = base(module, batch)
        nothing = torch.zeros((), device=found.loss_sum.device)
        overlap = (nothing, nothing)  # every batch counts the same names
        loss_sum = found.loss_sum
        if batch.replay is not None:
            again = replay(module, batch.replay)
            scale = weight * found.num_tokens / again.num_tokens
            loss_sum = loss_sum + scale * again.loss_sum
            overlap = again.counts["overlap"]
        return Terms(loss_sum, found.num_tokens, found.counts | {"replayed_overlap": overlap})

    return terms


def replay_loss(loss: LossConfig) -> LossConfig:
    """What refused drafts are learnt with: the reverse KL, with the weights that their batch has."""
    return LossConfig(
        name=LossName.reverse_kl, temperature=loss.temperature, chunk_tokens=loss.chunk_tokens
    )


def _example(name: str, token_ids: list[int], prompt_length: int) -> Example:
    count = len(token_ids) - prompt_length
    return Example(name, torch.tensor(token_ids), prompt_length, NoSignal(count))


def _spread(items: Sequence[Refusal], count: int) -> list[Refusal]:
    """At most `count` of them, evenly spread."""
    if len(items) <= count:
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


class _Recorder:
    """A drafter that notes what it drafted."""

    def __init__(self, drafter: RefreshableDrafter) -> None:
        self._drafter = drafter
        self.hidden_layers = drafter.hidden_layers
        self.max_positions = drafter.max_positions
        self.proposals: list[Proposal] = []

    def begin(self, batch_size: int, capacity: int, sampler: Sampler) -> "_RecordingSession":
        session = self._drafter.begin(batch_size, capacity, sampler)
        if isinstance(session, TargetSharing):
            return _SharingSession(session, self.proposals)
        return _RecordingSession(session, self.proposals)


class _RecordingSession:
    def __init__(self, session: DraftSession, proposals: list[Proposal]) -> None:
        self._session, self._proposals = session, proposals

    def propose(
        self,
        rows: list[int],
        committed: list[list[int]],
        lengths: LengthRound,
        features: dict[int, Tensor] | None = None,
    ) -> Draft:
        draft = self._session.propose(rows, committed, lengths, features)
        drafted = draft.token_ids.tolist()
        for i, count in enumerate(draft.num_drafted.tolist()):
            if count:
                start = len(committed[i])
                self._proposals.append(Proposal(rows[i], start, drafted[i][:count]))
        return draft

    def commit(self, rows: list[int], committed: list[list[int]]) -> None:
        self._session.commit(rows, committed)


class _SharingSession(_RecordingSession):
    """Of a drafter that works on the target's own cache."""

    def share(self, model: CausalModel, cache: Cache) -> None:
        assert isinstance(self._session, TargetSharing)
        self._session.share(model, cache)
