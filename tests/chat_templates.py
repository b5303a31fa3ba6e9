"""Chat templates written for the tests, each with what makes its kind hard to train on.

smollm2   ChatML, a system message of its own
llama3    writes the beginning-of-text token (its tokenizer adds one, too); trims texts; tools
qwen3     takes the thinking out of earlier turns; enable_thinking=false begins the answer itself
gemma3    no system role: merged into the user's turn; other role names; alternation enforced
gpt_oss   channels; the last answer ends in another token than earlier ones
markers   ChatML with generation markers
r1        begins the answer with <think>, and takes the thinking out of earlier turns
"""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SMOLLM2 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% if tools %}<|start|>system<|end|>\n\n{{ tools | tojson }}<|eot|>{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}{{ m.content | trim }}{% endif %}"
    "<|eot|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
QWEN3 = (
    "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}"
    "{% set content = m.content %}{% set thinking = m.reasoning_content or '' %}"
    "{% if '</think>' in content %}{% set thinking = content.split('</think>')[0].split('<think>')[-1]"
    ".strip('\n') %}{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > last.user %}<think>\n{{ thinking.strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ content }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
GEMMA3 = (
    "{{ bos_token }}{% set first = '' %}{% set chat = messages %}"
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set chat = messages[1:] %}{% endif %}"
    "{% for m in chat %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ first if loop.first else '' }}{{ m.content | trim }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>model\n{% endif %}"
)
GPT_OSS = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking and loop.last %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
MARKERS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "<|eot|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
KINDS = {
    "smollm2": SMOLLM2,
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "gemma3": GEMMA3,
    "gpt_oss": GPT_OSS,
    "markers": MARKERS,
    "r1": R1,
}
END = {
    "smollm2": "<|im_end|>",
    "llama3": "<|eot|>",
    "qwen3": "<|im_end|>",
    "gemma3": "<|eot|>",
    "gpt_oss": "<|return|>",
    "markers": "<|im_end|>",
    "r1": "<|eot|>",
}
BOS_ADDED = ("llama3", "gemma3", "r1")  # by their tokenizers, which the templates do as well
SPECIAL = [
    "<s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>", "<|unused|>",
    "<|message|>", "<|channel|>", "<|return|>", "<|user|>", "<|assistant|>",
]  # fmt: skip


def chat_tokenizer(kind):
    """One token a byte, special tokens, and the template of a kind."""
    tokenizer = byte_tokenizer(KINDS[kind], adds_bos=kind in BOS_ADDED)
    tokenizer.eos_token = END[kind]
    return tokenizer


def byte_tokenizer(template, *, adds_bos=False):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
