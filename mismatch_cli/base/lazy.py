"""Names of a package that are imported when somebody asks for them."""

from __future__ import annotations

TYPE_CHECKING = False  # instead of importing typing for it
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def lazy(package: str, module_of: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package: `module_of` maps a name to the module below that has it."""

    def attribute(name: str) -> object:
        from importlib import import_module

        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module_of[name]}"), name)

    return attribute
