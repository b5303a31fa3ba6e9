"""Assisted generation of transformers, with its rounds counted.

It drafts in front of the prefill too, so its first round has one token more than ours to win; all else
is counted as ours.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator


def decode(target, drafter, prompt: list[int], max_new_tokens: int) -> dict:
    """One greedy answer and its counts."""
    matches: list[int] = []
    told = AssistedCandidateGenerator.update_candidate_strategy

    def counted(self, input_ids, scores, num_matches):
        matches.append(int(num_matches))
        return told(self, input_ids, scores, num_matches)

    AssistedCandidateGenerator.update_candidate_strategy = counted
    try:
        ids = target.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            assistant_model=drafter,
        )
    finally:
        AssistedCandidateGenerator.update_candidate_strategy = told
    longest = max(matches, default=0)
    return {
        "token_ids": ids[0, len(prompt) :].tolist(),
        "num_rounds": len(matches),
        "num_accepted": sum(matches),
        "accepted_by_position": [sum(n > i for n in matches) for i in range(longest)],
    }


def main() -> None:
    request = json.load(sys.stdin)
    target = AutoModelForCausalLM.from_pretrained(request["target"], dtype=torch.float32)
    drafter = None
    if request["drafter"] is not None:
        drafter = AutoModelForCausalLM.from_pretrained(request["drafter"], dtype=torch.float32)
        drafter.generation_config.num_assistant_tokens = request["num_draft_tokens"]
    found = [
        decode(target, drafter, prompt, request["max_new_tokens"]) for prompt in request["prompts"]
    ]
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
