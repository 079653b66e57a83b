"""Loads a Hugging Face model or tokenizer, and reports whatever is wrong with it in one
sentence.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_cli.base import custom_code
from mismatch_cli.base.errors import MismatchError, UsageError, denied, first_line, unreadable
from mismatch_cli.base.extras import require
from mismatch_cli.base.text import parse_json
from mismatch_cli.models.attention import SAFE, attention_facts
from mismatch_cli.models.torch_settings import DTYPES, prepare_imports
from mismatch_cli.processes.ranks.joined import is_lost_rank

if TYPE_CHECKING:
    import torch

    from mismatch_cli.models.sharding import Sharding

# `num_hidden_layers`, `n_routed_experts`, `decoder_layers`; not `shared_expert_intermediate_size`
_COUNTS_MODULES = re.compile(r"(^|_)n(um)?_(\w+_)?(layer|expert)s?($|_per)|(layers|experts)$")
_MOST_MODULES = 4096
_PLACED_BY_ACCELERATE = ("auto", "balanced", "balanced_low_0", "sequential")


def load_causal_lm(
    model: str,
    dtype: str = "auto",
    attn_implementation: str | None = None,
    device_map: str | None = None,
    sharding: Sharding | None = None,
) -> Any:
    """Load a causal LM in eval mode, whole or spread over the ranks.

    `dtype` "auto" is the checkpoint's own; without a device map the model goes to CUDA if
    available. Without an attention implementation transformers chooses one; it is "eager" if that
    one would ignore what the model needs. Raises a UsageError for an unknown dtype or device, a
    MismatchError for anything wrong with the model.
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
            if device is not None:
                loaded = loaded.to(device)
        # sdpa, transformers' choice, silently drops an attention soft cap, and log π changes.
        # A trainer's model that is not loaded here would keep it.
        if attn_implementation is None and attention_facts(loaded):
            loaded.set_attn_implementation(SAFE)
    except MismatchError:
        raise
    except Exception as error:  # transformers raises all kinds of errors for damaged checkpoints
        if is_lost_rank(error):
            raise
        raise MismatchError(_explain_failure(model, error)) from error
    _check_complete(model, info)
    return loaded.eval()


def check_models(models: Sequence[str | None], who: str) -> None:
    """A `MismatchError` for a folder without a model, or if the libraries that score are not
    installed.
    """
    for model in filter(None, models):
        check_model_folder(model)
        require("hf", who)


def _device(device_map: str | None) -> torch.device | None:
    """The single device of the model; None if accelerate places its layers."""
    import torch

    check_device(device_map)
    if device_map in _PLACED_BY_ACCELERATE:
        return None
    device = torch.device(device_map or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MismatchError(
            f"device_map = {device_map} is not available: torch sees {torch.cuda.device_count()} "
            "CUDA devices. Use device_map = cpu, or leave it out."
        )
    return device


def check_device(device_map: str | None) -> None:
    """Check the name of a device without initialising CUDA, which must not happen before the
    engine starts.
    """
    if device_map in _PLACED_BY_ACCELERATE and importlib.util.find_spec("accelerate") is None:
        raise MismatchError(
            f"device_map = {device_map} needs accelerate. Install it with: pip install accelerate"
        )
    if device_map is None or device_map in ("cpu", "cuda", *_PLACED_BY_ACCELERATE):
        return
    import torch

    try:
        torch.device(device_map)
    except RuntimeError as error:
        raise UsageError(
            f"device_map = {device_map} is not a device. Use auto, cpu, cuda, cuda:0 or another "
            "name that torch knows."
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
    """Load a model of which each rank reads only its own part of the weights."""
    import torch

    from mismatch_cli.models.sharding import add_plan, prepare_for_passes

    config = load_config(model)
    dtype = options["dtype"]
    compute_dtype = config.dtype if dtype == "auto" else getattr(torch, dtype)
    if compute_dtype is None:
        raise MismatchError(
            f"{model} does not record the dtype of its weights. Name it with --trainer-dtype."
        )
    add_plan(config, model)
    with sharding.policy(compute_dtype):
        loaded, info = _from_pretrained(model, options | sharding.options(config, dtype))
    return prepare_for_passes(loaded, sharding, compute_dtype), info


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the progress bar and the table of missing weights, which are an error with its
    own message here.
    """
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    has_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def _explain_failure(model: str, error: Exception) -> str:
    """What the user should know about an error of transformers, in one sentence."""
    import torch

    lines = str(error).strip().splitlines()
    reason = lines[0].strip() if lines else type(error).__name__
    refusal = custom_code.refusal(model, error)
    if refusal:
        return refusal
    if "Unrecognized configuration class" in reason:
        if "text_config" in type(load_config(model)).sub_configs:
            return (
                f"{model} reads more than text, and transformers does not load its language model "
                "alone, which scoring needs. Name a model of text only."
            )
        return (
            f"{model} is not a causal language model. Name a model that generates text from left "
            "to right."
        )
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"{model} does not fit into the device's memory. Use --trainer-dtype bfloat16 or "
            "device_map = auto."
        )
    if "couldn't connect" in reason or "is not a local folder" in reason:
        return (
            f"{model} is not a local folder, and the Hugging Face hub cannot provide it "
            f"({reason}) Check the name."
        )
    return f"{model} cannot be loaded by transformers: {reason}"


def _check_complete(model: str, info: dict[str, Any]) -> None:
    """Refuse missing weights: transformers warns and fills them with random numbers, which would
    look like mismatch.
    """
    missing = sorted(info["missing_keys"])
    if missing:
        raise MismatchError(
            f"{model} is incomplete: {len(missing)} of its weights are missing, such as "
            f"{missing[0]}. Save the whole model (with its LM head) and try again."
        )


def checkpoint_layers(model: Any) -> None:
    """Checkpoint gradients: keep only the input of each layer, and recompute the rest, which trades
    time for memory.

    Only the layers are set to training mode, so dropout stays off.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    try:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise MismatchError(
            f"{type(model).__name__} does not support gradient checkpointing ({first_line(error)}). "
            "Leave out gradient_checkpointing."
        ) from error
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True


def round_weights(model: Any, dtype: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Round a model's weights to what an engine of this dtype holds, in place; each with what it
    was before.

    Its own dtype stays, so the model computes as before.
    """
    import torch

    from mismatch_cli.models.sharding import local_shard

    before = []
    for weight in model.parameters():
        shard = local_shard(weight.detach())
        before.append((shard, shard.clone()))
    for shard, _ in before:
        shard.copy_(shard.to(getattr(torch, dtype)))
    return before


def load_tokenizer(model: str) -> Any:
    """Load the tokenizer of a local folder or a hub name; a `MismatchError` if it is missing or
    does not fit.
    """
    prepare_imports()
    from transformers import AutoTokenizer

    check_model_folder(model)
    model = os.path.expanduser(model)
    try:
        config = load_config(model)
        tokenizer = AutoTokenizer.from_pretrained(model, **custom_code.loading())
        custom_code.note(model, tokenizer)
    except (MismatchError, MemoryError):
        raise
    # transformers and huggingface_hub raise all kinds of errors for damaged files.
    except Exception as error:
        raise MismatchError(
            custom_code.refusal(model, error)
            or f"{model}: the model's configuration or tokenizer cannot be loaded "
            f"({first_line(error)}). Name a model folder with config.json and tokenizer files, or "
            "a hub name."
        ) from error
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    largest = max(tokenizer.get_vocab().values(), default=0)
    if vocabulary is not None and largest >= vocabulary:
        raise MismatchError(
            f"The tokenizer of {model} has ids up to {largest}, but the model's vocabulary is "
            f"{vocabulary}: they do not match. Save the tokenizer that the model was trained "
            "with into the model's folder."
        )
    return tokenizer


def load_config(model: str) -> Any:
    """The configuration of a local folder or a hub name; raises whatever transformers raises for
    an invalid one.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(os.path.expanduser(model), **custom_code.loading())
    custom_code.note(model, config)
    return config


def check_attention(implementation: str | None) -> None:
    """A `UsageError` for an implementation that is code on the hub, unless the user allows it to
    run.
    """
    if implementation is not None and "/" in implementation and not custom_code.allowed():
        raise UsageError(
            f"attn = {implementation} is code on the hub, which would run here. If you have read "
            f"it and trust it, add {custom_code.FLAG}; otherwise use sdpa or eager."
        )


def known_vocabulary(model: str) -> int | None:
    """The number of token ids, if a local model's config.json states it."""
    tokens = _local_config(model).get("vocab_size")
    return tokens if isinstance(tokens, int) else None


def local_architecture(model: str) -> str:
    """The name of a local model's class, if its config.json states it, else empty."""
    names = _local_config(model).get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _local_config(model: str) -> dict[str, Any]:
    """A local model's config.json; empty if it cannot be read."""
    try:
        path = Path(model).expanduser() / "config.json"
        config = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError):  # RuntimeError: a home that does not exist
        return {}
    return config if isinstance(config, dict) else {}


def not_only_data(model: str) -> str:
    """Why a model is more than data, as a clause; empty for safetensors without code, here or in
    the hub's cache.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        cached = _in_cache(model)
        if cached is None:
            return "which is neither a folder on this machine nor in the hub's cache."
        folder = cached
    if any(_names_code(path) for path in folder.glob("*config*.json")):
        return f"which contains its own code and needs {custom_code.FLAG}."
    if not any(folder.glob("*.safetensors")):
        return "whose weights are not safetensors."
    return ""


def _in_cache(model: str) -> Path | None:
    """The folder of a hub name in the local cache, without asking the hub."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def _names_code(path: Path) -> bool:
    try:
        return _has_key(parse_json(path.read_text(encoding="utf-8")), "auto_map")
    except (OSError, ValueError):
        return False  # whoever loads the model says what is wrong with the file


def _has_key(content: Any, name: str) -> bool:
    """Whether a JSON object, or one inside it, has this key."""
    items = content
    if isinstance(content, dict):
        if name in content:
            return True
        items = content.values()
    elif not isinstance(content, list):
        return False
    return any(_has_key(item, name) for item in items)


def check_model_folder(model: str) -> None:
    """Report an invalid local path before a hub client takes it for the name of a repository."""
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
            f"There is no model folder {path}. Name a folder with config.json and weights, or a "
            "hub name."
        )
    if not (path / "config.json").is_file():
        raise MismatchError(
            f"{path} is not a model folder: it has no config.json. Save it with save_pretrained."
        )
    for file in path.iterdir():
        is_read = file.suffix in (".json", ".safetensors", ".bin")
        if is_read and not os.access(file, os.R_OK):
            raise denied(file)  # libraries report such a file as missing
    _check_config(path / "config.json")


def _check_config(path: Path) -> None:
    """Refuse a file that is no JSON object, and so many modules that libraries would build them
    for hours.
    """
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise unreadable(
            path, error, "Save the model with save_pretrained.", "cannot be read ({})"
        ) from error
    if not isinstance(config, dict):
        raise MismatchError(f"{path} is not a JSON object. Save the model with save_pretrained.")
    sections = [config, *(value for value in config.values() if isinstance(value, dict))]
    for section in sections:
        for name, value in section.items():
            is_excessive = isinstance(value, int) and value > _MOST_MODULES
            if is_excessive and _COUNTS_MODULES.search(name):
                raise MismatchError(
                    f"{path} sets {name} to {value}, and no model has so many. Fix the file."
                )
