"""Runs in vLLM's environment: decodes batches of prompts greedily, on request.

The first line of standard input are settings, each further one a batch; a line of output answers each.
"""

import json
import os
import sys

os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "KMP_BLOCKTIME": "0",  # its threads leave the cores to the other programs between batches
    }
)


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(settings["threads"])
    llm = LLM(
        settings["target"],
        dtype="bfloat16",
        max_model_len=settings["context"],
        max_num_seqs=settings["batch"],
        enforce_eager=settings["eager"],
        enable_prefix_caching=False,
        speculative_config=settings["speculative"],
    )
    print("READY", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        sampling = SamplingParams(
            temperature=0.0, max_tokens=request["max_new_tokens"], ignore_eos=True
        )
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        print("RESULT " + json.dumps(token_ids), flush=True)


if __name__ == "__main__":
    main()
