"""Names of a package that are imported when somebody asks for them."""

from collections.abc import Callable, Mapping
from importlib import import_module


def lazy(package: str, where: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package: `where` maps a name to the module below it that has it."""

    def attribute(name: str) -> object:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{where[name]}"), name)

    return attribute
