"""Runs in every Python that inherits the PYTHONPATH of `torch_settings`, and hides the same broken
packages there.

vLLM inspects model classes in a separate process and spawns workers; they import transformers like
the parent does.
"""

import importlib.machinery
import importlib.util
import os
import sys

for _name in filter(None, os.environ.get("MISMATCH_CLI_HIDDEN_MODULES", "").split(",")):
    sys.modules.setdefault(_name, None)  # type: ignore[arg-type]

# Python imports only one sitecustomize: run the one that this file shadows.
_here = os.path.dirname(os.path.abspath(__file__))
_others = [p for p in sys.path if os.path.abspath(p or os.curdir) != _here]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
