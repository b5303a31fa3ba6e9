"""The same counts under the names and definitions of other programs.

So that our figures can be laid beside theirs. What each program computes was read in its code or
documentation in 2026; where a program counts differently from ours, `how` says so.
"""

from dataclasses import dataclass

from eval.results import AcceptanceResult


@dataclass(frozen=True)
class OtherNumber:
    """One figure as another program would print it; None where it is not defined."""

    program: str
    name: str
    how: str
    value: float | None


def other_numbers(result: AcceptanceResult) -> list[OtherNumber]:
    """The acceptance of one result under each program's definition."""
    rounds, drafted = result.num_rounds, result.num_drafted
    accepted, tokens = result.num_accepted, result.num_tokens
    return [
        OtherNumber(
            "vLLM, llama.cpp",
            "draft acceptance rate",
            "accepted / drafted",
            _ratio(accepted, drafted),
        ),
        OtherNumber(
            "vLLM, DSpark papers",
            "mean acceptance length",
            "1 + accepted / rounds; with the bonus token",
            _ratio(accepted + rounds, rounds),
        ),
        OtherNumber(
            "gpt-fast",
            "mean accepted",
            "accepted / rounds; without the bonus token",
            _ratio(accepted, rounds),
        ),
        OtherNumber(
            "SGLang, SpecForge",
            "accept length",
            "returned tokens / rounds; the first token counts, tokens cut at the end do not",
            _ratio(tokens, rounds),
        ),
        OtherNumber(
            "AIPerf, DeepSpec",
            "verify rate",
            "(accepted + rounds) / (drafted + rounds)",
            _ratio(accepted + rounds, drafted + rounds),
        ),
        OtherNumber(
            "Spec-Bench",
            "#Mean accepted tokens",
            "returned tokens behind the prefill's / rounds",
            _ratio(tokens - result.num_prompts, rounds),
        ),
        OtherNumber(
            "transformers",
            "n_matches",
            "(returned tokens behind the prefill's - rounds) / rounds; inside generate, never returned",
            _ratio(tokens - result.num_prompts - rounds, rounds),
        ),
        OtherNumber(
            "SPEED-Bench (specdec_bench)",
            "acceptance length",
            "mean over prompts of each prompt's own length",
            result.macro_acceptance_length.value,
        ),
    ]


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
