"""The schema in words: --help, what a key allows, and the known name that a misspelt one may have meant."""

import json
from collections.abc import Iterable
from difflib import SequenceMatcher
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from titan_like.config.schema import Config

Key = tuple[str, ...]  # (section, key), or (section, key, entry) inside a table

SECTIONS: dict[str, Any] = {name: info.annotation for name, info in Config.model_fields.items()}
FIELDS: dict[Key, FieldInfo] = {(s, k): info for s, model in SECTIONS.items() for k, info in model.model_fields.items()}
OPTIONS = ("job.config_file", "print_config", "help")  # known to the command line alone

_WORDS: dict[Any, str] = {int: "int", float: "number", bool: "true or false", str: "string"}
_SYMBOLS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}

_HELP_HEAD = """\
usage: [--job.config_file FILE.toml] [--section.key VALUE ...] [--print_config] [--help]

  --job.config_file FILE   read settings from this TOML file; the command line overrides it
  --print_config           print all settings as TOML, which can be used as a config file, and exit
  -h, --help               print this and exit

Values: --section.key VALUE or --section.key=VALUE; the last one wins. Switches also --section.key and --section.no-key.
Lists: a,b or '["a", "b"]', empty '[]'; in the file only ["a", "b"]. Tables: --section.key.entry VALUE sets one entry,
--section.key '{entry = 1}' replaces them all. Relative paths are relative to the current directory.
"""


def help_text() -> str:
    """Every section and key with what is allowed, the default and the documentation."""
    lines = [_HELP_HEAD]
    for section, model in SECTIONS.items():
        lines.append(f"[{section}] {model.__doc__}")
        for name, info in model.model_fields.items():
            lines.append(f"  --{section}.{name}  ({describe(info)}; default: {as_text(info.default)})")
            lines.append(f"      {info.description}")
        lines.append("")
    return "\n".join(lines)


def as_text(value: Any) -> str:
    """A value on one line, as TOML writes it (tables as {"key": value})."""
    return json.dumps(value, default=str, ensure_ascii=False)


def allowed(key: Key) -> str:
    """What the value of `key` can be."""
    info = FIELDS[key[:2]]
    return describe(get_args(info.annotation)[1] if len(key) == 3 else info)


def describe(kind: Any) -> str:
    """What a field or a type allows, in words: "int >= 1", '"adamw" or "sgd"', "list of 2 [number > 0, ...]"."""
    annotation, limits = (kind.annotation, kind.metadata) if isinstance(kind, FieldInfo) else (kind, [])
    if get_origin(annotation) is Annotated:
        annotation, *infos = get_args(annotation)
        limits = [*limits, *(limit for info in infos for limit in getattr(info, "metadata", []))]
    origin, args = get_origin(annotation), get_args(annotation)
    minimum = next((limit.min_length for limit in limits if hasattr(limit, "min_length")), 0)
    bounds = {name: getattr(limit, name) for limit in limits for name in _SYMBOLS if hasattr(limit, name)}
    if origin is Literal:
        return " or ".join(as_text(arg) for arg in args)
    if origin in (Union, UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is dict:
        return f"table {{name = {describe(args[1])}, ...}}"
    if origin is tuple:
        return f"list of {f'{minimum} or more' if args[-1] is ... else len(args)} [{describe(args[0])}, ...]"
    if fields := getattr(annotation, "model_fields", None):
        return f"{{{', '.join(f'{name} = {describe(field)}' for name, field in fields.items())}}}"
    if "ge" in bounds and bounds["ge"] == bounds.get("le"):
        return str(bounds["ge"])
    range_ = " and ".join(f"{_SYMBOLS[name]} {bound}" for name, bound in bounds.items())
    return f"{'non-empty ' if minimum else ''}{_WORDS[annotation]} {range_}".rstrip()


def did_you_mean(name: str, more: Iterable[str] = ()) -> str:
    """A hint at the known name nearest to `name`, in any section; the key counts twice as much as the section."""

    def likeness(known: str) -> float:
        key = SequenceMatcher(None, name.rpartition(".")[2], known.rpartition(".")[2]).ratio()
        return (2 * key + SequenceMatcher(None, name, known).ratio()) / 3

    if name in SECTIONS:
        return f"; its keys are written {name}.KEY"
    nearest = max([*map(".".join, FIELDS), *more], key=likeness)
    return f"; did you mean {nearest}?" if likeness(nearest) > 0.6 else "; --help lists all keys"
