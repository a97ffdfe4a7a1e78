"""The one kind of error a user is meant to read."""


class LpaError(Exception):
    """Something the user can put right: the message names the thing and says what to do. One line in the CLI."""


def choose(name: str, choices, what: str):
    """The entry of a registry, or an error that lists the choices: `no mixer 'lap'; have conv, lpa, window`."""
    if name not in choices:
        raise LpaError(f"no {what} {name!r}; have {', '.join(sorted(choices))}")
    return choices[name]
