"""transformers' own classes, which vLLM changes where it serves a model through them, given back to the trainer.

vLLM's Transformers backend decorates the decoder class for torch.compile: from then on it can be made only inside vLLM,
and runs through vLLM's compiler. For some model types vLLM also puts a configuration class of its own in the table.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class ModelClasses:
    """Model classes as they were before an engine, and the table of configuration classes."""

    classes: dict[type, tuple[tuple[type, ...], dict[str, Any]]]  # bases and attributes
    configs: dict[Any, Any]

    @classmethod
    def current(cls, model: str) -> ModelClasses:
        """Those of the family of `model`, which transformers imports only when asked, among them."""
        from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

        with suppress(Exception):  # a model that transformers does not know: vLLM may, with classes of its own
            config = AutoConfig.from_pretrained(model, trust_remote_code=False)
            for each in (config, config.get_text_config()):
                for auto in (AutoModel, AutoModelForCausalLM):
                    auto._model_mapping.get(type(each), None)
        classes = {each: (each.__bases__, dict(vars(each))) for each in _with_subclasses(PreTrainedModel)}
        return cls(classes, dict(CONFIG_MAPPING._extra_content))

    def give_back(self, llm: Any = None) -> None:
        """Restore every class; what the engine has made of one becomes an instance of the changed class, by itself."""
        from transformers import CONFIG_MAPPING

        CONFIG_MAPPING._extra_content.clear()
        CONFIG_MAPPING._extra_content.update(self.configs)
        changed = {each: self._restored(each) for each in self.classes if each.__bases__ != self.classes[each][0]}
        if changed and llm is not None:
            llm.apply_model(partial(_move, changed))

    def _restored(self, changed: type) -> type:
        """Undo what was done to a class; answers a subclass that has it."""
        bases, attributes = self.classes[changed]
        added = tuple(base for base in changed.__bases__ if base not in bases)
        own = {name: value for name, value in vars(changed).items() if attributes.get(name) is not value}
        changed.__bases__ = bases
        for name in own:
            if name in attributes:
                setattr(changed, name, attributes[name])
            else:
                delattr(changed, name)
        return type(changed.__name__, (changed, *added), own | {"__module__": changed.__module__})


def _move(changed: dict[type, type], model: Any) -> None:
    for module in model.modules():
        if type(module) in changed:
            module.__class__ = changed[type(module)]


def _with_subclasses(base: type) -> set[type]:
    subclasses: list[type] = base.__subclasses__()
    return {base}.union(*map(_with_subclasses, subclasses))
