"""Values as users give them: strict about keys and types before conversion; and as TOML writes them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError, brief

Defaults = Mapping[str, Mapping[str, Any]]
"""Section -> key -> default: every key there is."""


def as_path(text: str | Path) -> Path:
    """A path that a user wrote, with ``~`` filled in. Raises ConfigError when that home is not known."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{brief(str(text))}: the home folder that ~ stands for is not known; write it out."
        ) from None


def reject_unknown_keys(data: Mapping[str, Any], defaults: Defaults, where: str) -> None:
    known = [f"{section}.{key}" for section, values in defaults.items() for key in values]
    sections = list(defaults)
    for section, values in data.items():
        if section not in sections:
            same_key = [key for key in known if key.partition(".")[2] == section]
            near = same_key or difflib.get_close_matches(section, sections, 1, 0.5)
            raise ConfigError(f"{where}: there is no section or key '{section}'." + _hint(near or sections))
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where}: '{section}' is a section: write [{section}] and its keys below it.")
        for key in values:
            dotted = f"{section}.{key}"
            if dotted not in known:
                meant = str(key).replace("-", "_")
                same_section = [name for name in known if name == f"{section}.{meant}"]
                elsewhere = same_section or [name for name in known if name.partition(".")[2] == meant]
                near = elsewhere or difflib.get_close_matches(dotted, known, 1, 0.0)
                raise ConfigError(f"{where}: there is no key '{dotted}'." + _hint(near))


def reject_odd_values(data: Mapping[str, Any], defaults: Defaults, where: str) -> None:
    """What a conversion would take for something else, or nothing later could use."""
    for section, values in data.items():
        for key, value in values.items():
            default = defaults[section][key]
            for item in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(item, bool) and not isinstance(default, bool):
                    raise ConfigError(f"{where}: {section}.{key} is not a switch, found {str(item).lower()}.")
                if isinstance(item, int) and abs(item) >= 1 << 63:
                    raise ConfigError(f"{where}: {section}.{key} has more than 64 bits; give a smaller number.")
                if isinstance(item, str) and not _is_text(item):
                    raise ConfigError(
                        f"{where}: {section}.{key} holds what is no text (a zero byte, or bytes that are not UTF-8), "
                        f"found {brief(item)}."
                    )


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def single_strings_as_lists(data: Mapping[str, Any], defaults: Defaults) -> dict[str, dict[str, Any]]:
    """``reward = "f.py:g"`` is as good as ``reward = ["f.py:g"]``."""
    return {
        section: {
            key: (value,) if isinstance(value, str) and isinstance(defaults[section][key], tuple) else value
            for key, value in values.items()
        }
        for section, values in data.items()
    }


def _hint(candidates: list[str]) -> str:
    return f" Did you mean '{candidates[0]}'?" if len(candidates) == 1 else f" There is: {', '.join(candidates)}."


def problem(item: Any) -> str:
    location = ".".join(str(part) for part in item["loc"])
    if item["type"] == "value_error":
        return str(item["ctx"]["error"]).rstrip(".")
    return f"{location or 'config'}: {item['msg']}, found {brief(item['input'])}"


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        text = repr(value)
        return text if any(mark in text for mark in ".en") else text + ".0"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    escaped = "".join(_TOML_ESCAPES.get(char, char if char.isprintable() else f"\\U{ord(char):08x}") for char in value)
    return f'"{escaped}"'


_TOML_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
