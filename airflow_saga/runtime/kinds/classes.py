"""How a class is named in the log and found again."""

from __future__ import annotations

import enum
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from airflow_saga.runtime.kinds.tree import Payload, Refused, class_name, text_of

# Airflow loads a DAG file under a name with the hash of its path, which differs between versions of a Git bundle.
_DAG_FILE_MODULE = re.compile(r"unusual_prefix_[0-9a-f]{40}_(.+)")
_DAG_FILE = "dag-file."


def class_reference(cls: type) -> str:
    """``module:qualified name`` of a class that can be found again by it.

    :raises Refused: it cannot, or copies of its objects would act.
    """
    if "<locals>" in cls.__qualname__:
        raise Refused(
            f"its class {class_name(cls)} is defined inside a function; move it to the top of a module"
        )
    dag_file = _DAG_FILE_MODULE.fullmatch(cls.__module__)
    reference = f"{_DAG_FILE + dag_file[1] if dag_file else cls.__module__}:{cls.__qualname__}"
    if _loaded_class(reference) is not cls:
        raise Refused(
            f"its class {class_name(cls)} is not what its module holds by that name (made on the fly, replaced, or "
            f"loaded twice)"
        )
    if hasattr(cls, "__del__"):
        raise Refused(
            f"its class {class_name(cls)} has a __del__, which would run for each copy the log makes"
        )
    return reference


def read_class(tree: Payload, is_kind: Callable[[type], bool], kind: str) -> type[Any]:
    """The class that a tagged object names, of that kind and no other.

    :raises LookupError: it is missing, or is of another kind; says which.
    """
    reference = text_of(tree, "c")
    cls = _find_class(reference)
    if not is_kind(cls) or hasattr(cls, "__del__"):
        raise LookupError(f"{reference} is not {kind} (any more)")
    return cls


def is_enum(cls: type) -> bool:
    return isinstance(cls, enum.EnumMeta)


def is_namedtuple(cls: type) -> bool:
    fields = in_class(cls, "_fields")
    return (
        tuple in cls.__mro__ and isinstance(fields, tuple) and all(isinstance(name, str) for name in fields)
    )


def is_dataclass(cls: type) -> bool:
    return isinstance(in_class(cls, "__dataclass_fields__"), dict)


def is_pydantic(cls: type) -> bool:
    """Whether a class is a pydantic model; pydantic is not imported for it."""
    pydantic = sys.modules.get("pydantic.main")
    return pydantic is not None and pydantic.BaseModel in cls.__mro__


def in_class(cls: type, name: str) -> object:
    """An attribute as it stands in the class; unlike ``getattr`` it calls nothing."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def _find_class(reference: str) -> type:
    module, _, qualname = reference.partition(":")
    found = _loaded_class(reference)
    if found is None and not module.startswith(_DAG_FILE) and module not in sys.modules:
        _import(module)
        found = _loaded_class(reference)
    if found is None:
        of = (
            f"a DAG file {module.removeprefix(_DAG_FILE)}.py"
            if module.startswith(_DAG_FILE)
            else f"module {module}"
        )
        raise LookupError(f"there is no class {qualname} in {of}; was it renamed, moved or removed?")
    return found


def _import(module: str) -> None:
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts) or "__main__" in parts:
        raise LookupError(f"there is no module {module} to import")
    if parts[0] in sys.stdlib_module_names:
        raise LookupError(f"the module {module} of the standard library is not loaded here")
    importlib.import_module(module)


def _loaded_class(reference: str) -> type | None:
    name, _, qualname = reference.partition(":")
    if not name.startswith(_DAG_FILE):
        return _class_in(sys.modules.get(name), qualname)
    found = (_class_in(module, qualname) for module in _dag_files(name.removeprefix(_DAG_FILE)))
    return next((cls for cls in found if cls is not None), None)


def _dag_files(stem: str) -> Iterator[ModuleType]:
    """Loaded DAG files of that name, the one loaded last first: the newest version is what undoes."""
    for name, module in reversed(list(sys.modules.items())):
        if name.endswith(stem) and (match := _DAG_FILE_MODULE.fullmatch(name)) and match[1] == stem:
            yield module


def _class_in(module: object, qualname: str) -> type | None:
    if not isinstance(module, ModuleType):
        return None
    # A parametrised pydantic model stands in its module as one name, "Box[int]".
    found: object = vars(module).get(qualname)
    if found is None:
        found = module
        for part in qualname.split("."):
            found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    return found if isinstance(found, type) else None
