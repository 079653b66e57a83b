"""Differences between the two models' configurations that can change log-probs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mismatch_cli.models.loading import check_model_folder, load_config
from mismatch_cli.models.torch_settings import prepare_imports

# Keys for a model's origin, training, run-time options, special tokens or dtypes.
_BOOKKEEPING = {
    "_attn_implementation", "_name_or_path", "architectures", "attention_dropout", "attn_pdrop",
    "auto_map",
    "bos_token_id", "chunk_size_feed_forward", "classifier_dropout", "dtype", "embd_pdrop",
    "embedding_dropout",
    "eos_token_id", "head_dtype", "hidden_dropout", "id2label", "initializer_range",
    "is_encoder_decoder", "label2id",
    "model_type", "output_attentions", "output_hidden_states", "output_router_logits",
    "pad_token_id", "problem_type",
    "quantization_config", "resid_pdrop", "return_dict", "router_aux_loss_coef",
    "router_jitter_noise",
    "router_z_loss_coef", "sep_token_id", "torch_dtype", "transformers_version", "use_cache",
    "vocab_size",
}  # fmt: skip
# Both sides read `rope_parameters` if it exists; vLLM then ignores `rope_theta` of `hf_overrides`.
# So beside it these keys change nothing, and a difference in them is not reported.
_OVERRULED = ("rope_theta", "rope_scaling")


@dataclass(frozen=True)
class ConfigDifference:
    """A key whose values differ; `inner` names the parts that differ, if the values have parts."""

    key: str
    rollout: Any
    trainer: Any
    inner: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"inner": list(self.inner)}


def config_differences(
    rollout: str, trainer: str, overrides: Mapping[str, Any] | None = None
) -> list[ConfigDifference]:
    """Compare key by key, as transformers resolves both configurations; `overrides` are those
    that the engine was started with.
    """
    prepare_imports()
    rollout_config, trainer_config = (
        _resolve_config(rollout, overrides or {}),
        _resolve_config(trainer, {}),
    )
    differences = []
    for key in _differing(rollout_config, trainer_config):
        if key not in _BOOKKEEPING:
            of_rollout, of_trainer = rollout_config.get(key), trainer_config.get(key)
            inner: tuple[str, ...] = ()
            if isinstance(of_rollout, Mapping) and isinstance(of_trainer, Mapping):
                inner = tuple(_differing(of_rollout, of_trainer))
            differences.append(ConfigDifference(key, of_rollout, of_trainer, inner))
    return differences


def _resolve_config(model: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's settings, with overrides applied as vLLM applies them."""
    check_model_folder(model)
    config = load_config(model)
    for key, value in overrides.items():
        own: Any = getattr(config, key, None)
        is_section = hasattr(own, "update") and not isinstance(own, Mapping)
        if isinstance(value, Mapping) and is_section:
            own.update(dict(value))
        else:
            config.update({key: value})
    text = config.get_text_config()
    if getattr(text, "rope_parameters", None) is not None:
        text.standardize_rope_params()
    settings: dict[str, Any] = text.to_dict()
    if "rope_parameters" in settings:
        for key in _OVERRULED:
            settings.pop(key, None)
    return settings


def _differing(rollout: Mapping[str, Any], trainer: Mapping[str, Any]) -> list[str]:
    """The keys whose values differ, sorted; a missing value is None."""
    keys = rollout.keys() | trainer.keys()
    return sorted(key for key in keys if rollout.get(key) != trainer.get(key))
