"""Assisted generation of transformers, with its rounds counted.

It drafts in front of the prefill too, so its first round has one token more than ours to win; all else
is counted as ours.
"""

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator

_TOLD = "update_candidate_strategy"  # called once a round, with the number of accepted tokens


def decode(
    target, drafter, prompt: list[int], max_new_tokens: int, *, temperature: float = 0.0, seed=0
) -> dict:
    """One answer and its counts."""
    matches: list[int] = []
    num_drafted = drafter.generation_config.num_assistant_tokens
    told = getattr(AssistedCandidateGenerator, _TOLD)

    def counted(self, input_ids, scores, num_matches):
        matches.append(int(num_matches))
        return told(self, input_ids, scores, num_matches)

    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(seed)
    setattr(AssistedCandidateGenerator, _TOLD, counted)
    try:
        ids = target.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_new_tokens,
            assistant_model=drafter,
            **sampling,
        )
    finally:
        setattr(AssistedCandidateGenerator, _TOLD, told)
    return {
        "token_ids": ids[0, len(prompt) :].tolist(),
        "num_rounds": len(matches),
        "num_accepted": sum(matches),
        "accepted_by_position": [sum(n > i for n in matches) for i in range(num_drafted)],
    }


def main() -> None:
    request = json.load(sys.stdin)
    target = AutoModelForCausalLM.from_pretrained(request["target"], dtype=torch.float32)
    drafter = AutoModelForCausalLM.from_pretrained(request["drafter"], dtype=torch.float32)
    drafter.generation_config.num_assistant_tokens = request["num_draft_tokens"]
    found = [
        [
            decode(
                target,
                drafter,
                prompt,
                request["max_new_tokens"],
                temperature=temperature,
                seed=seed,
            )
            for seed, prompt in enumerate(request["prompts"])
        ]
        for temperature in request["temperatures"]
    ]
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
