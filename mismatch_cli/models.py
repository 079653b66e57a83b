"""Loading a Hugging Face model or tokenizer, with what can be wrong said in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mismatch_cli.errors import MismatchError


def load_tokenizer(model: str) -> Any:
    """Load the tokenizer of a local folder or a hub name; raises a `MismatchError` where it is missing or does not fit."""
    from transformers import AutoConfig, AutoTokenizer

    check_model_folder(model)
    try:
        config = AutoConfig.from_pretrained(model)
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        raise MismatchError(
            f"{model}: the model's configuration or tokenizer cannot be loaded ({first_line(error)}). "
            "Give a model folder with config.json and tokenizer files, or a hub name."
        ) from error
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    largest = max(tokenizer.get_vocab().values(), default=0)
    if vocabulary is not None and largest >= vocabulary:
        raise MismatchError(
            f"The tokenizer of {model} has ids up to {largest}, but the model knows only {vocabulary}: they do not "
            "belong together. Save the tokenizer that the model was trained with into the model's folder."
        )
    return tokenizer


def check_model_folder(model: str) -> None:
    """Say what is wrong with a local path before a hub client takes it for the name of a repository."""
    path = Path(model).expanduser()
    looks_local = path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1 or path.exists()
    if not looks_local:
        return
    if not path.is_dir():
        raise MismatchError(f"There is no model folder {path}. Give a folder with config.json and weights, or a hub name.")
    if not (path / "config.json").is_file():
        raise MismatchError(f"{path} is no model folder: it has no config.json. Save the model with save_pretrained.")


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
