"""Runs in llama.cpp's environment: decodes prompts greedily, one by one, on request.

The first line of standard input are settings, each further one a batch; a line of output answers each.
"""

import json
import sys

import xllamacpp
from drive_llamacpp import post  # of train/export/drivers, which lie on the path


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    params = xllamacpp.CommonParams()
    params.model.path = settings["target"]
    params.n_ctx = settings["context"]
    params.n_parallel = 1
    params.verbosity = 0
    params.port = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    server = xllamacpp.Server(params)
    print("READY", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        token_ids = [
            completion(server.listening_address, ids, request["max_new_tokens"])
            for ids in request["prompts"]
        ]
        print("RESULT " + json.dumps(token_ids), flush=True)


def completion(address: str, prompt: list[int], max_new_tokens: int) -> list[int]:
    body = {
        "prompt": prompt,
        "n_predict": max_new_tokens,
        "samplers": ["top_k"],
        "top_k": 1,
        "ignore_eos": True,
        "return_tokens": True,
        "cache_prompt": False,
    }
    return post(f"{address}/completion", body)["tokens"]


if __name__ == "__main__":
    main()
