"""What our runtime expects along texts that an engine drew: its acceptance without a second draw.

Two draws at T > 0 are two texts, and acceptance depends on the text: beside our own draw an engine's
figure would say little. Along the engine's own text ours is known. An engine that drafts its likeliest
tokens kept a draft exactly where the text goes on with it, so its counts are a function of its text. Of
one that draws its drafts too, mean and variance of the number kept follow from both distributions
(eval/sampled_replay.py). What is left is whether the text is the target's: drawn_text.py, and here how
often it has the drafter's likeliest token, which is what acceptance hangs on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.sampled_replay import (
    ExpectedCounts,
    accepted_variance,
    expected_counts,
    keeps,
    token_survival,
)
from eval.target_texts import Answer, TargetStates, target_scores
from eval.text_drafts import ScoredDrafter, read_along
from specdec_runtime.target import Target
from train.export.drawn_text import DrawnText


@dataclass(frozen=True)
class Expected:
    """Counts to be expected of each text.

    chance: standard error that the engine's draws leave in the number of accepted tokens of all texts;
    0 where it drafts its likeliest tokens.
    """

    rows: list[ExpectedCounts]
    chance: float


def expected_along(
    target: Target,
    drafter: ScoredDrafter,
    answers: Sequence[Answer],
    *,
    temperature: float,
    num_draft_tokens: int,
) -> Expected:
    """Acceptance of verification token by token, as engines do it, along texts drawn at a temperature.

    Args:
        drafter: at temperature 0 if the engine drafts its likeliest tokens.
    """
    states = TargetStates(target, drafter.hidden_layers)
    rows, variance = [], 0.0
    for answer in answers:
        kept = keeps(
            states,
            drafter,
            answer,
            target_scores(states, answer, temperature=temperature).log_probs,
            temperature=temperature,
            max_draft_tokens=num_draft_tokens,
            survive=token_survival,
        )
        rows.append(expected_counts(answer, kept, num_draft_tokens))
        variance += accepted_variance(answer, kept, num_draft_tokens)
    return Expected(rows, variance**0.5)


@torch.inference_mode()
def likeliest_drafts(
    target: Target, drafter: ScoredDrafter, answers: Sequence[Answer], *, temperature: float
) -> DrawnText:
    """How often texts go on with the drafter's likeliest token, and how often the target's draws do.

    Raises:
        ValueError: no text has two tokens.
    """
    states = TargetStates(target, drafter.hidden_layers)
    moments = [_moments(states, drafter, answer, temperature) for answer in answers]
    return DrawnText.of_moments("its likeliest draft", torch.cat(moments))


def _moments(
    states: TargetStates, drafter: ScoredDrafter, answer: Answer, temperature: float
) -> Tensor:
    """[n - 1, 3] of each token but the first: is it the draft, the chance of that, its variance."""
    _, drafted = read_along(
        states,
        drafter,
        answer,
        lambda logits, _: logits.argmax(-1).tolist(),
        goes_on=lambda _: False,
        max_draft_tokens=1,
    )
    drafts = torch.tensor([one[0] for one in drafted if one], dtype=torch.int64)
    if not len(drafts):
        return torch.zeros(0, 3, dtype=torch.float64)
    logits = states.target.model.logits_of(states.head_input(answer)[: len(drafts)]).double()
    logits = logits[:, : states.target.real_vocab_size] / temperature
    chance = logits.softmax(-1).gather(-1, drafts[:, None])[:, 0]
    is_drafted = torch.tensor(answer.token_ids[1 : len(drafts) + 1]) == drafts
    return torch.stack([is_drafted.double(), chance, chance * (1 - chance)], dim=-1)
