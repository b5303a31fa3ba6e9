"""Looks at both models' distributions along the target's outputs: overlap, traces, weak places.

One pass of the target and one of the drafter over each greedy answer, softmax at temperature 1.
Shapes: n tokens of an answer, V target vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eval.suites import EvalPrompt
from eval.target_texts import HEAD_CHUNK, Answer, TargetStates
from eval.text_drafts import ScoredDrafter, text_drafts
from eval.trace import Top, Trace, TraceRound, TraceToken, WeakPrefix
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.draft import Drafter
from specdec_runtime.results import Generation
from specdec_runtime.target import Target

NUM_TOP = 4  # tokens shown of each distribution
MAX_WEAK = 400  # prefixes written for the next run
MAX_WEAK_OF_PROMPT = 8  # so that one odd prompt does not fill the list
TAIL_TOKENS = 16  # end of a prefix that the report shows


@dataclass(frozen=True)
class TopTokens:
    """The most probable tokens of one position; empty for drafters without distributions."""

    token_ids: list[int]
    probs: list[float]


@dataclass(frozen=True)
class AnswerScores:
    """Per answer token but the first.

    overlap: sum(min(target, draft)). target, draft: their most probable tokens.
    answer_probability: the target's of the token it said.
    """

    overlap: list[float]
    target: list[TopTokens]
    draft: list[TopTokens]
    answer_probability: list[float]


@torch.inference_mode()
def score_answer(states: TargetStates, drafter: ScoredDrafter, answer: Answer) -> AnswerScores:
    """Both distributions along one answer, the drafter's of the first token of a draft that begins
    there; positions that it cannot reach are left out."""
    scores = AnswerScores([], [], [], [])
    if len(answer.token_ids) < 2:
        return scores
    target = states.target
    target_hidden = states.head_input(answer)
    drafts = text_drafts(states, drafter, answer, max_draft_tokens=1)
    count = min(len(target_hidden), drafts.num_places)
    for start in range(0, count, HEAD_CHUNK):
        window = slice(start, min(start + HEAD_CHUNK, count))
        logits = target.model.logits_of(target_hidden[window])
        target_probs = logits[:, : target.real_vocab_size].softmax(-1)
        draft_probs = drafts.first(window).softmax(-1)
        answered = torch.tensor(answer.token_ids[1:])[window, None].to(target_probs.device)
        scores.overlap.extend(torch.minimum(target_probs, draft_probs).sum(-1).tolist())
        scores.answer_probability.extend(target_probs.gather(1, answered)[:, 0].tolist())
        scores.target.extend(_top_tokens(target_probs))
        scores.draft.extend(_top_tokens(draft_probs))
    return scores


def trace_answers(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[EvalPrompt],
    scores: Sequence[AnswerScores] | None,
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    drafter_name: str,
    suite: str,
) -> list[Trace]:
    """Decode each prompt alone and tell the story of its answer.

    Args:
        scores: of the same prompts, in order (and of more behind them); None = no distributions.
    """
    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=num_draft_tokens)
    traces = []
    for index, prompt in enumerate(prompts):
        generation = decoder.generate([prompt.token_ids], max_new_tokens=max_new_tokens)
        score = None if scores is None else scores[index]
        traces.append(
            make_trace(target, prompt, generation, score, drafter=drafter_name, suite=suite)
        )
    return traces


def make_trace(
    target: Target,
    prompt: EvalPrompt,
    generation: Generation,
    scores: AnswerScores | None,
    *,
    drafter: str,
    suite: str,
) -> Trace:
    """The story of one answer decoded at batch size 1."""
    token_ids = generation.token_ids[0]
    tops: list[tuple[Top, Top]] = [([], [])]  # nothing was drafted for the first token
    if scores is not None:
        for a, b in zip(scores.target, scores.draft, strict=True):
            tops.append((_as_text(target, a), _as_text(target, b)))
    tokens = []
    for index, (kind, round_index) in enumerate(_token_kinds(generation)[: len(token_ids)]):
        seen, drafted = tops[index] if index < len(tops) else ([], [])
        tokens.append(
            TraceToken(_text(target, [token_ids[index]]), kind, round_index, seen, drafted)
        )
    rounds = [
        TraceRound(r.drafted[0], r.accepted[0], r.draft_s, r.verify_s, r.other_s)
        for r in generation.rounds
    ]
    return Trace(
        drafter=drafter,
        suite=suite,
        prompt_id=prompt.id,
        prompt=prompt.text,
        tokens=tokens,
        rounds=rounds,
    )


def weak_prefixes(
    target: Target,
    prompts: Sequence[EvalPrompt],
    answers: Sequence[Answer],
    scores: Sequence[AnswerScores],
    *,
    drafter: str,
    suite: str,
) -> list[WeakPrefix]:
    """Places where the draft's top token is not the target's, least overlap first."""
    found = []
    for prompt, answer, score in zip(prompts, answers, scores, strict=True):
        misses = [
            i for i, top in enumerate(score.draft) if top.token_ids[0] != answer.token_ids[i + 1]
        ]
        misses.sort(key=lambda i: score.overlap[i])
        for i in misses[:MAX_WEAK_OF_PROMPT]:
            found.append(_weak_prefix(target, prompt, answer, score, i, drafter, suite))
    found.sort(key=lambda weak: weak.overlap)
    return found[:MAX_WEAK]


def _weak_prefix(
    target: Target,
    prompt: EvalPrompt,
    answer: Answer,
    score: AnswerScores,
    index: int,
    drafter: str,
    suite: str,
) -> WeakPrefix:
    prefix = [*answer.prompt_ids, *answer.token_ids[: index + 1]]
    said, proposed = answer.token_ids[index + 1], score.draft[index].token_ids[0]
    return WeakPrefix(
        drafter=drafter,
        suite=suite,
        prompt_id=prompt.id,
        position=index + 1,
        token_ids=prefix,
        tail=_text(target, prefix[-TAIL_TOKENS:]),
        target_token_id=said,
        target_text=_text(target, [said]),
        draft_token_id=proposed,
        draft_text=_text(target, [proposed]),
        target_probability=score.answer_probability[index],
        overlap=score.overlap[index],
    )


def _token_kinds(generation: Generation) -> list[tuple[str, int]]:
    """(kind, round) of every token of row 0; the round's last may have been cut off at the end."""
    kinds = [("first", -1)]
    for index, one in enumerate(generation.rounds):
        drafted, accepted = one.drafted[0], one.accepted[0]
        last = "plain" if not drafted else "bonus" if accepted == drafted else "corrected"
        kinds += [("accepted", index)] * accepted + [(last, index)]
    return kinds


def _top_tokens(probs: torch.Tensor) -> list[TopTokens]:
    values, ids = probs.topk(min(NUM_TOP, probs.shape[-1]), dim=-1)
    return [TopTokens(i, v) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]


def _as_text(target: Target, top: TopTokens) -> Top:
    return [
        (_text(target, [token]), round(prob, 4))
        for token, prob in zip(top.token_ids, top.probs, strict=True)
    ]


def _text(target: Target, token_ids: Sequence[int]) -> str:
    """Text of tokens, special ones included; ids where the target has no tokenizer."""
    if target.tokenizer is None:
        return " ".join(map(str, token_ids))
    return target.tokenizer.decode(list(token_ids))
