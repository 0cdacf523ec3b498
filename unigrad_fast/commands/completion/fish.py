"""The script for fish, tried in 3.6: a `complete` for each argument, which knows `--key value` and `--key=value`."""

from __future__ import annotations

from collections.abc import Iterator

from unigrad_fast.commands.completion.words import Argument, Command, filled

_SCRIPT = r"""# Completion of unigrad-fast for fish, written by `unigrad-fast completion fish`.

# The cursor is after this command.
function __unigrad_fast_after -a command
    set -l words (commandline -opc)[2..]
    test -z "$command$words"; or test -n "$command"; and string match -q -- "$command *" "$words "
end

# It is after this command, and the key is not among the words, unless its value is at the cursor.
function __unigrad_fast_takes -a command key
    __unigrad_fast_after $command
    and not contains -- --$key (commandline -opc)[..-2]
    and not string match -q -- "--$key=*" (commandline -opc)
end

# At the cursor is this positional argument of the command, counted from 1; if it takes all that are left, one of them.
function __unigrad_fast_place -a command place takes_rest
    __unigrad_fast_after $command; or return
    set -l words (commandline -opc)
    set -l found 1
    set -l key
    for word in $words[(math 2 + (count (string split -n ' ' -- $command)))..]
        if string match -q -- '--*' $word
            string match -q -- '*=*' $word; and set key; or set key $word
        else if test -n "$key"
            set key
        else
            set found (math $found + 1)
        end
    end
    test -z "$key"; and test $found -eq $place -o "$takes_rest" = rest -a $found -gt $place
end

function __unigrad_fast_recipes
    string split ' ' '@RECIPES@'
    __fish_complete_suffix .yaml
    __fish_complete_suffix .yml
end

function __unigrad_fast_list
    __fish_complete_list , "string split ' ' '$argv'"
end

complete -c unigrad-fast -f
@TABLE@
"""


def script(commands: list[Command]) -> str:
    """The script that completes these commands."""
    return filled(_SCRIPT, (line for command in commands for line in _lines(command)))


def _lines(command: Command) -> Iterator[str]:
    for place, argument, is_rest in command.places():
        start = _start(f"__unigrad_fast_place '{command.name}' {place}{' rest' * is_rest}")
        if any(argument.values.values()):
            yield from (f"{start} -a {word} -d {_quoted(said)}" for word, said in argument.values.items())
        else:
            yield f"{start} {_completed(argument)}"
    for key in command.keys:
        start = _start(f"__unigrad_fast_takes '{command.name}' {key.name}")
        yield f"{start} -l {key.name} -d {_quoted(key.description)} {_completed(key)}".rstrip()


def _start(condition: str) -> str:
    return f"complete -c unigrad-fast -n {_quoted(condition)}"


def _completed(argument: Argument) -> str:
    words = " ".join(argument.values)
    special = {
        "bare": "",
        "text": "-x",
        "file": "-r -F",
        "folder": "-x -a '(__fish_complete_directories (commandline -ct))'",
        "recipe": "-x -a '(__unigrad_fast_recipes)'",
        "list": f"-x -a '(__unigrad_fast_list {words})'",
    }
    return special.get(argument.kind, f"-x -a '{words}'")


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
