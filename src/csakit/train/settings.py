"""What makes a dataclass a group of settings: fields with help and bounds, and their ways in and out.

A setting comes from Python, from a TOML file, from a `key=value` text or from JSON; wherever it comes from, it is checked by the
dataclass it belongs to and named by its dotted key.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

C = TypeVar("C")


def option(
    default: Any,
    text: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] = (),
    path: bool = False,
) -> Any:
    """A dataclass field with its help text and its bounds: `minimum` is included, `above` is not. `path`: it names a file or folder."""
    return field(default=default, metadata={"help": text, "minimum": minimum, "above": above, "choices": choices, "path": path})


def inherited(base: type, name: str, default: Any) -> Any:
    """The field of a parent class with another default."""
    return field(default=default, metadata=base.__dataclass_fields__[name].metadata)  # type: ignore[attr-defined]


def check_fields(config: Any) -> None:
    """Raise unless every field has its declared type and lies within its bounds."""
    hints = get_type_hints(type(config))
    for entry in dataclasses.fields(config):
        value, hint = getattr(config, entry.name), hints[entry.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if not isinstance(value, hint):
                raise TypeError(f"{entry.name}: expected {hint.__name__}, got {value!r}")
        elif get_origin(hint) is tuple:
            if not isinstance(value, tuple) or (entry.default and not value):
                raise TypeError(f"{entry.name}: expected a tuple of {', '.join(entry.metadata['choices']) or 'texts'}, got {value!r}")
            for item in value:
                _check_value(entry, str, item)
        else:
            _check_value(entry, hint, value)


def _check_value(entry: dataclasses.Field[Any], hint: type, value: Any) -> None:
    accepted = (int, float) if hint is float else (hint,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise TypeError(f"{entry.name}: expected {_describe(entry, hint)}, got {value!r}")
    minimum, above, choices = (entry.metadata[key] for key in ("minimum", "above", "choices"))
    if choices and value not in choices:
        raise ValueError(f"{entry.name}: expected one of {', '.join(choices)}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{entry.name}: expected {_describe(entry, hint)}, got {value!r}")
    if (minimum is not None and value < minimum) or (above is not None and value <= above):
        raise ValueError(f"{entry.name}: expected {_describe(entry, hint)}, got {value!r}")


def _describe(entry: dataclasses.Field[Any], hint: type) -> str:
    minimum, above, choices = (entry.metadata[key] for key in ("minimum", "above", "choices"))
    kind = {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}[hint]
    if choices:
        return f"one of {', '.join(choices)}"
    if minimum is not None:
        return f"{kind} of at least {minimum:g}"
    return kind if above is None else f"{kind} above {above:g}"


def all_settings(config: type, prefix: str = "") -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """Every settable key in dotted form, with its field and its type."""
    found: dict[str, tuple[dataclasses.Field[Any], Any]] = {}
    hints = get_type_hints(config)
    for entry in dataclasses.fields(config):
        hint = hints[entry.name]
        if dataclasses.is_dataclass(hint):
            found |= all_settings(hint, f"{prefix}{entry.name}.")  # type: ignore[arg-type]
        else:
            found[prefix + entry.name] = (entry, hint)
    return found


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every setting by its dotted key."""
    found: dict[str, Any] = {}
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        found |= flat(value, f"{prefix}{entry.name}.") if dataclasses.is_dataclass(value) else {prefix + entry.name: value}
    return found


def parse(config: type, key: str, text: str) -> Any:
    """The value a text stands for under a dotted key.

    Raises: ValueError for an unknown key, or for a text that is not of the key's type.
    """
    known = all_settings(config)
    if key not in known:
        raise ValueError(_unknown(key, config))
    entry, hint = known[key]
    if get_origin(hint) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if hint is bool:
        if text not in ("true", "false"):
            raise ValueError(f"{key}: expected true or false, got {text!r}")
        return text == "true"
    try:
        return hint(text)
    except ValueError:
        raise ValueError(f"{key}: expected {_describe(entry, hint)}, got {text!r}") from None


def _unknown(key: str, config: type) -> str:
    near = difflib.get_close_matches(key, all_settings(config), n=3, cutoff=0.5)
    return f"{key}: unknown setting{', did you mean ' + ' or '.join(near) + '?' if near else ';'} csakit train --help lists them all"


def nested(changes: dict[str, Any]) -> dict[str, Any]:
    """Nested dictionaries from dotted keys."""
    values: dict[str, Any] = {}
    for key, value in changes.items():
        *sections, name = key.split(".")
        target = values
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value
    return values


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Nested dictionaries with those of `changes` in place of their own."""
    deeper = {
        key: merged(values[key], value) for key, value in changes.items() if isinstance(value, dict) and isinstance(values.get(key), dict)
    }
    return {**values, **changes, **deeper}


def updated(config: C, changes: dict[str, Any]) -> C:
    """The settings with those of nested dictionaries in place of their own.

    Raises: ValueError or TypeError naming the dotted key that is unknown or wrong.
    """
    return _updated(config, changes, type(config), "")


def _updated(config: Any, changes: dict[str, Any], root: type, prefix: str) -> Any:
    hints = get_type_hints(type(config))
    unknown = [key for key in changes if key not in hints]
    if unknown:
        raise ValueError(_unknown(prefix + unknown[0], root))
    arguments: dict[str, Any] = {}
    for name, value in changes.items():
        if dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, dict):
                raise TypeError(f"{prefix}{name}: expected a section of settings, got {value!r}")
            value = _updated(getattr(config, name), value, root, f"{prefix}{name}.")
        elif get_origin(hints[name]) is tuple and isinstance(value, list):
            value = tuple(value)
        arguments[name] = value
    try:
        return dataclasses.replace(config, **arguments)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{prefix}{error}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The nested dictionaries of a TOML file.

    Raises: ValueError when it cannot be read or is not TOML; ImportError on Python 3.10 without tomli.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError as error:
            raise ImportError("TOML files need tomli on Python 3.10: pip install 'csakit[train]'") from error
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: not TOML: {error}") from error


def with_absolute_paths(config: type, values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The nested dictionaries with every relative path in them taken as one below `folder`."""
    hints = get_type_hints(config)
    entries = {entry.name: entry for entry in dataclasses.fields(config)}
    found = {}
    for name, value in values.items():
        if isinstance(value, dict) and dataclasses.is_dataclass(hints.get(name)):
            value = with_absolute_paths(hints[name], value, folder)
        elif isinstance(value, str) and value and name in entries and entries[name].metadata.get("path"):
            value = str((folder / Path(value).expanduser()).resolve())
        found[name] = value
    return found


def to_toml(config: Any) -> str:
    """The settings as TOML, each with its help text; `read_toml` and `updated` lead back."""
    return "\n".join(_toml(config, "")) + "\n"


def _toml(config: Any, section: str) -> Iterator[str]:
    entries = [(entry, getattr(config, entry.name)) for entry in dataclasses.fields(config)]
    if section:
        yield f"\n[{section}]"
    for entry, value in entries:
        if not dataclasses.is_dataclass(value):
            yield f"{entry.name} = {_toml_value(value)}  # {_explained(entry)}"
    for entry, value in entries:
        if dataclasses.is_dataclass(value):
            yield from _toml(value, entry.name)


def _explained(entry: dataclasses.Field[Any]) -> str:
    choices = entry.metadata["choices"]
    return entry.metadata["help"] + (f" ({', '.join(choices)})" if choices else "")


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    # Strings are JSON's but for DEL, and characters stand for themselves: TOML has no surrogate pairs.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)
