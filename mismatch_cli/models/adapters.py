"""LoRA adapters on a Hugging Face model: saved ones, applied or merged, and new ones to train."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_cli.base import custom_code
from mismatch_cli.base.errors import MismatchError, first_line
from mismatch_cli.base.text import parse_json
from mismatch_cli.models.torch_settings import prepare_imports

if TYPE_CHECKING:
    import torch

_CONFIG = "adapter_config.json"
_WRAPPED = re.compile(r"(\.base_layer)+(?=\.|$)")  # how peft wraps a module, perhaps repeatedly
_SCALES = (
    "r",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "fan_in_fan_out",
    "lora_bias",
)


@dataclass(frozen=True)
class Adapter:
    """A saved adapter; `digest` hashes its weights and scales: equal digests mean equal
    adapters.
    """

    name: str  # as given
    folder: Path
    rank: int  # the largest, if modules differ
    alpha: float
    targets: tuple[str, ...]
    digest: str

    def facts(self, *, merged: bool) -> dict[str, Any]:
        """What a manifest records about it, besides its base model."""
        return {
            "adapter": self.name,
            "adapter_rank": self.rank,
            "adapter_alpha": self.alpha,
            "adapter_targets": ", ".join(self.targets),
            "adapter_merged": merged,
            "adapter_digest": self.digest,
        }


def check_adapter(name: str) -> None:
    """Raise an error if the settings of a local adapter are invalid, before peft reads its
    weights.
    """
    folder = _local_folder(name)
    if folder is not None:
        _read_settings(name, folder)


def base_model_of_adapter(name: str) -> str | None:
    """The base model that the adapter in a folder names; None for anything but such a folder."""
    folder = Path(name).expanduser()
    if not (folder / _CONFIG).is_file() or (folder / "config.json").is_file():
        return None
    with _readable(name):
        config = parse_json((folder / _CONFIG).read_text(encoding="utf-8"))
        return str(config["base_model_name_or_path"])


def read_adapter(name: str) -> Adapter:
    """The adapter in a folder or under a hub name; a `MismatchError` if it is not a LoRA adapter
    that peft can load.
    """
    folder = _local_folder(name) or _from_hub(name)
    config, rank, alpha = _read_settings(name, folder)
    prepare_imports()
    from peft import load_peft_weights

    with _readable(name):
        weights = load_peft_weights(str(folder), device="cpu")
    # Absent, empty and false mean the same, so that equal adapters have equal digests.
    scales = {key: config.get(key) or None for key in _SCALES}
    return Adapter(name, folder, rank, alpha, target_names(config), _digest(scales, weights))


def _read_settings(name: str, folder: Path) -> tuple[dict[str, Any], int, float]:
    """The adapter's configuration as peft saves it, with its largest rank and its alpha."""
    with _readable(name):
        config: dict[str, Any] = parse_json((folder / _CONFIG).read_text(encoding="utf-8"))
        rank = max(config["r"], *config.get("rank_pattern", {}).values(), 0)
        alpha = float(config["lora_alpha"])
    if config.get("modules_to_save"):
        raise MismatchError(
            f"{name} contains full modules ({', '.join(config['modules_to_save'])}) beside its "
            "low-rank weights, which rollout engines do not load. Merge it into the model, and "
            "probe that."
        )
    return config, int(rank), alpha


@contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # peft and safetensors raise all kinds of errors for broken files
        cause = f"{type(error).__name__}: {first_line(error)}"
        raise MismatchError(
            custom_code.refusal(f"The adapter {name}", error)
            or f"{name} is not a readable LoRA adapter ({cause}). "
            f"Name a folder with {_CONFIG} and adapter_model.safetensors, as peft saves them."
        ) from error


def target_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What an adapter changes, by peft's settings: modules by the last part of their names, and
    parameters.
    """
    modules = config["target_modules"]
    parameters = set(config.get("target_parameters") or ())
    if isinstance(modules, str):
        return (modules, *sorted(parameters))
    modules = set(modules or ()) - set(config.get("exclude_modules") or ())
    last_parts = {name.rpartition(".")[2] for name in modules}
    return tuple(sorted(last_parts | parameters))


def same_adapter(first: str | None, second: str | None) -> bool:
    """Whether two adapters, or none, change the weights in the same way, regardless of their
    paths.
    """
    if first is None or second is None:
        return first is second
    return first == second or read_adapter(first).digest == read_adapter(second).digest


def apply_adapter(model: Any, adapter: Adapter, *, merge: bool) -> Any:
    """The model with an adapter, in eval mode; `merge` adds it to the weights, rounded to their
    dtype.

    An unmerged adapter is in float32, as peft trains it. An adapter of the LM head is always
    merged, into an untied copy of the head: the head runs in tiles, and changing a tied head would
    change the embeddings too.
    """
    from peft import PeftConfig, PeftModel, load_peft_weights, set_peft_model_state_dict

    try:
        with _quiet():
            config = PeftConfig.from_pretrained(str(adapter.folder))
            config.inference_mode = True
            wrapped = PeftModel(model, config)
            weights = load_peft_weights(str(adapter.folder), device="cpu")
            loaded: Any = set_peft_model_state_dict(wrapped, weights)
    # peft raises all kinds of errors for a shape, module or option that does not fit.
    except Exception as error:
        raise MismatchError(
            f"The adapter {adapter.name} does not fit {model.name_or_path or 'the model'} "
            f"({first_line(error)}). Name the model that it was trained on."
        ) from error
    # The weights of the model itself are missing too, as they should be.
    missing = [key for key in loaded.missing_keys if "lora_" in key]
    if missing or loaded.unexpected_keys:
        odd = (missing or loaded.unexpected_keys)[0]
        raise MismatchError(
            f"The adapter {adapter.name} would be applied only in part: {len(missing)} of its "
            f"weights are missing and {len(loaded.unexpected_keys)} fit no module of "
            f"{model.name_or_path or 'the model'}, such as {odd}. Name the model that it was "
            "trained on."
        )
    with _quiet():
        _merge_head(model)
        if merge:
            model = wrapped.merge_and_unload()
        return model.eval()


def start_lora(model: Any, *, rank: int, alpha: float, targets: str, seed: int) -> Any:
    """Add a new adapter to a model in place, and freeze the rest; return peft's model, which can
    save the adapter.

    `targets` are comma-separated names of modules or parameters (fused experts), or all-linear. B
    starts at 0, so the initial policy is that of the model.
    """
    prepare_imports()
    import torch
    from peft import LoraConfig, PeftModel

    settings: dict[str, Any] = {"lora_alpha": alpha, **_target_settings(model, targets)}
    config = LoraConfig(r=rank, lora_dropout=0.0, task_type="CAUSAL_LM", **settings)
    try:
        with torch.random.fork_rng(), _quiet():
            torch.manual_seed(seed)
            wrapped = PeftModel(model, config)
    except ValueError as error:
        raise MismatchError(
            f"The model has no modules {targets} for an adapter ({first_line(error)}). Use "
            "lora_targets = all-linear."
        ) from error
    modules = [name for name, _ in model.named_modules()]
    # peft is content with one module of several targets.
    nowhere = [name for name in sorted(config.target_modules or ()) if not _ends_one(name, modules)]
    if nowhere:
        raise MismatchError(
            f"The model has no modules {', '.join(nowhere)} for an adapter. Use lora_targets = "
            "all-linear."
        )
    head = model.get_output_embeddings()
    embeddings = model.get_input_embeddings()
    if hasattr(head, "lora_A") or hasattr(embeddings, "lora_A"):
        raise MismatchError(
            f"lora_targets = {targets} includes the LM head or the embeddings, which an adapter "
            "cannot train here: the head runs in tiles. Leave them out, or use all-linear."
        )
    model.eval()
    return wrapped


def _target_settings(model: Any, targets: str) -> dict[str, Any]:
    """peft's settings for these targets: modules and parameters separately, and routers as plain
    matrices.
    """
    if targets == "all-linear":
        return {"target_modules": targets, "exclude_modules": _linear_routers(model) or None}
    modules = {name for name, _ in model.named_modules()}
    matrices = {name for name, weight in model.named_parameters() if weight.dim() == 3}
    target_modules = []
    fused = []
    for target in targets.split(","):
        name = target.strip()
        if not _ends_one(name, modules) and _ends_one(name, matrices):
            fused.append(name)
        else:
            target_modules.append(name)
    return {"target_modules": target_modules, "target_parameters": fused or None}


def _linear_routers(model: Any) -> list[str]:
    """Linear layers with a forward of their own: peft would add to its result as if it were a
    product.
    """
    from torch import nn

    routers = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward:
            routers.append(name)
    return routers


def _ends_one(name: str, paths: Iterable[str]) -> bool:
    """Whether a dotted path ends with this name."""
    return any(f".{path}".endswith(f".{name}") for path in paths)


def save_adapter(wrapped: Any, folder: Path) -> None:
    """Save a trained adapter as peft does, without the model's own weights, which may be
    sharded.
    """
    learnt = {name: weight for name, weight in wrapped.named_parameters() if weight.requires_grad}
    wrapped.save_pretrained(str(folder), state_dict=learnt, save_embedding_layers=False)


def state_below(wrapped: Any) -> dict[str, torch.Tensor]:
    """The base weights below an adapter, under the names of the plain model."""
    state = wrapped.state_dict().items()
    return {_WRAPPED.sub("", name): value for name, value in state if ".lora_" not in name}


class MergedAdapter:
    """A model with its adapter merged, for the rollout engine: `state_dict` has the names of the
    plain model.
    """

    def __init__(self, model: Any) -> None:
        self.learning = model

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        return _MergedState(self.learning)


class _MergedState(Mapping[str, "torch.Tensor"]):
    """The weights of a model by name, each merged only when requested; ranks must request the same
    ones in step.

    Each is computed from the untouched base as W + B A · scale in float32 and rounded once: merging
    in place and subtracting again would accumulate the rounding of every step.
    """

    def __init__(self, model: Any) -> None:
        self.base = state_below(model)
        self._layers = adapted_layers(model)

    def __getitem__(self, name: str) -> torch.Tensor:
        from mismatch_cli.models.sharding import whole

        weight = self.base[name]
        layer = self._layers.get(name)
        if layer is None:
            return weight
        delta = whole(layer.get_delta_weight("default").detach())
        return (whole(weight).float() + delta.float()).to(weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)


def adapted_layers(model: Any) -> dict[str, Any]:
    """The layers with an adapter, by the name of the weight that it changes in the plain model.

    Experts that are fused into one parameter have an adapter for each parameter, one wrapped around
    the other.
    """
    layers = {}
    for path, module in model.named_modules():
        if hasattr(module, "lora_A"):
            parameter = getattr(module, "parameter_name", "weight")
            layers[f"{_WRAPPED.sub('', path)}.{parameter}"] = module
    return layers


def _merge_head(model: Any) -> None:
    """Untie a head or embeddings that the adapter changes, and merge the head into one plain
    matrix.
    """
    head = model.get_output_embeddings()
    embeddings = model.get_input_embeddings()
    if not (hasattr(head, "lora_A") or hasattr(embeddings, "lora_A")):
        return
    from torch import nn

    base = head.get_base_layer() if hasattr(head, "lora_A") else head
    # peft merges into the matrix, which a tied head shares with the embeddings.
    # Without a matrix of its own, the head's adapter would change the embeddings too.
    base.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
    model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
    if base is not head:
        head.merge()
        model.set_output_embeddings(base)


def _local_folder(name: str) -> Path | None:
    """The local folder of an adapter; None for a name on the hub."""
    path = Path(name).expanduser()
    # A name on the hub is AUTHOR/NAME.
    if not (path.is_dir() or path.is_absolute() or name.startswith(".") or name.count("/") != 1):
        return None
    if not (path / _CONFIG).is_file():
        raise MismatchError(
            f"{path} is not an adapter: it has no {_CONFIG}. Name a folder that peft has saved."
        )
    return path.resolve()


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["adapter_*"]))
    except Exception as error:
        raise MismatchError(
            f"The adapter {name} is not a local folder, and the Hugging Face hub cannot provide it "
            f"({first_line(error)}). Check the name."
        ) from error


def _digest(scales: dict[str, Any], weights: Mapping[str, torch.Tensor]) -> str:
    import torch

    digest = hashlib.sha256(json.dumps(scales, sort_keys=True).encode())
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence peft's warnings about tied weights and missing keys; this module handles both."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
