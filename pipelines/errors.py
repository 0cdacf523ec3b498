"""The one error of the data path that is the user's to mend."""


class DataError(ValueError):
    """The user's data or data settings are wrong; the message names the value and the remedy."""
