"""What a drafter does on fixed contexts: what it proposes at each, and how the decoder fares with it.

The contexts are the target's own greedy answers to a few fixed prompts, cut at every token; a drafter
of any kind is asked through its session, with the target's states where it reads them. Two
drafters that are the same propose the same everywhere.

Shapes: N contexts, K drafted tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from eval.acceptance import measure_acceptance
from specdec_runtime.draft import Drafter, TargetSharing
from specdec_runtime.draft_length import FixedLength, LengthRound
from specdec_runtime.drafters.early_exit import EarlyExitDrafter
from specdec_runtime.sampling import Sampler
from specdec_runtime.sampling_settings import SamplingSettings
from specdec_runtime.stats import AcceptanceStats
from specdec_runtime.target import Target

NUM_CONTEXTS = 100  # at least so many
ENOUGH = 2 * NUM_CONTEXTS  # further prompts are decoded only
MAX_NEW_TOKENS = 12
_PROMPT_TAIL = 8  # contexts inside each prompt, so that answers of one token still give enough
QUESTIONS = (
    "Why is the sky blue?",
    "Write a function that returns the sum of a list of numbers.",
    "List three fruits and say what each tastes like.",
    "A train leaves at 9:15 and arrives at 11:40. How long does the journey take?",
    "Translate into French: The weather is fine today.",
    "Who wrote Hamlet, and when?",
    "Explain what a hash table is in two sentences.",
    "Continue: Once upon a time, in a village by the sea,",
    "What is 17 * 23?",
    "Summarise: Bees carry pollen from flower to flower and so let plants bear fruit.",
    "Give me a recipe for pancakes.",
    "What are the differences between TCP and UDP?",
)


@dataclass(frozen=True)
class Observation:
    """What one drafter did.

    proposals: per context, the tokens drafted there. texts: per prompt, what was decoded with it.
    rows: per prompt, the acceptance counts. same_text: whether the texts are the plain ones.
    plain: the answers at whose contexts it was asked.
    """

    proposals: list[list[int]]
    texts: list[list[int]]
    rows: list[AcceptanceStats]
    same_text: bool
    plain: list[list[int]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> "Observation":
        rows = [AcceptanceStats(**row) for row in content.pop("rows")]
        return cls(rows=rows, **content)


def fixed_prompts(target: Target, options: dict[str, Any]) -> list[list[int]]:
    """Token ids of the fixed questions, through the chat template if there is one.

    Args:
        options: of the template, as the drafter was trained.
    """
    tokenizer = target.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        return [tokenizer(question).input_ids for question in QUESTIONS]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **options,
        )
        for question in QUESTIONS
    ]


def plain_answers(
    target: Target, prompts: Sequence[Sequence[int]], settings: dict[str, Any]
) -> list[list[int]]:
    """What the target writes alone. `settings`: of `measure_acceptance`."""
    return measure_acceptance(target, None, prompts, **settings).token_ids


def observe(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    plain: list[list[int]],
    settings: dict[str, Any],
) -> Observation:
    """Ask the drafter at contexts of the target's plain answers, and decode with it.

    Args:
        plain: of `plain_answers` with the same settings.
    """
    num_draft_tokens = settings["num_draft_tokens"]
    measured = measure_acceptance(target, drafter, prompts, **settings)
    missing = NUM_CONTEXTS - sum(map(len, plain))
    tail = max(_PROMPT_TAIL, math.ceil(missing / len(prompts)))
    proposed: list[list[int]] = []
    for prompt, answer in zip(prompts, plain, strict=True):
        if len(proposed) >= ENOUGH:
            break
        proposed += proposals(target, drafter, list(prompt), answer, num_draft_tokens, tail=tail)
    same = measured.token_ids == plain
    return Observation(proposed, measured.token_ids, measured.prompts, same, plain)


@torch.inference_mode()
def proposals(
    target: Target,
    drafter: Drafter,
    prompt: list[int],
    answer: list[int],
    num_draft_tokens: int,
    *,
    tail: int = _PROMPT_TAIL,
) -> list[list[int]]:
    """[N][K] what is drafted after each of the last `tail` prompt tokens and each of the answer."""
    tokens = [*prompt, *answer]
    features = _target_states(target, drafter, tokens)
    sampler = Sampler(
        SamplingSettings(),
        batch_size=1,
        prompt_lengths=[len(prompt)],
        eos_token_ids=target.eos_token_ids,
        real_vocab_size=target.real_vocab_size,
        device=target.model.device,
    )
    capacity = len(tokens) + num_draft_tokens + 1
    session = drafter.begin(1, capacity, sampler)
    cache = target.model.new_cache(1, capacity)
    if isinstance(session, TargetSharing):
        session.share(target.model, cache)
    lengths = FixedLength(num_draft_tokens).begin(1)
    found, seen = [], 0
    for end in range(max(2, len(prompt) - tail), len(tokens) + 1):
        new = {k: states[:, seen : end - 1] for k, states in features.items()}
        if isinstance(drafter, EarlyExitDrafter):  # drafts on what verification left in the cache
            new_ids, layers = torch.tensor([tokens[seen : end - 1]]), (0, drafter.exit_layer)
            target.model.forward(new_ids, cache, logits=False, layers=layers)
        committed = [tokens[:end]]
        asked = LengthRound(lengths, [0], [num_draft_tokens])
        draft = session.propose([0], committed, asked, new or None)
        session.commit([0], committed)
        seen = end - 1
        found.append(draft.token_ids[0, : int(draft.num_drafted[0])].tolist())
    return found


def _target_states(target: Target, drafter: Drafter, tokens: list[int]) -> dict[int, Tensor]:
    """Layer -> [1, S, D] of the whole text; empty for a drafter that reads none."""
    if not drafter.hidden_layers:
        return {}
    cache = target.model.new_cache(1, len(tokens))
    output = target.model.forward(
        torch.tensor([tokens]), cache, logits=False, hidden_layers=drafter.hidden_layers
    )
    return output.hidden
