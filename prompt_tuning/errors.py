"""The one error that is the user's to mend."""


class InputError(ValueError):
    """Input (a file, a config, an argument) that cannot be used as it is.

    Its message says what was found, what was expected, where it came from and what to
    do. The command prints the message alone and exits with code 2; no step has been
    compiled and nothing written over when it is raised.
    """
