"""Reads the prompts of `eprt generate`: JSON lines in UTF-8, whatever their file holds."""

from __future__ import annotations

import json
import math
import stat
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from eprt.errors import ConfigError, InputError, one_block

MAX_LINE_BYTES = 64 << 20
EXPECTED = 'expected {"prompt": "text" or [token ids]}, {"messages": [...]}, "text" or [token ids] as JSON'
# Without --prompts, and of the tiny checkpoint's vocabulary: one is longer, and the last rank has none.
EXAMPLES = (b"[11, 42, 7]", b"[5, 310, 99, 23, 4, 61, 17]", b"[256]")


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        where: FILE:LINE.
        given: its line as a JSON object, with all that it holds beside the prompt.
        prompt: the text, token ids, or the messages of a chat.
        seed: the line's own, of its sampling.
    """

    where: str
    given: str
    prompt: str | list[Any]
    seed: int | None = None

    def ids(self, tokenizer: Any, vocabulary: int) -> list[int]:
        """Returns the prompt's token ids. Raises InputError: text without a tokenizer, messages that its template
        refuses, or an id that no token has."""
        found: list[int] = self.prompt if _are_ids(self.prompt) else self._encoded(tokenizer)
        if not found:
            raise InputError(f"{self.where}: the prompt has no token: expected at least one")
        wrong = next((token for token in found if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise InputError(f"{self.where}: token id {_cut(str(wrong))}: expected 0 to {vocabulary - 1}")
        return found

    def _encoded(self, tokenizer: Any) -> list[int]:
        """Returns the ids of text, or of a chat by the tokenizer's template. Raises InputError."""
        if tokenizer is None:
            raise InputError(
                f"{self.where}: a prompt is text and the checkpoint has no tokenizer: give token ids, or add its files"
            )
        if isinstance(self.prompt, str):
            return list(tokenizer(self.prompt)["input_ids"])
        if not tokenizer.chat_template:
            raise InputError(f"{self.where}: messages, and the checkpoint's tokenizer has no chat template: give text")
        try:
            found = tokenizer.apply_chat_template(self.prompt, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # whatever the template, a program of the checkpoint's, raises
            why = _cut(f"{type(error).__name__}: {error}")
            raise InputError(f"{self.where}: the chat template refuses the messages: {why}") from error
        return list(found)


def read_prompts(path: Path | None) -> list[Prompt]:
    """Reads the prompts of a file, one JSON value per line; "-" is stdin, None the examples.

    Raises:
        ConfigError: the file can't be read, or isn't a regular one.
        InputError: a line that is no prompt, by file and line.
    """
    if path is None:
        return [_prompt(line, "example") for line in EXAMPLES]
    prompts: list[Prompt] = []
    try:
        with _opened(path) as file:
            for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES + 1), b""), start=1):
                if len(line) > MAX_LINE_BYTES:
                    raise InputError(f"{path}:{number}: a line of more than {MAX_LINE_BYTES >> 20} MiB: {EXPECTED}")
                if line.strip():
                    prompts.append(_prompt(line, f"{path}:{number}"))
    except OSError as error:
        raise ConfigError(f"--prompts {path}: {error.strerror or error}") from error
    return prompts


def _opened(path: Path) -> AbstractContextManager[BinaryIO]:
    if path == Path("-"):
        if sys.stdin is None:
            raise ConfigError("--prompts -: standard input is closed")
        return nullcontext(sys.stdin.buffer)
    if not stat.S_ISREG(path.stat().st_mode):
        raise ConfigError(f"--prompts {path}: not a regular file; what a pipe brings is read with --prompts -")
    return path.open("rb")


def _prompt(line: bytes, where: str) -> Prompt:
    """Returns the prompt in a line. Raises InputError."""
    try:
        value = json.loads(line.decode("utf-8-sig"), parse_constant=_finite, parse_float=_finite)
        found: dict[str, Any] = value if isinstance(value, dict) else {"prompt": value}
        given = json.dumps(found)
    except ValueError as error:
        raise InputError(f"{where}: not JSON ({_cut(str(error))}): {EXPECTED}") from error
    except RecursionError as error:
        raise InputError(f"{where}: JSON that is nested too deeply: {EXPECTED}") from error
    content, seed = found.get("messages" if "prompt" not in found else "prompt"), found.get("seed")
    if not content or not (isinstance(content, str) or _are_ids(content) or ("prompt" not in found and _chat(content))):
        raise InputError(f"{where}: {_cut(line.decode())}: {EXPECTED}")
    if any("\ud800" <= character <= "\udfff" for character in json.dumps(content, ensure_ascii=False)):
        raise InputError(f"{where}: the prompt holds half of a surrogate pair, which is no character")
    if seed is not None and (type(seed) is not int or abs(seed) >= 1 << 63):
        raise InputError(f"{where}: seed {_cut(json.dumps(seed))}: expected an integer of 64 bits")
    return Prompt(where, given, content, seed)


def _are_ids(content: Any) -> TypeGuard[list[int]]:
    return isinstance(content, list) and all(type(token) is int for token in content)


def _chat(content: Any) -> bool:
    """Returns whether these are messages, as far as every template wants them."""
    return isinstance(content, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) for one in content
    )


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{_cut(digits)} is no finite number")
    return value


def _cut(text: str) -> str:
    return one_block(" ".join(text.split()), 80)
