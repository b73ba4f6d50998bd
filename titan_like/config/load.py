"""From a TOML file and the command line to a checked Config: defaults < file < command line.

All problems of both are collected and raised together, each with the key, the value, its source and what is allowed.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import tomli
import tomli_w
from pydantic import ValidationError

from titan_like.config.checks import cross_checks
from titan_like.config.describe import FIELDS, OPTIONS, SECTIONS, Key, allowed, as_text, did_you_mean, help_text
from titan_like.config.errors import ConfigError
from titan_like.config.schema import Config

COMMAND_LINE = "on the command line"
Checks = Callable[[Config], list[str]]


@dataclass
class Setting:
    """A value and how to speak of it: as the user wrote it, and where."""

    value: Any
    shown: str
    source: str


@dataclass
class Given:
    """What was asked for so far, and what is wrong with it."""

    settings: dict[Key, Setting] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def set(self, key: Key, value: Any, source: str, shown: str | None = None) -> None:
        """Replace `key` and, if it is a table, all entries that were set before."""
        self.settings = {old: setting for old, setting in self.settings.items() if old[: len(key)] != key}
        self.settings[key] = Setting(value, as_text(value) if shown is None else shown, source)
        if isinstance(value, dict) and len(key) == 2:
            for entry, entry_value in value.items():
                self.set((*key, entry), entry_value, source)

    def tree(self) -> dict[str, dict[str, Any]]:
        """The settings as nested tables."""
        tree: dict[str, dict[str, Any]] = {}
        for (section, name, *entry), setting in self.settings.items():
            table = tree.setdefault(section, {})
            if not entry:
                table[name] = {} if isinstance(setting.value, dict) else setting.value
            elif isinstance(table.setdefault(name, {}), dict):
                table[name][entry[0]] = setting.value
        return tree


def load_config(argv: Sequence[str], checks: Checks | None = cross_checks) -> Config:
    """The config that `argv` (without the program's name) asks for.

    Args:
        checks: one sentence for each reason why settings that are each valid alone do not go together, or cannot run
            here, which --print_config does not ask; None: somebody else chooses some of them, and checks all.

    Raises:
        ConfigError: with all problems of the file and the command line.
        SystemExit: 0, after --help or --print_config has printed.
    """
    line = Given()
    options = _parse(argv, line)
    if "help" in options:
        print(help_text(), end="")
        raise SystemExit(0)
    given = Given()
    is_read = "job.config_file" not in options or _read(options["job.config_file"], given)
    _, refused = _check(given)  # before the command line hides a bad value of the file
    for key, setting in line.settings.items():
        given.set(key, setting.value, setting.source, setting.shown)
    config, refused_of_line = _check(given)
    is_printed = "print_config" in options
    checks = cross_checks if checks and is_printed else checks
    problems = given.problems + refused + line.problems + refused_of_line
    named = [name for name in map(".".join, FIELDS) if any(name in problem for problem in problems)]
    if is_read and checks:  # conflicts with a default that stands in for a refused or misspelt value would mislead
        problems += [text for text in checks(config) if not any(name in text for name in named)]
    if problems:
        raise ConfigError(*problems)
    if is_printed:
        print(dump_toml(config), end="")
        raise SystemExit(0)
    return config


def load_config_or_exit(argv: Sequence[str], checks: Checks = cross_checks) -> Config:
    """load_config for a program's main: prints the problems to standard error and exits with code 2."""
    try:
        return load_config(argv, checks)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def dump_toml(config: Config) -> str:
    """All settings as TOML, which loads back to an equal Config."""
    return tomli_w.dumps(config.model_dump())


def _parse(argv: Sequence[str], line: Given) -> dict[str, str]:
    """Read the command line into `line`; returns the options that are not settings."""
    options: dict[str, str] = {}
    for token in argv:
        if token != token.encode("utf-8", "ignore").decode():
            line.problems.append(f"argument {token!a} {COMMAND_LINE} is not UTF-8 text; write it in UTF-8")
    rest = deque(argv)
    while rest:
        token = rest.popleft()
        name, equals, text = token.removeprefix("--").partition("=")
        if token in ("-h", "--help", "--print_config"):
            options["help" if token == "-h" else name] = ""
        elif not token.startswith("--"):
            line.problems.append(
                f"unexpected argument {token!r} {COMMAND_LINE}; settings look like --section.key VALUE"
            )
        elif switch := _turned_off(name):
            if equals:
                line.problems.append(f"--{name} takes no value {COMMAND_LINE}, but got {text}")
            line.set(switch, False, COMMAND_LINE)
        else:
            has_value = bool(equals) or bool(rest and not rest[0].startswith("--") and rest[0] != "-h")
            value = (text if equals else rest.popleft()) if has_value else None
            if name == "job.config_file" and value:
                options[name] = value
            else:
                _set_from_text(line, name, value)
    return options


def _is_switch(key: Key) -> bool:
    return key in FIELDS and FIELDS[key].annotation is bool


def _turned_off(name: str) -> Key | None:
    """The switch that `section.no-key` turns off, or None if `name` is not of that form."""
    section, _, key = name.partition(".no-")
    return (section, key) if _is_switch((section, key)) else None


def _set_from_text(line: Given, name: str, text: str | None) -> None:
    """Set the key called `name` to what `text` stands for (None: no value was given)."""
    key = tuple(name.split("."))
    info = FIELDS.get(key[:2])
    is_entry = info is not None and get_origin(info.annotation) is dict and len(key) == 3 and bool(key[2])
    if name == "job.config_file":
        line.problems.append(f"--{name} needs a value {COMMAND_LINE}: the path of a TOML file")
    elif info is None or not (len(key) == 2 or is_entry):
        line.problems.append(f"unknown key {name} {COMMAND_LINE}{did_you_mean(name, OPTIONS)}")
    elif text is None and not _is_switch(key):
        line.problems.append(f"--{name} needs a value {COMMAND_LINE}: {allowed(key)}")
    elif text is None:
        line.set(key, True, COMMAND_LINE)
    else:
        annotation = get_args(info.annotation)[1] if is_entry else info.annotation
        shown = text if text and text.isprintable() else as_text(text)
        line.set(key, _convert(text, annotation), COMMAND_LINE, shown)


def _convert(text: str, annotation: Any) -> Any:
    """The value of type `annotation` that `text` stands for; other text stays a str, for the type check to judge."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _convert(text, args[0])
    if origin in (Union, UnionType):
        values = (_convert(text, arg) for arg in args)
        return next((value for value in values if not isinstance(value, str)), text)
    if origin is dict or (origin is tuple and text.startswith("[")):
        try:
            parsed = tomli.loads(f"value = {text}")
        except ValueError:
            return text
        return parsed["value"] if len(parsed) == 1 else text
    if origin is tuple:
        return [_convert(item.strip(), args[0]) for item in text.split(",")]
    if annotation is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if annotation in (int, float):
        try:
            return annotation(text)
        except ValueError:
            return text
    return text


def _read(path: str, given: Given) -> bool:
    """Read the TOML file into `given`; false if it could not be read at all."""
    try:
        tables = tomli.loads(Path(path).read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        given.problems.append(f"config file {path} does not exist (current directory: {os.getcwd()}); check the path")
    except IsADirectoryError:
        given.problems.append(f"config file {path} is a folder; name a TOML file in it")
    except OSError as error:
        given.problems.append(f"config file {path} cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        given.problems.append(f"config file {path} is not UTF-8 text (byte {error.start}); save it as UTF-8")
    except ValueError as error:
        given.problems.append(f"config file {path} is not valid TOML: {error}")
    else:
        for section, table in tables.items():
            _read_section(section, table, f"in {path}", given)
        return True
    return False


def _read_section(section: str, table: Any, source: str, given: Given) -> None:
    if section not in SECTIONS:
        given.problems.append(f"unknown section {section} {source}{did_you_mean(section, SECTIONS)}")
    elif not isinstance(table, dict):
        given.problems.append(f"{section} is {as_text(table)} {source}; write it as a table [{section}]")
    else:
        for name, value in table.items():
            if (section, name) in FIELDS:
                given.set((section, name), value, source)
            else:
                dotted = f"{section}.{name}"
                given.problems.append(f"unknown key {dotted} {source}{did_you_mean(dotted)}")


def _check(given: Given) -> tuple[Config, list[str]]:
    """Check types and ranges: the config, with defaults where a value was refused, and why it was refused."""
    try:
        return Config.model_validate(given.tree()), []
    except ValidationError as error:
        places = [tuple(str(part) for part in entry["loc"]) for entry in error.errors()]
    problems = []
    for key in dict.fromkeys(place[:3] if place[:3] in given.settings else place[:2] for place in places):
        setting = given.settings.pop(key)
        problems.append(f"{'.'.join(key)} is {setting.shown} {setting.source}; allowed: {allowed(key)}")
    config, more = _check(given)
    return config, problems + more
