"""Answers that an OpenAI-compatible server writes: vLLM, SGLang, llama.cpp's server.

Prompts are sent as token ids to /completions, so the server sees exactly what our template made.
The answer's token ids are taken from the reply where the server gives them (vLLM and SGLang with
return_token_ids, llama.cpp with logprobs). Where it gives text only, the text is encoded again and
kept only if it decodes to itself and has as many tokens as the server counted; what does not is
dropped, and counted. Hidden states come afterwards, from `python -m distill.cache`.
"""

import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, GenerationConfig

from distill.answers.client import ApiClient
from distill.answers.config import AnswersConfig, ServerConfig
from distill.writer import Request, Text
from specdec_runtime.model_names import portable_name, resolve_model
from specdec_runtime.pretrained import load_tokenizer
from specdec_runtime.target import Target, end_of_text_ids
from specdec_runtime.tokenizers import real_vocab_size

log = logging.getLogger(__name__)

_SEED_RANGE = 1 << 31  # what every server takes
# Of a model's entry in /models; the rest changes from start to start.
_REPORTED = ("id", "root", "owned_by", "max_model_len", "meta")
_LLAMA_CPP = "llamacpp"  # its `owned_by`


@dataclass(frozen=True)
class ServedTarget:
    """What has to be here of a target that runs elsewhere."""

    name: str
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    vocab_size: int  # rows of its head, padding included
    real_vocab_size: int
    max_positions: int

    @classmethod
    def of(cls, target: Target) -> "ServedTarget":
        """Of a target that is loaded here as well."""
        return cls(
            name=target.name,
            tokenizer=target.tokenizer,
            eos_token_ids=target.eos_token_ids,
            vocab_size=target.model.vocab_size,
            real_vocab_size=target.real_vocab_size,
            max_positions=target.model.max_positions,
        )

    @classmethod
    def load(cls, name: str) -> "ServedTarget":
        """Tokenizer and configuration of a hub id or folder, without its weights.

        Raises:
            ValueError: if there are none.
        """
        source = resolve_model(name)
        tokenizer = load_tokenizer(source)
        config = AutoConfig.from_pretrained(source).get_text_config(decoder=True)
        try:
            generation = GenerationConfig.from_pretrained(source)
        except OSError:  # many repositories have none
            generation = None
        return cls(
            name=portable_name(name),
            tokenizer=tokenizer,
            eos_token_ids=end_of_text_ids(generation, config),
            vocab_size=config.vocab_size,
            real_vocab_size=real_vocab_size(tokenizer),
            max_positions=getattr(config, "max_position_embeddings", None) or 1 << 30,
        )


def model_report(client: ApiClient, config: ServerConfig) -> dict[str, Any]:
    """What the server says about the model that is to answer; where it runs is not in it.

    Raises:
        ValueError: if it serves no such model, or several and none was named.
    """
    entries = client.get("/models").get("data", [])
    names = [entry.get("id") for entry in entries]
    wanted = config.model or (names[0] if len(names) == 1 else None)
    for entry in entries:
        if entry.get("id") == wanted:
            return {key: entry[key] for key in _REPORTED if entry.get(key) is not None}
    raise ValueError(
        f"{config.url} serves {', '.join(map(str, names)) or 'no model'}: name one as "
        f"answers.server.model, got {config.model}"
    )


class ServerWriter:
    """Has a server write texts, several at once.

    Args:
        report: of the model, from `model_report`.
    """

    def __init__(
        self,
        client: ApiClient,
        report: dict[str, Any],
        target: ServedTarget,
        config: AnswersConfig,
    ) -> None:
        self._client, self._target, self._config = client, target, config
        self._model = report["id"]
        self._extra = dict(config.server.extra)
        if report.get("owned_by") == _LLAMA_CPP:
            self._extra.setdefault("logprobs", 1)  # it names token ids there and nowhere else

    def write(self, requests: Iterable[Request], *, longest_prompt: int) -> Iterator[Text]:
        """The texts, each as soon as it ends; one without tokens could not be used.

        Requests are taken from the iterable only when one may be sent. If one fails for good, the
        others under way are waited for and given before the error is raised.

        Raises:
            ValueError: if the server refuses, keeps failing, or is not this target's.
        """
        queue = iter(requests)
        running: set[Future[Text]] = set()
        failed: BaseException | None = None
        pool = ThreadPoolExecutor(self._config.server.concurrency)
        try:
            while True:
                while failed is None and len(running) < self._config.server.concurrency:
                    if (request := next(queue, None)) is None:
                        break
                    running.add(pool.submit(self._answer, request))
                if not running:
                    break
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    if (error := future.exception()) is None:
                        yield future.result()
                    else:
                        failed = failed or error
        except BaseException:
            self._client.stop()  # Ctrl-C is not to wait for what is under way
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        if failed is not None:
            raise failed

    def _answer(self, request: Request) -> Text:
        config = self._config
        reply = self._client.post(
            "/completions",
            {
                "model": self._model,
                "prompt": list(request.prompt_ids),
                "max_tokens": config.max_new_tokens,
                "temperature": request.temperature,
                "top_p": config.top_p,
                "seed": request.seed % _SEED_RANGE,
                "return_token_ids": True,
                **self._extra,
            },
        )
        choices = reply.get("choices") or [{}]
        usage = reply.get("usage") or {}
        self._require_same_prompt(request, choices[0], usage)
        ids = answer_ids(choices[0], usage, request, self._target)
        if any(index >= self._target.real_vocab_size for index in ids):
            raise ValueError(
                f"{config.server.url} answers with token id {max(ids)}, the tokenizer of "
                f"{self._target.name} has {self._target.real_vocab_size} ids: expected a server of "
                "the same target"
            )
        return Text(request, ids)

    def _require_same_prompt(
        self, request: Request, choice: dict[str, Any], usage: dict[str, Any]
    ) -> None:
        """Whether the server read the ids that were sent, no more and no others."""
        sent = list(request.prompt_ids)
        read = choice.get("prompt_token_ids")
        counted = usage.get("prompt_tokens", len(sent))
        if (read is not None and read != sent) or counted != len(sent):
            raise ValueError(
                f"{self._config.server.url} read a prompt of {counted} tokens, sent were "
                f"{len(sent)}: it changes prompts, or takes no token ids; expected an "
                "OpenAI-compatible /completions that reads them as they are"
            )


def answer_ids(
    choice: dict[str, Any], usage: dict[str, Any], request: Request, target: ServedTarget
) -> list[int]:
    """The token ids of an answer, its end-of-text token included; [] if they can not be known."""
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        return []
    ids = _given_ids(choice)
    if ids is None:
        ids = _encoded_again(str(choice.get("text", "")), usage, request, target)
    if ids is None:
        return []
    end = next((place for place, index in enumerate(ids) if index in target.eos_token_ids), None)
    if end is not None:
        return ids[: end + 1]
    if reason == "length":
        return ids
    stop = _stop_id(choice, target)
    return [] if stop is None else [*ids, stop]


def _given_ids(choice: dict[str, Any]) -> list[int] | None:
    """The ids of a reply that has some, under the name that its server has for them."""
    for name in ("token_ids", "response_token_ids"):
        if isinstance(choice.get(name), list):
            return list(choice[name])
    content = (choice.get("logprobs") or {}).get("content")
    if isinstance(content, list) and all("id" in entry for entry in content):
        return [entry["id"] for entry in content]
    return None


def _encoded_again(
    text: str, usage: dict[str, Any], request: Request, target: ServedTarget
) -> list[int] | None:
    """The ids of a text, if they are beyond doubt those that were written.

    Decoded behind their prompt, as a tokenizer may treat the beginning of a text in its own way.
    """
    tokenizer = target.tokenizer
    ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    prompt = list(request.prompt_ids)
    whole, before = (
        tokenizer.decode(part, clean_up_tokenization_spaces=False)
        for part in (prompt + ids, prompt)
    )
    if whole != before + text:
        return None
    written = usage.get("completion_tokens", len(ids))
    return ids if written - len(ids) in (0, 1) else None  # the end token is counted by some


def _stop_id(choice: dict[str, Any], target: ServedTarget) -> int | None:
    """Which of the target's end tokens ended a text that does not show it."""
    named = choice.get("stop_reason")
    if named in target.eos_token_ids:
        return int(named)
    if len(target.eos_token_ids) == 1:
        return target.eos_token_ids[0]
    own = getattr(target.tokenizer, "eos_token_id", None)
    return own if own in target.eos_token_ids else None
