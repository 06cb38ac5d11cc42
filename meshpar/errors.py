"""The root of all errors that a user can mend."""


class MeshparError(ValueError):
    """Something asked for cannot be done; the message gives values and the remedy.

    Programs print it without a traceback and exit with code 2.
    """
