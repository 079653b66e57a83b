"""Loading a Hugging Face model or tokenizer, with whatever can be wrong said in one sentence."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_cli import custom_code
from mismatch_cli.attention import SAFE, attention_facts
from mismatch_cli.errors import MismatchError, UsageError, first_line
from mismatch_cli.extras import require
from mismatch_cli.ranks.joined import is_lost_rank
from mismatch_cli.torch_settings import DTYPES, prepare_imports

if TYPE_CHECKING:
    import torch

    from mismatch_cli.sharding import Sharding

_UP_TO_NUMBER = re.compile(r"([^.]*\.)*?\d+\.|")  # `model.layers.3.` of what lies in a layer, else nothing
_PLACED_BY_ACCELERATE = ("auto", "balanced", "balanced_low_0", "sequential")


def load_causal_lm(
    model: str,
    dtype: str = "auto",
    attn_implementation: str | None = None,
    device_map: str | None = None,
    sharding: Sharding | None = None,
) -> Any:
    """Load a causal LM in eval mode, whole or spread over the ranks.

    `dtype` "auto" is the checkpoint's own; without a device map the model goes to CUDA if there is one. No attention
    implementation is transformers' choice, or "eager" where that leaves out what the model asks for.
    Raises UsageError for a dtype or device that does not exist, MismatchError for whatever is wrong with the model.
    """
    check_attention(attn_implementation)
    if dtype not in DTYPES:
        raise UsageError(f"{dtype!r} is not a dtype for a model. Use one of: {', '.join(DTYPES)}.")
    check_model_folder(model)
    device = _device(device_map)
    prepare_imports()
    options: dict[str, Any] = {"dtype": dtype}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if device is None:
        options["device_map"] = device_map
    try:
        if sharding is not None:
            loaded, info = _spread(model, options, sharding)
        else:
            loaded, info = _from_pretrained(model, options)
            loaded = loaded if device is None else loaded.to(device)
        if attn_implementation is None and attention_facts(loaded):
            loaded.set_attn_implementation(SAFE)
    except MismatchError:
        raise
    except Exception as error:  # a foreign library: a damaged checkpoint fails in as many ways as there are formats
        if is_lost_rank(error):
            raise
        raise MismatchError(_why(model, error)) from error
    _check_complete(model, info)
    return loaded.eval()


def check_models(models: Sequence[str | None], who: str) -> None:
    """A `MismatchError` for a folder that holds no model, or where what scores with one is not installed."""
    for model in filter(None, models):
        check_model_folder(model)
        require("hf", who)


def _device(device_map: str | None) -> torch.device | None:
    """The one device of the model; None where accelerate places its layers."""
    import torch

    check_device(device_map)
    if device_map in _PLACED_BY_ACCELERATE:
        return None
    device = torch.device(device_map or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MismatchError(
            f"--device-map {device_map} is not here: torch sees {torch.cuda.device_count()} CUDA devices. "
            "Use --device-map cpu, or leave it out."
        )
    return device


def check_device(device_map: str | None) -> None:
    """Say what is wrong with the name of a device, without looking for it: CUDA is not to begin before an engine."""
    if device_map in _PLACED_BY_ACCELERATE and importlib.util.find_spec("accelerate") is None:
        raise MismatchError(f"--device-map {device_map} needs accelerate. Install it with: pip install accelerate")
    if device_map is None or device_map in ("cpu", "cuda", *_PLACED_BY_ACCELERATE):
        return
    import torch

    try:
        torch.device(device_map)
    except RuntimeError as error:
        raise UsageError(
            f"--device-map {device_map} is no device. Use auto, cpu, cuda, cuda:0 or another name that torch knows."
        ) from error


def _from_pretrained(model: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    with _quiet():
        loaded, info = AutoModelForCausalLM.from_pretrained(
            os.path.expanduser(model), output_loading_info=True, **custom_code.loading(), **options
        )
        custom_code.note(model, loaded, loaded.config)
        return loaded, info


def _spread(model: str, options: dict[str, Any], sharding: Sharding) -> tuple[Any, dict[str, Any]]:
    """Each rank reads its own part of the weights."""
    import torch

    from mismatch_cli.sharding import add_plan, prepared

    config, dtype = load_config(model), options["dtype"]
    computes = config.dtype if dtype == "auto" else getattr(torch, dtype)
    if computes is None:
        raise MismatchError(f"{model} does not say in which dtype it was saved. Name one with --trainer-dtype.")
    add_plan(config, model)
    with sharding.policy(computes):
        loaded, info = _from_pretrained(model, options | sharding.options(config, dtype))
    return prepared(loaded, sharding, computes), info


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar and no table of missing weights: those are an error here, with a sentence of its own."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _why(model: str, error: Exception) -> str:
    import torch

    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if refused := custom_code.refusal(model, error):
        return refused
    if "Unrecognized configuration class" in reason:
        return f"{model} is not a causal language model. Name a model that generates text from left to right."
    if isinstance(error, torch.OutOfMemoryError):
        return f"{model} does not fit into the memory of the device. Use --trainer-dtype bfloat16 or --device-map auto."
    if "couldn't connect" in reason or "is not a local folder" in reason:
        return f"{model} is no folder here, and the Hugging Face hub did not give it ({reason}) Check the name."
    return f"{model} cannot be loaded by transformers: {reason}"


def _check_complete(model: str, info: dict[str, Any]) -> None:
    """transformers fills missing weights with random numbers and warns; that would be measured as mismatch."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise MismatchError(
            f"{model} is incomplete: {len(missing)} of its weights are missing, such as {missing[0]}. "
            "Save the whole model (with its LM head) and try again."
        )


def checkpoint_layers(model: Any) -> None:
    """Keep of each layer only what enters it, and compute the rest again for its gradients: memory for time.

    Only layers are told that they train: dropout stays off.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    try:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise MismatchError(
            f"{type(model).__name__} cannot compute its layers again ({first_line(error)}) "
            "Leave --gradient-checkpointing out."
        ) from error
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True


def saved_state(model: Any) -> Mapping[str, torch.Tensor]:
    """The weights of a Hugging Face model, or of one with an adapter added, under the names that its folder has.

    transformers fuses experts when it loads, and renames what older folders hold; engines read the names of folders.
    """
    from transformers.core_model_loading import revert_weight_conversion

    from mismatch_cli.sharding import is_spread, whole_state

    learning, state = getattr(model, "learning", model), whole_state(model)
    if is_spread(learning) and not learning._weight_conversions:
        return state  # each made whole only when it is asked for
    saved: Mapping[str, torch.Tensor] = revert_weight_conversion(learning, dict(state))
    return saved


def saved_by_layer(model: Any, state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's state under the names that its folder has, layer by layer: what is taken apart is copied."""
    from transformers.core_model_loading import revert_weight_conversion

    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in state.items():
        layers.setdefault(_UP_TO_NUMBER.match(name)[0], {})[name] = tensor  # type: ignore[index]
    for part in layers.values():
        yield from revert_weight_conversion(model, part).items()


def load_tokenizer(model: str) -> Any:
    """Load the tokenizer of a local folder or a hub name; a `MismatchError` where it is missing or does not fit."""
    prepare_imports()
    from transformers import AutoTokenizer

    check_model_folder(model)
    model = os.path.expanduser(model)
    try:
        config = load_config(model)
        tokenizer = AutoTokenizer.from_pretrained(model, **custom_code.loading())
        custom_code.note(model, tokenizer)
    except (OSError, ValueError, KeyError) as error:
        raise MismatchError(
            custom_code.refusal(model, error)
            or f"{model}: the model's configuration or tokenizer cannot be loaded ({first_line(error)}). "
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


def load_config(model: str) -> Any:
    """The configuration of a local folder or a hub name, with whatever error transformers has for one that is none."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(os.path.expanduser(model), **custom_code.loading())
    custom_code.note(model, config)
    return config


def check_attention(implementation: str | None) -> None:
    """A `UsageError` for an implementation that is code on the hub, where nobody has said that it may run."""
    if implementation is not None and "/" in implementation and not custom_code.allowed():
        raise UsageError(
            f"--attn {implementation} is code on the hub, which would run here. If you have read it and trust it, "
            f"add {custom_code.FLAG}; else use sdpa or eager."
        )


def known_vocabulary(model: str) -> int | None:
    """The number of token ids, where the model lies on this machine and says so at first sight."""
    try:
        tokens = json.loads((Path(model).expanduser() / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return tokens if isinstance(tokens, int) else None


def check_model_folder(model: str) -> None:
    """Say what is wrong with a local path before a hub client takes it for the name of a repository."""
    path = Path(model).expanduser()
    looks_local = (
        path.is_absolute()
        or model.startswith((".", "~"))
        or model.endswith("/")
        or model.count("/") > 1
        or path.exists()
    )
    if not looks_local:
        return
    if not path.is_dir():
        raise MismatchError(
            f"There is no model folder {path}. Give a folder with config.json and weights, or a hub name."
        )
    if not (path / "config.json").is_file():
        raise MismatchError(f"{path} is no model folder: it has no config.json. Save the model with save_pretrained.")
