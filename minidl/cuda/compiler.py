"""libnvrtc through ctypes; run as a program, a process that compiles what it is sent.

NVRTC compiles one program at a time in a process, on however many threads it is called: only processes compile side by
side. This file imports nothing of minidl or of other packages, so that one is ready in a tenth of a second.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence


class Library:
    """The few functions of libnvrtc that are needed, each raising on an error code."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def knows(self, option: str) -> bool:
        """Whether this version has it."""
        try:
            self.compile("", "nothing", [option], False)
        except RuntimeError:
            return False
        return True

    def compile(self, source: str, name: str, options: Sequence[str], exact: bool) -> tuple[bytes, str]:
        """The cubin, or PTX unless ``exact``, and the log of the compiler and the assembler.

        Raises:
            RuntimeError: when it does not compile, with the variant and the log.
        """
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        try:
            encoded = [option.encode() for option in options]
            failure = None
            try:
                self._call("nvrtcCompileProgram", program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded))
            except RuntimeError as error:
                failure = error
            log = self._read("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            if failure is not None:
                raise RuntimeError(f"{name} does not compile ({' '.join(options)}): {failure}\n{log}") from failure
            return self._read("CUBIN" if exact else "PTX", program), log
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {self._library.nvrtcGetErrorString(code).decode()}")

    def _read(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw


class Process:
    """A `Library` in a process of its own, which ends with the ``with`` block, or when its parent is no more.

    Attributes:
        ready: it has been waited for, and can compile.
    """

    def __init__(self, path: str) -> None:
        # Isolated, without site-packages: it needs the standard library only.
        command = [sys.executable, "-I", "-S", __file__, path]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.ready = False

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._process.communicate()

    def stop(self) -> None:
        """End it, from any thread; it holds nothing that would have to be put away."""
        self._process.kill()

    def wait(self) -> bool:
        """Until it is `ready`; False where it was stopped before."""
        try:
            self.ready = pickle.load(self._process.stdout)
        except EOFError:
            return False
        return self.ready

    def compile(self, *job: object) -> tuple[bytes, str]:
        """`Library.compile` of the same arguments.

        Raises:
            RuntimeError: also when the process has died.
        """
        try:
            _send(job, self._process.stdin)
            image, log = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            status = self._process.wait()
            raise RuntimeError(f"the process that compiled {job[1]} ended with status {status}") from error
        if image is None:
            raise RuntimeError(log)
        return image, log


def _send(what: object, pipe) -> None:
    pickle.dump(what, pipe)
    pipe.flush()


def _serve(path: str) -> None:
    """Say that all is loaded, then answer each job that comes in by stdin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    library = Library(path)
    _send(True, answers)
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = library.compile(*job)
        except RuntimeError as error:
            answer = None, str(error)
        _send(answer, answers)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
