"""Overlap: evaluation prompts are found in training whatever their spelling, and only those."""

from distill.overlap import describe, find_overlaps
from distill.prompt import asked, make_prompt

QUESTION = (
    "Imagine you are writing a blog post comparing two popular smartphone models. Develop an "
    "outline for the blog post, including key points and subheadings."
)
EVALUATION = {"suite": [asked("suite", QUESTION), asked("suite", "Who was Marie Curie?")]}


def found(*texts):
    train = [asked("train", text) for text in texts]
    return find_overlaps(train, EVALUATION)


def test_spelling_and_punctuation_hide_nothing():
    (overlap,) = found("who was  MARIE CURIE", "Who was Pierre Curie?")
    assert overlap.is_exact
    assert overlap.evaluation_id == EVALUATION["suite"][1].id


def test_a_few_changed_words_are_nearly_the_same_and_another_question_is_not():
    (near,) = found(QUESTION.replace("two popular", "three popular"))
    assert 0.85 <= near.similarity < 1
    assert not found("Who was Marie Antoinette?")
    assert not found("Imagine you are writing a blog post about two cities.", "Who was Rosa Parks?")


def test_a_long_prompt_is_found_inside_a_longer_text():
    other = " ".join(f"word{i}" for i in range(200))
    (inside,) = found(f"{other} {QUESTION} {other}")
    assert inside.similarity > 0.9
    assert not found(f"{other} Who was Marie Curie? {other}")  # short ones occur in any text


def test_every_user_message_of_a_conversation_is_compared():
    chat = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": QUESTION},  # what an assistant says is no prompt
        {"role": "user", "content": "Who was Marie Curie"},
    ]
    (overlap,) = find_overlaps([make_prompt("train", chat)], EVALUATION)
    assert overlap.evaluation_id == EVALUATION["suite"][1].id
    assert not find_overlaps([make_prompt("train", chat[:1])], EVALUATION)


def test_a_short_message_that_follows_is_no_overlap():
    def chat(*texts):
        return make_prompt("t", [{"role": "user", "content": text} for text in texts])

    evaluation = {"suite": [chat("Who was Rosa Parks?", "Are you sure?"), chat("hi", QUESTION)]}
    assert not find_overlaps([chat("Who was Max Planck?", "Are you sure?")], evaluation)
    assert not find_overlaps([chat("hi")], evaluation)
    (overlap,) = find_overlaps([chat(QUESTION)], evaluation)
    assert overlap.is_exact


def test_scripts_without_spaces_are_compared_by_character():
    evaluation = {
        "suite": [asked("s", "\u4f60\u597d\u5417\u6211\u5f88\u597d\u8c22\u8c22\u4f60\u4eec")]
    }
    near = asked("t", "\u4f60\u597d\u5417\u6211\u5f88\u597d\u8c22\u8c22\u4f60\u4eec\u554a")
    (overlap,) = find_overlaps([near], evaluation)
    assert not overlap.is_exact


def test_the_report_says_how_many_of_which_suite_with_an_example():
    text = describe(found(QUESTION, "Who was Marie Curie?"))
    assert text.startswith("2 training prompts left out")
    assert "2 exactly, 0 nearly; 2 of suite" in text
    assert describe([]) == ""
