"""The script for bash; tried in 5.2."""

from __future__ import annotations

from collections.abc import Iterator

from unigrad_fast.commands.completion.words import Argument, Command, filled

_SCRIPT = r"""# Completion of unigrad-fast for bash, written by `unigrad-fast completion bash`.

# What may follow the words "$@", of which `length` are the command. Each line of `arguments` is a key, or the number of
# a positional argument (* for all that are left), and its values, or their kind: @file, @folder, @recipe, @text, @bare,
# @list and its values.
_unigrad_fast_table() {
    case "$1 $2 " in
@TABLE@
    esac
}

# Keys that begin like the current word; of a group only its name, until that is typed.
_unigrad_fast_keys() {
    local key rest last=
    while read -r key rest; do
        [[ $key == --* && $key == "$current"* && $given != *" ${key//-/_} "* ]] || continue
        rest=${key#"$current"}
        [[ $rest == *.* ]] && key=$current${rest%%.*}.
        [[ $key == "$last" ]] || candidates+=("$key")
        last=$key
    done <<< "$arguments"
    [[ ${#candidates[@]} == 1 && $last == *. ]] && compopt -o nospace
}

# Values of the argument $1 that begin like $2; $3 stands before them in the same word.
_unigrad_fast_values() {
    local name values word listed=
    while read -r name values; do
        [[ ${name//-/_} == "${1//-/_}" ]] && break
    done <<< "$arguments"
    case $values in
    @file) compopt -o default ;;
    @folder) compopt -o dirnames ;;
    @recipe)
        compopt -o filenames -o plusdirs
        values='@RECIPES@'
        while read -r word; do
            candidates+=("$3$word")
        done < <(compgen -f -X '!*.yaml' -- "$2"; compgen -f -X '!*.yml' -- "$2")
        ;;
    @list*)
        compopt -o nospace
        [[ $2 == *,* ]] && listed=${2%,*},
        ;;
    esac
    for word in $values; do
        [[ $word == @* || ,$listed == *",$word,"* || $listed$word != "$2"* ]] || candidates+=("$3$listed$word")
    done
}

_unigrad_fast() {
    local IFS=$' \t\n' last=${COMP_WORDS[COMP_CWORD]} words=() word joins= current arguments length
    local key= place=1 given=' ' candidates=()
    for word in "${COMP_WORDS[@]:0:COMP_CWORD+1}"; do # readline also splits at = and :
        if [[ $joins || $word =~ ^[=:]+$ ]]; then
            words[-1]+=$word
        else
            words+=("$word")
        fi
        [[ $word =~ ^[=:]+$ ]] && joins=1 || joins=
    done
    current=${words[-1]}
    words=("${words[@]:1:${#words[@]}-2}")
    _unigrad_fast_table "${words[@]:0:2}"
    for word in "${words[@]:length}"; do
        if [[ $word == --* ]]; then
            key=${word%%=*}
            given+="${key//-/_} "
            [[ $word == *=* ]] && key=
        elif [[ $key ]]; then
            key=
        else
            ((place++))
        fi
    done
    [[ $arguments == *$'\n'"$place "* ]] || place='*'
    if [[ $current == --*=* ]]; then
        _unigrad_fast_values "${current%%=*}" "${current#*=}" "${current%%=*}="
    elif [[ $key && $current != -* ]]; then
        _unigrad_fast_values "$key" "$current"
    elif [[ $current != -* && $arguments == *$'\n'"$place "* ]]; then
        _unigrad_fast_values "$place" "$current"
    else
        _unigrad_fast_keys
    fi
    [[ $last =~ ^[=:]+$ ]] && last=
    COMPREPLY=("${candidates[@]#"${current%"$last"}"}") # readline keeps what is before its own word
}

complete -F _unigrad_fast unigrad-fast
"""


def script(commands: list[Command]) -> str:
    """The script that completes these commands."""
    return filled(_SCRIPT, map(_entry, commands))


def _entry(command: Command) -> str:
    pattern = f"'{command.name} '*" if command.name else "*"
    return "\n".join([f"    {pattern}) length={len(command.name.split())} arguments='", *_arguments(command), "' ;;"])


def _arguments(command: Command) -> Iterator[str]:
    for place, argument, is_rest in command.places():
        yield f"{'*' if is_rest else place} {_completed(argument)}"
    for key in command.keys:
        yield f"--{key.name} {_completed(key)}"


def _completed(argument: Argument) -> str:
    values = " ".join(argument.values)
    return {"choice": values, "switch": values, "list": f"@list {values}"}.get(argument.kind, f"@{argument.kind}")
