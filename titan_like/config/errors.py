"""The errors that a user can cause. Each message is one sentence with the value, what is allowed and the remedy."""


class TitanError(Exception):
    """A run cannot go on; shown without a traceback."""

    exit_code = 1


class ConfigError(TitanError):
    """What the user asked for cannot be run as asked: config, data, tokenizer, folders, launcher variables.

    Attributes:
        problems: one sentence per problem; all of them are shown at once.
    """

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(problems))
