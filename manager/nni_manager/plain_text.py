"""Escapes untrusted text for a terminal. This module is below every layer and imports nothing of the manager."""


def escaped(text: str) -> str:
    """The text with control and invisible characters as escapes: a carriage return is `\\r`.

    Escaped are control characters, line ends, and invisible characters such as those that change the writing direction.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
