"""Tables of what is measured on request only: policies, other programs, batches, contexts."""

from eval.report_tables import Cell, Table
from eval.results import Results


def policy_table(results: Results) -> Table:
    """Ways to choose the draft length, on the same texts."""
    return Table(
        "Draft-length policies",
        ["drafter", "prompts", "policy", "acceptance length", "drafted a round", "speedup"],
        [
            [
                Cell(one.drafter),
                Cell(one.suite),
                Cell(one.policy, wide=True),
                Cell(f"{one.acceptance_length:.2f}"),
                Cell(f"{one.mean_drafted:.2f}"),
                Cell(f"{one.speedup:.2f}"),
            ]
            for one in results.policies
        ],
        note="Replayed along the target's greedy texts; speedups predicted from measured costs.",
        text_columns=frozenset({0, 1, 2}),
    )


def rival_table(results: Results) -> Table:
    """Another program with the same drafter, beside ours."""
    return Table(
        "The same drafter in another program",
        ["drafter", "program", "draft length", "its ms a token", "ours", "ratio", "same texts"],
        [
            [
                Cell(one.drafter),
                Cell(one.program),
                Cell(str(one.num_draft_tokens)),
                Cell(f"{one.rival_ms_per_token:.1f}"),
                Cell(f"{one.ms_per_token:.1f}"),
                Cell(f"{one.rival_ms_per_token / one.ms_per_token:.2f}"),
                Cell(f"{one.num_identical} of {one.num_prompts}"),
            ]
            for one in results.rivals
        ],
        note="Greedy decoding of the same prompts, interleaved, prefill included.",
        text_columns=frozenset({0, 1}),
    )


def sweep_table(results: Results) -> Table:
    """Speed by batch size and context length."""
    return Table(
        "Batch sizes and context lengths",
        ["drafter", "batch", "context", "draft length", "plain tokens/s", "tokens/s", "speedup"],
        [
            [
                Cell(one.drafter),
                Cell(str(one.batch_size)),
                Cell(str(one.context_tokens)),
                Cell(str(one.num_draft_tokens)),
                Cell(f"{one.plain_tokens_per_s:.1f}"),
                Cell(f"{one.tokens_per_s:.1f}"),
                Cell(f"{one.speedup:.2f}" + ("" if one.measured else " (predicted)")),
            ]
            for one in results.sweeps
        ],
        note=(
            "Batch sizes: measured, prefill excluded, texts not ended by the end token. Context "
            "lengths: predicted from the costs measured there and the acceptance of the first suite."
        ),
        text_columns=frozenset({0}),
    )
