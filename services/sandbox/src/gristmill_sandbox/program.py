"""Runs a program in a process that is confined: `run`.

A test file and the program that it tests are two processes. The program never sees the tests, and cannot replace what
they use. Tests call the program's functions through a socket: a call's arguments and its result are copies, of
Python's plain values only (numbers, text, bytes, None, and lists, tuples, sets and dicts of them). Each side accepts
nothing else. An instance of a subclass of dict, list, tuple or set is sent as a value of that type.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib
import io
import linecache
import os
import pickle
import struct
import sys
import threading
import traceback
from types import ModuleType
from typing import Any, BinaryIO, Final, Literal

FILE: Final = "program.py"
"""Name of the program, and with role "test" of the tests, in tracebacks."""
MODULE: Final = "program"
"""Tests may import the program's functions from it. The functions are also global names of the tests."""
_LENGTH: Final = struct.Struct("!I")
_PLAIN: Final = frozenset({"dict", "list", "tuple", "set", "frozenset", "complex", "bytearray", "range", "slice"})


def run(role: Literal["run", "serve", "test"], text: str, peer: int | None) -> int:
    """Runs a program and returns its exit code, as Python's own command would. `peer`: descriptor of the other
    process."""
    sys.argv = [FILE]
    sys.path = ["", *(path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix)))]
    sys.dont_write_bytecode = True
    module = ModuleType("__main__" if role != "serve" else MODULE)
    module.__file__ = FILE
    sys.modules[module.__name__] = module
    linecache.cache[FILE] = (len(text), None, text.splitlines(keepends=True), FILE)
    other = None if peer is None else os.fdopen(peer, "r+b", buffering=0)
    if role == "test" and other is not None:
        _import_functions(other, module)
    code = _execute(text, module)
    if role == "serve" and other is not None:
        if code == 0:
            _serve(other, module)
        other.close()
    _end(module)
    return code


def _end(module: ModuleType) -> None:
    """Does what Python does at its end: waits for threads, calls exit functions, and writes what open files hold."""
    # The first also ends the threads of executors, which wait for work until then.
    for finish in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            finish()
    streams = [sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__]
    module.__dict__.clear()
    gc.collect()
    for stream in streams:
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]


def _execute(text: str, module: ModuleType) -> int:
    try:
        exec(compile(text, FILE, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        sys.stderr.write(f"{stop.code}\n")
        return 1
    except BaseException as error:  # noqa: BLE001  as Python's own command
        trace = error.__traceback__.tb_next if error.__traceback__ else None  # Without this function's frame.
        with contextlib.suppress(BaseException):
            traceback.print_exception(type(error), error, trace)
        return 1
    return 0


# --- The program's side of a test -------------------------------------------------------------------------------------


def _serve(tests: BinaryIO, module: ModuleType) -> None:
    """Sends the names of the program's functions and imported modules. Answers calls until the tests end."""
    functions = [name for name, value in vars(module).items() if callable(value)]
    modules = {name: value.__name__ for name, value in vars(module).items() if isinstance(value, ModuleType)}
    _send(tests, (functions, modules))
    while True:
        try:
            name, given, named = _receive(tests)
        except EOFError:
            return
        try:
            answer = "value", vars(module)[name](*given, **named)
            _pickled(answer)
        except BaseException as error:  # noqa: BLE001  the tests may expect it
            answer = "error", (type(error).__name__, str(error))
        _send(tests, answer)


# --- The side of the tests --------------------------------------------------------------------------------------------


class _Function:
    """A function of the program, called in the program's process."""

    def __init__(self, program: BinaryIO, name: str) -> None:
        self._program, self.__name__ = program, name

    def __call__(self, *given: Any, **named: Any) -> Any:
        _send(self._program, (self.__name__, given, named))
        kind, answer = _receive(self._program)
        if kind == "value":
            return answer
        name, text = answer
        value = getattr(builtins, str(name), None)
        # `map`, `zip` and `for` would take StopIteration as their end (PEP 479).
        ends = isinstance(value, type) and issubclass(value, StopIteration | StopAsyncIteration)
        raised = value if isinstance(value, type) and issubclass(value, Exception) and not ends else RuntimeError
        try:
            error = raised(text)
        except TypeError:  # UnicodeDecodeError takes five arguments.
            error = RuntimeError(f"{name}: {text}")
        raise error


def _import_functions(program: BinaryIO, module: ModuleType) -> None:
    """Gives the tests the program's functions, and the modules of the standard library that the program imported."""
    try:
        functions, modules = _receive(program)
    except EOFError:
        return  # The program ended. The tests fail at the first name.
    exported: dict[str, Any] = {str(name): _Function(program, str(name)) for name in functions}
    for name, original in modules.items():
        if str(original).partition(".")[0] in sys.stdlib_module_names:
            exported[str(name)] = importlib.import_module(str(original))
    # A program could otherwise replace `abs` or `AssertionError` for its tests.
    exported = {name: value for name, value in exported.items() if not hasattr(builtins, name) and name[:2] != "__"}
    module.__dict__.update(exported)
    sys.modules[MODULE] = ModuleType(MODULE)
    vars(sys.modules[MODULE]).update(exported)


class _Plain(pickle.Unpickler):
    """Reads plain values only."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "builtins" and name in _PLAIN:
            return getattr(builtins, name)
        raise TypeError(f"a value of {module}.{name} cannot be passed between a program and its tests")


class _Plainer(pickle.Pickler):
    """Writes an instance of a subclass, such as a Counter or a namedtuple, as the plain value that it equals."""

    def reducer_override(self, value: Any) -> Any:
        kind: type
        for kind in (dict, list, tuple, set):
            if isinstance(value, kind) and type(value) is not kind:
                return kind, (kind(value),)
        return NotImplemented


def _pickled(value: Any) -> bytes:
    written = io.BytesIO()
    _Plainer(written).dump(value)
    return written.getvalue()


def _send(to: BinaryIO, value: Any) -> None:
    body = _pickled(value)
    data = memoryview(_LENGTH.pack(len(body)) + body)
    while data:
        data = data[to.write(data) :]


def _receive(source: BinaryIO) -> Any:
    """Raises EOFError if the other process has ended, TypeError for a value that is not plain."""
    (length,) = _LENGTH.unpack(_exactly(source, _LENGTH.size))
    return _Plain(io.BytesIO(_exactly(source, length))).load()


def _exactly(source: BinaryIO, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = source.read(min(length - len(data), 65536))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
