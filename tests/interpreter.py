"""Triton's interpreter, in which kernels run on a CPU."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np


@cache
def make_quicker() -> None:
    """Let it do once what it does again at every operation; what comes out, and what it refuses, stay.

    Half of what a kernel costs there.
    """
    from triton.runtime import interpreter

    _look_once_for_builtins(interpreter)
    _replace_once_a_launch(interpreter)
    _know_dtypes(interpreter)
    _know_shapes(interpreter)
    if not interpreter.interpreter_builder.options.debug:  # else it says which integers overflow, which ours may
        interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = lambda *operation: None


def _look_once_for_builtins(interpreter: Any) -> None:
    is_builtin, patch_attr = interpreter.tl.core.is_builtin, interpreter._patch_attr

    @cache
    def builtins_of(place: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(place) if is_builtin(member)]

    def patch_builtin(place: Any, builder: Any, scope: Any) -> None:
        """As the interpreter's own, which walks through all members of ``triton.language``."""
        names = builtins_of(place)
        if names and is_builtin(getattr(place, names[0])):  # they are replaced and given back together
            for name in names:
                patch_attr(place, name, getattr(place, name), builder, scope)

    interpreter._patch_builtin = patch_builtin


def _replace_once_a_launch(interpreter: Any) -> None:
    """``triton.language`` is replaced for a launch; a device function that is called in it finds it so."""
    tl, patch_lang, restore = interpreter.tl, interpreter._patch_lang, interpreter._LangPatchScope.restore
    replaced: set[int] = set()

    @cache
    def languages(function: Callable[..., Any]) -> frozenset[int]:
        return frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)

    def once(function: Callable[..., Any]) -> Any:
        if replaced and languages(function) <= replaced:
            return interpreter._LangPatchScope()  # with nothing to give back
        replaced.update(languages(function))
        return patch_lang(function)

    def given_back(scope: Any) -> None:
        replaced.clear()
        restore(scope)

    interpreter._patch_lang = once
    interpreter._LangPatchScope.restore = given_back


def _know_dtypes(interpreter: Any) -> None:
    find, tl = interpreter._get_np_dtype, interpreter.tl
    known: dict[str, np.dtype] = {}

    def dtype_of(kind: Any) -> np.dtype:
        scalar = kind.scalar
        if isinstance(scalar, tl.pointer_type):
            return find(scalar)
        if scalar.name not in known:
            known[scalar.name] = find(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = dtype_of


def _know_shapes(interpreter: Any) -> None:
    """A tensor has a type with a name and a size of its own, and a shape of constants, which have types, too. They are
    made once a shape, or once a dtype and shape; nobody changes them. Two of one shape need no broadcast."""
    core, semantic = interpreter.tl.core, interpreter.interpreter_semantic
    make_block, broadcast = core.block_type.__init__, semantic.broadcast_impl_value
    blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    @cache
    def constants(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) is not core.dtype:  # a pointer, which has more than a name
            make_block(self, element_ty, shape)
            return
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        if (element_ty.name, sizes) not in blocks:
            make_block(self, element_ty, shape)
            blocks[element_ty.name, sizes] = dict(self.__dict__)
        self.__dict__.update(blocks[element_ty.name, sizes])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = constants(tuple(type.shape) if type.is_block() else ())

    def broadcast_unless_alike(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(lhs, rhs)

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    semantic.broadcast_impl_value = broadcast_unless_alike
