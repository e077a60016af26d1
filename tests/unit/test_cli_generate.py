"""`eprt generate`: JSON lines in, JSON lines out."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.cases.text_model import write_tokenizer
from support.libraries import needs
from support.processes import Python, descendants, wait_until_gone

from eprt.cli import generate as command
from eprt.cli import main
from eprt.cli.journal import Journal, as_line
from eprt.cli.terminal import Advance
from eprt.errors import ConfigError

pytestmark = needs("transformers")

ROOT = Path(__file__).parents[2]
WORDS = ["generate", "--device", "cpu", "--max-new-tokens", "4"]


def test_prompts_come_back_in_order_as_they_were_given(tiny: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """Their own keys may have any names, lines end at newlines only, and a file may begin with a byte order mark."""
    given = [
        {"prompt": [5, 6, 7], "id": "a\u2028\x85b", "rank": 9, "tokens": "mine"},
        [8],
        {"prompt": [9] * 20, "text": 1},
    ]
    text = "\n".join(json.dumps(line, ensure_ascii=False) for line in given) + "\r\n\n"
    (tmp_path / "prompts.jsonl").write_text(text, "utf-8-sig", newline="")
    words = [*WORDS, "--model", str(tiny), "--world", "2", "--batch", "1"]
    assert main([*words, "--prompts", str(tmp_path / "prompts.jsonl")]) == 0
    out, err = capsys.readouterr()
    found = [json.loads(line) for line in out.splitlines()]
    assert [row["given"] for row in found] == [given[0], {"prompt": [8]}, given[2]]
    assert [row["rank"] for row in found] == [0, 1, 0], "the second rank has nothing in the last round"
    assert all(1 <= len(row["tokens"]) <= 4 for row in found)
    assert "tokens/s by rank" in err
    assert "time to first token, from the start of a prompt's round: median" in err
    assert "3 of 3 prompts done" in err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert main([*words, "--prompts", "-"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == found


class _TerminalStream(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [_TerminalStream, io.StringIO])
def test_a_bar_moves_where_there_is_a_terminal(
    tiny: Path, this_process, monkeypatch, stream: type[io.StringIO]
) -> None:
    """By what ranks append to a file: layers, then tokens. Elsewhere there are lines alone."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setattr(command, "ranks", this_process)
    seen = []
    done = Advance.done
    monkeypatch.setattr(Advance, "done", lambda self, each: seen.append((self.total, done(self, each))) or seen[-1][1])
    assert main([*WORDS, "--model", str(tiny), "--world", "1"]) == 0
    text = sys.stderr.getvalue()
    assert "on 1 rank, ready after" in text
    assert "rounds 1/1: 3 of 3 prompts done" in text
    assert ("\x1b[" in text) == bool(seen) == (stream is _TerminalStream)
    assert not seen or seen[-1] == (1, 1.0)


@pytest.fixture(scope="module")
def speaking(tiny: Path, tmp_path_factory) -> Path:
    """The same model with a tokenizer, which samples unless a flag says otherwise."""
    folder = tmp_path_factory.mktemp("generate") / "speaking"
    shutil.copytree(tiny, folder)
    write_tokenizer(folder, 512)
    settings = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 3, "eos_token_id": [511, 600]}
    settings["pad_token_id"] = 512  # which the model hasn't got, as 600
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def test_options_of_generation_are_transformers_own(
    speaking: Path, this_process, tmp_path: Path, capsys, monkeypatch
) -> None:
    """Chats go through the template; the checkpoint's generation_config.json counts where no flag is given; a line may
    have a seed of its own, without which its number makes one."""
    rows = [
        '{"messages": [{"role": "user", "content": "hi"}]}',
        '"u:hia:"',
        "[80, 20]",
        '{"prompt": [80, 20], "seed": 5}',
    ]
    rows += rows[3:]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    monkeypatch.setattr(command, "ranks", this_process)
    words = [*WORDS[:3], "--world", "1", "--model", str(speaking), "--prompts", str(tmp_path / "prompts.jsonl")]

    def answers(*more: str) -> tuple[list[list[int]], list[str]]:
        assert main([*words, *more]) == 0
        out = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return [row["tokens"] for row in out], [row["text"] for row in out]

    sampled, texts = answers()
    assert sampled == answers("--batch", "1")[0]
    assert {len(row) for row in sampled} == {3}
    assert sampled[3] == sampled[4] != sampled[2]
    assert sampled[0] != sampled[1], "other seeds"
    assert sampled != answers("--seed", "1")[0]
    greedy, _ = answers("--temperature", "0", "--max-new-tokens", "5")
    assert {len(row) for row in greedy} == {5}
    assert greedy[0] == greedy[1], "the template's text"
    assert [row[:3] for row in greedy] == answers("--top-k", "1")[0] == answers("--top-p", "1e-9", "--min-p", "0")[0]
    settings = speaking / "generation_config.json"
    said = settings.read_text()
    settings.write_text(json.dumps(json.loads(said) | {"temperature": 0}))
    assert answers()[0] == [row[:3] for row in greedy], "0 is greedy there, too"
    settings.write_text(said)
    stop = re.findall(r"<\|\d+\|>|.", texts[0])[0]
    stopped, ended = answers("--stop-strings", stop, "--stop-strings", "never")
    assert ended[0] == stop
    assert stopped[0] == sampled[0][:1]
    monkeypatch.setattr(command, "ranks", lambda *_: pytest.fail("ranks were started"))
    assert main([*words, "--stop-strings", "\u00e9"]) == 2
    assert "stop_strings=['\u00e9']: the tokenizer has no tokens that end them" in capsys.readouterr().err
    for line, said in (
        ('{"messages": [{"role": "user"}]}', "the chat template refuses the messages: "),
        ('{"messages": [{"content": "a"}]}', '{"messages": [...]}'),
        ('{"messages": []}', '{"messages": [...]}'),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "half of a surrogate pair"),
        ('{"prompt": [1], "seed": 1.5}', "seed 1.5: expected an integer of 64 bits"),
    ):
        (tmp_path / "prompts.jsonl").write_text(line)
        assert main(words) == 2
        assert said in (err := capsys.readouterr().err)
        assert err.count("\n") == 1


WRONG = [
    (b"{", "not JSON"),
    (b"plain text", '"text" or [token ids] as JSON'),
    (b'{"text": "hello"}', 'expected {"prompt": "text" or [token ids]}'),
    (b"[1.5]", "expected"),
    (b"[]", "expected"),
    (b"[true]", "expected"),
    (b'"hello"', "a prompt is text and the checkpoint has no tokenizer"),
    (b"[99999]", "token id 99999: expected 0 to 511"),
    (b"[%d]" % 2**70, "token id 1180591620717411303424: expected 0 to 511"),
    (b"[-1]", "token id -1"),
    (b"[1" + 5000 * b"0" + b"]", "not JSON"),
    (b"[" * 10**6, "nested too deeply"),
    (b'{"prompt": [1], "score": NaN}', "NaN is no finite number"),
    (b'{"prompt": [1], "score": -1e999}', "-1e999 is no finite number"),
    (b'"\\ud800"', "half of a surrogate pair"),
    (b'{"prompt": "caf\xe9"}', "not JSON ('utf-8' codec can't decode byte 0xe9"),
    (b"\0\x1b[31m", "not JSON"),
]


@pytest.mark.parametrize(("line", "said"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_a_wrong_line_is_refused_before_ranks_start(
    tiny: Path, tmp_path: Path, no_ranks, line: bytes, said: str, capsys
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"[1]\n" + line + b"\n")
    assert main([*WORDS, "--model", str(tiny), "--prompts", str(path)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.startswith(f"eprt: InputError: {path}:2: ")
    assert err.count("\n") == 1
    assert err.strip().isprintable()


@pytest.fixture
def no_ranks(monkeypatch) -> None:
    monkeypatch.setattr(command, "ranks", lambda *_: pytest.fail("ranks were started"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompts", "/no/such"], "--prompts /no/such: No such file"),
        (["--prompts", "/dev/zero"], "--prompts /dev/zero: not a regular file"),
        (["--prompts", "/"], "--prompts /: not a regular file"),
        (["--output", "/dev/null"], "--output /dev/null: not a regular file"),
        (["--output", "/no/such/file"], "--output /no/such/file: No such file"),
        (["--temperature", "nan"], "--temperature nan: must be 0 (greedy) or at least 0.001, and finite"),
        (["--temperature", "inf"], "--temperature inf"),
        (["--top-p", "0"], "--top-p 0.0: must be above 0"),
        (["--top-k", "-1"], "--top-k -1: must be at least 0"),
        (["--min-p", "1.5"], "--min-p 1.5: must be 0 to 1"),
        (["--repetition-penalty", "nan"], "--repetition-penalty nan: must be 0.01 to 100"),
        (["--stop-strings", ""], "--stop-strings ['']: must be text"),
        (["--stop-strings", "a"], "the checkpoint has no tokenizer to tell text by"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0: must be at least 1"),
        (["--graphs", "--no-graphs"], "choose one"),
        (["--model", "someone/else"], "someone/else: no such directory, and no model to be had from the hub"),
        (["--world", "0"], "--world 0: must be at least 1"),
        (["--max-tokens", "0"], "--max-tokens 0: must be a positive integer"),
        (["--model", "/no/such"], "/no/such"),
        (["--model", "/dev/null"], "/dev/null: not a folder"),
        (["--model", "pyproject.toml"], "pyproject.toml: not a folder"),
    ],
)
def test_options_and_files_are_refused_before_ranks_start(
    tiny: Path, no_ranks, words, said, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main([*WORDS, *([] if "--model" in words else ["--model", str(tiny)]), *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


# As Kimi-K2's.
CODED = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}, "tokenizer_class": "TikToken"}


@pytest.mark.parametrize(
    ("file", "fields", "said"),
    [
        ("tokenizer.json", {}, "its tokenizer can't be loaded"),
        ("tokenizer_config.json", CODED, "eprt generate runs no code of a checkpoint: tokenize by yourself"),
        ("config.json", {"model_type": ["gpt_oss"]}, "model_type ['gpt_oss'] is not supported"),
        (
            "generation_config.json",
            {"do_sample": True, "num_beams": 2},
            "num_beams 2, whose samples no --seed decides: set it to 1 there, or give --temperature 0",
        ),
        (
            "generation_config.json",
            {"max_length": 7},
            "example: 7 tokens, and generation_config.json's max_length is 7",
        ),
        (
            "generation_config.json",
            {"do_sample": True, "temperature": "hot"},
            "_config.json: temperature is 'hot': exp",
        ),
        ("generation_config.json", {"num_beams": "2"}, "num_beams is '2': expected an integer"),
        ("generation_config.json", {"max_length": "20"}, "max_length is '20': expected an integer"),
        ("generation_config.json", {"max_time": "9"}, "max_time is '9': expected a number"),
        ("generation_config.json", {"do_sample": "no"}, "do_sample is 'no': expected true or false"),
        ("generation_config.json", {"do_sample": True, "top_k": -1}, "top_k is -1: must be at least 0"),
        ("generation_config.json", {"repetition_penalty": 0}, "repetition_penalty is 0: must be 0.01 to 100"),
        ("generation_config.json", {"forced_eos_token_id": 512}, "forced_eos_token_id has 512: expected token ids"),
        ("generation_config.json", {"bad_words_ids": [[5], [512, 6]]}, "bad_words_ids has 512: expected token ids"),
    ],
)
def test_a_checkpoint_is_refused_before_ranks_start(
    tiny: Path, tmp_path: Path, no_ranks, file: str, fields: dict, said: str, capsys
) -> None:
    path = shutil.copytree(tiny, tmp_path / "model") / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | fields))
    assert main([*WORDS[:3], "--model", str(path.parent)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


PROMPTS = [json.dumps({"prompt": [5 + number % 2, 7], "id": number, "tokens": 1}) for number in range(5)]
ANSWERS = [as_line(prompt, {"tokens": [1, 2], "rank": 0}) for prompt in PROMPTS]
SETTINGS = {"model": "one", "temperature": 0.5}
HEADER = '{"eprt generate": {"model": "one", "temperature": 0.5, "round": 2}}'


def lines(rows: Sequence[str]) -> bytes:
    return b"".join(row.encode() + b"\n" for row in rows)


@pytest.mark.parametrize(
    ("held", "round_size", "done"),
    [
        (b"", 2, 0),
        (HEADER[:9].encode(), 2, 0),  # cut off as it began
        (HEADER.encode(), 2, 0),
        (lines([HEADER]), 2, 0),
        (lines([HEADER, *ANSWERS[:2]]), 2, 2),
        (lines([HEADER, *ANSWERS]), 2, 5),
        (lines([HEADER, *ANSWERS[:3]]), 2, 2),  # a round that isn't whole
        (lines([HEADER, *ANSWERS[:3]]), 4, 3),  # of other rounds
        (lines([HEADER, *ANSWERS[:2]])[:-1], 1, 1),  # cut off before its end of line, though it is whole JSON
        (lines([HEADER, *ANSWERS[:2]]) + b'{"given": {"prompt": [5, 7], "id": 2, "tok', 2, 2),
    ],
)
def test_a_journal_goes_on_after_its_last_whole_round(tmp_path: Path, held: bytes, round_size: int, done: int) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(held)
    journal = Journal(path, SETTINGS, round_size, PROMPTS)
    assert journal.done == done
    journal.write(ANSWERS[done:])
    journal.close()
    assert path.read_bytes() == lines([HEADER, *ANSWERS])


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (lines([HEADER, ANSWERS[1]]), ":2 answers no prompt, or another than --prompts has there"),
        (lines([HEADER, *ANSWERS, ANSWERS[0]]), ":7 answers no prompt"),
        (lines([HEADER, *ANSWERS[:2], "not an answer"]), ":4 answers no prompt"),
        (lines([HEADER]) + b"\xff\n", ":2 answers no prompt"),
        (lines([HEADER, ANSWERS[0].replace("[5, 7]", "[5.0, 7]")]), ":2 answers no prompt"),
        (lines([HEADER.replace("one", "another")]), "holds answers of model 'another', now 'one'"),
        (lines([HEADER.replace("0.5", "1")]), "holds answers of temperature 1, now 0.5"),
        (lines(ANSWERS), "not begun by eprt generate"),
        (lines(PROMPTS), "not begun by eprt generate"),
        (b"my notes", "not begun by eprt generate"),
        (b"[" * 10**5 + b"\n", "not begun by eprt generate"),
    ],
)
def test_a_file_of_anything_else_is_left_as_it_is(tmp_path: Path, held: bytes, said: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(held)
    with pytest.raises(ConfigError, match=re.escape(said)):
        Journal(path, SETTINGS, 2, PROMPTS)
    assert path.read_bytes() == held


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    first = Journal(path, SETTINGS, 2, PROMPTS)
    with pytest.raises(ConfigError, match=r"answers\.jsonl: another eprt generate writes it"):
        Journal(path, SETTINGS, 2, PROMPTS)
    first.write(ANSWERS)
    first.close()
    assert path.read_bytes() == lines([HEADER, *ANSWERS])
    Journal(path, SETTINGS, 2, PROMPTS).close()


def test_a_file_without_a_prompt_says_so(tiny: Path, tmp_path: Path, no_ranks, capsys) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    assert main([*WORDS, "--model", str(tiny), "--world", "1", "--prompts", str(tmp_path / "empty.jsonl")]) == 0
    assert "empty.jsonl holds no prompt" in capsys.readouterr().err


def test_a_finished_journal_starts_no_ranks(tiny: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """Nor does one of other options, another model or the prompts' own file."""
    (tmp_path / "prompts.jsonl").write_bytes(lines(PROMPTS))
    words = [*WORDS, "--model", str(tiny), "--world", "1", "--prompts", str(tmp_path / "prompts.jsonl")]
    output = ["--output", str(tmp_path / "answers.jsonl")]
    assert main([*words, *output]) == 0
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [json.dumps(row["given"]) for row in rows[1:]] == PROMPTS
    monkeypatch.setattr(command, "ranks", lambda *_: pytest.fail("ranks were started"))
    before = (tmp_path / "answers.jsonl").read_bytes()
    assert main([*words, *output]) == 0
    assert "5 of 5 prompts answered in the file already" in capsys.readouterr().err
    shutil.copytree(tiny, tmp_path / "tuned")
    with next((tmp_path / "tuned").glob("*.safetensors")).open("r+b") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        file.write(b"\1\2")
    for other, said in (
        (["--temperature", "0.5"], "temperature None, now 0.5"),
        (["--seed", "1"], "seed 0, now 1"),
        (["--model", str(tmp_path / "tuned")], "model "),
        (["--output", str(tmp_path / "prompts.jsonl")], "it is the file of the prompts"),
    ):
        assert main([*words, *output, *other]) == 2
        assert said in capsys.readouterr().err
    assert (tmp_path / "answers.jsonl").read_bytes() == before
    assert (tmp_path / "prompts.jsonl").read_bytes() == lines(PROMPTS)


@pytest.mark.timeout(200)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("number", "said", "rounds"),
    [(signal.SIGINT, "interrupted", 0), (signal.SIGINT, "interrupted", 3), (signal.SIGTERM, "ended by SIGTERM", 3)],
)
def test_a_signal_to_all_processes_ends_them_in_two_seconds_with_one_line(
    tiny: Path, tmp_path: Path, number: signal.Signals, said: str, rounds: int
) -> None:
    """As a terminal sends it: to the processes that ranks are forked from, too, which import for seconds at first."""
    (tmp_path / "prompts.jsonl").write_bytes(b"[5, 7]\n" * 1000)
    journal = tmp_path / "answers.jsonl"
    words = [*WORDS, "--model", tiny, "--world", "2", "--prompts", tmp_path / "prompts.jsonl", "--output", journal]
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with Python("-m", "eprt", *words, "--batch", "1", env=settings, start_new_session=True) as process:
        while len(descendants(process.pid)) < 2 or (rounds and journal.read_bytes().count(b"\n") < 1 + 2 * rounds):
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        below, began = descendants(process.pid), time.monotonic()
        os.killpg(process.pid, number)
        wait_until_gone([pid for pid in below if os.getsid(pid) == pid])  # the ranks
        assert time.monotonic() - began < 2
        _, err = process.communicate(timeout=100)  # once all that may write there are gone
        wait_until_gone(below)
    assert process.returncode == 128 + number
    *before, last = err.splitlines()
    assert "Traceback" not in err, err
    assert last == f"eprt: {said}; all ranks that this command started have been ended"
    assert all(re.match("1 MoE layer on|rounds ", line) for line in before), err
    assert journal.read_bytes().endswith(b"}\n")
    assert journal.read_bytes().count(b"\n") % 2, "its first line, and whole rounds of two"
