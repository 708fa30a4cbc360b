"""A program taken from a directory, where it was compiled before, instead of compiled anew.

jax has a cache for this, and all that tells one program from another is left to it: versions,
devices, flags. But it is switched on by settings of the whole process, it believes what it reads,
and what it is writing another process may read. So here it works at a desk of its own, a directory
that lasts as long as one compilation, on which lies only what was found to be as it was written;
the settings are put back; and what is new is filed away at once and whole.
"""

import hashlib
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax

from stepfold import tree
from stepfold.errors import ConfigError

_SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_compilation_cache_max_size": -1,
    "jax_persistent_cache_enable_xla_caches": None,  # they would be lost with the desk
    "jax_raise_persistent_cache_errors": False,
}
_AT_THE_DESK = threading.Lock()  # settings that two threads put back would stay changed
_DIGEST = hashlib.sha256().digest_size


def check_cache(directory: Any) -> Path | None:
    """Read where compiled programs are kept; None is nowhere.

    Raises:
      ConfigError: if it is no path, or the path of a file.

    >>> check_cache(None), check_cache("/tmp/programs").name
    (None, 'programs')
    """
    if directory is None:
        return None
    if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
        raise ConfigError(
            f"compilation_cache: expected a directory, or None, got {tree.spell(directory)}"
        )
    place = Path(directory)
    if place.exists() and not place.is_dir():
        raise ConfigError(f"compilation_cache: expected a directory, got {place}, which is a file")
    return place


def compile_cached(lowered: jax.stages.Lowered, directory: Path | None) -> jax.stages.Compiled:
    """Compile a program, or take it from a directory; where that is of no use, warn and compile.

    Args:
      lowered: the program.
      directory: where programs are kept. What is in it is run, so it has to be trusted as code is.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     for _ in range(2):
    ...         lowered = jax.jit(lambda x: x + 1).lower(1.0)
    ...         compiled = compile_cached(lowered, Path(place))
    ...     len(os.listdir(place)), float(compiled(1.0))
    (1, 2.0)
    """
    if directory is None:
        return lowered.compile()
    name = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:32]
    with ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lasting = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            desk = Path(stack.enter_context(lasting))
            there = _fetch(directory, name, desk)
        except OSError as error:
            _warn(directory, error)
            return lowered.compile()
        with _cache_at(desk):
            compiled = lowered.compile()
        try:
            _file(directory, name, desk, there)
        except OSError as error:
            _warn(directory, error)
    return compiled


@contextmanager
def _cache_at(desk: Path) -> Iterator[None]:
    """Let jax's own cache be at the desk, and then where it was."""
    from jax.experimental.compilation_cache import compilation_cache

    settings = {"jax_compilation_cache_dir": str(desk), **_SETTINGS}
    with _AT_THE_DESK:
        before = {name: getattr(jax.config, name) for name in settings}
        try:
            for name, value in settings.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()  # it reads its settings when it is first used
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()


def _fetch(directory: Path, name: str, desk: Path) -> set[str]:
    """Put on the desk what there is of a program, for one machine or another, and is whole."""
    for path in directory.glob(f"{name}.*-cache"):
        content = path.read_bytes()
        digest, content = content[:_DIGEST], content[_DIGEST:]
        if hashlib.sha256(content).digest() == digest:
            (desk / path.name.removeprefix(f"{name}.")).write_bytes(content)
        else:
            warnings.warn(
                f"compilation_cache: {path} is damaged, and is compiled and written anew",
                RuntimeWarning,
                stacklevel=5,
            )
    return set(os.listdir(desk))


def _file(directory: Path, name: str, desk: Path, there: set[str]) -> None:
    """Put what jax has written beside the other programs, each file wholly or not at all."""
    for path in desk.glob("*-cache"):
        if path.name in there:
            continue
        content = path.read_bytes()
        with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
            try:
                file.write(hashlib.sha256(content).digest() + content)
                file.close()
                os.replace(file.name, directory / f"{name}.{path.name}")
            except OSError:
                os.unlink(file.name)
                raise


def _warn(directory: Path, error: OSError) -> None:
    warnings.warn(
        f"compilation_cache: {directory} is of no use, and the program is compiled without it: "
        f"{error.strerror or error}; free the disk, change the permission, or give another",
        RuntimeWarning,
        stacklevel=4,
    )
