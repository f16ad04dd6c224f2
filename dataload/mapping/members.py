"""The members of modules and classes that Python or a library makes. Some hold paths, others follow from the source."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import re
import sys
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from dataload.mapping.packages import is_own

_WRAPPERS = (staticmethod, classmethod, functools.cached_property)
OF_NAMED_TUPLES = {*vars(collections.namedtuple("_Empty", ())), "__orig_bases__"} - {"_field_defaults", "_fields"}  # noqa: PYI024
_One = collections.namedtuple("_One", "x")  # noqa: PYI024 (its members are those of every named tuple)
OF_MODULES = {*vars(types.ModuleType("")), *("__annotate__", "__annotations__", "__builtins__", "__cached__")}
OF_MODULES |= {"__annotate_func__", "__annotations_cache__", "__conditional_annotations__", "__file__", "__path__"}
OF_MODULES |= {"__warningregistry__"}
_OF_CLASSES = {"__annotations__", "__dataclass_fields__", "__dataclass_params__", "__dict__", "__doc__", "__module__"}
_OF_CLASSES |= {"__abstractmethods__", "__firstlineno__", "__orig_bases__", "__parameters__", "__protocol_attrs__"}
_OF_CLASSES |= {"__annotate_func__", "__annotations_cache__", "__qualname__", "__signature__", "__slotnames__"}
_OF_CLASSES |= {"__slots__", "__static_attributes__", "__type_params__", "__weakref__", "_abc_impl"}
_OF_LIBRARIES = ("__pydantic_", "__attrs_", "__private_attributes__", "__class_vars__")
_OF_ENUMS = re.compile("_[^_].*[^_]_")  # Python reserves these names.
_OF_FIELDS = ("__attrs_attrs__", "__dataclass_fields__", "__pydantic_fields__", "__private_attributes__")
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType, type(_One.x))


def parts_of(member: Any) -> Iterator[Any]:
    """Yield the functions and objects inside of the wrappers of a member of a class; without one, the member."""
    if isinstance(member, (property, types.DynamicClassAttribute)):
        parts = [member.fget, member.fset, member.fdel]
    elif isinstance(member, _WRAPPERS):
        parts = [member.func if isinstance(member, functools.cached_property) else member.__func__]
    else:
        yield member
        return
    if is_own(type(member)):
        yield type(member)
    for part in parts:
        if part is not None:
            yield from parts_of(part)


def is_made(kind: type, name: str, member: Any) -> bool:
    """Return whether Python or a library makes a member of a class from its source, and it is no function."""
    if isinstance(kind, enum.EnumMeta) and (name in kind.__members__ or _OF_ENUMS.fullmatch(name)):
        return True
    return isinstance(member, _DESCRIPTORS) or name in _OF_CLASSES or name.startswith(_OF_LIBRARIES)


def fields_of(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the name of each field of a class, with what it was made of, such as a default, a type, or a validator."""
    none = None, dataclasses.MISSING, getattr(sys.modules.get("pydantic_core"), "PydanticUndefined", None)
    types_of_none = {*map(type, none)}  # A class of a script brings copies of these objects to another process.
    if vars(kind).get("__pydantic_complete__") is False:  # Its first use would complete it, and change its fields.
        with suppress(Exception):
            kind.model_rebuild(raise_errors=False)  # type: ignore[attr-defined]
    for fields in _OF_FIELDS:
        found = vars(kind).get(fields, {})
        for name, field in found.items() if isinstance(found, dict) else ((each.name, each) for each in found):
            parts = [(part, getattr(field, part)) for part in type(field).__slots__ if not part.startswith("_")]
            yield from ((f"{name}.{part}", each) for part, each in parts if type(each) not in types_of_none)
