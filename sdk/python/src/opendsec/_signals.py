"""Linux's signals by number and name, and as the agent spells them."""

from __future__ import annotations

from ._args import invalid

_NAMES = {
    "HUP": 1, "INT": 2, "QUIT": 3, "ILL": 4, "TRAP": 5, "ABRT": 6, "BUS": 7, "FPE": 8, "KILL": 9,
    "USR1": 10, "SEGV": 11, "USR2": 12, "PIPE": 13, "ALRM": 14, "TERM": 15, "STKFLT": 16, "CHLD": 17,
    "CONT": 18, "STOP": 19, "TSTP": 20, "TTIN": 21, "TTOU": 22, "URG": 23, "XCPU": 24, "XFSZ": 25,
    "VTALRM": 26, "PROF": 27, "WINCH": 28, "IO": 29, "PWR": 30, "SYS": 31,
}  # fmt: skip

_WORDS = {
    "hangup": 1, "interrupt": 2, "quit": 3, "illegal instruction": 4, "trace/breakpoint trap": 5,
    "aborted": 6, "bus error": 7, "floating point exception": 8, "killed": 9, "user defined signal 1": 10,
    "segmentation fault": 11, "user defined signal 2": 12, "broken pipe": 13, "alarm clock": 14,
    "terminated": 15, "stack fault": 16, "child exited": 17, "continued": 18, "stopped (signal)": 19,
    "stopped": 20, "stopped (tty input)": 21, "stopped (tty output)": 22, "urgent I/O condition": 23,
    "CPU time limit exceeded": 24, "file size limit exceeded": 25, "virtual timer expired": 26,
    "profiling timer expired": 27, "window changed": 28, "I/O possible": 29, "power failure": 30,
    "bad system call": 31,
}  # fmt: skip


def from_status(status: str) -> int | None:
    """Return the signal in a status such as ``signal: killed``; None when none is named."""
    word, found, text = status.partition("signal: ")
    if not found or word:
        return None
    text = text.removesuffix(" (core dumped)")
    if text.startswith("signal ") and text[7:].isdecimal():
        return int(text[7:])
    return _WORDS.get(text)


def number(signal: int | str) -> int:
    """Return the number of a signal given as 15, ``TERM`` or ``SIGTERM``."""
    if isinstance(signal, str):
        found = _NAMES.get(signal.upper().removeprefix("SIG"))
        if found is None:
            raise invalid("signal", f"{signal!r} is not the name of a signal, such as 'TERM'")
        return found
    if isinstance(signal, bool) or not isinstance(signal, int) or not 1 <= signal <= 64:
        raise invalid("signal", f"{signal!r} is not the number of a signal, 1 to 64")
    return int(signal)
