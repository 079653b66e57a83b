"""The class of a token's text."""

from __future__ import annotations

import pytest

from mismatch_cli.studies.clipping import token_class

EXAMPLES = {
    "digit": ["0", "7", "42", "2024", " 5", "3 ", "\n9", "７", "４２", "٣"],
    "operator": [
        "+", "-", "*", "/", "=", "<", ">", " +", " = ", "==", "<=", "->", "×", "÷", "·", "±", "≤",
        "≥", "≠", "−", "^",
        "\\times", "\\cdot", "\\div", "\\frac", "\\sqrt", "\\leq", " \\pm", "%", "→", "**",
    ],
    "connective": [
        "Wait", " wait", "Thus", " thus", "Since", " since", "So", "However", " However",
        "Therefore", "WAIT", "Next",
        "Let", "If", "But", " because", "We", "This", "Instead",
    ],
    "structure": [
        ",", ".", "(", ")", ":\n\n", "\n", "\n\n", " ", "  ", "", "\t", "<|im_end|>", "</s>",
        "<think>", "\\(", "\\[",
        "\\]", "\\)", "\\", "\\\\", "_{", "):\n", ".\n\n", "$", "{", "}", "?", "\\begin", "\\text",
        "…", "。", "❤️", "•",
    ],
    "other": [
        "vector", " integer", "Identify", "spiral", "x", "k", "Sub", "x1", "3rd", "1.5", "waiting",
        "Sinces", "a+b",
        "café", "数学", "<b>bold</b>", "⟨17⟩", "\\frac{1}{2}", "wait,", "²",
        # Vowel signs and tones, which tokenizers part from their letters, and a part of a character
        "ा", "ें", "ั้", "\ufffd", " \ufffd\ufffd",
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", EXAMPLES)
def test_examples(kind):
    assert [text for text in EXAMPLES[kind] if token_class(text) != kind] == []


@pytest.mark.parametrize("text", ["🎉", "👩‍🔬", "\u200b", "\x00", "\ufffd", "\x1b[2J"])
def test_text_that_is_neither_word_nor_number_has_a_class(text):
    assert token_class(text) in ("structure", "other")


def test_a_text_of_the_paper_s_list_of_clipped_tokens():
    """Some of the fifty most clipped tokens in the appendix, as the tokenizer writes them."""
    kinds = {
        " the": "other",
        " \\(": "structure",
        "1": "digit",
        "Let": "connective",
        " +": "operator",
        " ->": "operator",
    }
    kinds |= {
        ":\n\n": "structure",
        " Instead": "connective",
        "div": "other",
        " =": "operator",
        "_{": "structure",
    }
    assert {text: token_class(text) for text in kinds} == kinds
