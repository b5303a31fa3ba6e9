"""The recommended draft length as each server wants to be told.

Names are those of the servers in 2026 (vLLM 0.33, SGLang 0.5, llama.cpp, transformers 5). Which
folder to give them is the export's business: `python -m train.export`.
"""

from dataclasses import dataclass

from eval.facts import DrafterFacts
from eval.report_tables import Cell, Table
from eval.results import Results


@dataclass(frozen=True)
class ServingSetting:
    """One server's settings for one drafter; `text` is what to write there."""

    server: str
    drafter: str
    text: str


def serving_settings(results: Results) -> list[ServingSetting]:
    """For every drafter: its best draft length on the first suite, per server; 0 is said as off."""
    found = []
    for drafter in results.drafters:
        prediction = next((p for p in results.predictions if p.drafter == drafter.name), None)
        if prediction is None:
            continue
        length = prediction.best_num_draft_tokens
        texts = _texts(drafter, length) if length else {"all": "no speculation: it does not pay"}
        texts |= _threshold(results, drafter) | _by_batch_size(results, drafter.name)
        found += [ServingSetting(server, drafter.name, text) for server, text in texts.items()]
    return found


def _threshold(results: Results, drafter: DrafterFacts) -> dict[str, str]:
    """Where drafting on only while the drafter is sure was replayed and is faster than any fixed
    length, its threshold; llama.cpp and transformers can run standalone models alone."""
    suite = results.suites[0].name if results.suites else ""
    tried = [p for p in results.policies if (p.drafter, p.suite) == (drafter.name, suite)]
    best = max(tried, key=lambda policy: policy.speedup, default=None)
    if best is None or best.threshold is None or best.max_draft_tokens is None:
        return {}
    bound, most = f"{best.threshold:g}", best.max_draft_tokens
    here = {"Draftloop, by confidence": f"num_draft_tokens=ConfidenceThreshold({bound}, {most})"}
    if drafter.kind != "causal_lm":
        return here
    return here | {
        "llama.cpp, by confidence": f"--draft-max {most} --draft-p-min {bound}",
        "transformers, by confidence": (
            f"num_assistant_tokens={most}, assistant_confidence_threshold={bound}"
        ),
    }


def _by_batch_size(results: Results, drafter: str) -> dict[str, str]:
    """The fastest measured draft length of every batch size that was swept."""
    best: dict[int, tuple[float, int]] = {}
    for one in results.sweeps:
        if one.drafter == drafter and one.measured:
            found = (one.speedup, one.num_draft_tokens)
            best[one.batch_size] = max(found, best.get(one.batch_size, (1.0, 0)))
    if len(best) < 2:
        return {}
    listed = [f"{size}: {length or 'off'}" for size, (_, length) in sorted(best.items())]
    return {"draft length by batch size": ", ".join(listed)}


def serving_table(results: Results) -> Table:
    """`serving_settings` for the report."""
    return Table(
        "Settings to serve with",
        ["drafter", "server", "setting"],
        [
            [Cell(one.drafter), Cell(one.server), Cell(one.text, wide=True)]
            for one in serving_settings(results)
        ],
        note=(
            "The draft length with the highest predicted speedup on the first suite, at batch size "
            "1 on this machine. DIR and FILE come from python -m train.export."
        ),
        text_columns=frozenset({0, 1, 2}),
    )


def _texts(drafter: DrafterFacts, length: int) -> dict[str, str]:
    here = {"Draftloop": f"num_draft_tokens={length}"}
    if drafter.kind == "causal_lm":
        return here | {
            "vLLM": f'--speculative-config \'{{"model": DIR, "num_speculative_tokens": {length}}}\'',
            "SGLang": (
                "--speculative-algorithm STANDALONE --speculative-draft-model-path DIR "
                f"--speculative-num-steps {length} --speculative-eagle-topk 1 "
                f"--speculative-num-draft-tokens {length + 1}"
            ),
            "llama.cpp": f"--model-draft FILE.gguf --draft-max {length} --draft-p-min 0",
            "transformers": (
                f"num_assistant_tokens={length}, num_assistant_tokens_schedule='constant', "
                "assistant_confidence_threshold=0.0"
            ),
        }
    if drafter.kind == "eagle3":
        return here | {
            "vLLM": (
                '--speculative-config \'{"method": "eagle3", "model": DIR, '
                f'"num_speculative_tokens": {length}}}\''
            ),
            "SGLang": (
                "--speculative-algorithm EAGLE3 --speculative-draft-model-path DIR "
                f"--speculative-num-steps {length} --speculative-eagle-topk 1 "
                f"--speculative-num-draft-tokens {length + 1}"
            ),
        }
    if drafter.kind == "parallel":
        return here | {
            "vLLM": (
                '--speculative-config \'{"method": "dspark", "model": DIR, '
                f'"num_speculative_tokens": {length}}}\''
            ),
        }
    if drafter.kind == "prompt_lookup":
        return here | {
            "vLLM": (
                f'--speculative-config \'{{"method": "ngram", "num_speculative_tokens": {length}}}\''
            ),
            "transformers": f"prompt_lookup_num_tokens={length}",
        }
    return here
