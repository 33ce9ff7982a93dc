#!/usr/bin/env python3
"""Writes src/opendsec/_sync from src/opendsec/_async, token by token.

    tools/generate_sync.py           write
    tools/generate_sync.py --check   write nothing; exit 1 if something is not as it would be written

``_concurrent.py``, which holds what differs by more than spelling, is written
by hand on both sides and left alone.
"""

from __future__ import annotations

import io
import sys
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "opendsec"
SOURCE, TARGET = PACKAGE / "_async", PACKAGE / "_sync"

BY_HAND = {"_concurrent.py"}

HEADER = "# Made by tools/generate_sync.py from {source}. DO NOT EDIT.\n"

# Names that change. Services have two generated clients; so has pyqwest.
NAMES = {
    "AsyncIterator": "Iterator",
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "aclose": "close",
    "aiter": "iter",
    "asynccontextmanager": "contextmanager",
    "AgentClient": "AgentClientSync",
    "FilesystemClient": "FilesystemClientSync",
    "ImageServiceClient": "ImageServiceClientSync",
    "ProcessClient": "ProcessClientSync",
    "SandboxServiceClient": "SandboxServiceClientSync",
    "Client": "SyncClient",
    "HTTPTransport": "SyncHTTPTransport",
    "Response": "SyncResponse",
}

# Words of docstrings and comments that change.
WORDS = {
    "``async with``": "``with``",
    "its task is cancelled": "it is interrupted",
    "; may be async": "",
    "as it comes; may be async": "as it comes",
}

# "Awaitable[X]" is "X".
UNWRAPPED = "Awaitable"


def convert(source: str) -> str:
    """Return the sync form of a module."""
    out: list[str] = []
    lines = source.splitlines(keepends=True)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    at = (1, 0)
    brackets: list[bool] = []  # for each open bracket, whether it is dropped

    def copy(to: tuple[int, int]) -> None:
        """Copy what lies between two tokens: blanks and line ends."""
        row, col = at
        while row < to[0]:
            out.append(lines[row - 1][col:])
            row, col = row + 1, 0
        out.append(lines[row - 1][col : to[1]] if row <= len(lines) else "")

    unwrap = skip_blank = False
    for i, token in enumerate(tokens):
        following = tokens[i + 1] if i + 1 < len(tokens) else token
        if skip_blank:
            at = token.start
            skip_blank = False
        copy(token.start)
        at = token.end
        text = token.string
        if token.type == tokenize.NAME and text in ("async", "await"):
            skip_blank = True
            continue
        if token.type == tokenize.NAME and text == UNWRAPPED and following.string == "[":
            unwrap = True
            continue
        if token.type == tokenize.OP and text in "([{":
            brackets.append(unwrap)
            if unwrap:
                unwrap = False
                continue
        if token.type == tokenize.OP and text in ")]}" and brackets.pop():
            continue
        if token.type == tokenize.NAME:
            text = NAMES.get(text, text)
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            for word, other in WORDS.items():
                text = text.replace(word, other)
        out.append(text)
    return "".join(out)


def wanted() -> dict[Path, str]:
    """Return the files as they should be."""
    files = {}
    for source in sorted(SOURCE.glob("*.py")):
        if source.name in BY_HAND:
            continue
        if source.name == "__init__.py":
            text = '"""The sync side, generated from ``opendsec._async`` by tools/generate_sync.py."""\n'
        else:
            text = convert(source.read_text(encoding="utf-8"))
        where = source.relative_to(PACKAGE.parent).as_posix()
        files[TARGET / source.name] = HEADER.format(source=where) + text
    return files


def main() -> int:
    """Write or check."""
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        print(__doc__, file=sys.stderr)
        return 2
    files = wanted()
    strangers = {p for p in TARGET.glob("*.py") if p not in files and p.name not in BY_HAND}
    stale = {p for p, text in files.items() if not p.exists() or p.read_text(encoding="utf-8") != text}
    if check:
        for path in sorted(stale | strangers):
            where = path.relative_to(PACKAGE.parent)
            print(f"{where} is not what tools/generate_sync.py makes; run it", file=sys.stderr)
        return 1 if stale or strangers else 0
    for path in strangers:
        path.unlink()
    for path in stale:
        path.write_text(files[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
