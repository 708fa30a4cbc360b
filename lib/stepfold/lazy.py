"""Packages whose public names load on first use."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType


def attach(
    package: str, names: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that imports its names on first use.

    A package imports the same names under `TYPE_CHECKING`, for type checkers and editors, and lists
    them in `__all__`. Where a function has the name of its module, such as `stepfold.data.collate`,
    the attribute of the package is the function: importing the module does not replace it.

    Args:
      package: `__name__` of the package.
      names: for each module of stepfold the names that it has, separated by spaces.

    >>> from stepfold import data
    >>> data.collate.__module__
    'stepfold.data.collate'
    """
    modules = {name: module for module, listed in names.items() for name in listed.split()}

    def load(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"stepfold.{modules[name]}"), name)
        vars(sys.modules[package])[name] = value  # the next use does not come here
        return value

    class Package(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            if name not in modules or not isinstance(value, ModuleType):
                super().__setattr__(name, value)

        def __reduce__(self) -> tuple[object, ...]:  # cloudpickle knows the type of modules only
            return import_module, (package,)

    sys.modules[package].__class__ = Package
    return load, lambda: sorted(modules)
