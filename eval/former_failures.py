"""Places where an earlier drafter failed: does this one get them right?

failures.jsonl of an evaluation holds prefixes at which that drafter's top token was not the target's.
A run that trained on them (`prompts.prefixes=`) asks its drafter again. The earlier drafter got none
of them right by their choice; another one of equal quality would get some, since it errs elsewhere,
so the share is to be read beside the agreement on all positions.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from eval.intervals import ratio_interval
from eval.on_request import FormerFailures
from eval.records import from_json
from eval.replay import proposals
from eval.target_texts import Answer, TargetStates
from eval.trace import WeakPrefix
from specdec_runtime.draft import Drafter

FAILURES = "failures.jsonl"
MAX_PREFIXES = 120  # a pass of the drafter each; the first ones, where it failed worst


def read_failures(path: Path) -> list[WeakPrefix]:
    """The prefixes of a failures.jsonl, or of the evaluation or run folder that holds it.

    Raises:
        ValueError: there is no such file, or a line (named) is not one of a prefix.
    """
    places = (path, path / FAILURES, path / "eval" / FAILURES)
    found = next((one for one in places if one.is_file()), None)
    if found is None:
        raise ValueError(f"failures={path}: no such file, and no folder with {FAILURES}")
    prefixes = []
    for number, line in enumerate(found.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            prefixes.append(from_json(WeakPrefix, json.loads(line)))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{found}:{number}: not a prefix that python -m eval wrote ({error})"
            ) from error
    return prefixes


def asked_again(
    states: TargetStates,
    drafter: Drafter,
    prefixes: Sequence[WeakPrefix],
    *,
    name: str,
    num_resamples: int,
    seed: int = 0,
) -> FormerFailures:
    """The share of the prefixes behind which a drafter now proposes the target's token."""
    right: dict[str, int] = {}
    asked: dict[str, int] = {}
    for prefix in prefixes[:MAX_PREFIXES]:
        *prompt, last = prefix.token_ids
        answer = Answer(prompt, [last, prefix.target_token_id], max_new_tokens=3)
        found = proposals(states, drafter, answer, max_draft_tokens=1)
        key = f"{prefix.suite} {prefix.prompt_id}"
        right[key] = right.get(key, 0) + (found.num_matching[0] > 0)
        asked[key] = asked.get(key, 0) + 1
    return FormerFailures(
        drafter=name,
        num_prefixes=sum(asked.values()),
        num_right=sum(right.values()),
        right=ratio_interval(
            [right[key] for key in asked],
            [asked[key] for key in asked],
            num_resamples=num_resamples,
            seed=seed,
        ),
    )
