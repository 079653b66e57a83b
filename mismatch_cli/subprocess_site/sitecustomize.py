"""Run by every Python that inherits the PYTHONPATH that `torch_settings` sets: hides the same broken packages there.

vLLM inspects model classes in a process of its own and spawns workers; they import transformers like the parent does.
"""

import importlib.machinery
import importlib.util
import os
import sys

for _name in filter(None, os.environ.get("MISMATCH_CLI_HIDDEN_MODULES", "").split(",")):
    sys.modules.setdefault(_name, None)  # type: ignore[arg-type]

# Only one sitecustomize is imported by Python: pass the turn on to the one that this file has shadowed.
_here = os.path.dirname(os.path.abspath(__file__))
_others = [p for p in sys.path if os.path.abspath(p or os.curdir) != _here]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
