"""What a caller asks of a new sandbox, checked before anything is sent."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Literal

from .errors import InvalidArgumentError

__all__ = ["DSecRunArgs", "check_rules", "invalid", "seconds"]

_LABEL_KEY = re.compile(r"[a-z0-9._/-]{1,63}")
_HOSTNAME = re.compile(r"(?=.{1,63}\Z)[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
_METADATA_BYTES = 16 * 1024
_LABEL_VALUE_CHARS = 255
_AMOUNTS = (("memory_limit_mb", 64, "MiB"), ("disk_limit_mb", 16, "MiB"), ("pids_limit", 16, "processes"))


def invalid(field_name: str, message: str) -> InvalidArgumentError:
    """Return an error that names the wrong argument."""
    err = InvalidArgumentError(f"{field_name}: {message}")
    err.field = field_name
    return err


def seconds(field_name: str, value: float | None) -> float | None:
    """Check a time in seconds: None, or a finite number above zero."""
    if value is None:
        return None
    if not _is_number(value) or not math.isfinite(value) or value <= 0:
        raise invalid(field_name, f"{value!r} is not a time; give seconds above 0, or None for no limit")
    return float(value)


@dataclass(frozen=True)
class DSecRunArgs:
    """What is wanted of a new sandbox.

    A wrong value raises :class:`InvalidArgumentError` with the argument's
    name in ``field``, here where that can be known, else from the call.

    Attributes:
        image: name of the image, ``project/name:tag``; the tag defaults to ``latest``.
        backend: ``gvisor``, ``container``, ``microvm``, ``sim`` (simulates, runs nothing), or
            ``auto`` for the strongest that the node can run.
        cpu_cores_limit: CPU time in cores, at least 0.1; None for 1.
        memory_limit_mb: memory in MiB, at least 64; None for 512.
        disk_limit_mb: MiB that may be written to the file system, at least 16; None for 10240.
        pids_limit: processes and threads, at least 16; None for 1024. A snapshot with memory has
            limits of its own: None takes them, for all four, and others are refused.
        ttl_running_stop: idle seconds after which ``on_idle`` happens; None for never. Idle is no
            running command, no open connection and no call.
        ttl_lifetime: seconds from creation after which it is stopped in any case; None for never.
            Time in which it is paused does not count.
        network_rules: outbound traffic that is allowed, by preset (``pypi``), domain, CIDR, each with
            an optional port (``github.com:443``), or ``*``; False denies. Empty: nothing is. None:
            nothing either, but for an image that was made of a sandbox of this project what that
            sandbox could reach then.
        env: variables of every process, over those of the image.
        workdir: directory of commands that name none; None for the image's.
        user: user of commands that name none; None for the image's.
        hostname: None for the sandbox's id.
        labels: marks to search by; keys up to 63 characters of ``[a-z0-9._/-]``, values up to 255.
        on_idle: ``stop`` or ``pause`` (on a backend that can).
        auto_resume: whether a call to the sandbox wakes it when it is paused.
        metadata: the caller's own data, kept and returned; up to 16 KiB in all.
    """

    image: str
    _: KW_ONLY
    backend: str = "auto"
    cpu_cores_limit: float | None = None
    memory_limit_mb: int | None = None
    disk_limit_mb: int | None = None
    pids_limit: int | None = None
    ttl_running_stop: float | None = None
    ttl_lifetime: float | None = None
    network_rules: Mapping[str, bool] | None = None
    env: Mapping[str, str] | None = field(default=None, repr=False)
    workdir: str | None = None
    user: str | None = None
    hostname: str | None = None
    labels: Mapping[str, str] | None = None
    on_idle: Literal["stop", "pause"] = "stop"
    auto_resume: bool = False
    metadata: Mapping[str, str] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_image(self.image)
        if not isinstance(self.backend, str) or not self.backend:
            raise invalid("backend", f"{self.backend!r} is not the name of a backend, such as 'gvisor'")
        cpu = self.cpu_cores_limit
        if cpu is not None and (not _is_number(cpu) or not math.isfinite(cpu) or cpu < 0.1):
            raise invalid("cpu_cores_limit", f"{cpu!r} is not a number of cores of at least 0.1")
        for name, least, unit in _AMOUNTS:
            value = getattr(self, name)
            if value is not None:
                _check_amount(name, value, least, unit)
        seconds("ttl_running_stop", self.ttl_running_stop)
        seconds("ttl_lifetime", self.ttl_lifetime)
        for name in ("workdir", "user", "hostname"):
            _check_text(name, getattr(self, name))
        if self.workdir is not None and not self.workdir.startswith("/"):
            raise invalid("workdir", f"{self.workdir!r} is not an absolute path")
        if self.hostname is not None and not _HOSTNAME.fullmatch(self.hostname):
            raise invalid("hostname", f"{self.hostname!r} is not up to 63 letters, digits, hyphens and dots")
        if self.on_idle not in ("stop", "pause"):
            raise invalid("on_idle", f"{self.on_idle!r} is neither 'stop' nor 'pause'")
        if not isinstance(self.auto_resume, bool):
            raise invalid("auto_resume", f"{self.auto_resume!r} is neither True nor False")
        self._check_maps()

    def _check_maps(self) -> None:
        check_rules("network_rules", self.network_rules)
        check_env(self.env)
        for key, value in _text_pairs("labels", self.labels):
            if not _LABEL_KEY.fullmatch(key):
                raise invalid("labels", f"the key {key!r} is not 1 to 63 characters of [a-z0-9._/-]")
            if len(value) > _LABEL_VALUE_CHARS:
                raise invalid("labels", f"the value of {key!r} has {len(value)} characters; 255 are allowed")
        size = sum(len(k.encode()) + len(v.encode()) for k, v in _text_pairs("metadata", self.metadata))
        if size > _METADATA_BYTES:
            raise invalid("metadata", f"{size} bytes in all; {_METADATA_BYTES} are allowed")

    def __repr__(self) -> str:
        shown = (
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if f.repr and (f.name == "image" or getattr(self, f.name) != f.default)
        )
        return f"DSecRunArgs({', '.join(shown)})"


def check_rules(name: str, rules: Mapping[str, bool] | None) -> dict[str, bool]:
    """Check the form of network rules; what they mean is the server's to say."""
    for key, value in _pairs(name, rules):
        if not isinstance(key, str) or not key or not isinstance(value, bool):
            raise invalid(name, f"{key!r}: {value!r} is not a rule; give name: True or False")
    return dict(rules or {})


def check_env(env: Mapping[str, str] | None) -> None:
    """Check variables of a process."""
    for key, value in _text_pairs("env", env):
        if not key or "=" in key or "\0" in key:
            raise invalid("env", f"{key!r} is not the name of a variable")
        if "\0" in value:
            raise invalid("env", f"the value of {key!r} holds a NUL character")


def _check_image(image: Any) -> None:
    if not isinstance(image, str) or "/" not in image.strip("/") or any(c.isspace() for c in image):
        raise invalid("image", f"{image!r} is not an image name; give project/name:tag, such as root/py:3.12")


def _check_amount(name: str, value: Any, least: int, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise invalid(name, f"{value!r} is not a whole number of at least {least} {unit}")


def _check_text(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not value or "\0" in value:
        raise invalid(name, f"{value!r} is not a text; leave it out for the default")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _pairs(name: str, value: Any) -> list[tuple[Any, Any]]:
    if value is None:
        return []
    if not isinstance(value, Mapping):
        raise invalid(name, f"{type(value).__name__} is not a mapping of names to values")
    return list(value.items())


def _text_pairs(name: str, value: Any) -> list[tuple[str, str]]:
    pairs = _pairs(name, value)
    for k, v in pairs:
        if not isinstance(k, str) or not isinstance(v, str):
            raise invalid(name, f"{k!r}: {type(v).__name__} is not a pair of texts")
    return pairs
