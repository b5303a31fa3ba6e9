"""The clean process of the parity gate: reads a request on standard input, writes observations.

Started by `parity.observed_elsewhere`. It loads one target and, one after the other, each drafter
folder, as anyone would who serves them.
"""

import json
import sys
import warnings
from typing import Any

from specdec_runtime.loading import load_drafter, load_target
from train.export.observation import MAX_NEW_TOKENS, fixed_prompts, observe, plain_answers


def main() -> None:
    request = json.load(sys.stdin)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the process that asks has shown them already
            found = answer(request)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    json.dump(found, sys.stdout)


def answer(request: dict[str, Any]) -> list[dict[str, Any]]:
    """One observation a folder; the keys are those that `observed_elsewhere` sends."""
    options = request["target_options"]
    target = load_target(request["target"], **options)
    prompts = request["prompts"] or fixed_prompts(target, request["template_options"])
    settings = {"max_new_tokens": MAX_NEW_TOKENS} | request["settings"]
    plain = plain_answers(target, prompts, settings)
    found = []
    for folder in request["folders"]:
        drafter = load_drafter(folder, target, engine=options.get("engine", "auto"))
        assert drafter is not None
        found.append(observe(target, drafter, prompts, plain, settings).as_json())
    return found


if __name__ == "__main__":
    main()
