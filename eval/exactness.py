"""The certificate: speculative decoding returned the target's own greedy text, token for token.

Two comparisons: speculative against plain decoding in the engine in use, and plain decoding
against transformers' own `generate(do_sample=False)` in float32. Where arithmetic depends on the
shape of a pass (16-bit weights, most GPU kernels), a difference is benign only if the target's
top two logits there are closer than the noise measured on this machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eval.acceptance import measure_acceptance
from eval.results import Certificate, Divergence, IdentityCheck, SamplingCheck
from eval.suites import EvalPrompt
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.model import CausalModel
from specdec_runtime.target import Target

AGAINST_PLAIN = "speculative against plain decoding"  # how names of such checks begin
SELF_DRAFT_MINIMUM = 0.98  # what the target as its own drafter must reach; ties may cost a little
# The top two logits can both move, and each by more than what one answer happened to show.
NOISE_MARGIN = 4.0
# Noise above this is no rounding but another computation: no difference is excused by it.
NOISE_CEILING = {torch.float32: 0.01, torch.bfloat16: 1.0, torch.float16: 0.25}


@dataclass(frozen=True)
class Texts:
    """Greedy outputs of the same prompts from two decoders, and what they are called."""

    name: str
    expected: Sequence[Sequence[int]]
    found: Sequence[Sequence[int]]


def compare(
    target: Target, prompts: Sequence[EvalPrompt], texts: Texts, *, tolerance: float
) -> IdentityCheck:
    """Token-by-token comparison; differing prompts are examined with one pass each.

    Args:
        tolerance: largest top-two gap at which a flip counts as a near tie; 0 excuses nothing.
    """
    divergences = []
    for prompt, expected, found in zip(prompts, texts.expected, texts.found, strict=True):
        position = first_difference(expected, found)
        if position is not None:
            divergences.append(_divergence(target, prompt, expected, found, position, tolerance))
    return IdentityCheck(
        name=texts.name,
        num_prompts=len(prompts),
        num_identical=len(prompts) - len(divergences),
        num_tokens=sum(len(expected) for expected in texts.expected),
        tolerance=tolerance,
        divergences=divergences,
    )


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first index at which two token lists differ, or where one ends early; None if equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def certify(
    drafter: str,
    target: Target,
    checks: Sequence[IdentityCheck],
    *,
    engine: str,
    self_draft_acceptance: float | None = None,
    sampling: Sequence[SamplingCheck] = (),
) -> Certificate:
    """The certificate of one drafter from its checks; fails if any text differs unexplained."""
    reasons = [_failure(check) for check in checks if not check.passed]
    reasons += [
        f"sampling, {check.rule}: chi-squared p-value {check.smallest_p_value:.1e} on toys, "
        f"{check.control_p_value:.1e} on the control that must fail"
        for check in sampling
        if not check.passed
    ]
    if self_draft_acceptance is not None and self_draft_acceptance < SELF_DRAFT_MINIMUM:
        reasons.append(
            f"the target as its own drafter accepts {self_draft_acceptance:.1%}, "
            f"expected {SELF_DRAFT_MINIMUM:.0%} or more"
        )
    identical = sum(check.num_identical for check in checks)
    compared = sum(check.num_prompts for check in checks)
    if not compared:
        reasons.append("no text was compared")
    return Certificate(
        drafter=drafter,
        engine=engine,
        dtype=arithmetic_of(target.model),
        checks=list(checks),
        self_draft_acceptance=self_draft_acceptance,
        passed=not reasons,
        summary="; ".join(reasons) or f"{identical} of {compared} texts identical",
    )


def arithmetic_of(model: CausalModel) -> str:
    """The dtype that a model computes in; the native engine always computes in float32."""
    return str(arithmetic_dtype(model)).removeprefix("torch.")


def arithmetic_dtype(model: CausalModel) -> torch.dtype:
    """See `arithmetic_of`."""
    return model.dtype if hasattr(model, "module") else torch.float32


@torch.inference_mode()
def shape_noise(model: CausalModel, token_ids: Sequence[int], *, width: int) -> float:
    """Largest change of a logit of passes over one token when they are run again, over `width` tokens
    at once, and over as many rows of a batch.

    0 for an engine whose results depend on none of it.
    """
    tokens = torch.tensor([list(token_ids)])
    once = _chunked_logits(model, tokens, 1)
    others = (
        _chunked_logits(model, tokens, 1),
        _chunked_logits(model, tokens, width),
        _chunked_logits(model, tokens.expand(width, -1), 1),
    )
    return max(float((once - other).abs().max()) for other in others)


def tie_tolerance(noise: float, dtype: torch.dtype) -> float:
    """Top-two gap below which a flip is rounding; 0 if the noise itself is beyond belief."""
    return 0.0 if noise > NOISE_CEILING[dtype] else NOISE_MARGIN * noise


@torch.inference_mode()
def reference_texts(
    module: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
) -> list[list[int]]:
    """New tokens of transformers' own greedy generate, prompt by prompt, end token included."""
    texts = []
    for prompt in prompts:
        inputs = torch.tensor([list(prompt)], device=module.device)
        output = module.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            **greedy_arguments(max_new_tokens, eos_token_ids),
        )
        texts.append(output[0, len(prompt) :].tolist())
    return texts


@torch.inference_mode()
def reference_choices(module: Any, prompt_ids: Sequence[int], text: Sequence[int]) -> list[int]:
    """The greedy choice of a transformers model at every position of a text: one pass.

    Equal to the text if and only if greedy decoding with that model returns it (but for rounding
    that depends on the shape of a pass).
    """
    tokens = torch.tensor([[*prompt_ids, *text[:-1]]], device=module.device)
    logits = module(tokens, logits_to_keep=len(text)).logits[0]
    return logits.argmax(-1).tolist()


def greedy_arguments(max_new_tokens: int, eos_token_ids: Sequence[int]) -> dict[str, object]:
    """Arguments of transformers' generate that mean plain greedy decoding and nothing else."""
    eos = list(eos_token_ids) or None
    return {
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
        "num_beams": 1,
        "repetition_penalty": 1.0,
        "eos_token_id": eos,
        "pad_token_id": eos[0] if eos else 0,
    }


@torch.inference_mode()
def implementation_noise(model: CausalModel, module: Any, token_ids: Sequence[int]) -> float:
    """Largest difference of a logit between our model and transformers' forward, same tokens."""
    tokens = torch.tensor([list(token_ids)])
    ours = _chunked_logits(model, tokens, tokens.shape[1])
    theirs = module(tokens.to(module.device)).logits[0].float().cpu()
    return float((ours - theirs[:, : ours.shape[1]]).abs().max())


def self_draft_acceptance(
    target: Target, prompts: Sequence[Sequence[int]], *, max_new_tokens: int
) -> float:
    """Acceptance rate of the target drafting for itself: 1 but for ties, if the loop is right."""
    measured = measure_acceptance(
        target,
        CausalLMDrafter(target.model),
        prompts,
        num_draft_tokens=3,
        max_new_tokens=max_new_tokens,
    )
    return measured.acceptance_rate


def _chunked_logits(model: CausalModel, tokens: Tensor, width: int) -> Tensor:
    """[S, V] logits of the first of [b, S] tokens, fed `width` at a time."""
    cache = model.new_cache(*tokens.shape)
    chunks = [model.forward(chunk, cache).logits for chunk in tokens.split(width, dim=1)]
    return torch.cat([chunk[0].cpu() for chunk in chunks if chunk is not None])


@torch.inference_mode()
def top_two_gap(model: CausalModel, token_ids: Sequence[int]) -> float:
    """Distance of the two highest logits after these tokens."""
    cache = model.new_cache(1, len(token_ids))
    output = model.forward(torch.tensor([list(token_ids)]), cache, last_only=True)
    assert output.logits is not None
    best = output.logits[0, -1].topk(2).values.tolist()
    return best[0] - best[1]


def _divergence(
    target: Target,
    prompt: EvalPrompt,
    expected: Sequence[int],
    found: Sequence[int],
    position: int,
    tolerance: float,
) -> Divergence:
    if position >= len(expected) or position >= len(found):
        gap, kind = None, "length"
    else:
        gap = top_two_gap(target.model, [*prompt.token_ids, *expected[:position]])
        kind = "near tie" if gap <= tolerance else "unexplained"
    return Divergence(
        prompt_id=prompt.id,
        position=position,
        expected_token_id=expected[position] if position < len(expected) else None,
        found_token_id=found[position] if position < len(found) else None,
        top_two_gap=gap,
        kind=kind,
    )


def _failure(check: IdentityCheck) -> str:
    bad = [d for d in check.divergences if d.kind != "near tie"]
    first = bad[0]
    return (
        f"{check.name}: {len(bad)} of {check.num_prompts} texts differ "
        f"(first: {first.prompt_id} at token {first.position}, {first.kind})"
    )
