"""The one error of the data path that the user can fix."""


class DataError(ValueError):
    """The user's data or data settings are wrong; the message names the value and the remedy."""
