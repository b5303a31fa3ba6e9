"""Runs in vLLM's environment: decodes in float32 with a drafter.

Reads a request on standard input, writes one result a temperature and prompt on standard output. The
counts are differences of vLLM's own counters; a round is one draft, as ours.
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
# DSpark exists in the newer model runner only, whose kernels are Triton's; see triton_interpreter.
NEWER_RUNNER = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
REPAIRED = (
    "vLLM {} does not pass the temperature on to the verification of drafts on a CPU; repaired for "
    "this comparison. Served by it at T > 0, the text is not the target's (docs/serving.md)"
)


def counters(llm) -> dict:
    return {
        metric.name.split("spec_decode_")[1]: getattr(
            metric, "value", getattr(metric, "values", None)
        )
        for metric in llm.get_metrics()
        if "spec_decode" in metric.name
    }


def decode(llm, prompt: list[int], sampling) -> dict:
    """One answer and what the counters counted meanwhile."""
    before = counters(llm)
    output = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
    after = counters(llm)
    name = "num_accepted_tokens"
    positions = zip(after[f"{name}_per_pos"], before[f"{name}_per_pos"], strict=True)
    return {
        "token_ids": list(output.outputs[0].token_ids),
        "num_rounds": after["num_drafts"] - before["num_drafts"],
        "num_accepted": after[name] - before[name],
        "accepted_by_position": [now - then for now, then in positions],
    }


def main() -> None:
    request = json.load(sys.stdin)
    os.environ.update(SETTINGS)
    # A speculators folder names its method itself.
    if (request["speculative"] or {}).get("method") == "dspark":
        os.environ.update(NEWER_RUNNER)
    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(
        request["target"],
        dtype="float32",
        max_model_len=request["context"],
        enforce_eager=True,
        max_num_seqs=1,
        disable_log_stats=False,
        speculative_config=request["speculative"],
        worker_extension_cls="vllm_temperature.Temperature",
    )
    if any(request["temperatures"]) and any(llm.collective_rpc("repair_temperature")):
        print(f"NOTE {REPAIRED.format(vllm.__version__)}", flush=True)
    found = []
    for temperature in request["temperatures"]:
        settings = {"temperature": temperature, "max_tokens": request["max_new_tokens"]}
        found.append(
            [
                decode(llm, prompt, SamplingParams(**settings, seed=seed if temperature else None))
                for seed, prompt in enumerate(request["prompts"])
            ]
        )
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
