"""Runs in vLLM's environment: greedy decoding in float32, with or without a drafter.

Reads a request on standard input, writes one result a prompt on standard output. The counts are
differences of vLLM's own counters; a round is one draft, as ours.
"""

import json
import os
import sys

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def counters(llm) -> dict:
    return {
        metric.name.split("spec_decode_")[1]: getattr(
            metric, "value", getattr(metric, "values", None)
        )
        for metric in llm.get_metrics()
        if "spec_decode" in metric.name
    }


def main() -> None:
    os.environ.update(SETTINGS)
    from vllm import LLM, SamplingParams

    request = json.load(sys.stdin)
    drafter = request["drafter"]
    speculative = drafter and {
        "model": drafter,
        "method": request["method"],
        "num_speculative_tokens": request["num_draft_tokens"],
    }
    llm = LLM(
        request["target"],
        dtype="float32",
        max_model_len=request["context"],
        enforce_eager=True,
        max_num_seqs=1,
        disable_log_stats=False,
        speculative_config=speculative,
    )
    sampling = SamplingParams(temperature=0, max_tokens=request["max_new_tokens"])
    found = []
    for prompt in request["prompts"]:
        before = counters(llm)
        output = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        after = counters(llm)
        found.append(
            {
                "token_ids": list(output.outputs[0].token_ids),
                "num_rounds": after.get("num_drafts", 0) - before.get("num_drafts", 0),
                "num_accepted": after.get("num_accepted_tokens", 0)
                - before.get("num_accepted_tokens", 0),
                "accepted_by_position": [
                    now - then
                    for now, then in zip(
                        after.get("num_accepted_tokens_per_pos", []),
                        before.get("num_accepted_tokens_per_pos", []),
                        strict=True,
                    )
                ],
            }
        )
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
