"""The facts that a backend states (`Support`, `Device`, `Requirement`), and what the tables of backends share."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, cast, get_args

import torch

from eprt.config import PayloadFormat, TokenFormat, WeightFormat
from eprt.errors import ConfigError
from eprt.kinds import require_kinds


@dataclass(frozen=True)
class Support:
    """A verdict and its reason. The reason of a yes is a remark worth printing (padding, cost) or empty."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


def refuse(reason: str) -> Support:
    return Support(ok=False, reason=reason)


# Compute capabilities of NVIDIA's GPUs (developer.nvidia.com/cuda-gpus), times ten. What is beyond may come.
CAPABILITIES = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)


@dataclass(frozen=True)
class Device:
    """A kind of device, described by facts, so that a plan for an SM100 can be made on a laptop.

    Attributes:
        kind: "cpu" or "cuda".
        sm: compute capability times ten (90 for Hopper, 100 for B200), 0 for CPU.
        installed: also require that the backend's packages are installed here.
    """

    kind: Literal["cpu", "cuda"]
    sm: int = 0
    installed: bool = False

    def __post_init__(self) -> None:
        require_kinds(Device, vars(self))

    @classmethod
    def parse(cls, text: str, *, installed: bool = False) -> Device:
        """Reads `cpu`, `sm90`, `sm100`, ... Raises ConfigError."""
        require_kinds(Device.parse, locals())
        if text == "cpu":
            return cls("cpu", 0, installed)
        if re.fullmatch(r"sm[0-9]{2,3}", text):
            if (sm := int(text[2:])) in CAPABILITIES or sm > CAPABILITIES[-1]:
                return cls("cuda", sm, installed)
            known = ", ".join(f"sm{sm}" for sm in CAPABILITIES)
            raise ConfigError(f"device {text!r}: no GPU has this compute capability; known are {known}")
        raise ConfigError(f"device {text!r}: expected 'cpu' or 'sm<number>' such as sm90 or sm100")

    @classmethod
    def of(cls, device: torch.device) -> Device:
        """Describes the device of a World; packages must then be installed. "meta" is the GPU compiled for."""
        if device.type == "cpu":
            return cls("cpu", 0, installed=True)
        if device.type == "meta":
            return _compiled_for.get()
        major, minor = torch.cuda.get_device_capability(device)
        return cls("cuda", 10 * major + minor, installed=True)

    @classmethod
    def here(cls, kind: str) -> Device:
        """Returns this machine's CPU, or its first GPU for "cuda"."""
        return cls.of(torch.device(kind, 0) if kind == "cuda" else torch.device("cpu"))

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" else f"sm{self.sm}"


_compiled_for: ContextVar[Device] = ContextVar("_compiled_for")


@contextmanager
def compiled_for(device: Device) -> Iterator[None]:
    """Lets torch's device "meta" stand for a GPU that needn't be here: kernels are compiled for it, tensors have no
    memory."""
    token = _compiled_for.set(device)
    try:
        yield
    finally:
        _compiled_for.reset(token)


@dataclass(frozen=True)
class Requirement:
    """A package a backend needs at run time, on Linux: import name, distributions that provide it, oldest version, and
    the first newer one that no longer has what the backend calls."""

    module: str
    distributions: tuple[str, ...]
    minimum: str
    below: str = ""

    @property
    def wanted(self) -> str:
        """Names the versions as pip does."""
        return f"{self.distributions[0]}>={self.minimum}{self.below and f',<{self.below}'}"

    def check(self) -> Support:
        """Tells whether the installed package satisfies this. Imports nothing."""
        if platform.system() != "Linux":
            return refuse(f"{self.module} runs on Linux only")
        if importlib.util.find_spec(self.module) is None:
            return refuse(f"{self.module} is not installed: pip install '{self.wanted}'")
        # None: no distribution's metadata names it (a bare folder on the path).
        found = next(filter(None, map(installed_version, self.distributions)), None)
        if found is None:
            return Support(True)
        if version_key(found) < version_key(self.minimum):
            return refuse(f"{self.module} {found} is older than {self.minimum}: pip install '{self.wanted}'")
        if self.below and version_key(found) >= version_key(self.below):
            return refuse(f"{self.module} {found} no longer has what is called here: pip install '{self.wanted}'")
        return Support(True)


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


class BackendSpec(Protocol):
    """A row of a table of backends, as far as its table knows it."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> str: ...


# What a row's fields may name.
_NAMES: dict[str, tuple[str, ...]] = {
    "formats": get_args(TokenFormat),
    "payloads": get_args(PayloadFormat),
    "weights": get_args(WeightFormat),
    "devices": ("cpu", "cuda"),
}

S = TypeVar("S", bound=BackendSpec)


def register(table: dict[str, S], spec: S, expected: type[S]) -> None:
    """Adds a user's row to `table`, for this process. Adding an equal row again changes nothing. A class has one row,
    which it reads.

    Raises ConfigError for a row of another class than `expected`; a name that is empty, "auto" or taken; a path that
    isn't "module:Class", or is another row's; a field that names nothing, or something that doesn't exist.
    """
    kind = expected.__name__
    if not isinstance(cast(object, spec), expected):
        raise ConfigError(f"{spec!r} is a {type(spec).__name__}: expected a {kind}")
    if not spec.name or spec.name == "auto":
        raise ConfigError(f"{kind} name {spec.name!r}: expected a name of its own, other than 'auto'")
    module, _, attribute = spec.path.partition(":")
    if not module or not attribute.isidentifier():
        raise ConfigError(f"{kind} {spec.name!r} has path {spec.path!r}: expected 'module:Class'")
    for field, known in _NAMES.items():
        given: tuple[str, ...] = getattr(spec, field, known)
        unknown = [name for name in given if name not in known]
        if unknown or not given:
            found = ", ".join(map(repr, unknown)) or "nothing"
            raise ConfigError(f"{kind} {spec.name!r}: {field} names {found}: choose from {', '.join(known)}")
    holder = next((name for name, row in table.items() if row.path == spec.path), None)
    if holder is not None and spec.name not in table:
        raise ConfigError(f"{spec.path} is {holder!r} already: register a subclass of it as {spec.name!r}")
    if table.setdefault(spec.name, spec) != spec:
        raise ConfigError(f"{spec.name!r} is {table[spec.name].path} already, not {spec.path}: register another name")


def load_class(spec: BackendSpec, base: type) -> Any:
    """Imports the class of a row.

    Raises:
        ConfigError: the module can't be imported, or the path names no complete subclass of `base`.
    """
    module, _, attribute = spec.path.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise ConfigError(f"{spec.name}: {module} can't be imported: {error}") from error
    if not isinstance(found, type) or not issubclass(found, base):
        raise ConfigError(f"{spec.name}: {spec.path} is {found!r}: expected a subclass of {base.__name__}")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConfigError(f"{spec.name}: {spec.path} doesn't define {', '.join(missing)}")
    return found


def version_key(text: str) -> tuple[int, ...]:
    """Returns the release numbers of a PEP 440 version; suffixes (post, rc, +cu130) don't count."""
    release = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, release[0].split("."))) if release else ()


def stream_number(device: torch.device) -> int:
    """Returns the current stream's number without making a Stream. `device`: a GPU with its index."""
    return torch._C._cuda_getCurrentRawStream(device.index)
