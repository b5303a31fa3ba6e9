"""Answers of an OpenAI-compatible server: each prompt once, exact ids, whatever fails on the way."""

import dataclasses
import json
import threading
from collections import Counter

import pytest

from distill.answers.authors import ServerAuthor
from distill.answers.cli import run_command as answers_command
from distill.answers.client import ApiClient
from distill.answers.config import AnswersConfig, ServerConfig
from distill.answers.dataset import AnswerSet
from distill.answers.manifest import fingerprint
from distill.answers.served import ServedTarget, answer_ids
from distill.answers.shards import read_shard, shard_paths
from distill.answers.write import collect_answers
from distill.cache.cli import run_command as cache_command
from distill.cache.read import SignalCache
from distill.prompt import Prompt
from distill.signals import NoSignal
from distill.sparse_signals import SparseRows
from distill.templates import ChatTemplate
from distill.writer import Request
from specdec_runtime.loading import load_target
from tests.killed_jobs import killed
from tests.stub_server import EOS, MODEL, Handler, serving, written
from tests.test_templates import CHATML, tokenizer
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.toy_prompts import write_prompts


@pytest.fixture(scope="module")
def served():
    reader = tokenizer(CHATML)
    size = len(reader)
    return ServedTarget("tiny", reader, (EOS,), size, size, max_positions=512)


@pytest.fixture(scope="module")
def prompts():
    texts = [f"question {i} {'x' * (i % 5)}" for i in range(24)]
    return [Prompt(f"p{i}", "test", ({"role": "user", "content": t},)) for i, t in enumerate(texts)]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("distill.answers.client._FIRST_DELAY_S", 0.01)


def settings(stub, **changes):
    own = {"url": stub.url, "concurrency": 4, "timeout_s": 600.0} | changes.pop("server", {})
    arguments = {"max_new_tokens": 9, "shard_tokens": 20, "temperatures": [0.0, 1.0]} | changes
    return AnswersConfig(server=ServerConfig(**own), **arguments)


def collect(served, prompts, config, folder, **others):
    author = ServerAuthor(served, ChatTemplate(served.tokenizer), config)
    return collect_answers(author, prompts, config, folder, **others)


def texts(answers):
    return {answer.id: answer.token_ids.tolist() for answer in answers.answers}


def require_right(answers, served, prompts, server):
    """Each prompt once, with the template's ids and what the server wrote to exactly these."""
    template = ChatTemplate(served.tokenizer)
    asked = {tuple(body["prompt"]): body for body in server.requests}
    assert [answer.id for answer in answers.answers] == [prompt.id for prompt in prompts]
    for answer, prompt in zip(answers.answers, prompts, strict=True):
        ids = answer.token_ids.tolist()
        own = template.render(prompt.messages)
        assert ids[: answer.prompt_length] == own
        body = asked[tuple(own)]
        assert body["temperature"] == answer.temperature
        new, ended = written(own, temperature=body["temperature"], seed=body["seed"], max_tokens=9)
        assert ids[answer.prompt_length :] == ([*new, EOS] if ended else new)
        assert isinstance(answer.rows, NoSignal)
        assert len(answer.rows) == answer.num_tokens


@pytest.mark.parametrize("given", ["token_ids", "logprobs", "text"])
def test_every_prompt_is_answered_once_with_the_ids_that_the_server_wrote(
    served, prompts, tmp_path, given
):
    with serving(served.tokenizer, given=given, together=2) as server:
        answers = collect(served, prompts, settings(server), tmp_path)
    require_right(answers, served, prompts, server)
    assert set(server.asked().values()) == {1}
    assert 2 <= server.most_running <= 4
    body = server.requests[0]
    assert body["return_token_ids"] is True
    assert (body["top_k"], body["min_p"], body["top_p"]) == (-1, 0.0, 1.0)
    assert len({body["seed"] for body in server.requests}) == len(prompts)


def test_failures_that_pass_are_repeated_and_leave_no_trace(served, prompts, tmp_path):
    plan = ["500", "drop", "hang", "half", "html", "429", "503", "", "drop", "502"]
    with serving(served.tokenizer, plan=plan) as server:
        patience = {"timeout_s": 1.0, "max_retries": 20}  # a busy machine may need more than one
        answers = collect(served, prompts, settings(server, server=patience), tmp_path)
    require_right(answers, served, prompts, server)
    assert len(server.requests) >= len(prompts) + 9


def test_a_server_that_keeps_failing_ends_the_job_and_what_is_written_stays(
    served, prompts, tmp_path
):
    plan = [""] * 10 + ["500"] * 500
    config = {"server": {"max_retries": 2}}
    with (
        serving(served.tokenizer, plan=plan) as server,
        pytest.raises(
            ValueError, match=r"failed 3 times, the last time with: 500 not now; what is"
        ),
    ):
        collect(served, prompts, settings(server, **config), tmp_path)
    assert len(AnswerSet.read(tmp_path).answers) == 10
    with serving(served.tokenizer) as server:
        answers = collect(served, prompts, settings(server), tmp_path)
        assert len(server.requests) == len(prompts) - 10
    assert len(answers.answers) == len(prompts)


def test_a_request_that_the_server_refuses_is_not_repeated(served, prompts, tmp_path):
    with (
        serving(served.tokenizer, plan=["400"] * 4) as server,
        pytest.raises(ValueError, match=r"/completions answers 400: not now"),
    ):
        collect(served, prompts, settings(server), tmp_path)
    assert len(server.requests) <= 4


def test_a_job_that_is_killed_anywhere_leaves_each_answer_once(served, prompts, tmp_path):
    folder = tmp_path / "killed"
    with serving(served.tokenizer) as server:
        undisturbed = collect(served, prompts, settings(server), tmp_path / "undisturbed")
        for wait in (4, 3, 4):
            killed(lambda: collect(served, prompts, settings(server), folder), at=wait)
        assert shard_paths(folder)
        assert texts(collect(served, prompts, settings(server), folder)) == texts(undisturbed)
    found = Counter(a.id for path in shard_paths(folder) for a in read_shard(path))
    assert set(found.values()) == {1}


def test_ctrl_c_does_not_wait_for_what_is_under_way(served, prompts, tmp_path):
    def interrupt(done, total, note):
        raise KeyboardInterrupt

    others = set(threading.enumerate())
    plan = ["", "hang", "hang", "hang"]
    with serving(served.tokenizer, plan=plan, together=4) as server:
        with pytest.raises(KeyboardInterrupt):
            collect(served, prompts, settings(server), tmp_path, progress=interrupt)
        assert server.running >= 3
        # Python itself waits for such threads before it exits.
        for thread in set(threading.enumerate()) - others:
            if thread.name.startswith("ThreadPoolExecutor"):
                thread.join(60)
                assert not thread.is_alive()
        assert server.running >= 3
    assert len(AnswerSet.read(tmp_path).answers) == 1


def test_the_address_is_not_part_of_the_fingerprint_and_the_model_is(served, prompts, tmp_path):
    with serving(served.tokenizer) as server:
        first = collect(served, prompts[:4], settings(server), tmp_path)
    with serving(served.tokenizer) as elsewhere:
        again = collect(served, prompts, settings(elsewhere), tmp_path)
        assert len(elsewhere.requests) == len(prompts) - 4
    assert fingerprint(first.manifest) == fingerprint(again.manifest)
    assert "created" not in json.dumps(first.manifest)
    other = MODEL | {"root": "/models/other"}
    with (
        serving(served.tokenizer, models=[other]) as server,
        pytest.raises(ValueError, match=r"holds answers \w+, wanted are \w+: server_model is"),
    ):
        collect(served, prompts, settings(server), tmp_path)


def test_one_of_several_models_has_to_be_named(served, prompts, tmp_path):
    models = [MODEL, MODEL | {"id": "large"}]
    with serving(served.tokenizer, models=models) as server:
        with pytest.raises(ValueError, match="serves tiny, large: name one as"):
            collect(served, prompts[:2], settings(server), tmp_path)
        config = settings(server, server={"model": "large"})
        collect(served, prompts[:2], config, tmp_path)
        assert {body["model"] for body in server.requests} == {"large"}


def test_a_server_of_another_tokenizer_or_one_that_adds_tokens_is_refused(
    served, prompts, tmp_path
):
    small = dataclasses.replace(served, real_vocab_size=60)
    with (
        serving(served.tokenizer) as server,
        pytest.raises(ValueError, match=r"answers with token id \d+, the tokenizer of tiny has"),
    ):
        collect(small, prompts, settings(server), tmp_path / "small")
    with serving(served.tokenizer) as server:
        server.RequestHandlerClass = _AddsBos
        with pytest.raises(ValueError, match=r"read a prompt of \d+ tokens, sent were"):
            collect(served, prompts, settings(server), tmp_path / "bos")


class _AddsBos(Handler):
    def _completion(self, body):
        return super()._completion({**body, "prompt": [0, *body["prompt"]]})


WORDS = byte_level_tokenizer(["the", " cat"])
READER = ServedTarget("words", WORDS, (WORDS.eos_token_id,), len(WORDS), len(WORDS), 512)


@pytest.mark.parametrize(
    ("text", "counted", "reason", "is_kept"),
    [
        ("the cat", 2, "length", True),
        ("the cat", 3, "stop", True),  # with the end token
        ("the cat", 4, "length", False),  # written in other pieces than it is read in
        ("caf\ufffd", 4, "length", False),  # a character that was cut
        ("the cat", 2, "abort", False),
        ("", 0, "length", False),
    ],
)
def test_a_text_whose_ids_are_not_beyond_doubt_is_dropped(text, counted, reason, is_kept):
    request = Request(0, WORDS("hello").input_ids, 0.0, 0)
    choice = {"text": text, "finish_reason": reason}
    ids = answer_ids(choice, {"completion_tokens": counted}, request, READER)
    assert bool(ids) is is_kept
    if is_kept:
        assert WORDS.decode(ids[:2]) == text
        assert (ids[-1] == WORDS.eos_token_id) is (reason == "stop")


def test_dropped_answers_are_counted_and_not_asked_for_again(served, prompts, tmp_path, caplog):
    with serving(served.tokenizer, given="text") as server:
        server.RequestHandlerClass = _Aborts
        answers = collect(served, prompts, settings(server), tmp_path)
    assert len(server.requests) == len(prompts)
    assert 0 < len(answers.answers) < len(prompts)
    dropped = len(prompts) - len(answers.answers)
    assert f"{dropped} answers were dropped" in caplog.text


class _Aborts(Handler):
    def _completion(self, body):
        reply = super()._completion(body)
        if sum(body["prompt"]) % 3 == 0:
            reply["choices"][0]["finish_reason"] = "abort"
        return reply


def test_which_end_token_is_taken_where_a_target_has_several():
    request = Request(0, [5], 0.0, 0)
    several = dataclasses.replace(READER, eos_token_ids=(3, WORDS.eos_token_id))
    choice = {"token_ids": [7, 8], "finish_reason": "stop"}
    assert answer_ids(choice, {}, request, several) == [7, 8, WORDS.eos_token_id]
    assert answer_ids(choice | {"stop_reason": 3}, {}, request, several) == [7, 8, 3]
    shown = {"token_ids": [7, 3, 9], "finish_reason": "stop"}
    assert answer_ids(shown, {}, request, several) == [7, 3]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"concurrency": 0}, "answers.server.concurrency must be positive"),
        ({"timeout_s": 0.0}, "answers.server.timeout_s must be positive"),
        ({"max_retries": -1}, "answers.server.max_retries must be 0 or more"),
    ],
)
def test_a_server_setting_out_of_range_is_named_by_its_path(setting, message):
    with pytest.raises(ValueError, match=message):
        ServerConfig(**setting)
    with pytest.raises(ValueError, match=r"server.url=localhost:8000 is no URL"):
        ApiClient(ServerConfig(url="localhost:8000"))


def test_the_commands_have_a_server_answer_and_add_the_signals(tmp_path, monkeypatch, capsys):
    """Without the target's weights first, then with them; nothing of either is lost on the way."""
    monkeypatch.setenv("DRAFTLOOP_CACHE", str(tmp_path / "cache"))
    reader = ServedTarget.load("tiny-random")
    target = ["target=tiny_random", f"answers={tmp_path / 'answers'}"]
    with serving(reader.tokenizer) as server:
        settings = [f"answers.server.url={server.url}", f"output={tmp_path / 'answers'}"]
        prompts = [f"prompts.file={write_prompts(tmp_path / 'asked.jsonl')}"]
        prompts += ["prompts.num_train=4", "prompts.num_held_out=1", "prompts.suites=[]"]
        assert answers_command([target[0], *settings, *prompts]) == 0, capsys.readouterr().err
        assert len(server.requests) == 4
    assert cache_command([*target, f"output={tmp_path / 'signals'}"]) == 0, capsys.readouterr().err
    answers = AnswerSet.read(tmp_path / "answers").answers
    for answer in SignalCache.open(tmp_path / "signals").attach(answers):
        assert isinstance(answer.rows, SparseRows)
        assert len(answer.rows) == answer.num_tokens
    loaded = ServedTarget.of(load_target("tiny-random"))
    for name in ("eos_token_ids", "vocab_size", "real_vocab_size", "max_positions", "name"):
        assert getattr(loaded, name) == getattr(reader, name)
