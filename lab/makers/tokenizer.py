"""Trains the tokenizer of the bundled model: byte-level BPE, so that it takes any text, with one
token per digit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lab.makers.solutions import write_solution
from lab.makers.word_problems import problems

VOCABULARY = 2048
CORPUS_PROBLEMS = 30_000
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
# ChatML, as Qwen3 uses it. A system message is passed on if there is one; there is no default.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n"
    "' + message['content'] + '<|im_end|>\n"
    "' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n"
    "' }}{% endif %}"
)
# The split of the Qwen tokenizers: words with their leading space, single digits, runs of
# punctuation, white space.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def corpus(seed: int) -> Iterator[str]:
    """Problems and solutions, on the training side of the split."""
    rng = random.Random(seed)
    for problem in islice(problems(seed, for_training=True), CORPUS_PROBLEMS):
        yield "user\n" + problem.text
        yield "assistant\n" + write_solution(rng, problem)


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """The tokenizer, with exactly `VOCABULARY` entries."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[START, END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise RuntimeError(
            f"the corpus gives {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
