"""How the model of a side may differ in its weights: a tensor that is missing, an adapter at
another scale, dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from mismatch_cli.diagnosis.model import Hypothesis

SCALES = (0.0, 0.5, 2.0)  # not applied, half of alpha, counted twice
_SCALED = (
    "without its adapter",
    "the adapter at half its scale",
    "the adapter at twice its scale",
)
_SEED = 0


def missing_tensors(model: Any) -> Iterator[Hypothesis]:
    """The weights of each kind of norm as if they were never loaded, each kind of bias left out,
    norms of queries and keys left out, and the head tied to the embeddings.
    """
    norms = _names(model, _is_norm)
    for name in norms:
        yield Hypothesis(f"{name} weights never loaded", changed=_unloaded(name))
        if name in _OF_HEADS:
            yield Hypothesis(f"no {name}", changed=_skipped([name]))
    if not set(norms).isdisjoint(_OF_HEADS):
        yield Hypothesis("no norms of queries and keys", changed=_skipped(_OF_HEADS))
    for name in _names(model, _has_bias):
        yield Hypothesis(f"no {name} biases", changed=_without_bias(name))
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is not embeddings.weight and head.weight.shape == embeddings.weight.shape:
        yield Hypothesis("the embeddings as its head", changed=_tied)


def adapter_scales(model: Any) -> list[Hypothesis]:
    """The adapter on a model at other scales; none without an adapter."""
    if not _adapted(model):
        return []
    named = zip(_SCALED, SCALES, strict=True)
    return [Hypothesis(name, changed=_scaled(factor)) for name, factor in named]


def with_dropout(model: Any) -> Hypothesis | None:
    """The model in training mode; None if neither its configuration nor its adapter has any
    dropout.
    """
    config = model.config.get_text_config().to_dict()
    rates = [rate for name, rate in config.items() if "dropout" in name or "pdrop" in name]
    for module in model.modules():
        if "Dropout" in type(module).__name__:
            rates.append(getattr(module, "p", 0))
    if not any(isinstance(rate, float) and rate > 0 for rate in rates):
        return None
    return Hypothesis("dropout on", changed=_training)


@contextmanager
def _training(model: Any) -> Iterator[None]:
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        model.train()
        try:
            yield
        finally:
            model.eval()


def _adapted(model: Any) -> list[Any]:
    """Modules with a LoRA adapter."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "lora_A") and isinstance(getattr(module, "scaling", None), dict)
    ]


def _scaled(factor: float) -> Callable[[Any], AbstractContextManager[None]]:
    @contextmanager
    def changed(model: Any) -> Iterator[None]:
        before = [(module, dict(module.scaling)) for module in _adapted(model)]
        try:
            for module, scaling in before:
                module.scaling.update({name: scale * factor for name, scale in scaling.items()})
            yield
        finally:
            for module, scaling in before:
                module.scaling.update(scaling)

    return changed


# Norms of one head's queries and keys, which some implementations lack
_OF_HEADS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")


def _is_norm(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return "norm" in type(module).__name__.lower() and weight is not None and weight.ndim == 1


def _has_bias(module: Any) -> bool:
    return getattr(module, "bias", None) is not None and not _is_norm(module)


def _own_name(path: str) -> str:
    """The last part of a module's path, which the modules of all layers share."""
    return path.rpartition(".")[2]


def _names(model: Any, wanted: Callable[[Any], bool]) -> list[str]:
    """The names of wanted modules, each once and in the order of the model."""
    modules = model.named_modules()
    return list(dict.fromkeys(_own_name(path) for path, module in modules if wanted(module)))


def _modules(model: Any, names: Sequence[str], wanted: Callable[[Any], bool]) -> list[Any]:
    """The wanted modules of all layers that have one of these names."""
    modules = []
    for path, module in model.named_modules():
        if _own_name(path) in names and wanted(module):
            modules.append(module)
    return modules


def _unloaded(name: str) -> Callable[[Any], AbstractContextManager[None]]:
    """Norms with the weights that they are made with: 1, or 0 where 1 is added."""

    def changed(model: Any) -> AbstractContextManager[None]:
        norms = _modules(model, [name], _is_norm)
        return _filled([(norm.weight, _initial(norm)) for norm in norms])

    return changed


def _initial(norm: Any) -> float:
    """The weights that a norm is made with: 1, or 0 if it adds 1 to them."""
    import torch

    size = norm.weight.shape[0]
    inputs_2H = torch.linspace(-1, 1, 2 * size, device=norm.weight.device).reshape(2, size)
    # With weights of 0 a norm forgets its input, unless it adds 1
    with torch.no_grad(), _filled([(norm.weight, 0.0)]):
        first_H, second_H = norm(inputs_2H.to(norm.weight.dtype))
    return 1.0 if torch.equal(first_H, second_H) else 0.0


def _without_bias(name: str) -> Callable[[Any], AbstractContextManager[None]]:
    def changed(model: Any) -> AbstractContextManager[None]:
        return _filled([(module.bias, 0.0) for module in _modules(model, [name], _has_bias)])

    return changed


def _skipped(names: Sequence[str]) -> Callable[[Any], AbstractContextManager[None]]:
    """Norms that return what they get."""

    @contextmanager
    def changed(model: Any) -> Iterator[None]:
        norms = _modules(model, names, _is_norm)
        hooks = [norm.register_forward_hook(lambda _, inputs, __: inputs[0]) for norm in norms]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    return changed


def _tied(model: Any) -> AbstractContextManager[None]:
    embeddings = model.get_input_embeddings().weight
    return _filled([(model.get_output_embeddings().weight, embeddings)])


@contextmanager
def _filled(values: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Put other values, a number or a tensor, into weights temporarily."""
    import torch

    before = [weight.detach().clone() for weight, _ in values]
    with torch.no_grad():
        for weight, value in values:
            weight.copy_(torch.as_tensor(value))
    try:
        yield
    finally:
        with torch.no_grad():
            for (weight, _), original in zip(values, before, strict=True):
                weight.copy_(original)
