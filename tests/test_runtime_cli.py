"""`python -m specdec_runtime`: text on standard output, the rest on standard error."""

import io
import os
import re
import subprocess
import sys

import pytest

from specdec_runtime import terminal
from specdec_runtime.__main__ import main
from specdec_runtime.formats import DrafterManifest, TargetRecord, write_drafter
from specdec_runtime.results import Chunk
from specdec_runtime.target import as_target
from tests.chat_templates import chat_tokenizer
from tests.conftest import tiny_llama
from tests.tiny_tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer([" the"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(target folder, drafter folder that names it)."""
    root = tmp_path_factory.mktemp("models")
    module = tiny_llama(0, vocab_size=len(TOKENIZER))
    module.generation_config.eos_token_id = TOKENIZER.eos_token_id
    module.save_pretrained(root / "target")
    TOKENIZER.save_pretrained(root / "target")
    manifest = DrafterManifest(
        kind="causal_lm",
        target=TargetRecord(name=str(root / "target")),
        recommended={"num_draft_tokens": 2},
    )
    write_drafter(root / "drafter", module, manifest, tokenizer=TOKENIZER)
    return str(root / "target"), str(root / "drafter")


def run(capsys, *arguments):
    code = main([*arguments, "--engine", "eager"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_drafter_folder_is_enough(folders, capsys):
    target, drafter = folders
    code, text, summary = run(capsys, drafter, "the cat", "--max-new-tokens", "12")
    assert code == 0
    assert "acceptance rate 100% at K=2" in summary
    assert "acceptance length" in summary
    assert "12 tokens (length)" in summary
    _, plain, summary = run(
        capsys, target, "the cat", "--max-new-tokens", "12", "--drafter", "none"
    )
    assert plain == text
    assert "acceptance" not in summary
    assert "\033[" not in text  # not a terminal


def test_the_prompt_is_rendered_with_the_options_that_the_drafter_was_trained_with(tiny_target):
    target = as_target(tiny_target)
    target.tokenizer = chat_tokenizer("qwen3")
    manifest = DrafterManifest(
        kind="causal_lm",
        target=TargetRecord(name=""),
        template_options={"enable_thinking": False, "system_prompt": "Be brief."},
    )
    ids = terminal._prompt_ids(target, "hi", manifest, as_chat=True)
    text = target.tokenizer.decode(ids)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert text.endswith("<think>\n\n</think>\n\n")
    plain = target.tokenizer.decode(terminal._prompt_ids(target, "hi", None, as_chat=True))
    assert plain == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_options_reach_the_decoder(folders, capsys):
    target, drafter = folders
    arguments = (drafter, "the", "--target", target, "--temperature", "1", "--seed", "3")
    first = run(capsys, *arguments, "--num-draft-tokens", "3", "--max-new-tokens", "9")
    again = run(capsys, *arguments, "--num-draft-tokens", "3", "--max-new-tokens", "9")
    assert first[1] == again[1]
    assert "at K=3" in first[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere/at/all", "x"), "no model can be loaded|no such folder"),
        (("{target}", "x", "--max-new-tokens", "0"), "max_new_tokens is 0"),
        (("{target}", "x", "--num-draft-tokens", "-1"), "num_draft_tokens is -1"),
        (("{target}", "x", "--dtype", "int3"), "--dtype is 'int3'"),
        (("{target}", "x", "--drafter", "none", "--target", "{target}"), "give one"),
        (("{target}", ""), "prompt 0 is empty"),
        (("{target}", "a\udcff"), r"holds '\\udcff' at character 1.*in UTF-8"),
    ],
)
def test_mistakes_end_in_one_line_and_a_code(folders, capsys, arguments, message):
    filled = [argument.format(target=folders[0]) for argument in arguments]
    code, text, errors = run(capsys, *filled)
    assert code == 2
    assert text == ""
    assert re.search(f"^error: .*({message})", errors)
    assert len(errors.splitlines()) == 1


def test_a_reader_that_has_gone_ends_the_text_without_a_word(folders, capsys, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert main([folders[0], "the cat", "--max-new-tokens", "4", "--drafter", "none"]) == 141
    assert "Error" not in capsys.readouterr().err


def test_tokens_are_coloured_on_a_terminal_by_what_became_of_them(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    a, b, c = (TOKENIZER.get_vocab()[token] for token in "abc")
    chunk, bonus, plain = Chunk(0, [a, b, c], 2, 3), Chunk(0, [b, a], 1, 1), Chunk(0, [c], 0, 0)
    stream = Terminal()
    printer = terminal._Printer(TOKENIZER, stream)
    for one in (chunk, bonus, plain):
        printer.show(one)
    green, yellow, cyan, reset = "\033[32m", "\033[33m", "\033[36m", "\033[0m"
    corrected = f"{green}a{reset}{green}b{reset}{yellow}c{reset}"
    assert stream.getvalue() == f"{corrected}{green}b{reset}{cyan}a{reset}c"
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    terminal._Printer(TOKENIZER, stream).show(chunk)
    assert stream.getvalue() == "abc"


def test_help_does_not_wait_for_torch():
    code = "import sys; sys.argv = ['x', '--help']; import runpy\n"
    code += "try: runpy.run_module('specdec_runtime', run_name='__main__')\n"
    code += "except SystemExit: pass\n"
    code += "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0
    assert b"num-draft-tokens" in done.stdout


def test_importing_the_package_imports_no_torch():
    code = "import specdec_runtime, sys; specdec_runtime.__all__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_importable():
    import specdec_runtime

    for name in specdec_runtime.__all__:
        assert getattr(specdec_runtime, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = specdec_runtime.nothing
