"""Templates: the ids that the target sees when served, no more and no less."""

import pytest

from distill.templates import ChatTemplate
from tests.chat_templates import LLAMA3
from tests.chat_templates import byte_tokenizer as tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = CHATML + "{% if not enable_thinking | default(true) %}<think>\n\n</think>\n\n{% endif %}"

HELLO = [{"role": "user", "content": "hello"}]


def test_a_template_that_writes_its_own_bos_gets_no_second_one():
    template = ChatTemplate(tokenizer(LLAMA3, adds_bos=True))
    ids = template.render(HELLO)
    assert ids.count(0) == 1
    assert template.tokenizer.decode(ids) == (
        "<s><|start|>user<|end|>\n\nhello<|eot|><|start|>assistant<|end|>\n\n"
    )


def test_a_tokenizer_without_a_template_reads_the_text_as_it_is():
    template = ChatTemplate(tokenizer(None, adds_bos=True))
    assert template.tokenizer.decode(template.render(HELLO)) == "<s>hello"
    assert template.special_ids() == set()
    with pytest.raises(ValueError, match="the target has no chat template"):
        template.user_opening()


@pytest.mark.parametrize(
    ("text", "opening", "end"),
    [
        (CHATML, "<|im_start|>user\n", "<|im_end|>"),
        (LLAMA3, "<s><|start|>user<|end|>\n\n", "<|eot|>"),
    ],
)
def test_the_opening_of_a_user_turn_is_what_stands_in_front_of_the_users_text(text, opening, end):
    template = ChatTemplate(tokenizer(text, adds_bos=True))
    assert template.tokenizer.decode(template.user_opening()) == opening
    assert template.user_opening() == template.render(HELLO)[: len(template.user_opening())]
    assert template.tokenizer.decode([template.user_end()]) == end


def test_options_reach_the_template_and_its_hash():
    plain = ChatTemplate(tokenizer(THINKING))
    without = ChatTemplate(plain.tokenizer, {"enable_thinking": False})
    assert len(without.render(HELLO)) > len(plain.render(HELLO))
    assert without.hash != plain.hash
    assert (
        plain.hash == ChatTemplate(tokenizer(THINKING)).hash != ChatTemplate(tokenizer(CHATML)).hash
    )


def test_the_special_tokens_of_a_conversation_are_those_that_its_template_writes():
    template = ChatTemplate(tokenizer(CHATML))
    assert template.special_ids() == {1, 2}


def test_a_template_that_hides_the_users_text_is_refused():
    with pytest.raises(ValueError, match="changes what a user writes"):
        ChatTemplate(tokenizer("{{ messages[0].content | length }}")).user_opening()
