"""The configuration of a run, from TOML and the command line; imports no torch."""

from titan_like.config.checks import world_checks
from titan_like.config.errors import ConfigError, TitanError
from titan_like.config.load import dump_toml, load_config, load_config_or_exit
from titan_like.config.schema import Config

__all__ = ["Config", "ConfigError", "TitanError", "dump_toml", "load_config", "load_config_or_exit", "world_checks"]
