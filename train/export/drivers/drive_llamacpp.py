"""Runs in llama.cpp's environment: decoding through its server, with or without a draft model.

Reads a request on standard input, writes one result a temperature and prompt on standard output.
llama.cpp reports drafted and accepted tokens of a request, not by position. Its first token comes
from the prefill, each round yields what was accepted and one more, so rounds = tokens - 1 - accepted.
It drafts its likeliest tokens at any temperature.
"""

import json
import sys
import urllib.request

import xllamacpp


def server(request: dict) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = request["target"]
    params.n_ctx = request["context"]
    params.n_parallel = 1
    params.warmup = False
    params.verbosity = 0
    params.port = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = request["threads"]
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cache_prompt = False
    if request["drafter"] is not None:
        kind = xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE
        params.speculative.types = [kind]
        draft = params.speculative.draft
        draft.mparams.path = request["drafter"]
        draft.n_max, draft.n_min, draft.p_min = request["num_draft_tokens"], 0, 0.0
        draft.cache_type_k = draft.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return xllamacpp.Server(params)


def complete(
    address: str, prompt: list[int], max_new_tokens: int, temperature: float, seed: int
) -> dict:
    body = {
        "prompt": prompt,
        "n_predict": max_new_tokens,
        "temperature": temperature,
        "samplers": ["temperature"] if temperature else ["top_k"],
        "top_k": 1,
        "seed": seed,
        "return_tokens": True,
        "cache_prompt": False,
    }
    return post(f"{address}/completion", body)


def post(url: str, body: dict) -> dict:
    """The server's answer."""
    headers = {"Content-Type": "application/json"}
    call = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers)
    with urllib.request.urlopen(call) as answer:
        return json.load(answer)


def result(answer: dict) -> dict:
    timings = answer["timings"]
    accepted = timings.get("draft_n_accepted", 0)
    return {
        "token_ids": answer["tokens"],
        "num_accepted": accepted,
        "num_rounds": timings["predicted_n"] - 1 - accepted,
        "accepted_by_position": None,
    }


def main() -> None:
    request = json.load(sys.stdin)
    running = server(request)
    address = running.listening_address
    found: list[list]
    if "tokenize" in request:
        found = [tokenize(address, text) for text in request["tokenize"]]
    else:
        found = [
            [
                result(complete(address, prompt, request["max_new_tokens"], temperature, seed))
                for seed, prompt in enumerate(request["prompts"])
            ]
            for temperature in request["temperatures"]
        ]
    print("RESULT " + json.dumps(found), flush=True)


def tokenize(address: str, text: str) -> list[int]:
    body = {"content": text, "add_special": False, "parse_special": True}
    return post(f"{address}/tokenize", body)["tokens"]


if __name__ == "__main__":
    main()
