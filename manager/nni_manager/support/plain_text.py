"""Escapes untrusted text for a terminal. This module is below every layer and imports nothing of the manager."""


def escaped(text: str) -> str:
    """The text with control and invisible characters as escapes: a carriage return is `\\r`.

    Control characters, line ends, and invisible characters such as marks of the writing direction are escaped.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
