"""Replaces characters that an encoding lacks: ASCII stand-ins for those we use, codes for others."""

from __future__ import annotations

import codecs
import unicodedata

NAME = "unigrad_fast.fallback"  # for the `errors` argument of a stream or of `str.encode`

TWINS = {
    **{"–": "-", "−": "-", "·": "*", "×": "x", "±": "+-", "…": "...", "→": "->", "←": "<-", "≤": "<=", "≥": ">="},
    **{"‖": "||", "√": "sqrt ", "Σ": "sum ", "µ": "u", "μ": "mu", "\N{COMBINING CIRCUMFLEX ACCENT}": "^"},
    **{"α": "alpha", "β": "beta", "γ": "gamma", "ε": "epsilon", "θ": "theta", "λ": "lambda", "π": "pi", "ρ": "rho"},
    **{"τ": "tau", "Λ": "Lambda", "ũ": "u~", "ṽ": "v~", "′": "'", "≠": "!=", "∞": "inf"},
    **{"σ": "sigma", "•": "*", "⟨": "<", "⟩": ">", "²": "^2", "³": "^3", "½": "1/2"},
    **{chr(code): "+" for code in range(0x2500, 0x2580)},  # corners and crossings of boxes; their lines follow
    **dict.fromkeys("─━═╌╍┄┅┈┉╴╶╸╺╼╾", "-"),
    **dict.fromkeys("│┃║╎╏┆┇┊┋╵╷╹╻╽╿", "|"),
    **{chr(code): "#" for code in range(0x2580, 0x25A0)},  # blocks
    **{chr(code): "*" for code in range(0x2800, 0x2900)},  # the dots of spinners
}


def twin(character: str) -> str:
    """The ASCII stand-in of a character; for an undecodable byte of a file's name, its code."""
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # an undecodable byte, as os.fsdecode returns it
        return _code(chr(code - 0xDC00))
    if character in TWINS:
        return TWINS[character]
    plain = unicodedata.normalize("NFKD", character)  # digits of superscripts; accented letters become codes
    return plain if plain.isascii() else character.encode("ascii", "backslashreplace").decode()


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(twin, error.object[error.start : error.end])), error.end


codecs.register_error(NAME, _stand_in)


def printable(text: str) -> str:
    """Text with codes for undecodable bytes, which a file's name may contain."""
    return text.encode("utf-8", NAME).decode()


def harmless(text: str) -> str:
    """Text with codes for control characters, which a file's name may contain."""
    return "".join(_code(c) if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def _code(character: str) -> str:
    return f"\\x{ord(character):02x}"
