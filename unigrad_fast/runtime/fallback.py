"""Text where an encoding lacks some of its characters: twins in ASCII for ours, codes for others."""

from __future__ import annotations

import codecs
import unicodedata

NAME = "unigrad_fast.fallback"  # as the `errors` of a stream or of `str.encode`

TWINS = {
    **{"–": "-", "−": "-", "·": "*", "×": "x", "±": "+-", "…": "...", "→": "->", "←": "<-", "≤": "<=", "≥": ">="},
    **{"‖": "||", "√": "sqrt ", "Σ": "sum ", "µ": "u", "μ": "mu", "\N{COMBINING CIRCUMFLEX ACCENT}": "^"},
    **{"α": "alpha", "β": "beta", "γ": "gamma", "ε": "epsilon", "θ": "theta", "λ": "lambda", "π": "pi", "ρ": "rho"},
    **{"τ": "tau", "Λ": "Lambda", "ũ": "u~", "ṽ": "v~", "′": "'", "≠": "!=", "∞": "inf"},
    **{"σ": "sigma", "•": "*", "⟨": "<", "⟩": ">", "²": "^2", "³": "^3", "½": "1/2"},
    **dict.fromkeys("─━═╌╍┄┅┈┉╴╶╸╺╼╾", "-"),
    **dict.fromkeys("│┃║╎╏┆┇┊┋╵╷╹╻╽╿", "|"),
    **{chr(code): "#" for code in range(0x2580, 0x25A0)},  # blocks
    **{chr(code): "*" for code in range(0x2800, 0x2900)},  # the dots of spinners
}
CORNERS = range(0x2500, 0x2580)  # what lines have besides: where they meet


def twin(character: str) -> str:
    """What stands for a character in ASCII; for a byte of a file's name that is no text, its code."""
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # as os.fsdecode gives it
        return _code(chr(code - 0xDC00))
    if character in TWINS:
        return TWINS[character]
    if code in CORNERS:
        return "+"
    plain = unicodedata.normalize("NFKD", character)  # a superscript's digit; of letters with accents nothing is lost
    return plain if plain.isascii() else character.encode("ascii", "backslashreplace").decode()


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(twin, error.object[error.start : error.end])), error.end


codecs.register_error(NAME, _stand_in)


def printable(text: str) -> str:
    """Text that may hold a file's name that is none, as text."""
    return text.encode("utf-8", NAME).decode()


def harmless(text: str) -> str:
    """Text with codes for what steers a terminal, which a file's name may hold."""
    return "".join(_code(c) if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def _code(character: str) -> str:
    return f"\\x{ord(character):02x}"


def fitted(text: str, encoding: str | None) -> str:
    """Text with twins where an encoding lacks characters, for where the width counts."""
    try:
        return text.encode(encoding or "utf-8", NAME).decode(encoding or "utf-8")
    except LookupError:
        return text
