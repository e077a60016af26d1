"""A tokenizer of one character a token, for checkpoints of random weights: text in, text out."""

from __future__ import annotations

from pathlib import Path

FIRST = 33  # "!" is token 0
CHAT = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Adds a tokenizer to a checkpoint; ids behind its characters have no text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(FIRST, min(FIRST + vocabulary - 1, 127))]
    names = characters + [f"<|{number}|>" for number in range(len(characters), vocabulary)]
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=names[-1])
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
