"""The formats a drafter can be exported to, in a line each; the code of them is in registry.py."""

SUMMARIES = {
    "draftloop": "the folder of our own runtime",
    "transformers": "an `assistant_model` for assisted generation (batch size 1)",
    "vllm": "a draft model, an EAGLE-3 head, or a parallel drafter as a DSpark folder",
    "speculators": "an EAGLE-3 head that vLLM serves together with the target it names",
    "sglang": "a standalone draft model, or an EAGLE-3 head",
    "llamacpp": "a GGUF draft model, its tokenizer included",
}
